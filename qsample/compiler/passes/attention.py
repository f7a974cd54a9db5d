"""Passes around GroupQueryAttention: the least work before and after each attention.

Models hold queries and keys as [B, heads, S, D] between two transposes that the operator has no use for, and split and
merge heads with reshapes around every operator. Norms over D and rotary embeddings also read [B, S, heads, D], so the
first transpose moves after them, to meet the second. Each remaining pair of reshapes costs a check or a copy a step for
nothing; onnxscript's MaterializeReshapeShape stops at two symbolic axes, here B and S.

One matrix product makes queries, keys and values, and the operator takes its result uncut. onnxscript's
PackedQKVForGQAFusion drops the attributes scale and local_window_size, and does not take biases. On CUDA, the operator
also applies the norms of queries and keys.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.graph.edit import (
    constant,
    initializer,
    insert,
    part_of,
    producer,
    reshape,
    reshape_target,
)
from qsample.graph.gqa import Slot, attentions, set_inputs
from qsample.graph.operators import is_contrib

_SWAP = [0, 2, 1, 3]
_NORMS = ("SimplifiedLayerNormalization", "LayerNormalization", "RMSNormalization")


def remove_head_transposes(model: ir.Model) -> bool:
    """Move transposes of [B, S, heads, D], heads and D recorded, after nodes that read heads either way; drop pairs.

    1. A norm over D, a RotaryEmbedding and a Split of D read the value before the transpose; their results are
       transposed.
    2. A transpose of a transposed value goes.
    3. Outputs of the graph stay as they are, and so do the nodes that compute them.
    """
    modified = False
    for node in list(model.graph):
        if not node.inputs or (source := _swapped(node.inputs[0])) is None:
            continue
        if any(output.is_graph_output() for output in node.outputs):
            continue
        if _is_swap(node):
            ir.convenience.replace_all_uses_with(node.outputs[0], source)
        elif node.outputs[0].shape is not None and node.op_type in _NORMS and _over_last_axis(node):
            _sink(node, _normed(node, source))
        elif node.outputs[0].shape is not None and is_contrib(node, "RotaryEmbedding"):
            _sink(node, _rotated(node, source))
        elif node.op_type == "Split" and node.attributes.get_int("axis", 0) in (-1, 3):
            _split(node, source)
        else:
            continue
        modified = True
    return modified


def _is_swap(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and list(node.attributes.get_ints("perm", [])) == _SWAP


def _swapped(value: ir.Value | None) -> ir.Value | None:
    """The source [B, S, heads, D], with known heads and D, of the transpose that gives `value` [B, heads, S, D]."""
    node = producer(value)
    if node is None or not _is_swap(node):
        return None
    source = node.inputs[0]
    known = (
        source is not None
        and source.shape is not None
        and all(isinstance(dim, int) for dim in source.shape[2:])
    )
    return source if known else None


def _over_last_axis(node: ir.Node) -> bool:
    return node.attributes.get_int("axis", -1) in (-1, 3) and not any(
        value.uses() for value in node.outputs[1:]
    )


def _sink(node: ir.Node, result: ir.Value, index: int = 0) -> None:
    """Let the users of `node`'s output `index` read `result` [B, S, heads, D], transposed."""
    old = node.outputs[index]
    assert old.shape is not None
    ir.convenience.replace_all_uses_with(
        old, insert(node, "Transpose", [result], old.shape, {"perm": _SWAP})
    )


def _split(node: ir.Node, source: ir.Value) -> None:
    """A head's queries, keys and values may lie side by side."""
    split = ir.node(
        "Split",
        [source, *node.inputs[1:]],
        {**node.attributes, "axis": -1},
        num_outputs=len(node.outputs),
    )
    assert node.graph is not None
    node.graph.insert_before(node, split)
    for index, (old, new) in enumerate(zip(node.outputs, split.outputs, strict=True)):
        assert old.shape is not None
        batch, heads, length, size = old.shape
        new.shape = ir.Shape([batch, length, heads, size])
        new.type = old.type
        _sink(node, new, index)


