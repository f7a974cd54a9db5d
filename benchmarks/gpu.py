"""Decoding on an NVIDIA GPU: checks the captured graph, and compares its speed with alternatives.

    python benchmarks/gpu.py                              # everything, the most valuable first
    python benchmarks/gpu.py --budget-seconds 570         # what fits into ten minutes
    python benchmarks/gpu.py --parts smoke                # two minutes: does it work on this machine?
    python benchmarks/gpu.py --page build/gpu/*/gpu.json  # makes docs/benchmarks/gpu.* of the results of runs

It makes models of random weights, without a network, and keeps them in --work: delete it after a change of the
compiler. Builds and the smoke parts run side by side; then come figures, one after the other. Each part is a process:
if it fails, crashes or hangs, a row says so, and the rest goes on. If the provider does not compute, the run ends with
the reason. Each run has a folder of its own for its results and log.txt, the output of its parts. It needs the extras
`gpu` and `export`, pytest for the check of the sampler, PYTHONPATH=. if qsample is not installed, and
onnxruntime-genai-cuda for genai. The systems:

- captured: `generate` over a package whose step, the sampler included, is replayed as a single CUDA graph
- uncaptured: the same graph, its kernels launched one by one
- host: a package without a sampler; logits are copied to the host, for qsample's sampler or transformers' processors
- genai: onnxruntime-genai, without and with its CUDA graph
- transformers: `generate` with a static cache, compiled
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from checkpoints import ASSETS, SHAPES, make_checkpoint, make_genai_model
from gpu_checks import ROOT, check_package, check_sampler, describe, look_at_the_gpu
from gpu_parts import Part, run_parts
from gpu_report import TABLES, Row, Rows, plot, shown, tables, write
from gpu_systems import Figures, compile_package, make_once
from report import make_parser, one_line
from rich.console import Console
from rich.progress import Progress

PAGES: Final = ROOT / "docs" / "benchmarks"
CTX_LEN, BUNDLED_CTX_LEN = 1024, 256
# Of a row, at least 64, so that runs differ by windows of 16 steps; rounds after one that warms up.
NEW_TOKENS, ROUNDS = 128, 3
BUILD_SECONDS, SMOKE_SECONDS, PLOT_SECONDS = 300.0, 45.0, 8.0
WIDTH: Final = 160  # characters of a line that goes to a file
PRECISIONS: Final = {"bfloat16": "bf16", "float16": "fp16"}


def checks(figures: Figures) -> None:
    check_package(figures.rows, figures.folder / "float", figures.folder / "checkpoint")


# In order of value.
FIGURES: Final[tuple[Callable[[Figures], None], ...]] = (
    *(Figures.captured, Figures.uncaptured, Figures.host, Figures.int4, Figures.kernels),
    *(Figures.reads, Figures.genai, checks, Figures.prompts, Figures.transformers),
)


def build(folder: Path, name: str, make: Callable[[Path], object]) -> Part:
    work = partial(make_once, folder / name, make)
    return Part(f"{folder.name}: {name}", lambda _: work(), BUILD_SECONDS)


def figures_part(measure: Callable[[Figures], None], folder: Path, dtype: str) -> Part:
    name = f"{folder.name}: figures of {measure.__name__}"
    return Part(name, lambda rows: measure(Figures(rows, folder, dtype, NEW_TOKENS, ROUNDS)))


def planned_parts(options: argparse.Namespace) -> Iterator[list[Part]]:
    """Groups of parts in order of value; a group needs those before it."""
    smoke_builds, smoke_checks = smoke_parts(options) if "smoke" in options.parts else ([], [])
    for shape in options.shapes if "figures" in options.parts else ():
        folder = options.work / shape
        checkpoint = folder / "checkpoint"
        compiled = partial(compile_package, checkpoint, dtype=options.dtype, ctx_len=CTX_LEN)
        genai = partial(make_genai_model, checkpoint, python=sys.executable, provider="cuda")
        models: dict[str, Callable[[Path], object]] = {
            "float": compiled,
            "int4": partial(compiled, weights="int4"),
            "host": partial(compiled, sampler=False),
            "genai": partial(genai, precision=PRECISIONS[options.dtype]),
        }
        yield [build(folder, "checkpoint", partial(make_checkpoint, shape)), *smoke_builds]
        yield [*(build(folder, name, make) for name, make in models.items()), *smoke_checks]
        smoke_builds, smoke_checks = [], []
        yield from ([figures_part(measure, folder, options.dtype)] for measure in FIGURES)
    yield from (smoke_builds, smoke_checks)


def smoke_parts(options: argparse.Namespace) -> tuple[list[Part], list[Part]]:
    """The bundled model, whose weights are trained, in each dtype and quantized; and its checks, and the sampler's."""
    folder, dtype = options.work / "bundled", options.dtype
    packages: dict[str, dict[str, Any]] = {name: {"dtype": name} for name in PRECISIONS}
    packages["int4"] = {"dtype": dtype, "weights": "int4"}
    packages["int8-cache"] = {"dtype": dtype, "kv_cache_dtype": "int8"}
    builds, checks = [], [Part("the sampler", check_sampler, SMOKE_SECONDS)]
    for name, kind in packages.items():
        compiled = partial(compile_package, ASSETS, ctx_len=BUNDLED_CTX_LEN, **kind)
        builds.append(build(folder, name, compiled))
        check = partial(check_package, folder=folder / name, checkpoint=ASSETS)
        checks.append(Part(f"{folder.name}: checks of {name}", check, SMOKE_SECONDS))
    return builds, checks


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, work="build/gpu/models")
    add = parser.add_argument
    add("--parts", nargs="+", choices=("smoke", "figures"), default=["smoke", "figures"])
    shapes = ["qwen3-0.6b", "llama-3.2-1b"]
    add("--shapes", nargs="+", choices=list(SHAPES), default=shapes, metavar="SHAPE")
    add("--dtype", choices=list(PRECISIONS), default="bfloat16")
    add("--budget-seconds", type=float, default=float("inf"), help="the limit of the run")
    add("--out", type=Path, default=Path("build/gpu"), help="folder of the folders of runs")
    add("--page", nargs="+", type=Path, metavar="JSON", help="gpu.json of the runs for the page")
    return parser.parse_args()


