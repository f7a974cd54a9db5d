"""Decoding on an NVIDIA GPU: checks the captured graph, and times it beside what else there is.

    python benchmarks/gpu.py                                   # 0.6B and 1B shapes, every batch and mix
    python benchmarks/gpu.py --shapes qwen3-0.6b --budget-seconds 500 --work work   # what fits
    python benchmarks/gpu.py --provider cpu --shapes tiny --batch 1 4   # a try of this script without a GPU

One call makes a checkpoint of random weights, exports and compiles it on the machine, and writes a table and a plot
(docs/benchmarks/gpu.*) after every figure. A part that fails is noted there, and the next one goes on. Ways to decode,
one after another, the median of the rounds counting:

- captured: the sampler in the graph, replayed as one CUDA graph, read every 4, 1 and 16 steps
- uncaptured: the same graph, its kernels launched one by one
- host: the package exported with include_sampler=False; logits are copied to the host and sampled there
- transformers: `generate` with a static cache, compiled
- genai: onnxruntime-genai, where --genai names a model built for it (its CUDA wheel is not on PyPI for every platform)

The share of the floor is the time that reading the weights and the cache once takes, at the bandwidth that a copy on
this device reaches, over the time of a step.
"""

from __future__ import annotations

import argparse
import gc
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import SHAPES, make_checkpoint
from gpu_checks import check_package, executions_of_a_capture
from gpu_report import HEADER, Cell, Results
from gpu_systems import FIRST_TIMED, MIXED, MIXES, PROMPT_TOKENS, Decode, Genai, Qsample, System, Transformers
from rich.console import Console
from rich.table import Table

import qsample

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
CTX_LEN = 1024
FEW = ("greedy", "everything")  # for systems that are measured for one comparison
SYSTEMS = ("captured", "uncaptured", "host", "transformers", "genai")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-0.6b", "llama-3.2-1b"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--weights", choices=("int4", "int8"), help="quantize the weights, too")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 32, 64])
    parser.add_argument("--mix", nargs="+", choices=[*MIXES, MIXED], default=[*MIXES, MIXED])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--genai", type=Path, help="a model folder for onnxruntime-genai, of the first shape")
    parser.add_argument("--budget-seconds", type=float, help="leave out what would not fit into this time")
    parser.add_argument(
        "--work", type=Path, help="folder that keeps checkpoints and packages (default: a temporary one)"
    )
    parser.add_argument("--out", type=Path, default=OUTPUT, help="folder for gpu.json, gpu.md and gpu.png")
    options = parser.parse_args()
    if options.new_tokens <= FIRST_TIMED:
        parser.error(f"--new-tokens is {options.new_tokens}; it must be more than {FIRST_TIMED}")
    return options