def _normed(node: ir.Node, source: ir.Value) -> ir.Value:
    assert source.shape is not None
    return insert(
        node,
        node.op_type,
        [source, *node.inputs[1:]],
        source.shape,
        dict(node.attributes),
        node.domain,
    )


def _rotated(node: ir.Node, source: ir.Value) -> ir.Value:
    """RotaryEmbedding takes merged heads if it is told how many they are."""
    assert source.shape is not None
    batch, length, heads, size = source.shape
    assert isinstance(heads, int)
    assert isinstance(size, int)
    merged = reshape(node, source, [0, 0, heads * size])
    attributes = {**node.attributes, "num_heads": heads}
    inputs = [merged, *node.inputs[1:]]
    rotated = insert(
        node, node.op_type, inputs, [batch, length, heads * size], attributes, node.domain
    )
    return reshape(node, rotated, [0, 0, heads, size])


def simplify_reshapes(model: ir.Model) -> bool:
    """Merge chains of reshapes (only the last shape counts), drop reshapes that change nothing, and make computed
    targets constant if at most one axis is neither known nor the input's. Only recorded shapes are trusted."""
    modified = False
    for node in list(model.graph):
        if node.op_type == "Reshape" and node.domain == "":
            modified |= _skip_earlier_reshape(model.graph, node)
            modified |= _drop(node) or _make_target_constant(model.graph, node)
    return modified


def _skip_earlier_reshape(graph: ir.Graph, node: ir.Node) -> bool:
    """Read the input of an earlier reshape. A 0 in the target meant an axis of its result: name the target anew."""
    source = node.inputs[0]
    earlier = producer(source)
    if earlier is None or earlier.op_type != "Reshape" or earlier.graph is not node.graph:
        return False
    first = earlier.inputs[0]
    sizes = (
        _relative_sizes(first, node.outputs[0])
        if first is not None and _known(node.outputs[0])
        else None
    )
    if sizes is None:
        return False
    node.replace_input_with(0, first)
    _set_target(graph, node, sizes)
    return True


def _drop(node: ir.Node) -> bool:
    """Remove a reshape to the shape that its input has already."""
    source = node.inputs[0]
    result = node.outputs[0]
    if source is None or not _known(source) or not _known(result) or result.is_graph_output():
        return False
    if list(source.shape or ()) != list(result.shape or ()):
        return False
    ir.convenience.replace_all_uses_with(result, source)
    return True


