"""A fused decode graph enters; the same graph whose attention reads queries, keys and values packed leaves.

One matrix product makes all three. GroupQueryAttention takes its result as it is, so cutting it up is work for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.exporters.graph.edit import constant, initializer, insert, part_of


def pack_qkv(model: ir.Model) -> bool:
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
    return modified


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