def publish(paths: Sequence[Path], folder: Path) -> None:
    """Write the page, its plot and its figures. paths: gpu.json of runs on one GPU.

    Raises:
        SystemExit: The runs were on several GPUs.
    """
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    rows: list[tuple[str, Row]] = []
    for one in documents:
        rows += [(name, row) for name in TABLES for row in one[name] if (name, row) not in rows]
    gpus = [row["value"] for name, row in rows if name == "machine" and row["name"] == "gpu"]
    if len(gpus) > 1:
        sys.exit(f"--page: these are results of {' and '.join(gpus)}; give those of one GPU")
    data = tables("; ".join(one["command"] for one in documents), rows)
    plot(data, folder / "gpu.png")
    write(data, folder)


def main() -> None:
    options = parse_arguments()
    if options.page is not None:
        publish(options.page, PAGES)
        return
    end = time.monotonic() + options.budget_seconds - PLOT_SECONDS
    command = one_line(f"python benchmarks/gpu.py {' '.join(sys.argv[1:])}")
    rows = Rows(options.out / f"{datetime.now():%Y-%m-%d-%H%M%S}", "the run")
    rows.folder.mkdir(parents=True)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
    printed: list[Row] = []

    def show_new_rows() -> None:
        found = rows.read()
        for table, row in found[len(printed) :]:
            line = " | ".join(map(shown, row.values()))
            console.print(f"{table}: {line}", markup=False, highlight=False)
            printed.append(row)
            write(tables(command, found), rows.folder)

    for name, value in describe():
        rows.add("machine", name=name, value=value)
    # torch then asks the driver's library for devices, so that forked processes can use the GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with rows.section("imports"):
        for name in ("transformers", "qsample.exporters.export", "qsample.compiler.compile"):
            import_module(name)
    with Progress(console=console, auto_refresh=False, redirect_stdout=False) as bar:
        run_parts([[Part("the GPU", look_at_the_gpu)]], rows, end, show_new_rows, bar)
        computes = any(row.get("name") == "provider" for row in printed)
        if computes:
            run_parts(planned_parts(options), rows, end, show_new_rows, bar)
    with rows.section("the plot"):
        plot(tables(command, rows.read()), rows.folder / "gpu.png")
    write(tables(command, rows.read()), rows.folder)
    show_new_rows()
    console.print(f"the page: {rows.folder / 'gpu.md'}")
    sys.exit(0 if computes else 1)


if __name__ == "__main__":
    main()
