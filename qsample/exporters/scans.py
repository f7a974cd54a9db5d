"""A graph traced with one token of each loop in line enters; the graph with `Scan` nodes leaves.

A `ScanBegin` marker (`transforms.recurrent`) gives the states and one token of each input; whatever lies between it and
its `ScanEnd` moves into the Scan's body. What does not depend on the marker stays outside, computed once.
"""

from __future__ import annotations

import onnx_ir as ir

from qsample.exporters.branches import copy_node
from qsample.transforms.recurrent import BEGIN, END, MARKER_DOMAIN, NUM_STATES


def outline_scans(model: ir.Model) -> bool:
    """Turn every pair of markers into a `Scan` over axis 1, in place. Returns whether there was one."""
    graph = model.graph
    ends = [node for node in graph if node.domain == MARKER_DOMAIN and node.op_type == END]
    for number, end in enumerate(ends):
        _outline(graph, end, f"scan{number}")
    model.opset_imports.pop(MARKER_DOMAIN, None)
    return bool(ends)


def _outline(graph: ir.Graph, end: ir.Node, name: str) -> None:
    begin, body = _between(graph, end)
    num_states = int(end.attributes[NUM_STATES].as_int())
    copies = {
        value: ir.Value(name=f"{value.name}_{name}", type=value.type, shape=value.shape) for value in begin.outputs
    }
    inner_inputs = list(copies.values())
    nodes = [copy_node(node, copies, name) for node in body]
    outputs: list[ir.Value] = []
    for value in end.inputs:
        assert value is not None
        # Not computed by a node of its own: a body has to produce each of its outputs, once.
        if value not in copies or copies[value] in inner_inputs or copies[value] in outputs:
            nodes.append(ir.Node("", "Identity", [copies.get(value, value)]))
            nodes[-1].outputs[0].name = f"{value.name}_{name}_{len(outputs)}"
            nodes[-1].outputs[0].type, nodes[-1].outputs[0].shape = value.type, value.shape
            outputs.append(nodes[-1].outputs[0])
        else:
            outputs.append(copies[value])
    num_inputs, num_results = len(inner_inputs) - num_states, len(outputs) - num_states
    scan = ir.Node(
        "",
        "Scan",
        list(begin.inputs),
        [
            ir.AttrGraph("body", ir.Graph(inner_inputs, outputs, nodes=nodes, name=name)),
            ir.AttrInt64("num_scan_inputs", num_inputs),
            ir.AttrInt64s("scan_input_axes", [1] * num_inputs),
            ir.AttrInt64s("scan_output_axes", [1] * num_results),
        ],
        num_outputs=len(end.outputs),
        name=name,
    )
    for old, new in zip(end.outputs, scan.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
        new_name, old.name = old.name, f"{old.name}_marker"
        new.name = new_name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.insert_before(end, scan)
    graph.remove([end, *reversed(body), begin], safe=False)


def _between(graph: ir.Graph, end: ir.Node) -> tuple[ir.Node, list[ir.Node]]:
    """The marker that `end` belongs to, and the nodes between them in graph order."""
    needed: set[ir.Node] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer not in needed:
                needed.add(producer)
                if producer.op_type != BEGIN:
                    waiting.append(producer)
    # Of several loops before this one, the last is its own: the others end before it begins.
    begin = [node for node in graph if node in needed and node.op_type == BEGIN][-1]
    inside = {*begin.outputs}
    body = []
    for node in graph:
        if node in needed and node is not begin and any(value in inside for value in node.inputs if value is not None):
            inside.update(node.outputs)
            body.append(node)
    return begin, body
