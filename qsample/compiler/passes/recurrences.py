"""Branches the recurrences of a decode graph: a row that begins starts from zeros, not from the content of its buffers.

The Where that puts zeros there copies the states of all rows, megabytes a layer. The branch leaves that copy to the
calls in which a row begins.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qsample.contract.tensors import LENGTHS, RUNNING, STATUS
from qsample.graph.edit import constant, copy_node, initializer, insert, producer, replace_outputs
from qsample.graph.operators import is_contrib

# The index of the state among LinearAttention's inputs.
_PAST_STATE_INPUT = 3


def branch_where_rows_begin(model: ir.Model) -> bool:
    """Let each recurrence of a decode graph read its state as it is in calls in which no row begins.

    A recurrence is a LinearAttention whose state, an input of the graph, is replaced by 0 for some rows, in a Where
    that nothing else reads. Both move into one side of an If, the operator alone into the other. A row begins if its
    length is 0 and it runs; the states of other rows make no difference then.
    """
    graph = model.graph
    found = [node for node in graph if _starts_from_zeros(node)]
    if not found:
        return False
    begins = _some_row_begins(graph)
    for node in found:
        start = node.inputs[_PAST_STATE_INPUT]
        where = producer(start)
        assert where is not None
        sides = []
        for name, state in (("begin", None), ("go_on", where.inputs[1])):
            copies: dict[ir.Value, ir.Value] = {}
            nodes = [copy_node(where, copies, f"{node.name}_{name}")] if state is None else []
            nodes.append(copy_node(node, copies, name))
            if state is not None:
                nodes[-1].replace_input_with(_PAST_STATE_INPUT, state)
            sides.append(
                ir.Graph([], list(nodes[-1].outputs), nodes=nodes, name=f"{node.name}_{name}")
            )
        attributes = [ir.AttrGraph("then_branch", sides[0]), ir.AttrGraph("else_branch", sides[1])]
        branch = ir.Node(
            "", "If", [begins], attributes, num_outputs=len(node.outputs), name=f"{node.name}_if"
        )
        replace_outputs(node, branch)
        graph.insert_before(node, branch)
        graph.remove([node, where], safe=True)
    return True


def _starts_from_zeros(node: ir.Node) -> bool:
    if not is_contrib(node, "LinearAttention") or len(node.inputs) <= _PAST_STATE_INPUT:
        return False
    start = node.inputs[_PAST_STATE_INPUT]
    where = producer(start)
    if start is None or where is None or where.op_type != "Where" or where.graph is not node.graph:
        return False
    state = where.inputs[1]
    other = constant(where.inputs[2])
    only_reader = len(start.uses()) == 1 and not start.is_graph_output()
    return (
        only_reader
        and state is not None
        and state.is_graph_input()
        and other is not None
        and not other.any()
    )


def _some_row_begins(graph: ir.Graph) -> ir.Value:
    """A bool scalar: whether the length and the status of a row are 0, and so is the least sum of both."""
    assert RUNNING == 0
    inputs = {value.name: value for value in graph.inputs}
    first = graph[0]
    lengths = inputs[LENGTHS.name]
    assert lengths.shape is not None
    sums = insert(first, "Add", [lengths, inputs[STATUS.name]], lengths.shape)
    least = insert(first, "ReduceMin", [sums], [], {"keepdims": 0})
    begin = initializer(graph, "begins_at", np.zeros((), LENGTHS.dtype))
    return insert(first, "Equal", [least, begin], [], dtype=ir.DataType.BOOL)
