"""A graph traced with both sides of each branch in line enters; the graph with `If` nodes leaves.

A `Branch` marker (`transforms.sampler.control`) has the inputs predicate, then's results, otherwise's results. Whatever
only a side needs moves into that side's subgraph, copied where two sides share it: common subexpressions that the
optimizer merged must not be computed unconditionally.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from qsample.transforms.sampler.control import MARKER, MARKER_DOMAIN


def outline_branches(model: ir.Model) -> bool:
    """Turn every `Branch` marker into an `If`, in place, nested ones included. Returns whether there was one."""
    modified = _outline(model.graph, "branch")
    model.opset_imports.pop(MARKER_DOMAIN, None)
    return modified


def _outline(graph: ir.Graph, prefix: str) -> bool:
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
    return node.domain == MARKER_DOMAIN and node.op_type == MARKER


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
    found: set[ir.Node] = ancestors(graph.outputs, needed, data=False)
    while found:
        needed |= found
        found = set()
        for marker in filter(_is_marker, needed):
            then, otherwise = (ancestors(side, needed, data=True) for side in _sides(marker))
            for shared in filter(_is_marker, then & otherwise):
                found |= ancestors(shared.outputs, needed, data=False)
    return needed


def ancestors(values: Iterable[ir.Value | None], stop: set[ir.Node], *, data: bool) -> set[ir.Node]:
    """The nodes outside `stop` that the values come from; of a marker, with `data`, also what its sides come from."""
    reached: set[ir.Node] = set()
    waiting = [value.producer() for value in values if value is not None]
    while waiting:
        node = waiting.pop()
        if node is None or node in stop or node in reached:
            continue
        reached.add(node)
        inputs = reads(node) if data or not _is_marker(node) else node.inputs[:1]
        waiting += [value.producer() for value in inputs if value is not None]
    return reached


def reads(node: ir.Node) -> list[ir.Value]:
    """What a node reads: its inputs, and what the graphs inside it (of an If or a Scan) read."""
    values = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            values += [value for inner in attribute.as_graph() for value in reads(inner)]
    return values


def _subgraph(
    results: Iterable[ir.Value | None], always: set[ir.Node], order: dict[ir.Node, int], name: str
) -> ir.Graph:
    """Copies of the nodes that `results` need and that are not computed anyway."""
    outputs = [value for value in results if value is not None]
    # A node of an enclosing graph has no place in this order, and is computed by then.
    wanted = ancestors(outputs, always, data=True) & order.keys()

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
    _outline(graph, f"{name}_")
    return graph


def copy_node(node: ir.Node, copies: dict[ir.Value, ir.Value], suffix: str) -> ir.Node:
    """A copy of `node` that reads and notes its values in `copies`; names get `suffix`."""
    inputs = [value if value is None else copies.get(value, value) for value in node.inputs]
    copy = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        list(node.attributes.values()),
        num_outputs=len(node.outputs),
        version=node.version,
        name=f"{node.name}_{suffix}",
    )
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        new.name, new.type, new.shape = f"{old.name}_{suffix}", old.type, old.shape
        copies[old] = new
    return copy


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
