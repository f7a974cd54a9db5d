"""Products with packed weights, as checkpoints bring them: their offsets, and 8-bit levels in float32.

ONNX Runtime's CPU has no kernel of its own for 8-bit weights and float32 activations: such a product takes 50 times as
long as one with 4 bits. But a byte is two levels of 4 bits, low + 16 high, so the same bytes are the 4-bit weights of
twice as many inputs x0, 16 x0, x1, 16 x1 …, in blocks of twice the size. Their zero point of 8 stands for 8 + 16 * 8 =
136, and the sums of blocks times scale * (136 - zero point) make up for that. No weight is stored again, except for
these factors if there are zero points. Portable graphs have this form, and compile undoes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.contract.arrays import Array
from qsample.graph.edit import (
    drop_unread,
    initializer,
    insert,
    lazy_initializer,
    producer,
    replace_node,
    reshape,
    suffixed,
)
from qsample.graph.operators import CONTRIB_DOMAIN, INT8_ACTIVATIONS, MATMUL_NBITS, is_matmul_nbits

_NIBBLES: Final = "nibbles"  # the suffix of such a product's name
_ZERO: Final = 8 + 16 * 8
_MIDDLE: Final = 128  # the zero point of 8-bit levels without another


class Offsets(NamedTuple):
    """Offsets [K / block size, N] of packed weights: the node `product` multiplies sums of blocks by them, and `total`
    adds that to a MatMulNBits."""

    offsets: ir.Value
    product: ir.Node
    total: ir.Node


def offsets_of(node: ir.Node) -> Offsets | None:
    """The offsets of the product `node`; None without them."""
    users = list(node.outputs[0].uses()) if is_matmul_nbits(node) else []
    total = users[0].node if len(users) == 1 else None
    product = producer(total.inputs[1]) if total is not None and total.op_type == "Add" else None
    if total is None or product is None or product.op_type != "MatMul":
        return None
    sums, offsets = producer(product.inputs[0]), product.inputs[1]
    summed = sums is not None and sums.op_type == "ReduceSum"
    return (
        Offsets(offsets, product, total)
        if summed and offsets is not None and offsets.is_initializer()
        else None
    )


def row_offsets_of(node: ir.Node) -> ir.Value | None:
    """The offsets [N, blocks, 1] of the table that the GatherBlockQuantized `node` reads; None without them."""
    users = list(node.outputs[0].uses())
    total = users[0].node if len(users) == 1 else None
    rows = producer(total.inputs[1]) if total is not None and total.op_type == "Add" else None
    return rows.inputs[0] if rows is not None and rows.op_type == "Gather" else None


def block_sums(before: ir.Node, states: ir.Value, size: int) -> ir.Value:
    """[.., K / size]: the sums of each `size` of the states [.., K], computed before the node `before`."""
    assert states.shape is not None
    *kept, inputs = states.shape
    assert isinstance(inputs, int)
    blocks = reshape(before, states, [*[0] * len(kept), inputs // size, size])
    return insert(
        before, "ReduceSum", [blocks, _last_axis(before)], [*kept, inputs // size], {"keepdims": 0}
    )


def in_nibbles(model: ir.Model) -> bool:
    """Let products of float32 activations with 8-bit weights read 4-bit levels, in place, unless they may round the
    activations; returns whether there were any."""
    graph = model.graph
    read: dict[tuple[ir.Value, int], tuple[ir.Value, ir.Value]] = {}
    nodes = [node for node in graph if _is_slow(node)]
    for node in nodes:
        states, blocks, scales, *zero_points = (value for value in node.inputs if value is not None)
        size = node.attributes.get_int("block_size", 0)
        if (states, size) not in read:
            read[states, size] = _in_turns(node, states), block_sums(node, states, size)
        twice, sums = read[states, size]
        product = _product(node, [twice, blocks, scales], 4, 2, suffixed(node, _NIBBLES))
        factors, alpha = scales, float(_ZERO - _MIDDLE)
        if zero_points:
            factors, alpha = _factors(graph, scales, zero_points[0]), 1.0
        attributes = {"transB": 1, "alpha": alpha}
        shift = ir.node("FusedMatMul", [sums, factors], attributes, domain=CONTRIB_DOMAIN)
        for made in (product.outputs[0], shift.outputs[0]):
            made.shape, made.type = node.outputs[0].shape, node.outputs[0].type
        replace_node(node, [product, shift, ir.node("Add", [product.outputs[0], shift.outputs[0]])])
        drop_unread(graph, zero_points)
    return bool(nodes)


def in_bytes(model: ir.Model) -> bool:
    """The inverse of `in_nibbles`, in place."""
    graph = model.graph
    nodes: list[Any] = [
        node for node in graph if is_matmul_nbits(node) and str(node.name).endswith(f"_{_NIBBLES}")
    ]
    for node in nodes:
        twice, blocks, scales = node.inputs
        states = twice.producer().inputs[0].producer().inputs[0].producer().inputs[0]
        total = node.outputs[0].consumers()[0]
        factors = total.inputs[1].producer().inputs[1]
        zero_points = [] if factors is scales else [_zero_points(graph, scales, factors)]
        product = _product(
            node,
            [states, blocks, scales, *zero_points],
            8,
            0.5,
            node.name.removesuffix(f"_{_NIBBLES}"),
        )
        replace_node(total, [product])
    common_passes.RemoveUnusedNodesPass()(model)
    return bool(nodes)


def _is_slow(node: ir.Node) -> bool:
    if (
        not is_matmul_nbits(node)
        or node.attributes.get_int("bits", 4) != 8
        or len(node.inputs) > 4
        or not node.name
    ):
        return False  # without a name, `in_bytes` would not find it
    scales, exact = node.inputs[2], node.attributes.get_int("accuracy_level", 0) != INT8_ACTIVATIONS
    if (
        scales is None or scales.shape is None or len(scales.shape) != 2
    ):  # as FusedMatMul takes them
        return False
    return exact and scales.dtype == ir.DataType.FLOAT


def _product(
    old: ir.Node, inputs: Sequence[ir.Value | None], bits: int, factor: float, name: str | None
) -> ir.Node:
    """factor: on the inputs, and on the inputs of a block."""
    sizes = {key: int(old.attributes.get_int(key, 0) * factor) for key in ("K", "block_size")}
    attributes = {**sizes, "N": old.attributes.get_int("N", 0), "bits": bits}
    return ir.node(MATMUL_NBITS, inputs, attributes, domain=CONTRIB_DOMAIN, name=name)


def _in_turns(before: ir.Node, states: ir.Value) -> ir.Value:
    """[.., 2 * K]: each state, and 16 times the same."""
    assert states.shape is not None
    assert isinstance(before.graph, ir.Graph)
    *kept, inputs = states.shape
    assert isinstance(inputs, int)
    apart = insert(before, "Unsqueeze", [states, _last_axis(before)], [*kept, inputs, 1])
    factors = initializer(before.graph, "low_and_high", np.array([1, 16], np.float32))
    return reshape(
        before,
        insert(before, "Mul", [apart, factors], [*kept, inputs, 2]),
        [*[0] * len(kept), 2 * inputs],
    )


def _factors(graph: ir.Graph, scales: ir.Value, zero_points: ir.Value) -> ir.Value:
    """[N, blocks]: scale * (136 - zero point)."""
    steps, zeros = scales.const_value, zero_points.const_value
    assert steps is not None
    assert zeros is not None
    shape = tuple(map(int, steps.shape.numpy()))

    def compute() -> Array:
        factors: Array = steps.numpy() * (_ZERO - zeros.numpy().reshape(shape).astype(np.float32))
        return factors

    return _once(
        graph, lazy_initializer(f"{scales.name}_factors", shape, ir.DataType.FLOAT, compute)
    )


def _zero_points(graph: ir.Graph, scales: ir.Value, factors: ir.Value) -> ir.Value:
    """The inverse of `_factors`, exactly: factors are rounded to 24 bits. A block whose scale is 0 gets the middle."""
    steps, products = scales.const_value, factors.const_value
    assert steps is not None
    assert products is not None

    def compute() -> Array:
        divisors = steps.numpy().reshape(-1)
        shift = np.full(len(divisors), _ZERO - _MIDDLE, np.float32)
        np.divide(products.numpy().reshape(-1), divisors, out=shift, where=divisors != 0)
        return np.rint(_ZERO - shift).astype(np.uint8)

    size = math.prod(map(int, steps.shape.numpy()))
    return _once(
        graph, lazy_initializer(f"{factors.name}_zero_points", (size,), ir.DataType.UINT8, compute)
    )


def _once(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """`value`, or the initializer of its name: layers may share a weight."""
    return graph.initializers.setdefault(str(value.name), value)


def _last_axis(before: ir.Node) -> ir.Value:
    assert isinstance(before.graph, ir.Graph)
    return initializer(before.graph, "axis_last", np.array([-1], np.int64))
