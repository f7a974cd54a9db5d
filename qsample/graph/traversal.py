"""What a node reads, the nodes that values are computed from, and copies of nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import onnx_ir as ir


def reads(node: ir.Node) -> list[ir.Value]:
    """What a node reads: its inputs, and what the graphs inside it (of an If or a Scan) read."""
    values = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            values += [value for inner in attribute.as_graph() for value in reads(inner)]
    return values


def producer(value: ir.Value | None) -> ir.Node | None:
    """The node that computes `value`; None for inputs, constants and what is absent."""
    return None if value is None else value.producer()


def with_loop_bodies(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of a graph, then those of the bodies of its Scans: all that is computed for a token."""
    bodies = [node.attributes["body"].as_graph() for node in graph if node.op_type == "Scan"]
    return [*graph, *(node for body in bodies for node in body)]


def all_initializers(graph: ir.Graph) -> list[ir.Value]:
    """The constants of a graph and of the graphs inside it."""
    return [value for part in (graph, *graph.subgraphs()) for value in part.initializers.values()]


def ancestors(
    values: Iterable[ir.Value | None],
    stop: Collection[ir.Node] = frozenset(),
    reads: Callable[[ir.Node], Iterable[ir.Value | None]] = reads,
) -> set[ir.Node]:
    """The nodes outside `stop` that the values come from. reads: of each node, the values that count."""
    reached: set[ir.Node] = set()
    waiting = [value.producer() for value in values if value is not None]
    while waiting:
        node = waiting.pop()
        if node is None or node in stop or node in reached:
            continue
        reached.add(node)
        waiting += [value.producer() for value in reads(node) if value is not None]
    return reached


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
