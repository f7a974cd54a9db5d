"""A graph enters that computes the levels of quantized weights from constants; it leaves with the
levels as constants.

onnx-community's files of 1 bit (`model_q1.onnx`) hold the signs of 8 weights in a byte, because
ONNX Runtime's operators have no kernels for 1 bit: the graph looks each byte up in a table of levels
of 2 bits, or of 4 bits for the table of embeddings.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from qsample.contract.arrays import Array
from qsample.graph.edit import ancestors, lazy_initializer
from qsample.graph.evaluate import GraphPart, inputs_of
from qsample.graph.operators import is_contrib, is_matmul_nbits

_TABLE_LOOKUP: Final = "GatherBlockQuantized"


def unpack_levels(model: ir.Model) -> bool:
    """Replace computed levels by constants, in place, whose numbers are computed at each read.

    Returns whether there were any.
    """
    unpacked: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        slot = 1 if is_matmul_nbits(node) else 0
        if not is_matmul_nbits(node) and not is_contrib(node, _TABLE_LOOKUP):
            continue
        levels = node.inputs[slot]
        shape = _shape(node)
        if levels is None or shape is None or not _is_looked_up(levels):
            continue
        if levels not in unpacked:
            unpacked[levels] = _constant(model, levels, shape)
            model.graph.register_initializer(unpacked[levels])
        node.replace_input_with(slot, unpacked[levels])
    return bool(unpacked)


def _is_looked_up(levels: ir.Value) -> bool:
    """Whether levels are computed from constants alone, and not only reshaped: a table and a head
    may share a constant in two shapes."""
    nodes = ancestors([levels])
    return any(node.op_type != "Reshape" for node in nodes) and not inputs_of([levels])


def _shape(node: ir.Node) -> tuple[int, ...] | None:
    """The shape of the levels of a MatMulNBits, or of a GatherBlockQuantized along its last axis;
    None if it is unknown."""
    bits = node.attributes.get_int("bits", 4)
    size = node.attributes.get_int("block_size", 128)
    if is_matmul_nbits(node):
        blocks = -(-node.attributes.get_int("K", 0) // size)
        return node.attributes.get_int("N", 0), blocks, size * bits // 8
    scales = node.inputs[2]
    dims = [] if scales is None or scales.const_value is None else scales.const_value.shape.numpy()
    axis = node.attributes.get_int("quantize_axis", 1)
    if not dims or axis % len(dims) != len(dims) - 1:
        return None
    *rows, blocks = map(int, dims)
    return *rows, blocks * size * bits // 8


def _constant(model: ir.Model, levels: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    # A copy of the nodes, because those in the graph are removed.
    part = ir.Model(ir.convenience.extract(model.graph, [], [levels]), ir_version=model.ir_version)

    def compute() -> Array:
        (computed,) = GraphPart(part, part.graph.outputs)({}, {})
        return computed.reshape(shape)

    return lazy_initializer(f"{levels.name}_unpacked", shape, ir.DataType.UINT8, compute)
