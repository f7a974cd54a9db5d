"""Removes reshapes that change nothing, and the computing of shapes that are known.

A model splits its hidden states into heads and merges them again around every operator. Fused, the operators read
merged heads, and each pair of reshapes costs a check or a copy a step for nothing. onnxscript's MaterializeReshapeShape
stops at two symbolic axes; the hidden states of a decode graph have two, B and S.
"""

from __future__ import annotations

import onnx_ir as ir

from qsample.graph.edit import producer, reshape_target


def simplify_reshapes(model: ir.Model) -> bool:
    """Merge chains of reshapes, drop those that change nothing and give the rest a constant target; in place.

    1. Of two reshapes in a row, the second reads what the first read: only the last shape counts.
    2. A reshape to the shape that its input has already goes.
    3. A computed target becomes a constant where at most one of its axes is neither known nor the input's.

    Only recorded shapes are trusted: a reshape whose shapes are unknown stays. Returns whether anything changed.
    """
    modified = False
    for node in list(model.graph):
        if node.op_type == "Reshape" and node.domain == "":
            modified |= _skip_earlier_reshape(model.graph, node)
            modified |= _drop(node) or _make_target_constant(model.graph, node)
    return modified


def _skip_earlier_reshape(graph: ir.Graph, node: ir.Node) -> bool:
    """Read what an earlier reshape read: only the last shape counts. A 0 in the old target meant an axis of the
    earlier one's result, so the target is named anew."""
    source = node.inputs[0]
    earlier = producer(source)
    if earlier is None or earlier.op_type != "Reshape" or earlier.graph is not node.graph:
        return False
    first = earlier.inputs[0]
    sizes = _relative_sizes(first, node.outputs[0]) if first is not None and _known(node.outputs[0]) else None
    if sizes is None:
        return False
    node.replace_input_with(0, first)
    _set_target(graph, node, sizes)
    return True


def _drop(node: ir.Node) -> bool:
    """Remove a reshape to the shape that its input has already."""
    source, result = node.inputs[0], node.outputs[0]
    if source is None or not _known(source) or not _known(result) or result.is_graph_output():
        return False
    if list(source.shape or ()) != list(result.shape or ()):
        return False
    ir.convenience.replace_all_uses_with(result, source)
    return True


def _make_target_constant(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace a computed target shape by numbers: 0 copies the input's size on the same axis, -1 stands for one that
    remains."""
    source, target = node.inputs[0], node.inputs[1]
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
    """True where every axis has a size or a name: two unnamed axes are not known to be equal."""
    return value.shape is not None and all(isinstance(dim, int) or dim.value is not None for dim in value.shape)


def _relative_sizes(source: ir.Value, result: ir.Value) -> list[int] | None:
    """The sizes of `result` as a reshape of `source` would name them, or None where more than one is unknown."""
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
    return sizes if sizes.count(-1) <= 1 and 0 not in (dim for dim in result.shape if isinstance(dim, int)) else None