class Budget:
    """seconds: of the whole run; None = without end."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.perf_counter() + seconds

    def allows(self, seconds: float) -> bool:
        return self._end is None or time.perf_counter() + seconds < self._end


class Files:
    """Checkpoint and packages of a shape, each made when it is first asked for; what is there is kept."""

    def __init__(self, shape: str, folder: Path, options: argparse.Namespace) -> None:
        self._shape, self._folder = shape, folder
        self.building = 0.0  # seconds that the compiled package took, with what it was made from
        self._chosen: dict[str, Any] = {"provider": options.provider, "ctx_len": CTX_LEN, "weights": options.weights}
        if options.provider == "cuda":
            self._chosen["dtype"] = options.dtype

    def checkpoint(self) -> Path:
        return make_checkpoint(self._shape, self._folder / "checkpoint")

    def portable(self, *, sampler: bool = True) -> Path:
        def export(path: Path) -> None:
            qsample.AutoModelForCausalLM.from_pretrained(self.checkpoint(), include_sampler=sampler).export(path)

        return self._made("portable" if sampler else "host-portable", export)

    def compiled(self, *, sampler: bool = True) -> Path:
        def compile_to(path: Path) -> None:
            portable = self.portable(sampler=sampler)
            package = qsample.AutoModelForCausalLM.from_pretrained(portable, include_sampler=sampler)
            package.compile(
                path, max_divergence=100, **self._chosen
            )  # random weights are off by more than trained ones

        return self._made("compiled" if sampler else "host", compile_to)

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        path = self._folder / name
        if not path.exists():
            start = time.perf_counter()
            make(path)
            taken = time.perf_counter() - start
            if name == "compiled":
                self.building = taken
            print(f"{self._shape}: {name} took {taken:.0f} s", file=sys.stderr)
        return path


def systems(files: Files, options: argparse.Namespace, *, first_shape: bool) -> list[System]:
    """In order of importance."""
    cuda, mixes = options.provider == "cuda", tuple(options.mix)
    few = tuple(mix for mix in mixes if mix in FEW) or mixes[:1]
    name = "captured" if cuda else "baked"
    systems = []
    if "captured" in options.systems:
        for flush_every in (4, 1, 16):
            open_it = partial(lambda every: Qsample(files.compiled(), every), flush_every)
            systems.append(System(f"{name}, read every {flush_every}", mixes if flush_every == 4 else few, open_it))
    if "uncaptured" in options.systems and cuda:
        systems.append(System("uncaptured, read every 4", few, lambda: Qsample(files.compiled(), 4, replay=False)))
    if "transformers" in options.systems:
        device, dtype = ("cuda", options.dtype) if cuda else ("cpu", "float32")
        one_setting = tuple(mix for mix in mixes if mix != MIXED)
        open_it = partial(lambda *chosen: Transformers(files.checkpoint(), *chosen), device, dtype)
        systems.append(System("transformers, static cache", one_setting, open_it))
    if "genai" in options.systems and options.genai is not None and first_shape:
        simple = tuple(mix for mix in mixes if mix not in (MIXED, "everything"))
        systems.append(System("genai", simple, lambda: Genai(options.genai)))
    if "host" in options.systems:
        # Another export and another compilation, as long as the first ones.
        systems.append(System("host", few, lambda: Qsample(files.compiled(sampler=False), 1), files.building))
    return systems


def measure(
    system: System, shape: str, floor: Floor, options: argparse.Namespace, budget: Budget, into: Results
) -> None:
    if not budget.allows(system.opens_in):
        into.problems.append(f"{shape}, {system.name}: left out, the time was up")
        return
    decode = system.open()
    expected = 0.0
    for rows in options.batch:
        for index, mix in enumerate(system.mixes):
            name = f"{shape}, {system.name}, {rows} rows, {mix}"
            if not budget.allows(expected):
                into.problems.append(f"{name}: left out, the time was up")
                continue
            start = time.perf_counter()
            with into.section(name):
                if index == 0:
                    decode.warm_up(rows, options.new_tokens)
                seconds = measured(decode, rows, mix, options)
                into.cells.append(Cell(shape, system.name, rows, mix, seconds, floor.seconds(rows, options.new_tokens)))
            expected = 1.5 * (time.perf_counter() - start)


def measured(decode: Decode, rows: int, mix: str, options: argparse.Namespace) -> float:
    return float(np.median([decode.seconds(rows, mix, options.new_tokens) for _ in range(options.rounds)]))


class Floor:
    """The least time of a step: the weights, and the cache of half the new tokens, read once.

    An embedding that is not the head as well is left out: a step reads a few of its rows.
    """

    def __init__(self, package: Path, shape: str, bandwidth: float | None) -> None:
        opened = qsample.package.read_package(package, verify=False)
        interface = opened.interface
        element = 4 if interface.dtype == "float32" else 2
        self._weights = opened.manifest.files["decoder.onnx.data"].bytes
        quantized = opened.manifest.compilation is not None and opened.manifest.compilation.quantization
        if not SHAPES[shape]["tie_word_embeddings"] and not quantized:
            self._weights -= interface.vocab_size * SHAPES[shape]["hidden_size"] * element
        cached = 1 if interface.kv_cache_dtype == "int8" else element
        self._token = sum(2 * layer.num_key_value_heads * layer.head_dim * cached for layer in interface.key_values)
        self._bandwidth = bandwidth

    def seconds(self, rows: int, new_tokens: int) -> float | None:
        if self._bandwidth is None:
            return None
        return (self._weights + rows * self._token * (PROMPT_TOKENS + new_tokens / 2)) / self._bandwidth


def bandwidth() -> float:
    """Bytes a second that a copy on the GPU reads and writes."""
    import torch

    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / float(np.median(seconds))


def describe() -> dict[str, str]:
    """The machine's processor and the versions of what is measured."""
    versions = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    packages = (
        "onnxruntime-gpu",
        "onnxruntime",
        "torch",
        "transformers",
        "onnxruntime-genai-cuda",
        "onnxruntime-genai",
    )
    for name in packages:
        try:
            versions[name] = version(name)
        except ModuleNotFoundError:
            continue
    return versions


def look_at_the_gpu(into: Results) -> float:
    """Note what the GPU is and that the provider captures graphs on it; its bandwidth."""
    import onnxruntime as ort
    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    into.machine["gpu"] = done.stdout.strip() or torch.cuda.get_device_name()
    ort.preload_dlls()
    runs, replays = executions_of_a_capture()
    into.machine["capture"] = f"the first run under a number executes the graph {runs} times, each later one {replays}"
    rate = bandwidth()
    into.machine["bandwidth of a copy"] = f"{rate / 1e12:.2f} TB/s, read and written"
    return rate


def show(cells: list[Cell], console: Console) -> None:
    table = Table(*HEADER)
    for cell in cells:
        table.add_row(*cell.columns)
    console.print(table)


def main() -> None:
    options = parse_arguments()
    console, budget = Console(), Budget(options.budget_seconds)
    results = Results(options.out, f"python benchmarks/gpu.py {' '.join(sys.argv[1:])}".strip())
    results.machine = describe()
    rate: float | None = None
    if options.provider == "cuda":
        with results.section("the GPU"):
            rate = look_at_the_gpu(results)
    building = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        for shape in options.shapes:
            if not budget.allows(building):
                results.problems.append(f"{shape}: left out, the time was up")
                results.save()
                continue
            files = Files(shape, (options.work or Path(temporary)) / shape, options)
            with results.section(f"{shape}: packages"):
                floor = Floor(files.compiled(), shape, rate)
                building = files.building
                with results.section(f"{shape}: checks"):
                    check_package(files, options, partial(results.check, shape), results.section)
                for system in systems(files, options, first_shape=shape == options.shapes[0]):
                    with results.section(f"{shape}: {system.name}"):
                        measure(system, shape, floor, options, budget, results)
                    gc.collect()
            show([cell for cell in results.cells if cell.shape == shape], console)
            with results.section("the plot"):
                results.plot("everything" if "everything" in options.mix else options.mix[0])
    for line in (*(line for said in results.checks.values() for line in said), *results.problems):
        console.print(line, highlight=False, markup=False)


if __name__ == "__main__":
    main()
