"""What nodes read, what values come from, and copies of nodes."""

from __future__ import annotations

import onnx_ir as ir

from qsample.graph.traversal import ancestors, copy_node, reads
from tests.helpers.small_graphs import small_graph

GRAPH = """
decode (bool condition, float[2] x, float[2] y) => (float[2] result, float[2] other)
{
    a = Neg (x)
    b = Abs (y)
    chosen = If (condition) <
        then_branch = one () => (float[2] then) { then = Exp (a) },
        else_branch = two () => (float[2] else) { else = Sqrt (b) }
    >
    result = Add (chosen, x)
    other = Neg (b)
}
"""


def nodes(model: ir.Model) -> dict[str | None, ir.Node]:
    return {node.outputs[0].name: node for node in model.graph}


def test_a_node_reads_what_the_graphs_inside_it_read() -> None:
    chosen = nodes(small_graph(GRAPH))["chosen"]
    assert [value.name for value in reads(chosen)] == ["condition", "a", "b"]


def test_the_nodes_that_values_come_from() -> None:
    model = small_graph(GRAPH)
    named = nodes(model)

    def names(reached: set[ir.Node]) -> set[str | None]:
        return {node.outputs[0].name for node in reached}

    result, other = model.graph.outputs
    assert names(ancestors([result])) == {"result", "chosen", "a", "b"}
    assert names(ancestors([other, None])) == {"other", "b"}
    assert names(ancestors([result], stop={named["chosen"]})) == {"result"}
    assert names(ancestors([result], reads=lambda node: node.inputs)) == {"result", "chosen"}


def test_a_copy_reads_copies() -> None:
    named = nodes(small_graph(GRAPH))
    for name, node in named.items():
        node.name = f"node_{name}"
    copies: dict[ir.Value, ir.Value] = {}
    first = copy_node(named["b"], copies, "again")
    second = copy_node(named["other"], copies, "again")
    assert (second.op_type, second.name, second.outputs[0].name) == ("Neg", "node_other_again", "other_again")
    assert second.inputs[0] is first.outputs[0]
    assert first.inputs[0] is named["b"].inputs[0]  # of which there is no copy
    assert copies[named["other"].outputs[0]] is second.outputs[0]
    assert list(second.outputs[0].shape or ()) == [2]
