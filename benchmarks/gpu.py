"""Decoding on an NVIDIA GPU: checks the captured graph, and times it beside what else there is.

    python benchmarks/gpu.py                                   # 0.6B and 1B shapes, every batch and mix
    python benchmarks/gpu.py --budget-seconds 570 --work out/gpu   # what fits, the most telling first
    python benchmarks/gpu.py --parts smoke                     # two minutes: does it work here at all?
    python benchmarks/gpu.py --provider cpu --shapes tiny --batch 1 4   # a try of this script without a GPU

One call makes checkpoints of random weights, exports and compiles them on the machine, and needs no network. It goes
through its parts by value: what the GPU is; a smoke test of the sampler alone, over logits of every kind, and of a tiny
model (placement, capture, tokens equal to the CPU's, with each kind of weights and cache); the first shape at 1 and 32
rows; the rest. Each part is a process of its own, so that one which fails, or hangs, ends alone. The page and the
figures (docs/benchmarks/gpu.*) are written after every measurement. A second call with the same --work goes on with the
packages of the first; --parts says what it is to do. Where the provider does not run at all, the run ends there and
says why. It needs what the extras `gpu` and `export` bring; where qsample itself is not installed, put PYTHONPATH=. in
front. Ways to decode, the median of the rounds counting:

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
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from checkpoints import SHAPES
from gpu_parts import describe
from gpu_plan import PARTS, SYSTEMS, NoGpuError, Part, Plan
from gpu_process import run_apart
from gpu_report import HEADER, Results, comparisons
from gpu_systems import FIRST_TIMED, MIXED, MIXES
from rich.console import Console
from rich.table import Table

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
ENDING = 8.0  # seconds of a budget for the plot and the table


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
    """seconds: of the whole run; None = without end. What is left is for parts: the ending has its own share."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.perf_counter() + seconds - ENDING

    @property
    def left(self) -> float:
        return float("inf") if self._end is None else self._end - time.perf_counter()


def import_what_parts_need() -> Iterator[str]:
    """Once, for all processes that are forked for parts. Yields what cannot be imported, and why.

    A process forked from one that uses the GPU cannot use it, so nothing here may: torch is told to ask the driver's
    library, which tells what there is without a start of CUDA. torch brings CUDA's libraries with it, too.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    packages = ("onnxruntime", "torch", "transformers")
    for name in (*packages, "qsample.auto_model", "qsample.exporters.export", "qsample.compiler.compile"):
        try:
            importlib.import_module(name)
        except Exception as error:  # libraries that are missing are OSErrors, transformers has RuntimeErrors
            yield f"{name} cannot be imported: {type(error).__name__}: {error}"
    if _has_started_cuda():
        yield "CUDA runs in this process already, so that processes forked from it cannot use the GPU"


def _has_started_cuda() -> bool:
    """Linux: whether this process has the file open by which CUDA shares its memory with the driver."""
    opened = Path("/proc/self/fd")
    names = [os.readlink(link) for link in opened.iterdir() if link.is_symlink()] if opened.exists() else []
    return any(name.startswith("/dev/nvidia-uvm") for name in names)


def run_part(part: Part, budget: Budget, take: Callable[..., None]) -> None:
    """Run `part` in a process of its own, in the time that there is, and report what ended it early."""
    if budget.left < part.least:
        take("problem", f"{part.name}: left out, the time was up")
        return
    start = time.perf_counter()
    ended = run_apart(part.name, part.work, take, min(budget.left, part.most), part.environment)
    print(f"{part.name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    if ended is not None:
        take("problem", f"{part.name}: {ended}")


def main() -> None:
    options = parse_arguments()
    budget = Budget(options.budget_seconds)
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
                run_part(part, budget, take)
        except NoGpuError as error:
            measured = False
            results.take("problem", str(error))
    try:
        results.plot("everything" if "everything" in options.mix else options.mix[0])
    except Exception as error:  # an ornament, as of a library that may be missing or find no place for its fonts
        results.take("problem", f"the plot: {type(error).__name__}: {error}")
    console, table = Console(), Table(*HEADER)
    for cell in results.cells:
        table.add_row(*cell.columns)
    console.print(table)
    said = [*(line for lines in results.checks.values() for line in lines), *comparisons(results.cells)]
    for line in (*said, *results.problems):
        console.print(line, highlight=False, markup=False)
    if not measured:
        sys.exit(1)


if __name__ == "__main__":
    main()
