"""Refuses a model of which nothing was quantized though it was asked for, and says why."""

from __future__ import annotations

import onnx_ir as ir

from qsample.compiler.quantize.report import quantization_report
from qsample.compiler.quantize.rounding import WeightQuantization
from qsample.compiler.quantize.weights import matrix_of
from qsample.errors import CompileError
from qsample.graph.edit import with_loop_bodies
from qsample.graph.operators import BLOCK_SIZES, is_matmul_nbits


def check_quantized(model: ir.Model, quantization: WeightQuantization) -> None:
    """Raise CompileError where neither a matrix nor an expert of `model` was quantized."""
    report = quantization_report(model)
    if report is not None and (report.matrices or report.experts):
        return
    nodes = list(with_loop_bodies(model.graph))
    sizes = {matrix.input_size for node in nodes if (matrix := matrix_of(node)) is not None}
    if sizes:
        smallest = f"{BLOCK_SIZES[0]}, the smallest block"
        why = f"none of their input sizes ({', '.join(map(str, sorted(sizes)))}) is a multiple of {smallest}"
    else:
        why = "it multiplies by no constant matrix of float32, float16 or bfloat16"
        if any(is_matmul_nbits(node) for node in nodes):
            why += " besides those that the checkpoint brought quantized, which stay as they are"
    raise CompileError(
        f"{quantization.bits}-bit weights were asked for and no matrix of the model can be quantized: {why}; "
        "leave weights out"
    )
