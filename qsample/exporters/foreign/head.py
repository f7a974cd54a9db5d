"""Puts the choice of a row's last real token before the head, so that the head makes one row of logits a prompt."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from qsample.contract import LOGITS
from qsample.exporters.foreign.interface import ForeignGraph
from qsample.exporters.foreign.nodes import Nodes
from qsample.exporters.foreign.rows import Rows
from qsample.graph.edit import constant
from qsample.graph.evaluate import inputs_of

_PRODUCTS: Final = ("MatMul", "Gemm", "MatMulNBits", "MatMulBnb4", "FusedMatMul", "MatMulFpQ4")
_ALONG: Final = ("Cast", "Mul", "Div", "Add", "Sub", "Tanh", "Identity", "Neg", "Clip", "Where")
_SHAPES: Final = ("Reshape", "Unsqueeze", "Squeeze", "Slice", "Gather", "Identity")
_RANK: Final = 3  # of hidden states, [B, S, size]


def select_last(foreign: ForeignGraph, rows: Rows, nodes: Nodes) -> ir.Value:
    """`logits` [B, V] float32 of the rows' last real tokens, and the graph's first output from now on.

    Tokens that the file itself leaves out before its head (Slice, Gather) are chosen here instead.
    """
    graph, old = foreign.graph, foreign.logits
    dims = ["B", foreign.vocab_size]
    head, behind = _head(old)
    if head is None:
        flat = nodes("GatherND", [old, rows.last], old.dtype, dims, batch_dims=1)
    else:
        for node in behind:
            if node.op_type in _SHAPES:  # they are of [B, S, V]
                _bypass(foreign, node)
        hidden = _hidden(head.inputs[0])
        size = hidden.shape[-1] if hidden.shape is not None else None
        row = nodes("GatherND", [hidden, rows.last], hidden.dtype, ["B", size], batch_dims=1)
        if head.op_type != "Gemm":
            row = nodes("Unsqueeze", [row, nodes.integers(1)], hidden.dtype, ["B", 1, size])
        head.replace_input_with(0, row)
        for node in (head, *behind):
            node.outputs[0].shape = None
        last = next(value for value in graph.outputs if value is foreign.logits or value.name == LOGITS.name)
        flat = nodes("Reshape", [last, nodes.integers(-1, foreign.vocab_size)], last.dtype, dims)
        old = last
    if flat.dtype != ir.DataType.FLOAT:  # a Cast that changes nothing is optimised away, and the name with it
        flat = nodes("Cast", [flat], ir.DataType.FLOAT, dims, to=ir.DataType.FLOAT)
    old.name = f"{LOGITS.name}.foreign"
    flat.name = LOGITS.name
    graph.outputs[graph.outputs.index(old)] = flat
    return flat


def _head(logits: ir.Value) -> tuple[ir.Node | None, list[ir.Node]]:
    """The product that makes the logits, and the nodes behind it, the last first; None where there is no such
    product."""
    behind: list[ir.Node] = []
    node = logits.producer()
    while node is not None and node.op_type not in _PRODUCTS:
        computed = [value for value in node.inputs if value is not None and inputs_of([value])]
        along = node.op_type in _ALONG and len(computed) == 1
        if not along and not (node.op_type in _SHAPES and computed and computed[0] is node.inputs[0]):
            return None, []
        behind.append(node)
        node = computed[0].producer()
    return node, behind


def _hidden(value: ir.Value | None) -> ir.Value:
    """[B, S, size] that `value` was cut from or flattened from; `value` itself where it was not."""
    assert value is not None
    top, found = value, value
    while (node := top.producer()) is not None and node.op_type in _SHAPES and node.inputs[0] is not None:
        top = node.inputs[0]
        if node.op_type == "Reshape" or (node.op_type in ("Slice", "Gather") and _is_along_tokens(node)):
            found = top
    is_hidden = found.shape is None or len(found.shape) == _RANK
    return found if is_hidden else value


def _is_along_tokens(node: ir.Node) -> bool:
    if node.op_type == "Gather":
        return node.attributes.get_int("axis", 0) in (1, -2)
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
    return axes is not None and axes.tolist() in ([1], [-2])


def _bypass(foreign: ForeignGraph, node: ir.Node) -> None:
    source, output = node.inputs[0], node.outputs[0]
    assert source is not None
    if output.is_graph_output():
        graph = foreign.graph
        source.name, output.name = output.name, f"{output.name}.shaped"
        graph.outputs[graph.outputs.index(output)] = source
    output.replace_all_uses_with(source)
