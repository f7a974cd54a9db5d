"""Removes the transposes around queries and keys.

Models hold them as [B, heads, S, D] between two transposes that GroupQueryAttention has no use for. Norms over D and
rotary embeddings read [B, S, heads, D] as well, so the first transpose moves behind them, where it meets the second.
"""

from __future__ import annotations

import onnx_ir as ir

from qsample.graph.edit import insert, producer, reshape
from qsample.graph.operators import is_contrib

_SWAP = [0, 2, 1, 3]
_NORMS = ("SimplifiedLayerNormalization", "LayerNormalization", "RMSNormalization")


def remove_head_transposes(model: ir.Model) -> bool:
    """Move transposes of [B, S, heads, D] behind what reads heads either way, and drop those that cancel; in place.

    1. A norm over D, a RotaryEmbedding and a Split of D read what was transposed; their results are transposed.
    2. A transpose of a transposed value goes.
    3. Outputs of the graph stay what they are, and so does what computes them.

    Heads and D have recorded sizes. Returns whether anything changed.
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
            _sink(node, _norm(node, source))
        elif node.outputs[0].shape is not None and is_contrib(node, "RotaryEmbedding"):
            _sink(node, _rotate(node, source))
        elif node.op_type == "Split" and node.attributes.get_int("axis", 0) in (-1, 3):
            _split(node, source)
        else:
            continue
        modified = True
    return modified


def _is_swap(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and list(node.attributes.get_ints("perm", [])) == _SWAP


def _swapped(value: ir.Value | None) -> ir.Value | None:
    """What `value` [B, heads, S, D] was transposed from, [B, S, heads, D] with known heads and D; else None."""
    node = producer(value)
    if node is None or not _is_swap(node):
        return None
    source = node.inputs[0]
    known = source is not None and source.shape is not None and all(isinstance(dim, int) for dim in source.shape[2:])
    return source if known else None


def _over_last_axis(node: ir.Node) -> bool:
    return node.attributes.get_int("axis", -1) in (-1, 3) and not any(value.uses() for value in node.outputs[1:])


def _sink(node: ir.Node, result: ir.Value, index: int = 0) -> None:
    """Let the users of `node`'s output `index` read `result` [B, S, heads, D], transposed."""
    old = node.outputs[index]
    assert old.shape is not None
    ir.convenience.replace_all_uses_with(old, insert(node, "Transpose", [result], old.shape, {"perm": _SWAP}))


def _split(node: ir.Node, source: ir.Value) -> None:
    """A head's queries, keys and values may lie side by side."""
    split = ir.node("Split", [source, *node.inputs[1:]], {**node.attributes, "axis": -1}, num_outputs=len(node.outputs))
    assert node.graph is not None
    node.graph.insert_before(node, split)
    for index, (old, new) in enumerate(zip(node.outputs, split.outputs, strict=True)):
        assert old.shape is not None
        batch, heads, length, size = old.shape
        new.shape, new.type = ir.Shape([batch, length, heads, size]), old.type
        _sink(node, new, index)


def _norm(node: ir.Node, source: ir.Value) -> ir.Value:
    assert source.shape is not None
    return insert(node, node.op_type, [source, *node.inputs[1:]], source.shape, dict(node.attributes), node.domain)


def _rotate(node: ir.Node, source: ir.Value) -> ir.Value:
    """RotaryEmbedding takes merged heads if it is told how many they are."""
    assert source.shape is not None
    batch, length, heads, size = source.shape
    assert isinstance(heads, int)
    assert isinstance(size, int)
    merged = reshape(node, source, [0, 0, heads * size])
    attributes = {**node.attributes, "num_heads": heads}
    inputs = [merged, *node.inputs[1:]]
    rotated = insert(node, node.op_type, inputs, [batch, length, heads * size], attributes, node.domain)
    return reshape(node, rotated, [0, 0, heads, size])
