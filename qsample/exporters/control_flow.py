"""`Scan` nodes from the markers that a trace leaves of its loops; and an `If` around recurrences.

A trace has the code of one step of a loop in line. `outline_scans` moves it into a subgraph.

Loops over tokens: a `ScanBegin` marker (`transforms.recurrent`) gives the states and one token of each
input. What depends on it, up to its `ScanEnd`, moves into the Scan's body. The rest stays outside and is computed once.

Recurrences: a row that begins starts from zeros, whatever its buffers hold. The Where that puts them there copies the
states of all rows, megabytes a layer; `branch_where_rows_begin` leaves that to the calls in which a row begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from qsample.contract import LENGTHS, RUNNING, STATUS
from qsample.graph.edit import ancestors, constant, copy_node, initializer, insert, producer, reads
from qsample.graph.operators import is_contrib
from qsample.transforms.markers import MARKER_DOMAIN, NUM_STATES, SCAN_BEGIN, SCAN_END

_PAST_STATE = 3  # the index of LinearAttention's input


def outline_scans(model: ir.Model) -> bool:
    """Turn every pair of loop markers into a `Scan` over axis 1, in place. Returns whether there was one."""
    graph = model.graph
    ends = [node for node in graph if node.domain == MARKER_DOMAIN and node.op_type == SCAN_END]
    for number, end in enumerate(ends):
        _outline_scan(graph, end, f"scan{number}")
    model.opset_imports.pop(MARKER_DOMAIN, None)
    return bool(ends)


def branch_where_rows_begin(model: ir.Model) -> bool:
    """Let each recurrence of a decode graph read its state as it is in calls in which no row begins; in place.

    1. A recurrence is a LinearAttention whose state, an input of the graph, is replaced by 0 for some rows, in a Where
       that nothing else reads. Both move into one side of an If, the operator alone into the other.
    2. A row begins where its length is 0 and it runs. What the others' states are makes no difference there.

    Returns whether there was one.
    """
    graph = model.graph
    found = [node for node in graph if _starts_from_zeros(node)]
    if not found:
        return False
    begins = _some_row_begins(graph)
    for node in found:
        start = node.inputs[_PAST_STATE]
        where = producer(start)
        assert where is not None
        sides = []
        for name, state in (("begin", None), ("go_on", where.inputs[1])):
            copies: dict[ir.Value, ir.Value] = {}
            nodes = [copy_node(where, copies, f"{node.name}_{name}")] if state is None else []
            nodes.append(copy_node(node, copies, name))
            if state is not None:
                nodes[-1].replace_input_with(_PAST_STATE, state)
            sides.append(ir.Graph([], list(nodes[-1].outputs), nodes=nodes, name=f"{node.name}_{name}"))
        attributes = [ir.AttrGraph("then_branch", sides[0]), ir.AttrGraph("else_branch", sides[1])]
        branch = ir.Node("", "If", [begins], attributes, num_outputs=len(node.outputs), name=f"{node.name}_if")
        _replace_outputs(node, branch)
        graph.insert_before(node, branch)
        graph.remove([node, where], safe=True)
    return True


def _starts_from_zeros(node: ir.Node) -> bool:
    if not is_contrib(node, "LinearAttention") or len(node.inputs) <= _PAST_STATE:
        return False
    start = node.inputs[_PAST_STATE]
    where = producer(start)
    if start is None or where is None or where.op_type != "Where" or where.graph is not node.graph:
        return False
    state, other = where.inputs[1], constant(where.inputs[2])
    only_reader = len(start.uses()) == 1 and not start.is_graph_output()
    return only_reader and state is not None and state.is_graph_input() and other is not None and not other.any()


def _some_row_begins(graph: ir.Graph) -> ir.Value:
    """A bool scalar: whether the length and the status of a row are 0, and so is the least sum of both."""
    assert RUNNING == 0
    inputs = {value.name: value for value in graph.inputs}
    first, lengths = graph[0], inputs[LENGTHS.name]
    assert lengths.shape is not None
    sums = insert(first, "Add", [lengths, inputs[STATUS.name]], lengths.shape)
    least = insert(first, "ReduceMin", [sums], [], {"keepdims": 0})
    begins = insert(first, "Equal", [least, initializer(graph, "begins_at", np.zeros((), LENGTHS.dtype))], [])
    begins.dtype = ir.DataType.BOOL
    return begins


def _outline_scan(graph: ir.Graph, end: ir.Node, name: str) -> None:
    begin, steps = _loop(graph, end)
    num_states = int(end.attributes[NUM_STATES].as_int())
    body = _body_graph(begin, steps, end, name)
    num_inputs, num_results = len(body.inputs) - num_states, len(body.outputs) - num_states
    attributes = [
        ir.AttrGraph("body", body),
        ir.AttrInt64("num_scan_inputs", num_inputs),
        ir.AttrInt64s("scan_input_axes", [1] * num_inputs),
        ir.AttrInt64s("scan_output_axes", [1] * num_results),
    ]
    scan = ir.Node("", "Scan", list(begin.inputs), attributes, num_outputs=len(end.outputs), name=name)
    _replace_outputs(end, scan)
    graph.insert_before(end, scan)
    graph.remove([end, *reversed(steps), begin], safe=False)


def _loop(graph: ir.Graph, end: ir.Node) -> tuple[ir.Node, list[ir.Node]]:
    """The marker that `end` belongs to, and the nodes of one step in graph order."""
    needed = ancestors(end.inputs)
    (begin,) = (node for node in needed if node.op_type == SCAN_BEGIN)  # earlier loops are Scan nodes by now
    per_token = {*begin.outputs}
    steps = []
    for node in graph:
        if node in needed and not per_token.isdisjoint(reads(node)):
            per_token.update(node.outputs)
            steps.append(node)
    return begin, steps


def _body_graph(begin: ir.Node, steps: Sequence[ir.Node], end: ir.Node, name: str) -> ir.Graph:
    """The body of a Scan: copies of the nodes of one step, between the outputs of `begin` and the inputs of `end`."""
    copies = {
        value: ir.Value(name=f"{value.name}_{name}", type=value.type, shape=value.shape) for value in begin.outputs
    }
    inputs = list(copies.values())
    nodes = [copy_node(node, copies, name) for node in steps]
    outputs: list[ir.Value] = []
    for value in end.inputs:
        assert value is not None
        inner = copies.get(value, value)
        # A body has to produce each of its outputs with a node of its own, once.
        if inner is value or inner in inputs or inner in outputs:
            nodes.append(_identity(inner, value, f"{value.name}_{name}_{len(outputs)}"))
            inner = nodes[-1].outputs[0]
        outputs.append(inner)
    return ir.Graph(inputs, outputs, nodes=nodes, name=name)


def _identity(source: ir.Value, like: ir.Value, name: str) -> ir.Node:
    """An Identity of `source` with an output of that name, and the type and shape of `like`."""
    output = ir.Value(name=name, type=like.type, shape=like.shape)
    return ir.Node("", "Identity", [source], outputs=[output])


def _replace_outputs(old: ir.Node, new: ir.Node) -> None:
    """Let everything that reads the outputs of `old` read those of `new`, which get their names, types and shapes."""
    for marked, value in zip(old.outputs, new.outputs, strict=True):
        value.type, value.shape = marked.type, marked.shape
        name, marked.name = marked.name, f"{marked.name}_marker"
        value.name = name
        marked.replace_all_uses_with(value, replace_graph_outputs=True)