def _make_target_constant(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace a computed target by numbers: 0 copies the input's size on that axis, -1 stands for one that remains."""
    source = node.inputs[0]
    target = node.inputs[1]
    if source is None or target is None or target.const_value is not None:
        return False
    sizes = _relative_sizes(source, node.outputs[0])
    if sizes is None:
        return False
    _set_target(graph, node, sizes)
    return True


def _set_target(graph: ir.Graph, node: ir.Node, sizes: list[int]) -> None:
    node.replace_input_with(1, reshape_target(graph, sizes))
    node.attributes.pop("allowzero", None)


def _known(value: ir.Value) -> bool:
    """Whether every axis has a size or a name: two unnamed axes are not known to be equal."""
    return value.shape is not None and all(
        isinstance(dim, int) or dim.value is not None for dim in value.shape
    )


def _relative_sizes(source: ir.Value, result: ir.Value) -> list[int] | None:
    """The sizes of `result` as a reshape of `source` would name them, or None if more than one is unknown."""
    if source.shape is None or result.shape is None:
        return None
    sizes = []
    for axis, dim in enumerate(result.shape):
        if isinstance(dim, int):
            sizes.append(dim)
        elif axis < len(source.shape) and dim.value is not None and source.shape[axis] == dim:
            sizes.append(0)
        else:
            sizes.append(-1)
    return (
        sizes
        if sizes.count(-1) <= 1 and 0 not in (dim for dim in result.shape if isinstance(dim, int))
        else None
    )


def pack_qkv(model: ir.Model) -> bool:
    """Give each GroupQueryAttention the value that its queries, keys and values were cut from: they are a Split or
    Slices of it, in order, and all of it. All of them have a constant bias added, or none; biases are joined and added
    before."""
    modified = False
    for node in attentions(model.graph):
        parts = [
            part for value in node.inputs[: Slot.VALUE + 1] if (part := _part(value)) is not None
        ]
        if len(parts) == 3 and _covers(parts):
            set_inputs(
                node, {Slot.QUERY: _with_biases(node, parts), Slot.KEY: None, Slot.VALUE: None}
            )
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
            if (
                part is not None
                and part.bias is None
                and bias is not None
                and _is_vector(bias, part)
            ):
                return part._replace(bias=bias)
        return None
    cut = part_of(value)
    return None if cut is None else _Part(*cut, None)


def _is_vector(bias: ir.Value, part: _Part) -> bool:
    return (
        bias.is_initializer()
        and bias.shape is not None
        and list(bias.shape) == [part.stop - part.start]
    )


def _covers(parts: list[_Part]) -> bool:
    """Whether the parts are all of the same value, in order, and either all or none have a bias."""
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


_RMS_NORMS: Final = ("SimplifiedLayerNormalization", "RMSNormalization")


class _Norm(NamedTuple):
    """An RMS norm over D of `heads`, [B, S, heads, D]."""

    heads: ir.Value
    weight: ir.Value
    epsilon: float


def absorb_qk_norms(model: ir.Model) -> bool:
    """Give each GroupQueryAttention the RMS norms, over whole heads with one epsilon, before a reshape merges the heads
    of its queries and keys. It has to rotate by itself (`absorb_rope`): it norms before, as models do."""
    modified = False
    for node in attentions(model.graph):
        query = _norm(node.inputs[Slot.QUERY])
        key = _norm(node.inputs[Slot.KEY])
        if (
            query is None
            or key is None
            or query.epsilon != key.epsilon
            or node.attributes.get_int("do_rotary", 0) == 0
        ):
            continue
        set_inputs(
            node, {Slot.QUERY: _merged(node, query.heads), Slot.KEY: _merged(node, key.heads)}
        )
        set_inputs(node, {Slot.Q_NORM_WEIGHT: query.weight, Slot.K_NORM_WEIGHT: key.weight})
        node.attributes["qk_norm_epsilon"] = ir.AttrFloat32("qk_norm_epsilon", query.epsilon)
        modified = True
    return modified


def _norm(value: ir.Value | None) -> _Norm | None:
    """The norm of the heads that `value` merges, if that is how it was made."""
    merge = _reshape(value)
    norm = None if merge is None else producer(merge.inputs[0])
    if (
        norm is None
        or norm.op_type not in _RMS_NORMS
        or norm.attributes.get_int("axis", -1) not in (-1, 3)
    ):
        return None
    heads, weight = norm.inputs[:2]
    if heads is None or heads.shape is None or weight is None or weight.shape is None:
        return None
    if len(heads.shape) != 4 or list(weight.shape) != [heads.shape[3]]:
        return None
    return _Norm(heads, weight, norm.attributes.get_float("epsilon", 1e-5))


def _merged(before: ir.Node, heads: ir.Value) -> ir.Value:
    """[B, S, heads * D] from `heads` [B, S, heads, D]: what a reshape split into them, or else a reshape of them."""
    split = _reshape(heads)
    if split is not None and split.inputs[0] is not None:
        return split.inputs[0]
    assert heads.shape is not None
    _, _, count, size = heads.shape
    assert isinstance(count, int)
    assert isinstance(size, int)
    return reshape(before, heads, [0, 0, count * size])


def _reshape(value: ir.Value | None) -> ir.Node | None:
    """The reshape that gives `value`, if there is any."""
    node = producer(value)
    return node if node is not None and node.op_type == "Reshape" else None
