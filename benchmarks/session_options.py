"""ONNX Runtime's options one by one: a package's steps, first token, opening and memory with each, in turns.

    qsample compile CHECKPOINT compiled --weights int4 --ctx-len 2048
    python benchmarks/session_options.py compiled                                    # three minutes at 0.6 B parameters
    python benchmarks/session_options.py compiled --cases "no spinning" --pause 1    # a first token after a second

A round runs each case once, in an order that changes: some steps of one row and of four, and a prompt in new memory.
The first steps of a turn do not count. A ratio is the median of the rounds' ratios to the defaults of `ort/options.py`,
in brackets its quartiles. Every case has its session in memory, so name a few with --cases if memory is short.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import onnxruntime as ort
from report import describe_machine, make_parser, print_table, rotated
from systems import memory

import qsample.ort.session as opened
from qsample.runtime import CausalLM, SamplingParams, load
from qsample.runtime.bench import LockStep
from qsample.runtime.prepare import parameter_row

UNCOUNTED, COUNTED = 3, 8  # steps of a turn
DEFAULT: Final = "defaults"
GREEDY: Final = SamplingParams(temperature=0.0, eos_token_id=())
# Entries of the session's configuration, attributes of SessionOptions, arguments of `load`, or names of parts to undo.
CASES: Final[dict[str, dict[str, Any]]] = {
    DEFAULT: {},
    "no spinning": {"session.intra_op.allow_spinning": "0"},
    "spinning stops after a run": {"session.force_spinning_stop": "1"},
    "spins for 10 ms": {"session.intra_op.spin_duration_us": "10000"},
    "backs off while it spins": {"session.intra_op.spin_backoff_max": "8"},
    "blocks of a quarter": {"session.dynamic_block_base": "4"},
    "denormals are zero": {"session.set_denormal_as_zero": "1"},
    "prepacks in parallel": {"session.prepack.enable_parallel": "1"},
    "threads keep to processors": {"session.intra_op_thread_affinities": "2"},
    "no arena": {"enable_cpu_mem_arena": False},
    "no memory pattern": {"enable_mem_pattern": False},
    "order by priority": {"execution_order": ort.ExecutionOrder.PRIORITY_BASED},
    "pages of 4 KiB": {"in_huge_pages": nullcontext},
    "not batch invariant": {"batch_invariant": False},
}


class Case:
    """A package opened with other options, and its rows."""

    def __init__(
        self, package: Path, threads: int, changes: dict[str, Any], rows: list[int], steps: int
    ) -> None:
        entries = {key: value for key, value in changes.items() if "." in key}
        parts = {key: value for key, value in changes.items() if hasattr(opened, key)}
        arguments = {key: value for key, value in changes.items() if key == "batch_invariant"}
        attributes = set(changes) - {*entries, *parts, *arguments}
        plain = opened.session_options

        def session_options(*args: Any, **kwargs: Any) -> ort.SessionOptions:
            native = plain(*args, **kwargs)
            for name in attributes:
                setattr(native, name, changes[name])
            return native

        before, start = memory().get("anonymous", 0), time.perf_counter()
        with mock.patch.multiple(opened, session_options=session_options, **parts):
            self.model = load(
                package,
                intra_op_num_threads=threads,
                verify=False,
                session_config=entries,
                **arguments,
            )
        self.seconds, self.megabytes = (
            time.perf_counter() - start,
            (memory().get("anonymous", 0) - before) / 1e6,
        )
        self._loops = {count: make_loop(self.model, count, steps) for count in rows}
        for count, loop in self._loops.items():
            loop.prefill([random_ids(self.model, 8) for _ in range(count)])

    def step(self, rows: int) -> float:
        times = []
        for index in range(UNCOUNTED + COUNTED):
            start = time.perf_counter()
            self._loops[rows].decode()
            times += [time.perf_counter() - start] if index >= UNCOUNTED else []
        return 1e3 * float(np.median(times))

    def first_token(self, tokens: int, pause: float) -> float:
        prompt = random_ids(self.model, tokens)
        time.sleep(pause)
        start = time.perf_counter()
        make_loop(self.model, 1, tokens + 1).prefill([prompt])
        return 1e3 * (time.perf_counter() - start)


def make_loop(model: CausalLM, rows: int, tokens: int) -> LockStep:
    capacity = model.capacity(tokens + 1)
    return LockStep(
        model.sessions,
        [parameter_row(model.interface, GREEDY, 8, capacity)] * rows,
        [0] * rows,
        capacity,
    )


def random_ids(model: CausalLM, count: int) -> Any:
    return np.random.default_rng().integers(3, model.interface.vocab_size, count)


def main() -> None:
    parser = make_parser(__doc__, threads=2)
    parser.add_argument("package", type=Path, help="compiled for the CPU")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds before a prompt")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    names = list(dict.fromkeys([DEFAULT, *options.cases]))
    steps = 16 + (options.rounds + 1) * (UNCOUNTED + COUNTED)
    cases = {
        name: Case(options.package, options.threads, CASES[name], options.rows, steps)
        for name in names
    }
    time.sleep(2)  # memory is still put into huge pages
    works: list[Callable[[Case], float]] = [
        lambda case, rows=rows: case.step(rows) for rows in options.rows
    ]  # type: ignore[misc]
    works.append(lambda case: case.first_token(options.prompt, options.pause))
    found = {name: list[list[float]]() for name in names}
    for index in range(options.rounds + 1):
        for name in rotated(names, index):
            time.sleep(0.02)  # threads of the case before it spin
            found[name].append([work(cases[name]) for work in works])
    times = {name: np.array(figures[1:]) for name, figures in found.items()}
    lines = []
    for name, figures in times.items():
        low, middle, high = np.quantile(figures / times[DEFAULT], (0.25, 0.5, 0.75), axis=0)
        cells = [
            f"{a:.1f}: {b:.3f} ({c:.2f} to {d:.2f})"
            for a, b, c, d in zip(np.median(figures, axis=0), middle, low, high, strict=True)
        ]
        lines.append([name, *cells, f"{cases[name].seconds:.1f}", f"{cases[name].megabytes:.0f}"])
    header = ("options", *(f"{rows} rows, ms a step" for rows in options.rows))
    header += (f"first token of {options.prompt}, ms", "opening, s", "anonymous MB")
    print_table(header, lines, describe_machine(options.threads))


if __name__ == "__main__":
    main()
