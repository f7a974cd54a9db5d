"""Feeds GroupQueryAttention packed QKV: queries, keys and values in one input.

One matrix product makes all three, and the operator takes its result as it is, so cutting it up is work for nothing.
onnxscript's PackedQKVForGQAFusion drops the attributes scale and local_window_size, and knows no biases.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.graph.edit import constant, initializer, insert, part_of, producer
from qsample.graph.gqa import Slot, attentions, set_inputs


def pack_qkv(model: ir.Model) -> bool:
    """Give each GroupQueryAttention the value that its queries, keys and values were cut from; in place.

    1. The three are a Split or Slices of one value, in order, and all of it.
    2. All of them have a constant bias added, or none; the biases become one, added before.

    Returns whether anything changed.
    """
    modified = False
    for node in attentions(model.graph):
        parts = [part for value in node.inputs[: Slot.VALUE + 1] if (part := _part(value)) is not None]
        if len(parts) == 3 and _covers(parts):
            set_inputs(node, {Slot.QUERY: _with_biases(node, parts), Slot.KEY: None, Slot.VALUE: None})
            modified = True
    return modified


class _Part(NamedTuple):
    """Indices start to stop, stop excluded, of the last axis of `source`, plus `bias`."""

    source: ir.Value
    start: int
    stop: int
    bias: ir.Value | None


def _part(value: ir.Value | None) -> _Part | None:
    node = producer(value)
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
    bias = initializer(node.graph, f"{source.name}_bias", np.concatenate(arrays))
    return insert(node, "Add", [source, bias], source.shape)
