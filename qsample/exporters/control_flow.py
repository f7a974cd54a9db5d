"""A traced graph with the code of its branches and loops in line enters; the graph with `If` and `Scan` nodes leaves.

Branches: a `Branch` marker (`transforms.sampler.branching`) has the inputs predicate, then's results, otherwise's
results. Whatever only a side needs moves into that side's subgraph, copied where two sides share it: common
subexpressions that the optimizer merged must not be computed unconditionally.

Loops over tokens: a `ScanBegin` marker (`transforms.recurrent`) gives the states and one token of each input; whatever
lies between it and its `ScanEnd` moves into the Scan's body. What does not depend on the marker stays outside, computed
once.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from qsample.exporters.graph.traversal import ancestors, copy_node, reads
from qsample.transforms import recurrent
from qsample.transforms.sampler import branching


def outline_branches(model: ir.Model) -> bool:
    """Turn every `Branch` marker into an `If`, in place, nested ones included. Returns whether there was one."""
    modified = _outline_branches(model.graph, "branch")
    model.opset_imports.pop(branching.MARKER_DOMAIN, None)
    return modified


def _outline_branches(graph: ir.Graph, prefix: str) -> bool:
    always = _always_needed(graph)
    order = {node: place for place, node in enumerate(graph)}
    markers = [node for node in order if node in always and _is_marker(node)]
    if not markers:
        return False
    for number, marker in enumerate(markers):
        name = f"{prefix}{number}"
        then, otherwise = (
            _subgraph(side, always, order, f"{name}_{kind}")
            for side, kind in zip(_sides(marker), ("then", "else"), strict=True)
        )
        always.remove(marker)
        always.add(_replace(graph, marker, then, otherwise))
    graph.remove([node for node in order if node not in always], safe=False)
    graph.sort()  # what two places need may stand behind the first of them
    return True


def _is_marker(node: ir.Node) -> bool:
    return node.domain == branching.MARKER_DOMAIN and node.op_type == branching.MARKER


def _unconditional_reads(node: ir.Node) -> Iterable[ir.Value | None]:
    """What a node reads whichever sides are taken: of a marker, the predicate alone."""
    return node.inputs[:1] if _is_marker(node) else reads(node)


def _sides(marker: ir.Node) -> tuple[list[ir.Value | None], list[ir.Value | None]]:
    """What the marker gives if its predicate holds, and what it gives if not."""
    half = (len(marker.inputs) - 1) // 2
    return list(marker.inputs[1 : 1 + half]), list(marker.inputs[1 + half :])


def _always_needed(graph: ir.Graph) -> set[ir.Node]:
    """The nodes that are needed whichever sides are taken.

    They are those that an output or a predicate needs, and markers that both sides of a marker need: their branch
    stands before the other, not twice inside it.
    """
    needed: set[ir.Node] = set()
    found: set[ir.Node] = ancestors(graph.outputs, needed, _unconditional_reads)
    while found:
        needed |= found
        found = set()
        for marker in filter(_is_marker, needed):
            then, otherwise = (ancestors(side, needed) for side in _sides(marker))
            for shared in filter(_is_marker, then & otherwise):
                found |= ancestors(shared.outputs, needed, _unconditional_reads)
    return needed


def _subgraph(
    results: Iterable[ir.Value | None], always: set[ir.Node], order: dict[ir.Node, int], name: str
) -> ir.Graph:
    """Copies of the nodes that `results` need and that are not computed anyway."""
    outputs = [value for value in results if value is not None]
    # A node of an enclosing graph has no place in this order, and is computed by then.
    wanted = ancestors(outputs, always) & order.keys()

    copies: dict[ir.Value, ir.Value] = {}
    nodes = [copy_node(node, copies, name) for node in sorted(wanted, key=order.__getitem__)]
    inner = []
    for value in outputs:
        if value not in copies:  # from outside: a subgraph has to produce its outputs itself
            nodes.append(ir.Node("", "Identity", [value]))
            nodes[-1].outputs[0].name = f"{value.name}_{name}"
            nodes[-1].outputs[0].type, nodes[-1].outputs[0].shape = value.type, value.shape
            inner.append(nodes[-1].outputs[0])
        else:
            inner.append(copies[value])
    graph = ir.Graph([], inner, nodes=nodes, name=name)
    _outline_branches(graph, f"{name}_")
    return graph


def _replace(graph: ir.Graph, marker: ir.Node, then: ir.Graph, otherwise: ir.Graph) -> ir.Node:
    branch = ir.Node(
        "",
        "If",
        marker.inputs[:1],
        [ir.AttrGraph("then_branch", then), ir.AttrGraph("else_branch", otherwise)],
        num_outputs=len(marker.outputs),
        name=f"{marker.name}_if",
    )
    for old, new in zip(marker.outputs, branch.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
        name, old.name = old.name, f"{old.name}_marker"
        new.name = name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.insert_before(marker, branch)
    return branch


def outline_scans(model: ir.Model) -> bool:
    """Turn every pair of markers into a `Scan` over axis 1, in place. Returns whether there was one."""
    graph = model.graph
    ends = [node for node in graph if node.domain == recurrent.MARKER_DOMAIN and node.op_type == recurrent.END]
    for number, end in enumerate(ends):
        _outline_scan(graph, end, f"scan{number}")
    model.opset_imports.pop(recurrent.MARKER_DOMAIN, None)
    return bool(ends)


def _outline_scan(graph: ir.Graph, end: ir.Node, name: str) -> None:
    begin, body = _between(graph, end)
    num_states = int(end.attributes[recurrent.NUM_STATES].as_int())
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
                if producer.op_type != recurrent.BEGIN:
                    waiting.append(producer)
    # Of several loops before this one, the last is its own: the others end before it begins.
    begin = [node for node in graph if node in needed and node.op_type == recurrent.BEGIN][-1]
    inside = {*begin.outputs}
    body = []
    for node in graph:
        if node in needed and node is not begin and any(value in inside for value in node.inputs if value is not None):
            inside.update(node.outputs)
            body.append(node)
    return begin, body
