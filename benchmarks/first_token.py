"""The first token on the CPU: how prompts are cut, and how an engine admits several.

    qsample compile CHECKPOINT compiled --weights int4 --ctx-len 2048
    python benchmarks/first_token.py compiled                       # three minutes at 0.6 B parameters, two cores
    python benchmarks/first_token.py compiled --parts together

Four parts, each in rounds in which its cases take turns:

pieces    a prompt read in pieces of several sizes; the runtime's own size is `piece_size` of its sessions.
chunks    a prompt that arrives at an engine with other running rows, by `prefill_chunk_size`: the time to its first
          token, and the longest gap between the other rows' tokens.
together  four prompts added to an engine at once, with two values of `prefill_chunk_size`, or each after the first
          token of the previous prompt: the mean and the latest of their first tokens; with equal and different lengths.
saved     a prompt behind a prefix that it shares with earlier prompts: read anew, loaded from a file that the engine
          opened when it started, and loaded from a folder by a new engine, which checks the file's sha256 first.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from report import describe_machine, make_parser, print_table, rotated
from rich.console import Console
from systems.qsample import load_watched

from qsample.runtime import Engine, SamplingParams
from qsample.runtime.bench import LockStep
from qsample.runtime.prepare import parameter_row

QUESTION: Final = 16  # tokens after a saved prefix
PIECES: Final = (32, 64, 128, 256, 512, 1024)
CHUNKS: Final = (64, 128, 256, 512, 1024)
SLOTS: Final = 4
TOGETHER: Final = ((64,) * 4, (16,) * 4, (13, 14, 15, 16))
GREEDY: Final = SamplingParams(temperature=0.0, eos_token_id=())
Case = Callable[[], list[float]]
Found = Mapping[str, np.ndarray[Any, Any]]  # case → [rounds, figures]


class Prompts:
    """Random prompts without repetition, because an engine continues from prompts that it holds."""

    def __init__(self, vocab_size: int) -> None:
        self._generator, self._vocab_size = np.random.default_rng(0), vocab_size

    def __call__(self, tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self._generator.integers(3, self._vocab_size, tokens)


class Stream:
    """A request, and the moments of its tokens, which a thread records."""

    def __init__(self, request: Any) -> None:
        self.moments: list[float] = []
        self._first, self._request = threading.Event(), request
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for delta in self._request:
            if delta.token_ids:
                self.moments.append(time.perf_counter())
                self._first.set()

    def wait(self) -> float:
        """The moment of its first token."""
        if not self._first.wait(600):
            raise SystemExit("no token in ten minutes")
        return self.moments[0]

    def end(self) -> None:
        self._request.cancel()
        self._thread.join()


def in_turns(cases: Mapping[str, Case], rounds: int) -> Found:
    """The figures of each case, after a round that warms up."""
    found: dict[str, list[list[float]]] = {name: [] for name in cases}
    for index in range(rounds + 1):
        for name in rotated(cases, index):
            figures = cases[name]()
            if index:
                found[name].append(figures)
    return {name: np.array(figures) for name, figures in found.items()}


def show(title: str, header: tuple[str, ...], found: Found, reference: str | None = None) -> None:
    """A line per case: the medians, and the median ratio of the first figure to the reference's."""
    lines = []
    for name, figures in found.items():
        lines.append([name, *(f"{value:.1f}" for value in np.median(figures, axis=0))])
        if reference is not None:
            lines[-1].append(f"{np.median(figures[:, 0] / found[reference][:, 0]):.2f}")
    print_table(header + ((f"over {reference}",) if reference else ()), lines, title)


def pieces(model: Any, tokens: int, rounds: int) -> None:
    """Measure reading a prompt in pieces."""
    capacity, make = model.capacity(tokens + 2), Prompts(model.interface.vocab_size)
    parameters = [parameter_row(model.interface, GREEDY, tokens, capacity)]

    def case(size: int) -> Case:
        prompts = replace(model.sessions.prompts, piece_size=size, late_piece_size=None)

        def read() -> list[float]:
            loop = LockStep(
                replace(model.sessions, prompts=prompts),
                parameters,
                [0],
                capacity,
            )
            start = time.perf_counter()
            loop.prefill([make(tokens)])
            return [1e3 * (time.perf_counter() - start)]

        return read

    own = model.sessions.prompts.piece_size
    sizes = sorted({own, *(min(size, tokens) for size in PIECES)})
    found = in_turns({str(size): case(size) for size in sizes}, rounds)
    show(f"a prompt of {tokens:,} tokens", ("tokens per piece", "ms"), found, str(own))


