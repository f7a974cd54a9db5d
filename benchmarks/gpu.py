"""Decoding on an NVIDIA GPU: checks the captured graph, and compares its speed with alternatives.

    python benchmarks/gpu.py                                   # 0.6B and 1B shapes, every batch and mix
    python benchmarks/gpu.py --budget-seconds 570 --work out/gpu   # the parts that fit, by value
    python benchmarks/gpu.py --parts smoke                     # two minutes: does it work on this machine?
    python benchmarks/gpu.py --provider cpu --shapes tiny --batch 1 4   # to try this script without a GPU

A run makes checkpoints of random weights, and exports and compiles them on the machine, without a network. Its parts
are in order of value: the description of the GPU; a smoke test of the sampler alone, over logits of every kind, and of
a tiny model (placement, capture, tokens equal to the CPU's, with each kind of weights and cache); the first shape at 1
and 32 rows; the rest. Each part is a separate process, so that a failure or a hang ends only this part. The page and
the figures (docs/benchmarks/gpu.*) are written after every measurement. A second run with the same --work reuses the
packages of the first; --parts selects its parts. If the provider does not run, the run ends there with the reason. It
needs the extras `gpu` and `export`; if qsample is not installed, set PYTHONPATH=. before the command. It measures these
ways to decode, as medians of the rounds:

- captured: the sampler in the graph, replayed as a single CUDA graph, read every 4, 1 and 16 steps
- uncaptured: the same graph, its kernels launched individually
- host: the package exported with include_sampler=False; logits are copied to the host and sampled there
- int4, int8: captured, with weights of 4 or 8 bits (--weights)
- genai: onnxruntime-genai, if onnxruntime-genai-cuda is installed; --genai names an existing model for it
- transformers: `generate` with a static cache, compiled

The share of the floor is the time to read the weights and the cache once, at the bandwidth of a copy on this device
(--bandwidth overrides it), over the time of a step.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints import SHAPES
from gpu_checks import check_sampler
from gpu_parts import PROVIDER, build, describe, look_at_the_gpu, measure, smoke
from gpu_report import CAPTURED, HEADER, Reports, Results, comparisons, run_apart
from gpu_systems import (
    MIXED,
    MIXES,
    PLAIN,
    Decode,
    Files,
    Qsample,
    Variant,
    open_genai,
    open_transformers,
)
from report import make_parser, print_table
from rich.console import Console
from systems import FIRST_TIMED

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
PARTS = ("smoke", "first", "checks", "rest")
SYSTEMS = (CAPTURED, "uncaptured", "host", "genai", "transformers")
FIRST_ROWS = (1, 32)
FEW = ("greedy", "everything")  # for systems that serve a single comparison
MOST = 240.0  # the default limit of a part in seconds: more than any has taken
MOST_SMOKE = 120.0  # of tiny models
ENDING = 8.0  # seconds of a budget for the plot and the table


@dataclass(frozen=True)
class Part:
    """A part of a run: it starts only with `least` seconds left, and is stopped after `most` seconds."""

    name: str
    work: Callable[[Reports], None]
    least: float = 5.0
    most: float = MOST
    environment: dict[str, str] = field(default_factory=dict)


class NoGpuError(Exception):
    """The run has nothing to measure."""


class Plan:
    """The parts of a run, in order of value.

    Raises:
        NoGpuError: The findings so far make the rest pointless (from `parts`).
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._cuda = options.provider == "cuda"
        self._dtype = options.dtype if self._cuda else None
        self._captured = CAPTURED if self._cuda else "baked"
        self._bandwidth = options.bandwidth * 1e12 if options.bandwidth else None
        self._runs = not self._cuda

    def found(self, name: str, value: str) -> None:
        """Take the bandwidth, and whether the provider runs, from a finding on the machine."""
        if name == PROVIDER:
            self._runs = True
        if name == "bandwidth" and self._bandwidth is None:
            with suppress(ValueError):
                self._bandwidth = float(value.split()[0]) * 1e12

    def parts(self) -> Iterator[Part]:
        options = self._options
        if self._cuda:
            yield Part("the GPU", look_at_the_gpu, most=90)
            if not self._runs:
                raise NoGpuError(
                    "the provider was not seen to run here, so everything else was omitted"
                )
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
            yield Part(
                f"{first.shape}: checks",
                lambda reports: smoke(first, float_weights, reports, trace=trace),
            )
        if "rest" in options.parts:
            yield from self._rest(first)
            for files in others:
                yield self._build(files, float_weights)
                yield from self._baked(files, float_weights, options.batch, options.mix)
                yield from self._baked(
                    files, float_weights, options.batch, self._among(FEW), replay=False
                )
                yield from self._transformers(files, options.batch)

    def _smoke(self) -> Iterator[Part]:
        files = Files("tiny", self._folder / "tiny")
        provider = self._options.provider
        yield Part("the sampler", lambda reports: check_sampler(provider, reports), most=MOST_SMOKE)
        yield Part("tiny: export", lambda _: files.portable() and None, most=MOST_SMOKE)
        variants = [
            self._variant(),
            self._variant(weights="int4"),
            self._variant(kv_cache_dtype="int8"),
        ]
        if self._cuda:
            variants.append(Variant("cuda", "float16" if self._dtype == "bfloat16" else "bfloat16"))
        for variant in variants:
            yield Part(
                f"tiny, {variant.name}: smoke test",
                lambda reports, variant=variant: smoke(files, variant, reports),
                most=MOST_SMOKE,
            )
        if self._cuda:
            switch = {"ORT_ENABLE_CUDNN_FLASH_ATTENTION": "0"}
            # Another package, so that compile's own test also runs without cuDNN's attention.
            apart = Files("tiny", self._folder / "tiny", "-no-cudnn")
            yield Part(
                "tiny without cuDNN's attention: smoke test",
                lambda reports: smoke(apart, self._variant(), reports),
                most=MOST_SMOKE,
                environment=switch,
            )

    def _first(self, files: Files) -> Iterator[Part]:
        rows, few, mixes = self._first_rows(), self._among(FEW), self._first_mixes()
        host = self._variant(sampler=False)
        yield from self._baked(files, self._variant(), rows, mixes)
        if self._cuda:
            yield from self._baked(files, self._variant(), rows, few, replay=False)
        if "host" in self._options.systems:
            yield self._build(files, host)
            yield self._measure(
                files, "host", host.name, lambda: Qsample(files.there(host.name), 1), rows, few
            )
        if CAPTURED in self._options.systems:
            for weights in self._options.weights:
                variant = self._variant(weights=weights)
                yield self._build(files, variant)
                yield from self._baked(files, variant, rows, mixes)
        yield from self._genai(files, rows)
        yield from self._transformers(files, rows)

    def _rest(self, files: Files) -> Iterator[Part]:
        """The requested measurements that `_first` does not cover."""
        options, variant, few = self._options, self._variant(), self._among(FEW)
        rows, others = self._first_rows(), options.batch
        for every in (1, 16):
            yield from self._baked(files, variant, rows, few, flush_every=every)
        if "first" in options.parts:
            others = [number for number in options.batch if number not in rows]
            mixes = [mix for mix in options.mix if mix not in self._first_mixes()]
            yield from self._baked(files, variant, rows, mixes)
        yield from self._baked(files, variant, others, options.mix)
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
        if (CAPTURED if replay else kind) not in self._options.systems or (
            not replay and not self._cuda
        ):
            return
        if not rows or not mixes:
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
            yield Part(
                f"{files.shape}: genai's package",
                lambda _: files.genai(dtype) and None,
                least=30,
                most=400,
            )
        mixes = self._among(("greedy", PLAIN, "top-k 50, top-p 0.95"))
        # The floor uses the same weights and cache.
        yield self._measure(
            files,
            "genai",
            self._variant().name,
            lambda: open_genai(given or files.there(f"genai-{self._options.dtype}")),
            rows,
            mixes,
        )

    def _transformers(self, files: Files, rows: Sequence[int]) -> Iterator[Part]:
        if "transformers" not in self._options.systems or not rows:
            return
        device, dtype = ("cuda", self._options.dtype) if self._cuda else ("cpu", "float32")

        yield self._measure(
            files,
            "transformers, static cache",
            self._variant().name,
            lambda: open_transformers(files.there("checkpoint"), device, dtype),
            rows,
            self._among(FEW),
        )

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
        return Part(
            f"{files.shape}: {variant.name}", lambda _: build(files, variant), least=20, most=540
        )

    def _variant(self, **options: object) -> Variant:
        return Variant(self._options.provider, self._dtype, **options)  # type: ignore[arg-type]

    def _first_rows(self) -> list[int]:
        batch: list[int] = self._options.batch
        return [number for number in batch if number in FIRST_ROWS] or batch[:1]

    def _first_mixes(self) -> list[str]:
        return self._among((FEW[0], PLAIN, FEW[1]))

    def _among(self, mixes: Sequence[str]) -> list[str]:
        return [mix for mix in mixes if mix in self._options.mix] or self._options.mix[:1]


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    mixes = [*MIXES, MIXED]
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-0.6b", "llama-3.2-1b"]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    more = "in addition to float weights"
    parser.add_argument(
        "--weights", nargs="*", choices=("int4", "int8"), default=["int4"], help=more
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 32, 64])
    parser.add_argument("--mix", nargs="+", choices=mixes, default=mixes)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--genai", type=Path, help="a model folder for onnxruntime-genai, of the first shape"
    )
    rate = "of the GPU's memory, in TB/s, in place of the measured bandwidth"
    parser.add_argument("--bandwidth", type=float, help=rate)
    parser.add_argument(
        "--budget-seconds", type=float, help="the limit of the run; omits parts that do not fit"
    )
    parser.add_argument(
        "--work", type=Path, help="folder that keeps checkpoints and packages (default: temporary)"
    )
    parser.add_argument(
        "--out", type=Path, default=OUTPUT, help="folder for gpu.json, gpu.md and gpu.png"
    )
    options = parser.parse_args()
    if options.new_tokens <= FIRST_TIMED or min(options.batch) < 1:
        parser.error(f"--new-tokens must be more than {FIRST_TIMED}, and --batch at least 1")
    return options


