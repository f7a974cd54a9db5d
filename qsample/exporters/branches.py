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
    """Turn every `Branch` marker of the main graph into an `If`, in place. Returns whether there was one.

    Precondition: markers stand side by side, none in another's sides.
    """
    graph = model.graph
    markers = [node for node in graph if _is_marker(node)]
    if not markers:
        return False
    always = _always_needed(graph, markers)
    order = {node: place for place, node in enumerate(graph)}
    for number, marker in enumerate(markers):
        half = (len(marker.inputs) - 1) // 2
        sides = [
            _subgraph(marker.inputs[start : start + half], always, order, f"branch{number}_{name}")
            for name, start in (("then", 1), ("else", 1 + half))
        ]
        always.add(_replace(graph, marker, *sides))
        always.discard(marker)
    rest = [node for node in graph if node in order and node not in always]
    graph.remove(rest, safe=False)
    graph.sort()  # what two places need may stand behind the first of them
    model.opset_imports.pop(MARKER_DOMAIN, None)
    return True


def _is_marker(node: ir.Node) -> bool:
    return node.domain == MARKER_DOMAIN and node.op_type == MARKER


def _always_needed(graph: ir.Graph, markers: list[ir.Node]) -> set[ir.Node]:
    """The nodes that some output or predicate needs whichever sides are taken, markers included."""
    needed: set[ir.Node] = set()
    waiting = [*markers, *(value.producer() for value in graph.outputs)]
    while waiting:
        node = waiting.pop()
        if node is None or node in needed:
            continue
        needed.add(node)
        inputs = node.inputs[:1] if _is_marker(node) else node.inputs
        waiting += [value.producer() for value in inputs if value is not None]
    return needed


def _subgraph(
    results: Iterable[ir.Value | None], always: set[ir.Node], order: dict[ir.Node, int], name: str
) -> ir.Graph:
    """Copies of the nodes that `results` need and that are not computed anyway."""
    wanted: set[ir.Node] = set()
    outputs = [value for value in results if value is not None]
    waiting = [value.producer() for value in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in always or node in wanted:
            continue
        wanted.add(node)
        waiting += [value.producer() for value in node.inputs if value is not None]

    copies: dict[ir.Value, ir.Value] = {}
    nodes = [_copy(node, copies, name) for node in sorted(wanted, key=order.__getitem__)]
    inner = []
    for value in outputs:
        if value not in copies:  # from outside: a subgraph has to produce its outputs itself
            nodes.append(ir.Node("", "Identity", [value]))
            nodes[-1].outputs[0].name = f"{value.name}_{name}"
            nodes[-1].outputs[0].type, nodes[-1].outputs[0].shape = value.type, value.shape
            inner.append(nodes[-1].outputs[0])
        else:
            inner.append(copies[value])
    return ir.Graph([], inner, nodes=nodes, name=name)


def _copy(node: ir.Node, copies: dict[ir.Value, ir.Value], suffix: str) -> ir.Node:
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
