"""Decoding on an NVIDIA GPU: checks the captured graph, and times it beside what else there is.

    python benchmarks/gpu.py                                   # 0.6B and 1B shapes, every batch and mix
    python benchmarks/gpu.py --budget-seconds 570 --work out/gpu   # what fits, the most telling first
    python benchmarks/gpu.py --parts smoke                     # two minutes: does it work here at all?
    python benchmarks/gpu.py --provider cpu --shapes tiny --batch 1 4   # a try of this script without a GPU

One call makes checkpoints of random weights, exports and compiles them on the machine, and needs no network. It goes
through its parts by value: what the GPU is; a smoke test of a tiny model (placement, capture, tokens equal to the
CPU's, with each kind of weights and cache); the first shape at 1 and 32 rows; the rest. Each part is a process of its
own, so that one which fails, or hangs, ends alone. The page and the figures (docs/benchmarks/gpu.*) are written after
every one of them. A second call with the same --work goes on with the packages of the first. Ways to decode, the
median of the rounds counting:

- captured: the sampler in the graph, replayed as one CUDA graph, read every 4, 1 and 16 steps
- uncaptured: the same graph, its kernels launched one by one
- host: the package exported with include_sampler=False; logits are copied to the host and sampled there
- int4, int8: captured, with weights of 4 or 8 bits (--weights)
- genai: onnxruntime-genai, where onnxruntime-genai-cuda is installed, or --genai names a model that was built for it
- transformers: `generate` with a static cache, compiled

The share of the floor is the time that reading the weights and the cache once takes, at the bandwidth that a copy on
this device reaches (--bandwidth says another), over the time of a step.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints import SHAPES
from gpu_files import Files, Variant
from gpu_parts import build, describe, look_at_the_gpu, measure, smoke
from gpu_process import Reports, run_apart
from gpu_report import CAPTURED, HEADER, Results, comparisons
from gpu_systems import FIRST_TIMED, MIXED, MIXES, PLAIN, Decode, Genai, Qsample, Transformers
from rich.console import Console
from rich.table import Table

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
PARTS = ("smoke", "first", "checks", "rest")
SYSTEMS = (CAPTURED, "uncaptured", "host", "genai", "transformers")
FIRST_ROWS = (1, 32)
FEW = ("greedy", "everything")  # for systems that are measured for one comparison
MOST = 240.0  # seconds for a part, where nothing else is said: more than any has taken, less than a hang takes


@dataclass(frozen=True)
class Part:
    """least: seconds that there must be for it to be started. most: after which it is stopped."""

    name: str
    work: Callable[[Reports], None]
    least: float = 5.0
    most: float = MOST
    environment: dict[str, str] = field(default_factory=dict)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-0.6b", "llama-3.2-1b"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--weights", nargs="*", choices=("int4", "int8"), default=["int4"], help="beside float ones")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 32, 64])
    parser.add_argument("--mix", nargs="+", choices=[*MIXES, MIXED], default=[*MIXES, MIXED])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--genai", type=Path, help="a model folder for onnxruntime-genai, of the first shape")
    parser.add_argument("--bandwidth", type=float, help="of the GPU's memory, in TB/s, in place of the measured one")
    parser.add_argument("--budget-seconds", type=float, help="stop in time, and leave out what does not fit")
    parser.add_argument(
        "--work", type=Path, help="folder that keeps checkpoints and packages (default: a temporary one)"
    )
    parser.add_argument("--out", type=Path, default=OUTPUT, help="folder for gpu.json, gpu.md and gpu.png")
    options = parser.parse_args()
    if options.new_tokens <= FIRST_TIMED:
        parser.error(f"--new-tokens is {options.new_tokens}; it must be more than {FIRST_TIMED}")
    if min(options.batch) < 1:
        parser.error(f"--batch is {min(options.batch)}; it must be at least 1")
    return options


class Budget:
    """seconds: of the whole run; None = without end."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return float("inf") if self._end is None else self._end - time.perf_counter()