def import_what_parts_need() -> Iterator[str]:
    """Import modules for all processes that are forked for parts; yields the failures.

    A process forked from a process that uses the GPU cannot use it, so this process must not: torch asks the driver's
    library for devices, which does not start CUDA. torch also loads CUDA's libraries.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    packages = ("onnxruntime", "torch", "transformers")
    for name in (
        *packages,
        "qsample.models.auto_model",
        "qsample.exporters.export",
        "qsample.compiler.compile",
    ):
        try:
            importlib.import_module(name)
        except (
            Exception
        ) as error:  # missing libraries raise OSErrors, transformers raises RuntimeErrors
            yield f"{name} cannot be imported: {type(error).__name__}: {error}"
    if _has_started_cuda():
        yield "CUDA runs in this process already, so that processes forked from it cannot use the GPU"


def _has_started_cuda() -> bool:
    """Whether this process has opened the file through which CUDA shares its memory with the driver (Linux)."""
    opened = Path("/proc/self/fd")
    names = (
        [os.readlink(link) for link in opened.iterdir() if link.is_symlink()]
        if opened.exists()
        else []
    )
    return any(name.startswith("/dev/nvidia-uvm") for name in names)


def run_part(part: Part, left: float, take: Callable[..., None]) -> None:
    """Run `part` in its own process within the `left` seconds, and report an early end."""
    if left < part.least:
        take("problem", f"{part.name}: omitted, the time was up")
        return
    start = time.perf_counter()
    ended = run_apart(part.name, part.work, take, min(left, part.most), part.environment)
    print(f"{part.name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    if ended is not None:
        take("problem", f"{part.name}: {ended}")


def main() -> None:
    options = parse_arguments()
    limit = float("inf") if options.budget_seconds is None else options.budget_seconds - ENDING
    end = time.perf_counter() + limit
    results = Results(options.out, f"python benchmarks/gpu.py {' '.join(sys.argv[1:])}".strip())
    results.machine = describe()
    results.save()
    for problem in import_what_parts_need():
        results.take("problem", problem)
    measured = True
    with tempfile.TemporaryDirectory() as temporary:
        plan = Plan(options, options.work or Path(temporary))

        def take(kind: str, *values: object) -> None:
            results.take(kind, *values)
            if kind == "machine":
                plan.found(*map(str, values))

        try:
            for part in plan.parts():
                run_part(part, end - time.perf_counter(), take)
        except NoGpuError as error:
            measured = False
            results.take("problem", str(error))
    try:
        results.plot("everything" if "everything" in options.mix else options.mix[0])
    except (
        Exception
    ) as error:  # the plot is optional: matplotlib may be missing, or find no folder for its fonts
        results.take("problem", f"the plot: {type(error).__name__}: {error}")
    console = Console()
    print_table(HEADER, [cell.columns for cell in results.cells])
    said = [
        *(line for lines in results.checks.values() for line in lines),
        *comparisons(results.cells),
    ]
    for line in (*said, *results.problems):
        console.print(line, highlight=False, markup=False)
    if not measured:
        sys.exit(1)


if __name__ == "__main__":
    main()
