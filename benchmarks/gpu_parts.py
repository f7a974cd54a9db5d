"""What the parts of the GPU benchmark do, each in a process of its own."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np
from gpu_checks import check_package, executions_of_a_capture
from gpu_files import Files, Floor, Variant
from gpu_process import Reports
from gpu_report import Cell
from gpu_systems import Decode

from qsample.runtime.session.buffers import Buffer, copy_on_device

PACKAGES = (
    "onnxruntime-gpu",
    "onnxruntime",
    "torch",
    "transformers",
    "onnxruntime-genai-cuda",
    "onnxruntime-genai",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
)
# Of the memory, in bytes a second, by NVIDIA's data sheets; for a device whose copies could not be timed.
BANDWIDTHS = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12, "L40S": 0.864e12, "L4": 0.3e12, "A10": 0.6e12}
COPIED = 2**28  # float32 numbers
COPIES = 10


def describe() -> dict[str, str]:
    """The machine's processor, the versions of what is measured, and the switches of ONNX Runtime that are set."""
    facts = {"processor": platform.processor() or platform.machine(), "cores": str(os.cpu_count())}
    facts["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    return facts | {name: value for name, value in os.environ.items() if name.startswith(("ORT_", "CUDA_VISIBLE"))}


def look_at_the_gpu(reports: Reports) -> None:
    """Note what the GPU is, that the provider captures graphs on it, and the bandwidth of its memory."""
    import onnxruntime as ort

    gpu = ""
    with reports.section("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        reports.machine("gpu", gpu)
    ort.preload_dlls()
    with reports.section("capture of a graph"):
        runs, replays = executions_of_a_capture()
        text = f"the first run under a number executes the graph {runs} times, each later one {replays}"
        reports.machine("capture", text)
    try:
        reports.machine("bandwidth", f"{bandwidth() / 1e12:.3g} TB/s, read and written by a copy")
    except Exception as error:
        reports.problem(f"the bandwidth: {type(error).__name__}: {error}")
        known = [(name, rate) for name, rate in BANDWIDTHS.items() if name in gpu]
        if known:
            name, rate = known[0]
            reports.machine("bandwidth", f"{rate / 1e12:.3g} TB/s, as the data sheet of {name} has it")


def bandwidth() -> float:
    """Bytes a second that a copy on the GPU reads and writes."""
    large, small = copy_seconds(COPIED), copy_seconds(1)
    return 2 * 4 * COPIED / (large - small)


def copy_seconds(count: int) -> float:
    """Of `count` float32 numbers, with what a call costs."""
    import onnxruntime as ort

    def made() -> Buffer:
        owner = ort.OrtValue.ortvalue_from_shape_and_type((count,), np.float32, "cuda")
        return Buffer(owner, "float32", (count,), owner.data_ptr(), "cuda")

    source, target, seconds = made(), made(), []
    for _ in range(COPIES):
        start = time.perf_counter()
        copy_on_device(source, target)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def build(files: Files, variant: Variant) -> None:
    files.compiled(variant)


def smoke(files: Files, variant: Variant, reports: Reports, *, trace: bool = False) -> None:
    files.compiled(variant)
    check_package(files, variant, reports, trace=trace)


def measure(
    files: Files,
    system: str,
    package: str,
    rate: float | None,
    open_it: Callable[[], Decode],
    batches: Sequence[int],
    mixes: Sequence[str],
    options: argparse.Namespace,
    reports: Reports,
) -> None:
    """One cell for each batch and mix. package: whose weights and cache a step reads. rate: bytes a second."""
    floor = Floor(files.there(package), files.shape, rate)
    decode = open_it()
    for rows in batches:
        with reports.section(f"{files.shape}, {system}, {rows} rows"):
            decode.warm_up(rows, options.new_tokens)
            for mix in mixes:
                with reports.section(f"{files.shape}, {system}, {rows} rows, {mix}"):
                    rounds = [decode.seconds(rows, mix, options.new_tokens) for _ in range(options.rounds)]
                    seconds = float(np.median(rounds))
                    least = floor.seconds(rows, options.new_tokens)
                    reports.cell(Cell(files.shape, system, rows, mix, seconds, least, decode.stalls))
