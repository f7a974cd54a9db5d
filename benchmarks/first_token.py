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
from common import describe_machine, make_parser, rotated
from rich.console import Console
from rich.table import Table
from serving_worker import load_package

PARTS: Final = ("pieces", "chunks", "together", "saved")
QUESTION: Final = 16  # tokens after a saved prefix
PIECES: Final = (32, 64, 128, 256, 512, 1024)
CHUNKS: Final = (64, 128, 256, 512, 1024)
SLOTS: Final = 4
Prompt = np.ndarray[Any, np.dtype[np.int64]]


class Prompts:
    """Random prompts without repetition, because an engine continues from prompts that it holds."""

    def __init__(self, vocab_size: int) -> None:
        self._generator, self._vocab_size = np.random.default_rng(0), vocab_size

    def __call__(self, tokens: int) -> Prompt:
        return self._generator.integers(3, self._vocab_size, tokens)


def in_turns(cases: Mapping[str, Callable[[], list[float]]], rounds: int) -> dict[str, np.ndarray[Any, Any]]:
    """The figures of each case, [rounds, figures], after a round that warms up."""
    found: dict[str, list[list[float]]] = {name: [] for name in cases}
    for index in range(rounds + 1):
        for name in rotated(cases, index):
            figures = cases[name]()
            if index:
                found[name].append(figures)
    return {name: np.array(figures) for name, figures in found.items()}


def piece_table(model: Any, tokens: int, pieces: list[int], rounds: int) -> Table:
    """Measure reading a prompt in pieces."""
    from qsample.request.sampling_params import SamplingParams
    from qsample.runtime.bench import LockStep
    from qsample.runtime.prepare import parameter_row

    capacity, make = model.capacity(tokens + 2), Prompts(model.interface.vocab_size)
    params = SamplingParams(temperature=0.0, eos_token_id=())
    parameters = [parameter_row(model.interface, params, tokens, capacity)]

    def case(size: int) -> Callable[[], list[float]]:
        def read() -> list[float]:
            loop = LockStep(replace(model.sessions, piece_size=size, late_piece_size=None), parameters, [0], capacity)
            start = time.perf_counter()
            loop.prefill([make(tokens)])
            return [1e3 * (time.perf_counter() - start)]

        return read

    own = model.sessions.piece_size
    sizes = sorted({own, *(min(size, tokens) for size in pieces)})
    found = in_turns({str(size): case(size) for size in sizes}, rounds)
    table = Table("tokens per piece", "ms", f"over {own}", title=f"a prompt of {tokens:,} tokens", title_justify="left")
    for name, times in found.items():
        ratio = np.median(times[:, 0] / found[str(own)][:, 0])
        table.add_row(name, f"{np.median(times[:, 0]):.1f}", f"{ratio:.2f}")
    return table


class Stream:
    """A request, and the moments of its tokens, which a thread records."""

    def __init__(self, request: Any) -> None:
        self.moments: list[float] = []
        self.first = threading.Event()
        self._request = request
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for delta in self._request:
            if delta.token_ids:
                self.moments.append(time.perf_counter())
                self.first.set()

    def wait(self) -> float:
        """The moment of its first token."""
        if not self.first.wait(600):
            raise SystemExit("no token in ten minutes")
        return self.moments[0]

    def end(self) -> None:
        self._request.cancel()
        self._thread.join()


def chunk_table(model: Any, tokens: int, rounds: int) -> Table:
    """Measure a prompt that arrives while SLOTS - 1 rows run."""
    from qsample.runtime import Engine, SamplingParams

    make = Prompts(model.interface.vocab_size)

    def case(size: int) -> Callable[[], list[float]]:
        def come() -> list[float]:
            length = model.capacity(tokens + 512) - 8
            params = SamplingParams(temperature=0.0, eos_token_id=(), max_length=length)
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
            gaps = [np.diff([moment for moment in other.moments if moment > start - 0.5]).max() for other in others]
            return [1e3 * (first - start), 1e3 * max(gaps)]

        return come

    found = in_turns({str(size): case(size) for size in CHUNKS if size < 2 * tokens}, rounds)
    table = Table(
        "prefill_chunk_size",
        "first token, ms",
        "longest gap of the others, ms",
        title=f"a prompt of {tokens:,} tokens, with {SLOTS - 1} running rows",
        title_justify="left",
    )
    for name, figures in found.items():
        table.add_row(name, *(f"{value:.1f}" for value in np.median(figures, axis=0)))
    return table


