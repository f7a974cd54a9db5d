"""The work of the parts of the GPU benchmark, each in its own process."""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import subprocess
import time
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from gpu_checks import check_package, executions_of_a_capture
from gpu_report import Cell, Reports
from gpu_systems import Decode, Files, Floor, Variant

from qsample.ort import small_graphs
from qsample.ort.buffers import Buffer, copy_on_device
from qsample.ort.options import session_options
from qsample.ort.providers import execution_providers, open_session

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
PROVIDER = "provider"  # reported by `look_at_the_gpu` if the provider runs
# Bytes per second of the memory, by NVIDIA's data sheets; for a device whose copies could not be timed.
BANDWIDTHS = {
    "H200": 4.8e12,
    "H100": 3.35e12,
    "A100": 2.04e12,
    "L40S": 0.864e12,
    "L4": 0.3e12,
    "A10": 0.6e12,
}
FLOAT32 = 1  # onnx.TensorProto.DataType
COPIED = 2**28  # float32 numbers
COPIES = 10


def describe() -> dict[str, str]:
    """The machine's processor, the versions of the systems, and the environment's switches of ONNX Runtime."""
    facts = {"processor": platform.processor() or platform.machine(), "cores": str(os.cpu_count())}
    facts["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    others = other_versions()
    if others:
        facts["other versions than qsample's extra `export` takes"] = ", ".join(others)
    return facts | {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("ORT_", "CUDA_VISIBLE"))
    }


def other_versions() -> list[str]:
    """Installed versions that pyproject.toml does not allow for an export, e.g. "transformers 5.17.0 (==5.23.*)"."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return []
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    found = []
    for requirement in map(Requirement, project["optional-dependencies"]["export"]):
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            found.append(f"no {requirement.name} ({requirement.specifier})")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            found.append(f"{requirement.name} {installed} ({requirement.specifier})")
    return found


def look_at_the_gpu(reports: Reports) -> None:
    """Report the GPU, whether the provider runs and captures graphs on it, and the bandwidth of its memory."""
    gpu = ""
    with reports.section("nvidia-smi"):
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader",
        ]
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        reports.machine("gpu", gpu)
    try:
        reports.machine(PROVIDER, try_the_provider())
    except Exception as error:
        reports.problem(f"the provider for CUDA: {' '.join(str(error).split())}{missing_library()}")
        return
    with reports.section("capture of a graph"):
        runs, replays = executions_of_a_capture()
        text = f"the first run with an id executes the graph {runs} times, each later run {replays}"
        reports.machine("capture", text)
    try:
        reports.machine("bandwidth", f"{bandwidth() / 1e12:.3g} TB/s, read and written by a copy")
    except Exception as error:
        reports.problem(f"the bandwidth: {type(error).__name__}: {error}")
        known = [(name, rate) for name, rate in BANDWIDTHS.items() if name in gpu]
        if known:
            name, rate = known[0]
            reports.machine("bandwidth", f"{rate / 1e12:.3g} TB/s, by the data sheet of {name}")


def try_the_provider() -> str:
    """Run a graph with a single node on CUDA; returns the provider and its ONNX Runtime. Raises like `open_session`."""
    import onnxruntime as ort

    session = open_session(
        small_graphs.identity(FLOAT32), session_options(), execution_providers("cuda")
    )
    given = np.arange(4, dtype=np.float32)
    (got,) = session.run(None, {"x": given})
    if not np.array_equal(got, given):
        raise RuntimeError(f"Identity made {got.tolist()} of {given.tolist()}")
    return f"{session.get_providers()[0]} of onnxruntime {ort.__version__}, {Path(ort.__file__).parent}"


def missing_library() -> str:
    """The reason why the system's loader rejects the provider's library, which ONNX Runtime's exceptions lack.

    "" if it loads, or if the library does not exist.
    """
    import onnxruntime as ort

    folder = Path(ort.__file__).parent / "capi"
    try:
        for name in ("libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so"):
            if (folder / name).exists():
                ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
    except OSError as error:
        return f"; its library does not load: {error}"
    return ""


def bandwidth() -> float:
    """Bytes per second that a copy on the GPU reads and writes."""
    large, small = copy_seconds(COPIED), copy_seconds(1)
    return 2 * 4 * COPIED / (large - small)


def copy_seconds(count: int) -> float:
    """The seconds of a copy of `count` float32 numbers, including the cost of a call."""
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
    """Measure a cell for each batch and mix.

    Args:
        files: The models of a shape.
        system: The name of the system.
        package: The package with the weights and the cache that a step reads, for the floor.
        rate: The bandwidth in bytes per second; None = unknown.
        open_it: Opens the system.
        batches: Numbers of rows.
        mixes: Names of sampling parameters.
        options: The options of the run.
        reports: The receiver of the cells.
    """
    floor = Floor(files.there(package), files.shape, rate)
    decode = open_it()
    for rows in batches:
        with reports.section(f"{files.shape}, {system}, {rows} rows"):
            decode.warm_up(rows, options.new_tokens)
            for mix in mixes:
                with reports.section(f"{files.shape}, {system}, {rows} rows, {mix}"):
                    rounds = [
                        decode.seconds(rows, mix, options.new_tokens) for _ in range(options.rounds)
                    ]
                    seconds = float(np.median(rounds))
                    least = floor.seconds(rows, options.new_tokens)
                    reports.cell(Cell(files.shape, system, rows, mix, seconds, least))
