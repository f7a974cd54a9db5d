"""How fast weights are rounded to 4 or 8 bits (rtn) and written, in GB of checkpoint a second.

    python benchmarks/quantize_rate.py                                       # a minute, and 2 GB of disk at most
    python benchmarks/quantize_rate.py --gigabytes 4 --processors 1 2 4 8 --folder /data

A file of bfloat16 matrices, of the shape of an 8 B model's, is read through the page cache, as a checkpoint's is that
was just downloaded, and a graph's weights are written from it. Compared are the compiler's own road, ONNX Runtime's
quantizer for a whole matrix at once, which the compiler used before, and a copy of the file by the same writer, which
hashes and computes nothing: about as fast as the disk takes it. Each runs in a process of its own, on the given number
of processors, some times in turns. The median is printed, also per second of processor time, which says more on a busy
machine, and the largest anonymous memory of the process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np
import onnx_ir as ir

from qsample.compiler.quantize.blocks import QuantizedWeight
from qsample.compiler.quantize.methods import WeightQuantization
from qsample.graph.edit import constant_value
from qsample.graph.save import save_graph
from qsample.graph.weights import StoredTensor

ROWS, COLUMNS = 14336, 4096
BLOCK: Final = 32
_MATRIX_BYTES: Final = ROWS * COLUMNS * 2
_INTERVAL: Final = 0.01  # seconds between two looks at the memory

Weights = list[ir.ExternalTensor]


def make_checkpoint(path: Path, matrices: int) -> None:
    numbers = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(ml_dtypes.bfloat16)
    with path.open("wb") as file:
        for number in range(matrices):
            file.write(np.roll(numbers, number, axis=0).tobytes())


def open_checkpoint(path: Path) -> Weights:
    return [
        ir.ExternalTensor(
            path.name,
            offset,
            _MATRIX_BYTES,
            ir.DataType.BFLOAT16,
            shape=ir.Shape([ROWS, COLUMNS]),
            name=f"weight_{offset}",
            base_dir=path.parent,
        )
        for offset in range(0, path.stat().st_size, _MATRIX_BYTES)
    ]


def empty_graph() -> ir.Model:
    return ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="g"), ir_version=10)


def by_compiler(weights: Weights, bits: int, folder: Path) -> None:
    model = empty_graph()
    for tensor in weights:
        value = constant_value(str(tensor.name), StoredTensor(tensor, tensor.name, transposed=True))
        weight = QuantizedWeight(value, WeightQuantization(bits, BLOCK), outputs_first=False)
        blocks = weight.row_blocks
        weight.operands((weight.rows, blocks, weight.block_bytes), (weight.rows * blocks,), (0,))
        weight.register(model.graph)
    save_graph(model, folder / "graph.onnx")


def by_onnxruntime(weights: Weights, bits: int, folder: Path) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        DefaultWeightOnlyQuantizer,
    )

    quantizer = DefaultWeightOnlyQuantizer(DefaultWeightOnlyQuantConfig(block_size=BLOCK, is_symmetric=True, bits=bits))
    with (folder / "weights").open("wb") as file:
        for tensor in weights:
            matrix = tensor.numpy().T.astype(np.float32)
            blocks, scales, _ = quantizer.qbits_block_quant(np.ascontiguousarray(matrix))
            file.write(blocks.data)
            file.write(scales.data)


def by_copy(weights: Weights, bits: int, folder: Path) -> None:
    del bits
    with (folder / "weights").open("wb") as file:
        for tensor in weights:
            file.write(tensor.numpy().view(np.uint8).data)


SYSTEMS: Final[dict[str, Callable[[Weights, int, Path], None]]] = {
    "compiler": by_compiler,
    "onnxruntime": by_onnxruntime,
    "copy": by_copy,
}


def anonymous_megabytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


@contextmanager
def largest_memory() -> Iterator[list[float]]:
    """While open, the list holds the largest anonymous memory of this process so far, in MB."""
    largest, ended = [anonymous_megabytes()], threading.Event()

    def watch() -> None:
        while not ended.wait(_INTERVAL):
            largest[0] = max(largest[0], anonymous_megabytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield largest
    finally:
        ended.set()
        thread.join()


def measure(system: str, checkpoint: Path, bits: int) -> None:
    """Print seconds, those of processors, and megabytes: the work of the process that `main` starts."""
    weights = open_checkpoint(checkpoint)
    for tensor in weights:
        tensor.numpy().view(np.uint16).max()  # it is in the page cache then
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder, largest_memory() as largest:
        start, busy = time.perf_counter(), time.process_time()
        SYSTEMS[system](weights, bits, Path(folder))
        print(time.perf_counter() - start, time.process_time() - busy, largest[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4)
    parser.add_argument("--processors", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files go; by default, to the folder for temporary files")
    parser.add_argument("--measure", nargs=2, metavar=("SYSTEM", "CHECKPOINT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], Path(options.measure[1]), options.bits)
        return
    own = sorted(os.sched_getaffinity(0))
    if max(options.processors) > len(own):
        parser.error(f"--processors {max(options.processors)}: this process may use {len(own)}")
    matrices = max(1, round(options.gigabytes * 1e9 / _MATRIX_BYTES))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpoint = Path(folder) / "weights.bin"
        make_checkpoint(checkpoint, matrices)
        cases = [(system, count) for count in options.processors for system in SYSTEMS]
        results: dict[tuple[str, int], list[list[float]]] = {case: [] for case in cases}
        for _ in range(options.repetitions):
            for system, count in cases:
                command = [sys.executable, __file__, "--bits", str(options.bits), "--measure", system, str(checkpoint)]
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    check=True,
                    preexec_fn=lambda count=count: os.sched_setaffinity(0, own[:count]),  # type: ignore[misc]
                )
                results[system, count].append([float(number) for number in done.stdout.split()])
    size = matrices * _MATRIX_BYTES / 1e9
    print(f"{size:.2f} GB of bfloat16 to {options.bits} bits in blocks of {BLOCK}")
    for (system, count), found in results.items():
        seconds, busy, _ = (statistics.median(column) for column in zip(*found, strict=True))
        rates = f"{size / seconds:6.2f} GB/s  {size / busy:6.2f} GB per processor second"
        print(f"{system:12} {count} processors  {rates}  {max(memory for *_, memory in found):6.0f} MB anonymous")


if __name__ == "__main__":
    main()