def together_table(model: Any, lengths: list[tuple[int, ...]], rounds: int) -> Table:
    """Measure prompts added at once and in sequence: their first tokens, and the runs of the graph."""
    from qsample.runtime import Engine, SamplingParams

    make, sessions = Prompts(model.interface.vocab_size), model.sessions
    params = SamplingParams(temperature=0.0, eos_token_id=(), max_new_tokens=64)

    def case(prompts: tuple[int, ...], chunk_size: int | None) -> Callable[[], list[float]]:
        def add() -> list[float]:
            with Engine(model, slots=len(prompts), prefill_chunk_size=chunk_size) as engine:
                runs, start, streams = sessions.decoder.runs, time.perf_counter(), []
                for tokens in prompts:
                    streams.append(Stream(engine.add_request(make(tokens), params)))
                    if chunk_size is None:
                        streams[-1].wait()
                first = [1e3 * (stream.wait() - start) for stream in streams]
                runs = sessions.decoder.runs - runs
                for stream in streams:
                    stream.end()
            return [float(np.mean(first)), max(first), float(runs)]

        return add

    ways = {"in sequence": None, **{f"at once, chunks of {size}": size for size in (sessions.piece_size, max(CHUNKS))}}
    cases = {
        f"{', '.join(map(str, prompts))}: {way}": case(prompts, chunk_size)
        for prompts in lengths
        for way, chunk_size in ways.items()
    }
    header = ("tokens of the prompts", "first tokens, mean, ms", "the last, ms", "runs of the graph")
    table = Table(*header, title="several prompts", title_justify="left")
    for name, figures in in_turns(cases, rounds).items():
        table.add_row(name, *(f"{value:.1f}" for value in np.median(figures, axis=0)))
    return table


def saved_table(model: Any, tokens: int, rounds: int) -> Table:
    """Measure the first token behind a prefix of `tokens` tokens."""
    from qsample.runtime import Engine, SamplingParams

    make, params = Prompts(model.interface.vocab_size), SamplingParams(temperature=0.0, max_new_tokens=1)
    prefix = make(tokens)

    def case(**stored: Any) -> Callable[[], list[float]]:
        def come() -> list[float]:
            with Engine(model, slots=1, **stored) as engine:
                start = time.perf_counter()
                request = engine.add_request(np.concatenate([prefix, make(QUESTION)]), params)
                output = request.result()
                return [1e3 * (time.perf_counter() - start), output.usage.cached_tokens]

        return come

    with tempfile.TemporaryDirectory() as folder:
        file, kept = Path(folder, "prefix"), Path(folder, "kept")
        model.save_prefix(prefix, file)
        case(prefix_cache_dir=kept)()
        size = file.stat().st_size / 1e6
        ways = {"read": {}, "from a file": {"prefixes": [file]}, "from a folder": {"prefix_cache_dir": kept}}
        found = in_turns({name: case(**stored) for name, stored in ways.items()}, rounds)
    title = f"{QUESTION} tokens behind a prefix of {tokens:,} tokens, {size:.0f} MB"
    table = Table("the prefix", "first token, ms", "of reading", "tokens not read", title=title, title_justify="left")
    for name, figures in found.items():
        times, cached = np.median(figures, axis=0)
        ratio = np.median(found["read"][:, 0] / figures[:, 0])
        table.add_row(name, f"{times:.1f}", f"1 / {ratio:.1f}", f"{cached:.0f}")
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("package", type=Path, help="compiled for the CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prompt", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--piece", type=int, nargs="+", default=list(PIECES), help="tokens, of the first part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options, console = parser.parse_args(), Console()
    if options.rounds < 1 or min(options.prompt) < 2 or min(options.piece) < 2:
        parser.error("--rounds must be at least 1, --prompt and --piece at least 2")
    model = load_package(options.package, options.threads)
    needed = max(options.prompt) + (520 if "chunks" in options.parts else QUESTION + 1)
    if model.capacity(needed) < needed:
        parser.error(
            f"{options.package} takes {model.capacity(needed)} tokens per row; compile it with --ctx-len {needed}"
        )
    console.print(describe_machine(options.threads), highlight=False)
    if "pieces" in options.parts:
        for tokens in options.prompt:
            console.print(piece_table(model, tokens, options.piece, options.rounds))
    if "chunks" in options.parts:
        for tokens in options.prompt:
            console.print(chunk_table(model, tokens, options.rounds))
    if "together" in options.parts:
        lengths = [(64,) * 4, (16,) * 4, (13, 14, 15, 16)]
        console.print(together_table(model, lengths, options.rounds))
    if "saved" in options.parts:
        for tokens in options.prompt:
            console.print(saved_table(model, tokens, options.rounds))


if __name__ == "__main__":
    main()
