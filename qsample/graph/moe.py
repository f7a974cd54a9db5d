"""MoE and QMoE, ONNX Runtime's operators for mixtures of experts, as qsample uses them.

Each row goes through a single expert, whose value in its `ROUTER` row is the largest, with weight
1: k is 1, and the weights of the selected experts are normalised. The weights of a token's experts
are applied after the operator.

Source:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.QMoE
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.graph.edit import ancestors, constant, producer
from qsample.graph.operators import is_contrib

OP_TYPE: Final = "MoE"
QUANTIZED_OP_TYPE: Final = "QMoE"
_PRODUCTS: Final = ("MatMul", "FusedMatMul", "Gemm")
# The rows of gate and up alternate in fc1, because the CPU's kernels support no other order.
ATTRIBUTES: Final[dict[str, Any]] = {
    "k": 1,
    "normalize_routing_weights": 1,
    "activation_type": "swiglu",
    "swiglu_fusion": 1,
}


class Slot(IntEnum):
    """The index of each input of MoE.

    fc1 is [E, 2 * I, H], and fc2 is [E, H, I]; their biases are [E, 2 * I] and [E, H].
    """

    INPUT = 0
    ROUTER = 1
    FC1 = 2
    FC1_BIAS = 3
    FC2 = 4
    FC2_BIAS = 5


class QuantizedSlot(IntEnum):
    """The index of each input of QMoE.

    Weights have the shapes of MoE, as uint8, packed along the last axis. Scales are [E, N, K /
    block size]. Zero points are uint8, packed along the last axis of the scales; without them, the
    zero point is the middle level.
    """

    INPUT = 0
    ROUTER = 1
    FC1 = 2
    FC1_SCALES = 3
    FC1_BIAS = 4
    FC2 = 5
    FC2_SCALES = 6
    FC2_BIAS = 7
    FC1_ZERO_POINTS = 11
    FC2_ZERO_POINTS = 12


class PackedMatrices(NamedTuple):
    """The matrices of the experts of a layer as a checkpoint brought them: integers, which a
    portable graph makes float in front of an MoE.

    Attributes:
        shape: E, N, K.
        levels: [E, N, K * bits / 8] uint8, with the first level in the low bits and the middle
            level for 0.
        scales: [E, N, K / block size].
        bits: 4 or 8.
        block_size: the number of levels along K that share a scale.
    """

    shape: tuple[int, int, int]
    levels: ir.Value
    scales: ir.Value
    bits: int
    block_size: int


def packed_weights(node: ir.Node) -> list[PackedMatrices]:
    """The weights of an MoE, fc1 before fc2, that are computed from integers."""
    found = [packed_matrices(node.inputs[slot]) for slot in (Slot.FC1, Slot.FC2)]
    return [one for one in found if one is not None]


def packed_matrices(weights: ir.Value | None) -> PackedMatrices | None:
    """The integers that weights of an MoE are computed from; None for other weights."""
    gather = producer(weights)
    if gather is None or not is_contrib(gather, "GatherBlockQuantized") or len(gather.inputs) > 3:
        return None
    levels, ids, scales = gather.inputs
    numbers = constant(ids)
    if levels is None or scales is None or levels.const_value is None or numbers is None:
        return None
    experts, outputs, row_bytes = levels.const_value.shape.numpy()
    if not np.array_equal(numbers, np.arange(experts)):
        return None
    bits = gather.attributes.get_int("bits", 4)
    block_size = gather.attributes.get_int("block_size", 0)
    return PackedMatrices(
        (experts, outputs, row_bytes * 8 // bits), levels, scales, bits, block_size
    )


def mixtures(graph: ir.Graph) -> list[ir.Node]:
    """The MoE nodes of `graph`, in order; not in graphs inside it."""
    return [node for node in graph if is_contrib(node, OP_TYPE)]


def gather_of_weights(node: ir.Node) -> ir.Value | None:
    """The constant, [E, N, K] floats, whose matrices a Gather looks up; None for any other node."""
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return None
    weights = node.inputs[0]
    if weights is None or not weights.is_initializer() or weights.const_value is None:
        return None
    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    has_matrices = len(weights.const_value.shape) == 3 and weights.dtype in floats
    return weights if has_matrices else None


def routers(graph: ir.Graph) -> set[ir.Node]:
    """The products that score the experts: the last products before the experts are selected."""
    choices = [
        node.inputs[Slot.ROUTER] for node in graph if is_contrib(node, OP_TYPE, QUANTIZED_OP_TYPE)
    ]
    choices += [node.inputs[1] for node in graph if gather_of_weights(node) is not None]
    products = {node for node in graph if node.op_type in _PRODUCTS}
    needed = ancestors(choices, products)
    read = {value.producer() for node in needed for value in node.inputs if value is not None}
    read |= {value.producer() for value in choices if value is not None}
    return {node for node in read if node is not None and node in products}