def chunks(model: Any, tokens: int, rounds: int) -> None:
    """Measure a prompt that arrives while SLOTS - 1 rows run."""
    make = Prompts(model.interface.vocab_size)
    params = replace(GREEDY, max_length=model.capacity(tokens + 512) - 8)

    def case(size: int) -> Case:
        def come() -> list[float]:
            with Engine(model, slots=SLOTS, prefill_chunk_size=size) as engine:
                others = [Stream(engine.add_request(make(8), params)) for _ in range(SLOTS - 1)]
                for other in others:
                    other.wait()
                start = time.perf_counter()
                new = Stream(engine.add_request(make(tokens), params))
                first = new.wait()
                time.sleep(0.2)
                for stream in (new, *others):
                    stream.end()
            gaps = [
                np.diff([moment for moment in other.moments if moment > start - 0.5]).max()
                for other in others
            ]
            return [1e3 * (first - start), 1e3 * max(gaps)]

        return come

    found = in_turns({str(size): case(size) for size in CHUNKS if size < 2 * tokens}, rounds)
    header = ("prefill_chunk_size", "first token, ms", "longest gap of the others, ms")
    show(f"a prompt of {tokens:,} tokens, with {SLOTS - 1} running rows", header, found)


def together(model: Any, tokens: int, rounds: int) -> None:
    """Measure prompts added at once and in sequence: their first tokens, and the runs of the graph."""
    make, sessions = Prompts(model.interface.vocab_size), model.sessions
    params = replace(GREEDY, max_new_tokens=64)

    def case(prompts: tuple[int, ...], chunk_size: int | None) -> Case:
        def add() -> list[float]:
            with Engine(model, slots=len(prompts), prefill_chunk_size=chunk_size) as engine:
                runs, start, streams = sessions.decoder.runs, time.perf_counter(), []
                for length in prompts:
                    streams.append(Stream(engine.add_request(make(length), params)))
                    if chunk_size is None:
                        streams[-1].wait()
                first = [1e3 * (stream.wait() - start) for stream in streams]
                runs = sessions.decoder.runs - runs
                for stream in streams:
                    stream.end()
            return [float(np.mean(first)), max(first), float(runs)]

        return add

    ways = {
        "in sequence": None,
        **{
            f"at once, chunks of {size}": size
            for size in (sessions.prompts.piece_size, max(CHUNKS))
        },
    }
    cases = {
        f"{', '.join(map(str, prompts))}: {way}": case(prompts, chunk_size)
        for prompts in TOGETHER
        for way, chunk_size in ways.items()
    }
    header = (
        "tokens of the prompts",
        "first tokens, mean, ms",
        "the last, ms",
        "runs of the graph",
    )
    show("several prompts", header, in_turns(cases, rounds))


def saved(model: Any, tokens: int, rounds: int) -> None:
    """Measure the first token behind a prefix of `tokens` tokens."""
    make, params = (
        Prompts(model.interface.vocab_size),
        SamplingParams(temperature=0.0, max_new_tokens=1),
    )
    prefix = make(tokens)

    def case(**stored: Any) -> Case:
        def come() -> list[float]:
            with Engine(model, slots=1, **stored) as engine:
                start = time.perf_counter()
                output = engine.add_request(
                    np.concatenate([prefix, make(QUESTION)]), params
                ).result()
                return [1e3 * (time.perf_counter() - start), output.usage.cached_tokens]

        return come

    with tempfile.TemporaryDirectory() as folder:
        file, kept = Path(folder, "prefix"), Path(folder, "kept")
        model.save_prefix(prefix, file)
        case(prefix_cache_dir=kept)()
        title = f"{QUESTION} tokens behind a prefix of {tokens:,} tokens, {file.stat().st_size / 1e6:.0f} MB"
        ways = {
            "read": {},
            "from a file": {"prefixes": [file]},
            "from a folder": {"prefix_cache_dir": kept},
        }
        found = in_turns({name: case(**stored) for name, stored in ways.items()}, rounds)
    show(title, ("the prefix", "first token, ms", "tokens not read"), found, "read")


PARTS: Final = {"pieces": pieces, "chunks": chunks, "together": together, "saved": saved}


def main() -> None:
    parser = make_parser(__doc__, threads=2)
    parser.add_argument("package", type=Path, help="compiled for the CPU")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--prompt", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = load_watched(options.package, options.threads)
    needed = max(options.prompt) + (520 if "chunks" in options.parts else QUESTION + 1)
    if model.capacity(needed) < needed:
        parser.error(
            f"{options.package} takes {model.capacity(needed)} tokens per row; compile it with --ctx-len {needed}"
        )
    Console().print(describe_machine(options.threads), highlight=False)
    for name in options.parts:
        for tokens in options.prompt[:1] if name == "together" else options.prompt:
            PARTS[name](model, tokens, options.rounds)


if __name__ == "__main__":
    main()
