"""Products with the packed weights of checkpoints: their offsets, and 8-bit levels in float32.

ONNX Runtime has no separate CPU kernel for 8-bit weights with float32 activations, so such a
product takes 50 times as long as a product with 4 bits. But a byte is two levels of 4 bits, low +
16 high. So the same bytes are the 4-bit weights of twice as many inputs x0, 16 x0, x1, 16 x1 …, in
blocks of twice the size. Their zero point of 8 stands for 8 + 16 * 8 = 136, and the sums of blocks
times scale * (136 - zero point) correct that. No weight is stored again; only these factors are, if
there are zero points. Portable graphs have this form, and compile undoes it.
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

# The suffix of the name of a product that reads bytes as 4-bit levels.
_NIBBLES_SUFFIX: Final = "nibbles"
_NIBBLES_ZERO_POINT: Final = 8 + 16 * 8
# The zero point of 8-bit levels without an input for it.
_DEFAULT_ZERO_POINT: Final = 128


class Offsets(NamedTuple):
    """The offsets of packed weights, and the nodes that apply them.

    Attributes:
        offsets: [K / block size, N].
        product: the node that multiplies sums of blocks by the offsets.
        total: the node that adds the result to a MatMulNBits.
    """

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
    sums = producer(product.inputs[0])
    offsets = product.inputs[1]
    if sums is None or sums.op_type != "ReduceSum":
        return None
    if offsets is None or not offsets.is_initializer():
        return None
    return Offsets(offsets, product, total)


def row_offsets_of(node: ir.Node) -> ir.Value | None:
    """The offsets, [N, blocks, 1], of the table of a GatherBlockQuantized; None without them."""
    users = list(node.outputs[0].uses())
    total = users[0].node if len(users) == 1 else None
    rows = producer(total.inputs[1]) if total is not None and total.op_type == "Add" else None
    return rows.inputs[0] if rows is not None and rows.op_type == "Gather" else None


def block_sums(before: ir.Node, states: ir.Value, size: int) -> ir.Value:
    """The sums of the blocks of states: [.., K] gives [.., K / size].

    Args:
        before: the node in front of which they are computed.
        states: the states.
        size: the size of a block.
    """
    assert states.shape is not None
    *outer, inputs = states.shape
    assert isinstance(inputs, int)
    count = inputs // size
    blocks = reshape(before, states, [*[0] * len(outer), count, size])
    axis = _last_axis(before)
    return insert(before, "ReduceSum", [blocks, axis], [*outer, count], {"keepdims": 0})


def in_nibbles(model: ir.Model) -> bool:
    """Let products of float32 activations with 8-bit weights read 4-bit levels, in place.

    Products that may round their activations stay. Returns whether there were any others.
    """
    graph = model.graph
    # The doubled states and their sums, by states and block size.
    read: dict[tuple[ir.Value, int], tuple[ir.Value, ir.Value]] = {}
    nodes = [node for node in graph if _is_slow(node)]
    for node in nodes:
        states, blocks, scales, *zero_points = (value for value in node.inputs if value is not None)
        size = node.attributes.get_int("block_size", 0)
        if (states, size) not in read:
            read[states, size] = _doubled(node, states), block_sums(node, states, size)
        doubled, sums = read[states, size]
        name = suffixed(node, _NIBBLES_SUFFIX)
        product = _product(node, [doubled, blocks, scales], 4, 2, name)
        if zero_points:
            factors = _factors(graph, scales, zero_points[0])
            alpha = 1.0
        else:
            factors = scales
            alpha = float(_NIBBLES_ZERO_POINT - _DEFAULT_ZERO_POINT)
        attributes = {"transB": 1, "alpha": alpha}
        shift = ir.node("FusedMatMul", [sums, factors], attributes, domain=CONTRIB_DOMAIN)
        for output in (product.outputs[0], shift.outputs[0]):
            output.shape = node.outputs[0].shape
            output.type = node.outputs[0].type
        replace_node(node, [product, shift, ir.node("Add", [product.outputs[0], shift.outputs[0]])])
        drop_unread(graph, zero_points)
    return bool(nodes)


def in_bytes(model: ir.Model) -> bool:
    """The inverse of `in_nibbles`, in place."""
    graph = model.graph
    nodes: list[Any] = [
        node
        for node in graph
        if is_matmul_nbits(node) and str(node.name).endswith(f"_{_NIBBLES_SUFFIX}")
    ]
    for node in nodes:
        doubled, blocks, scales = node.inputs
        # The nodes of `_doubled`.
        reshaped = doubled.producer()
        product = reshaped.inputs[0].producer()
        unsqueezed = product.inputs[0].producer()
        states = unsqueezed.inputs[0]
        total = node.outputs[0].consumers()[0]
        factors = total.inputs[1].producer().inputs[1]
        zero_points = [] if factors is scales else [_zero_points(graph, scales, factors)]
        name = node.name.removesuffix(f"_{_NIBBLES_SUFFIX}")
        whole = _product(node, [states, blocks, scales, *zero_points], 8, 0.5, name)
        replace_node(total, [whole])
    common_passes.RemoveUnusedNodesPass()(model)
    return bool(nodes)


def _is_slow(node: ir.Node) -> bool:
    """Whether `node` is a product of exact float32 activations with 8-bit weights."""
    if not is_matmul_nbits(node) or node.attributes.get_int("bits", 4) != 8:
        return False
    # Without a name, `in_bytes` would not find the product.
    if len(node.inputs) > 4 or node.name in (None, ""):
        return False
    if node.attributes.get_int("accuracy_level", 0) == INT8_ACTIVATIONS:
        return False
    scales = node.inputs[2]
    # FusedMatMul takes a matrix of factors.
    if scales is None or scales.shape is None or len(scales.shape) != 2:
        return False
    return scales.dtype == ir.DataType.FLOAT


def _product(
    old: ir.Node, inputs: Sequence[ir.Value | None], bits: int, factor: float, name: str | None
) -> ir.Node:
    """A product like `old` with other inputs.

    Args:
        old: the product whose sizes it has.
        inputs: its inputs.
        bits: the bits of its weights.
        factor: how many inputs it has for each input of `old`, and so in each block.
        name: its name.
    """
    sizes = {key: int(old.attributes.get_int(key, 0) * factor) for key in ("K", "block_size")}
    attributes = {**sizes, "N": old.attributes.get_int("N", 0), "bits": bits}
    return ir.node(MATMUL_NBITS, inputs, attributes, domain=CONTRIB_DOMAIN, name=name)


def _doubled(before: ir.Node, states: ir.Value) -> ir.Value:
    """Each state, followed by 16 times the state: [.., K] gives [.., 2 * K]."""
    assert states.shape is not None
    assert isinstance(before.graph, ir.Graph)
    *outer, inputs = states.shape
    assert isinstance(inputs, int)
    columns = insert(before, "Unsqueeze", [states, _last_axis(before)], [*outer, inputs, 1])
    factors = initializer(before.graph, "low_and_high", np.array([1, 16], np.float32))
    pairs = insert(before, "Mul", [columns, factors], [*outer, inputs, 2])
    return reshape(before, pairs, [*[0] * len(outer), 2 * inputs])


def _factors(graph: ir.Graph, scales: ir.Value, zero_points: ir.Value) -> ir.Value:
    """The factors scale * (136 - zero point): [N, blocks]."""
    steps = scales.const_value
    zeros = zero_points.const_value
    assert steps is not None
    assert zeros is not None
    shape = tuple(map(int, steps.shape.numpy()))

    def compute() -> Array:
        numbers = zeros.numpy().reshape(shape).astype(np.float32)
        factors: Array = steps.numpy() * (_NIBBLES_ZERO_POINT - numbers)
        return factors

    factors = lazy_initializer(f"{scales.name}_factors", shape, ir.DataType.FLOAT, compute)
    return _registered(graph, factors)


def _zero_points(graph: ir.Graph, scales: ir.Value, factors: ir.Value) -> ir.Value:
    """The zero points of `_factors`, exactly, although factors are rounded to 24 bits.

    A block with a scale of 0 gets the default zero point.
    """
    steps = scales.const_value
    products = factors.const_value
    assert steps is not None
    assert products is not None

    def compute() -> Array:
        divisors = steps.numpy().reshape(-1)
        shift = np.full(len(divisors), _NIBBLES_ZERO_POINT - _DEFAULT_ZERO_POINT, np.float32)
        np.divide(products.numpy().reshape(-1), divisors, out=shift, where=divisors != 0)
        return np.rint(_NIBBLES_ZERO_POINT - shift).astype(np.uint8)

    size = math.prod(map(int, steps.shape.numpy()))
    name = f"{factors.name}_zero_points"
    return _registered(graph, lazy_initializer(name, (size,), ir.DataType.UINT8, compute))


def _registered(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """The initializer with the name of `value`, by default `value`: layers may share a weight."""
    return graph.initializers.setdefault(str(value.name), value)


def _last_axis(before: ir.Node) -> ir.Value:
    assert isinstance(before.graph, ir.Graph)
    return initializer(before.graph, "axis_last", np.array([-1], np.int64))
