"""A fused decode graph enters; the same graph whose attention reads queries, keys and values packed leaves.

One matrix product makes all three. GroupQueryAttention takes its result as it is, so cutting it up is work for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.exporters.graph.edit import constant, initializer, insert, part_of


def gemms_to_matmuls(model: ir.Model) -> bool:
    """Turn each Gemm by a constant matrix into MatMul and Add, in place: a MatMul keeps [B, S, N] as it is where a Gemm
    needs flattened rows, and is what weight quantization packs. Returns whether there was one."""
    modified = False
    for node in list(model.graph):
        if node.op_type == "Gemm" and _is_plain(node):
            ir.convenience.replace_all_uses_with(node.outputs[0], _matmul(node))
            modified = True
    if modified:
        common_passes.RemoveUnusedNodesPass()(model)
    return modified


def pack_attention_inputs(model: ir.Model) -> bool:
    """Give each GroupQueryAttention the packed projection itself where its queries, keys and values are just the parts
    of one, in order; their biases are added before. In place. Returns whether anything changed."""
    modified = False
    for node in model.graph:
        if node.op_type != "GroupQueryAttention" or node.domain != "com.microsoft":
            continue
        parts = [_part(value) for value in node.inputs[:3]]
        found = [part for part in parts if part is not None]
        if len(found) < 3 or not _covers(found):
            continue
        node.replace_input_with(0, _with_biases(node, found))
        node.replace_input_with(1, None)
        node.replace_input_with(2, None)
        modified = True
    if modified:
        common_passes.RemoveUnusedNodesPass()(model)
    return modified


def _is_plain(node: ir.Node) -> bool:
    numbers = node.attributes
    plain = numbers.get_float("alpha", 1.0) == 1.0 and numbers.get_float("beta", 1.0) == 1.0
    turned = numbers.get_int("transA", 0) or numbers.get_int("transB", 0)
    weight = node.inputs[1]
    return plain and not turned and node.outputs[0].shape is not None and weight is not None and weight.is_initializer()


def _matmul(node: ir.Node) -> ir.Value:
    """What `node` computes, [rows, N], from the states before they were flattened where a reshape did that."""
    source, weight, *bias = node.inputs
    result = node.outputs[0]
    assert node.graph is not None
    assert source is not None
    assert result.shape is not None
    flattening = source.producer()
    unflattened = flattening.inputs[0] if flattening is not None and flattening.op_type == "Reshape" else None
    # Other reshapes than a flattening end in another size than the matrix takes.
    if unflattened is not None and unflattened.shape is not None and weight is not None and weight.shape is not None:
        source = unflattened if unflattened.shape[-1] == weight.shape[0] else source
    assert source.shape is not None
    shape = [*source.shape[:-1], result.shape[-1]]
    product = insert(node, "MatMul", [source, weight], shape)
    if bias and bias[0] is not None:
        product = insert(node, "Add", [product, bias[0]], shape)
    if len(shape) == 2:
        return product
    target = initializer(node.graph, "shape_-1_" + str(shape[-1]), np.array([-1, shape[-1]], dtype=np.int64))
    return insert(node, "Reshape", [product, target], result.shape)


class _Part(NamedTuple):
    """Places start to stop of the last axis of `source`, plus `bias`."""

    source: ir.Value
    start: int
    stop: int
    bias: ir.Value | None


def _part(value: ir.Value | None) -> _Part | None:
    node = value.producer() if value is not None else None
    if value is None or node is None:
        return None
    if node.op_type == "Add":
        for states, bias in (node.inputs, reversed(node.inputs)):
            part = _part(states)
            if part is not None and part.bias is None and bias is not None and _is_vector(bias, part):
                return part._replace(bias=bias)
        return None
    cut = part_of(value)
    return None if cut is None else _Part(*cut, None)


def _is_vector(bias: ir.Value, part: _Part) -> bool:
    return bias.is_initializer() and bias.shape is not None and list(bias.shape) == [part.stop - part.start]


def _covers(parts: list[_Part]) -> bool:
    """True where the parts are all of one value, one behind the other, and either all or none have a bias."""
    source = parts[0].source
    edges = [0, *(part.stop for part in parts)]
    return (
        all(part.source is source for part in parts)
        and [part.start for part in parts] == edges[:-1]
        and source.shape is not None
        and source.shape[-1] == edges[-1]
        and len({part.bias is None for part in parts}) == 1
    )


def _with_biases(node: ir.Node, parts: list[_Part]) -> ir.Value:
    source = parts[0].source
    biases = [constant(part.bias) for part in parts]
    arrays = [bias for bias in biases if bias is not None]
    if not arrays:
        return source
    assert source.shape is not None
    assert node.graph is not None
    packed = initializer(node.graph, f"{source.name}_bias", np.concatenate(arrays))
    return insert(node, "Add", [source, packed], source.shape)
