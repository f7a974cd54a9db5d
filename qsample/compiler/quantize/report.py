"""What quantization did to the weights of a graph, and what it left in float."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from qsample.graph import gqa, moe
from qsample.graph.operators import is_contrib, is_matmul_nbits

_REPORT: Final = "qsample.quantization"
_FLOATS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What was quantized, and what was not.

    matrices: how many, those of experts not counted. block_sizes: weights of them that share a scale: what was
    asked for, or less where that divides no input size. bytes_before, bytes_after: of all quantized weights. experts:
    how many, in all layers. expert_block_size: weights of an expert that share a scale, where experts were quantized:
    what was asked for, or the nearest that the operator takes. float_bytes: of the parameters that are still float;
    scales and tables of angles are none. wide_matrices: of `matrices`, those that a mixed quantization holds in 8 bits.
    """

    matrices: int
    bytes_before: int
    bytes_after: int
    experts: int = 0
    expert_block_size: int | None = None
    float_bytes: int = 0
    block_sizes: tuple[int, ...] = ()
    wide_matrices: int = 0


def quantization_report(model: ir.Model) -> QuantizationReport | None:
    """What quantization did to the weights of `model` since it was loaded; None where it was not asked for."""
    report: QuantizationReport | None = model.meta.get(_REPORT)
    return report


def report_quantization(model: ir.Model, report: QuantizationReport) -> None:
    """Keep `report` with `model`, not in its file."""
    model.meta[_REPORT] = report


def float_bytes(model: ir.Model) -> int:
    """The bytes of the constants of `model` that are float and no scales of quantized ones or tables of angles."""
    others = {value for node in model.graph.all_nodes() for value in _scales_and_tables(node)}
    total = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in _FLOATS and value not in others:
            total += tensor.nbytes
    return total


def _scales_and_tables(node: ir.Node) -> list[ir.Value | None]:
    if is_matmul_nbits(node) or node.op_type == "GatherBlockQuantized":
        return [node.inputs[2]]
    if is_contrib(node, moe.QUANTIZED_OP_TYPE):
        return [node.inputs[moe.QuantizedSlot.FC1_SCALES], node.inputs[moe.QuantizedSlot.FC2_SCALES]]
    if node.op_type == gqa.OP_TYPE:
        return list(node.inputs[gqa.Slot.COS_CACHE : gqa.Slot.POSITION_IDS])
    return list(node.inputs[2:4]) if node.op_type == "RotaryEmbedding" else []
