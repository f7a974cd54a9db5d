"""Edits of graphs: constants, nodes, what values come from, and named axes with a fixed size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qsample.graph.edit import (
    Part,
    all_initializers,
    ancestors,
    cast,
    constant,
    copy_node,
    drop_unread,
    fix_axes,
    initializer,
    insert,
    lazy_initializer,
    part_of,
    put_behind,
    reads,
    replace_node,
    replace_outputs,
    reshape,
    suffixed,
    with_loop_bodies,
)
from tests.helpers.small_graphs import loop_graph, normal, operators, results, small_graph

TURN = "turn (float[B,S,8] x) => (float[B,S,8] y) { y = Neg (x) }"


def test_an_initializer_is_made_once() -> None:
    graph = small_graph(TURN).graph
    first = initializer(graph, "numbers", np.arange(3))
    assert initializer(graph, "numbers", np.arange(3)) is first
    assert (first.dtype, list(first.shape or ())) == (ir.DataType.INT64, [3])


def test_a_scalar_initializer_has_no_axis() -> None:
    value = initializer(small_graph(TURN).graph, "number", np.array(3))
    assert value.shape == value.const_value.shape == ir.Shape([])


def test_what_nothing_reads_is_dropped() -> None:
    graph = small_graph(
        "add (float[B] x) => (float[B] y) <float read = {1}, float unread = {2}> { y = Add (x, read) }"
    ).graph
    drop_unread(graph, [None, *graph.initializers.values(), *graph.inputs, *graph.outputs])
    assert list(graph.initializers) == ["read"]
    assert [value.name for value in (*graph.inputs, *graph.outputs)] == ["x", "y"]


def test_a_lazy_initializer_is_computed_whenever_it_is_read() -> None:
    calls = []

    def compute() -> np.ndarray:
        calls.append(None)
        return np.full((2, 3), len(calls), np.float16)

    value = lazy_initializer("late", (2, 3), ir.DataType.FLOAT16, compute)
    assert (value.name, value.dtype, list(value.shape or ())) == (
        "late",
        ir.DataType.FLOAT16,
        [2, 3],
    )
    assert value.const_value.nbytes == 12
    assert calls == []
    assert [int(value.const_value.numpy()[0, 0]) for _ in range(2)] == [1, 2]


def test_a_node_is_put_before_another_with_its_shape_and_dtype() -> None:
    model = small_graph(TURN)
    (node,) = model.graph
    merged = insert(node, "ReduceSum", [node.inputs[0]], ["B", 1, 1], {"keepdims": 1})
    node.replace_input_with(0, merged)
    assert operators(model) == ["ReduceSum", "Neg"]
    assert (merged.dtype, list(merged.shape or ())) == (
        ir.DataType.FLOAT,
        [ir.SymbolicDim("B"), 1, 1],
    )
    merged.dtype = ir.DataType.FLOAT16
    assert model.graph.inputs[0].dtype == ir.DataType.FLOAT  # a type of its own


def test_values_are_cast_and_nodes_put_behind_them() -> None:
    model = small_graph(TURN)
    (node,) = model.graph
    x, y = model.graph.inputs[0], node.outputs[0]
    assert cast(x, ir.DataType.FLOAT, node) is x
    half = cast(x, ir.DataType.FLOAT16, node)
    node.replace_input_with(0, cast(half, ir.DataType.FLOAT))
    behind = put_behind(y, "Abs", name="behind")
    assert operators(model) == ["Cast", "Cast", "Neg", "Abs"]
    assert model.graph.outputs[0] is behind
    assert (half.dtype, behind.dtype, behind.shape) == (
        ir.DataType.FLOAT16,
        ir.DataType.FLOAT,
        y.shape,
    )
    (result,) = results(model, {"x": (states := normal(2, 3, 8))})
    np.testing.assert_allclose(result, np.abs(states), rtol=1e-3)


def test_the_last_axes_are_reshaped() -> None:
    model = small_graph(TURN)
    (node,) = model.graph
    x = model.graph.inputs[0]
    heads = reshape(node, x, [0, 0, 2, 4])
    assert list(heads.shape or ()) == [ir.SymbolicDim("B"), ir.SymbolicDim("S"), 2, 4]
    node.replace_input_with(0, reshape(node, heads, [0, 0, 8]))
    assert reshape(node, x, [0, 0, 2, 4]).producer().inputs[1] is heads.producer().inputs[1]  # type: ignore[union-attr]
    (result,) = results(model, {"x": (states := normal(2, 3, 8))})
    np.testing.assert_array_equal(result, -states)


def test_numbers_of_constants() -> None:
    model = small_graph(
        "add (float[2] x) => (float[2] y) <float[2] c = {1, 2}> { d = Constant <value_floats = [3.0, 4.0]> () "
        "z = Add (x, c) y = Add (z, d) }"
    )
    first, second = (node for node in model.graph if node.op_type == "Add")
    numbers = [constant(value) for value in (*first.inputs, *second.inputs)]
    assert [None if array is None else array.tolist() for array in numbers] == [
        None,
        [1, 2],
        None,
        [3, 4],
    ]
    assert constant(None) is None


@pytest.mark.parametrize(
    ("cut", "start", "stop"),
    [
        ("a, part, b = Split <axis = -1> (x, sizes)", 2, 5),
        ("part, a, b = Split <axis = 2> (x, sizes)", 0, 2),
        ("part = Slice (x, two, five, last)", 2, 5),
        ("part = Slice (x, two, five, axis, one)", 2, 5),
        ("part = Slice (x, two, last, last)", 2, 7),
        ("part = Slice (x, two, far, last)", 2, 8),
    ],
)
def test_a_part_of_the_last_axis(cut: str, start: int, stop: int) -> None:
    source, part = source_and_part(cut)
    assert part_of(part) == Part(source, start, stop)


@pytest.mark.parametrize(
    "cut",
    [
        "a, part, b = Split <axis = 1> (x, sizes)",
        "a, part = Split <axis = -1, num_outputs = 2> (x)",  # of equal sizes, which are not written down
        "part = Slice (x, two, five)",  # of the first axes
        "part = Slice (x, two, five, first)",
        "part = Slice (x, two, five, last, two)",  # every second
        "part = Slice (x, last, five, last)",  # from the end
        "part = Slice (x, two, stop, last)",  # to somewhere
        "part = Neg (x)",
    ],
)
def test_other_parts(cut: str) -> None:
    _, part = source_and_part(cut)
    assert part_of(part) is None


def source_and_part(cut: str) -> tuple[ir.Value, ir.Value | None]:
    model = small_graph(
        "cut (float[B,S,8] x, int64[1] stop) => (float[B,S,M] y) <int64[3] sizes = {2, 3, 3}, int64[1] one = {1}, "
        "int64[1] two = {2}, int64[1] five = {5}, int64[1] far = {100}, int64[1] last = {-1}, int64[1] first = {0}, "
        f"int64[1] axis = {{2}}> {{ {cut} y = Neg (part) }}"
    )
    return model.graph.inputs[0], list(model.graph)[-1].inputs[0]


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
    assert (second.op_type, second.name, second.outputs[0].name) == (
        "Neg",
        "node_other_again",
        "other_again",
    )
    assert second.inputs[0] is first.outputs[0]
    assert first.inputs[0] is named["b"].inputs[0]  # of which there is no copy
    assert copies[named["other"].outputs[0]] is second.outputs[0]
    assert list(second.outputs[0].shape or ()) == [2]


def test_only_the_axes_named_are_fixed() -> None:
    model = small_graph("turn (float[B,S] x) => (float[B,S] y) { y = Neg (x) }")
    assert not fix_axes(model, {"T": 5})
    assert fix_axes(model, {"B": 3, "T": 5})
    assert [list(value.shape or ()) for value in (*model.graph.inputs, *model.graph.outputs)] == [
        [3, ir.SymbolicDim("S")]
    ] * 2
    assert not fix_axes(model, {"B": 4})


def test_fix_axes_reaches_every_shape(llama_package: Path) -> None:
    model = ir.load(llama_package / "decoder.onnx")
    assert fix_axes(model, {"T": 50, "B": 2})
    names = {
        str(dim)
        for node in model.graph.all_nodes()
        for value in node.outputs
        for dim in value.shape or ()
    }
    assert not names & {"T", "B"}
    assert list(model.graph.inputs[0].shape or ()) == [2, ir.SymbolicDim("S")]


def test_a_node_is_replaced_by_several() -> None:
    """The last one has the name, type, shape and readers of the old one, also as an output of the graph."""
    model = small_graph(TURN)
    (node,) = model.graph
    x = model.graph.inputs[0]
    first = ir.node("Abs", [x])
    last = ir.node("Exp", [first.outputs[0]])
    shape = node.outputs[0].shape
    replace_node(node, [first, last])
    assert operators(model) == ["Abs", "Exp"]
    (result,) = model.graph.outputs
    assert result is last.outputs[0]
    assert (result.name, result.dtype, result.shape) == ("y", ir.DataType.FLOAT, shape)


def test_several_outputs_are_replaced() -> None:
    """With their names; the old node may stay until it is removed."""
    model = small_graph(
        """g (float[B,8] x) => (float[B,4] a, float[B,4] c) {
            a, b = Split <axis = 1, num_outputs = 2> (x)
            c = Neg (b)
        }"""
    )
    old, reader = model.graph
    for value in old.outputs:
        value.shape = ir.Shape(["B", 4])
    new = ir.Node("", "Split", old.inputs, old.attributes.values(), num_outputs=2)
    model.graph.insert_before(old, new)
    replace_outputs(old, new)
    assert [value.name for value in new.outputs] == ["a", "b"]
    assert [value.name for value in old.outputs] == ["a_marker", "b_marker"]
    assert [list(value.shape or ()) for value in new.outputs] == [["B", 4]] * 2
    assert [value.type for value in new.outputs] == [value.type for value in old.outputs]
    assert reader.inputs[0] is new.outputs[1]
    assert model.graph.outputs[0] is new.outputs[0]
    model.graph.remove(old, safe=True)


def test_names_of_replacements() -> None:
    named, nameless = ir.node("Neg", [None], name="one"), ir.node("Neg", [None])
    nameless.name = None
    empty = ir.node("Neg", [None], name="")
    assert suffixed(named, "more") == "one_more"
    assert suffixed(nameless, "more") is None
    assert suffixed(empty, "more") is None


def test_constants_and_nodes_of_graphs_inside() -> None:
    """Of a graph first, then of those inside; loops, but no branches, compute for a token."""
    model = loop_graph(normal(64, 32), normal(64, 32))
    loop = next(node for node in model.graph if node.op_type == "Scan")
    nodes = [node.op_type for node in with_loop_bodies(model.graph)]
    assert nodes == ["Scan", "MatMul", "MatMul", "Mul", "Add", "Identity"]
    body = loop.attributes["body"].as_graph()
    initializer(body, "inner", np.zeros(1))
    assert [value.name for value in all_initializers(model.graph)] == [
        "w1_weight",
        "w2_weight",
        "inner",
    ]


def test_the_dtype_and_name_of_an_inserted_node() -> None:
    model = small_graph(TURN)
    (node,) = model.graph
    x = model.graph.inputs[0]
    value = insert(
        node,
        "QuickGelu",
        [x],
        None,
        {"alpha": 2.0},
        "com.microsoft",
        ir.DataType.FLOAT16,
        "gelu",
    )
    made = value.producer()
    assert made is not None
    assert (made.name, value.name, made.domain) == ("gelu", "gelu", "com.microsoft")
    assert (value.dtype, value.shape) == (ir.DataType.FLOAT16, None)
    assert made.attributes.get_float("alpha", 0.0) == 2.0
    absent = insert(node, "Loop", [None], [1])
    assert absent.dtype is None, "an absent input has none"


def test_a_constant_of_a_transposed_array_is_what_it_says() -> None:
    array = np.arange(6).reshape(2, 3).T
    value = initializer(small_graph(TURN).graph, "turned", array)
    assert value.const_value is not None
    assert value.const_value.name == "turned"
    np.testing.assert_array_equal(value.const_value.numpy(), array)
    assert value.const_value.tobytes() == np.ascontiguousarray(array).tobytes()