class Plan:
    """The parts of a run, in order of value."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._cuda = options.provider == "cuda"
        self._dtype = options.dtype if self._cuda else None
        self._captured = CAPTURED if self._cuda else "baked"
        self._bandwidth = options.bandwidth * 1e12 if options.bandwidth else None

    def found(self, name: str, value: str) -> None:
        """What a part says of the machine: later ones take the bandwidth from it."""
        if name == "bandwidth" and self._bandwidth is None:
            with suppress(ValueError):
                self._bandwidth = float(value.split()[0]) * 1e12

    def parts(self) -> Iterator[Part]:
        options = self._options
        if self._cuda:
            yield Part("the GPU", look_at_the_gpu, most=90)
        if "smoke" in options.parts:
            yield from self._smoke()
        first, *others = [Files(shape, self._folder / shape) for shape in options.shapes]
        float_weights = self._variant()
        if {"first", "checks", "rest"} & {*options.parts}:
            yield self._build(first, float_weights)
        if "first" in options.parts:
            yield from self._first(first)
        if "checks" in options.parts:
            trace = self._cuda
            yield Part(f"{first.shape}: checks", lambda reports: smoke(first, float_weights, reports, trace=trace))
        if "rest" in options.parts:
            yield from self._rest(first)
            for files in others:
                yield self._build(files, float_weights)
                yield from self._baked(files, float_weights, options.batch, options.mix)
                yield from self._baked(files, float_weights, options.batch, self._among(FEW), replay=False)
                yield from self._transformers(files, options.batch)

    def _smoke(self) -> Iterator[Part]:
        files = Files("tiny", self._folder / "tiny")
        yield Part("tiny: export", lambda _: files.portable() and None)
        variants = [self._variant(), self._variant(weights="int4"), self._variant(kv_cache_dtype="int8")]
        if self._cuda:
            variants.append(Variant("cuda", "float16" if self._dtype == "bfloat16" else "bfloat16"))
        for variant in variants:
            yield Part(
                f"tiny, {variant.name}: smoke test", lambda reports, variant=variant: smoke(files, variant, reports)
            )
        if self._cuda:
            switch = {"ORT_ENABLE_CUDNN_FLASH_ATTENTION": "0"}
            # Another package, so that compile's own test of it runs without cuDNN's attention, too.
            apart = Files("tiny", self._folder / "tiny", "-no-cudnn")
            yield Part(
                "tiny without cuDNN's attention: smoke test",
                lambda reports: smoke(apart, self._variant(), reports),
                environment=switch,
            )

    def _first(self, files: Files) -> Iterator[Part]:
        rows = [number for number in self._options.batch if number in FIRST_ROWS] or self._options.batch[:1]
        few, mixes = self._among(FEW), self._among((FEW[0], PLAIN, FEW[1]))
        host = self._variant(sampler=False)
        yield from self._baked(files, self._variant(), rows, mixes)
        if self._cuda:
            yield from self._baked(files, self._variant(), rows, few, replay=False)
        if "host" in self._options.systems:
            yield self._build(files, host)
            yield self._measure(files, "host", host.name, lambda: Qsample(files.there(host.name), 1), rows, few)
        if CAPTURED in self._options.systems:
            for weights in self._options.weights:
                variant = self._variant(weights=weights)
                yield self._build(files, variant)
                yield from self._baked(files, variant, rows, mixes)
        yield from self._genai(files, rows)
        yield from self._transformers(files, rows)

    def _rest(self, files: Files) -> Iterator[Part]:
        done = {*FIRST_ROWS} if "first" in self._options.parts else set()
        variant, few = self._variant(), self._among(FEW)
        rows = [number for number in self._options.batch if number in FIRST_ROWS] or self._options.batch[:1]
        for every in (1, 16):
            yield from self._baked(files, variant, rows, few, flush_every=every)
        yield from self._baked(files, variant, self._options.batch, self._options.mix)
        others = [number for number in self._options.batch if number not in done]
        if others:
            yield from self._transformers(files, others)

    def _baked(
        self,
        files: Files,
        variant: Variant,
        rows: Sequence[int],
        mixes: Sequence[str],
        *,
        flush_every: int = 4,
        replay: bool = True,
    ) -> Iterator[Part]:
        kind = self._captured if replay else "uncaptured"
        if (CAPTURED if replay else kind) not in self._options.systems or (not replay and not self._cuda):
            return
        weights = f", {variant.weights}" if variant.weights else ""
        name = f"{kind}{weights}" + (f", read every {flush_every}" if flush_every != 4 else "")
        yield self._measure(
            files,
            name,
            variant.name,
            lambda: Qsample(files.there(variant.name), flush_every, replay=replay),
            rows,
            mixes,
        )

    def _genai(self, files: Files, rows: Sequence[int]) -> Iterator[Part]:
        given: Path | None = self._options.genai
        installed = importlib.util.find_spec("onnxruntime_genai") is not None
        if "genai" not in self._options.systems or not self._cuda or not (given or installed):
            return
        if given is None:
            dtype = self._options.dtype
            yield Part(f"{files.shape}: genai's package", lambda _: files.genai(dtype) and None, least=30, most=400)
        mixes = self._among(("greedy", PLAIN, "top-k 50, top-p 0.95"))
        # The floor is that of the same weights and cache.
        yield self._measure(
            files,
            "genai",
            self._variant().name,
            lambda: Genai(given or files.there(f"genai-{self._options.dtype}")),
            rows,
            mixes,
        )

    def _transformers(self, files: Files, rows: Sequence[int]) -> Iterator[Part]:
        if "transformers" not in self._options.systems:
            return
        device, dtype = ("cuda", self._options.dtype) if self._cuda else ("cpu", "float32")

        def open_it() -> Decode:
            return Transformers(files.there("checkpoint"), device, dtype)

        yield self._measure(files, "transformers, static cache", self._variant().name, open_it, rows, self._among(FEW))

    def _measure(
        self,
        files: Files,
        system: str,
        package: str,
        open_it: Callable[[], Decode],
        rows: Sequence[int],
        mixes: Sequence[str],
    ) -> Part:
        options = self._options

        def work(reports: Reports) -> None:
            measure(files, system, package, self._bandwidth, open_it, rows, mixes, options, reports)

        return Part(f"{files.shape}: {system}", work, least=10)

    def _build(self, files: Files, variant: Variant) -> Part:
        return Part(f"{files.shape}: {variant.name}", lambda _: build(files, variant), least=20, most=540)

    def _variant(self, **options: object) -> Variant:
        return Variant(self._options.provider, self._dtype, **options)  # type: ignore[arg-type]

    def _among(self, mixes: Sequence[str]) -> list[str]:
        return [mix for mix in mixes if mix in self._options.mix] or self._options.mix[:1]


def import_what_parts_need() -> None:
    """Once, for all processes that are forked for parts."""
    packages = ("onnxruntime", "torch", "transformers")
    for name in (*packages, "qsample.auto_model", "qsample.exporters.export", "qsample.exporters.compiler.compile"):
        with suppress(ImportError):
            importlib.import_module(name)


def main() -> None:
    options = parse_arguments()
    budget = Budget(options.budget_seconds)
    results = Results(options.out, f"python benchmarks/gpu.py {' '.join(sys.argv[1:])}".strip())
    results.machine = describe()
    results.save()
    import_what_parts_need()
    with tempfile.TemporaryDirectory() as temporary:
        plan = Plan(options, options.work or Path(temporary))

        def take(kind: str, *values: object) -> None:
            results.take(kind, *values)
            if kind == "machine":
                plan.found(*map(str, values))

        for part in plan.parts():
            if budget.left < part.least:
                results.take("problem", f"{part.name}: left out, the time was up")
                continue
            start = time.perf_counter()
            ended = run_apart(part.name, part.work, take, min(budget.left, part.most), part.environment)
            print(f"{part.name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
            if ended is not None:
                results.take("problem", f"{part.name}: {ended}")
    try:
        results.plot("everything" if "everything" in options.mix else options.mix[0])
    except ImportError as error:
        results.take("problem", f"the plot: {error}")
    console, table = Console(), Table(*HEADER)
    for cell in results.cells:
        table.add_row(*cell.columns)
    console.print(table)
    said = [*(line for lines in results.checks.values() for line in lines), *comparisons(results.cells)]
    for line in (*said, *results.problems):
        console.print(line, highlight=False, markup=False)


if __name__ == "__main__":
    main()
