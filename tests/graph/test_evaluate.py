"""Parts of graphs, run on numbers of one's own."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qsample.graph.evaluate import GraphPart, inputs_of, sizes, with_outputs, zeros
from tests.helpers.small_graphs import normal, small_graph

GRAPH = """
decode (int64[B,S] input_ids, int32[B] lengths, float[B,8] x, float[B,8] unread) => (float[B,8] result)
    <float[8] weight = {1, 2, 3, 4, 5, 6, 7, 8}>
{
    shape = Shape (input_ids)
    start = Cast <to = 1> (lengths)
    scaled = Mul (x, weight)
    middle = Neg (scaled)
    result = Add (middle, unread)
}
"""


def test_a_value_from_inputs() -> None:
    model = small_graph(GRAPH)
    values = {value.name: value for node in model.graph for value in node.outputs}
    part = GraphPart(model, [values["middle"], values["start"]])
    assert set(part.inputs) == {"x", "lengths"}
    x = normal(2, 8)
    middle, start = part({"x": x, "lengths": np.array([3, 4], np.int32), "other": x}, {})
    np.testing.assert_allclose(middle, -x * np.arange(1, 9), rtol=1e-6)
    assert start.tolist() == [3, 4]


def test_inputs_that_are_not_given_are_zeros_of_the_axes_sizes() -> None:
    model = small_graph(GRAPH)
    shape, start = (value for node in list(model.graph)[:2] for value in node.outputs)
    assert [array.tolist() for array in GraphPart(model, [shape, start])({}, {"B": 2, "S": 5})] == [
        [2, 5],
        [0, 0],
    ]


def test_a_value_from_one_in_between() -> None:
    model = small_graph(GRAPH, {"scaled": ["B", 8]})
    values = {value.name: value for node in model.graph for value in node.outputs}
    part = GraphPart(model, [values["middle"]], [values["scaled"]])
    assert part.inputs == {}
    (middle,) = part({"scaled": np.ones((1, 8), np.float32)}, {})
    assert (middle == -1).all()


def test_the_inputs_of_values() -> None:
    model = small_graph(GRAPH)
    values = {value.name: value for node in model.graph for value in node.outputs}
    assert set(inputs_of([values["result"]])) == {"x", "unread"}
    assert set(inputs_of([values["result"]], [values["scaled"]])) == {"unread"}


def test_sizes_of_axes() -> None:
    x = small_graph(GRAPH).graph.inputs[2]
    assert sizes(x, {"B": 3, "S": 9}) == [3, 8]
    with pytest.raises(KeyError, match="B"):
        sizes(x, {"S": 9})


def test_wanted_values_are_computed_in_arrays_that_are_given() -> None:
    """An array may be read and written at once; the results are in the order of the values."""
    model = small_graph(GRAPH)
    values = {value.name: value for node in model.graph for value in node.outputs}
    part = GraphPart(model, [values["start"], values["middle"]])
    x, given = normal(2, 8), normal(2, 8, seed=1)
    lengths = np.array([3, 4], np.int32)
    start, middle = part({"x": x, "lengths": lengths}, {}, {"middle": given})
    assert middle is given
    np.testing.assert_allclose(given, -x * np.arange(1, 9), rtol=1e-6)
    assert start.tolist() == [3, 4]
    (start, middle) = part({"x": given, "lengths": lengths}, {}, {"middle": given})
    assert middle is given
    np.testing.assert_allclose(given, x * np.arange(1, 9) ** 2, rtol=1e-6)
    # Arrays in another order of memory are read as they are meant.
    _, middle = part({"x": np.asfortranarray(x), "lengths": lengths}, {})
    np.testing.assert_allclose(middle, -x * np.arange(1, 9), rtol=1e-6)


def test_a_constant_may_be_given() -> None:
    """The graph keeps its own, and other constants, whose numbers are copied, their names."""
    model = small_graph(GRAPH)
    values = {value.name: value for node in model.graph for value in node.outputs}
    weight = model.graph.initializers["weight"]
    kept = weight.const_value
    part = GraphPart(model, [values["scaled"]], [weight])
    x = normal(2, 8)
    (scaled,) = part({"x": x, "weight": np.full(8, 3, np.float32)}, {})
    np.testing.assert_allclose(scaled, 3 * x, rtol=1e-6)
    assert set(part.inputs) == {"x"}
    GraphPart(model, [values["scaled"]])
    assert weight.const_value is kept
    assert model.graph.initializers["weight"] is weight


def test_a_graph_with_further_outputs() -> None:
    """Each once, behind its own; the graph itself stays as it is."""
    model = small_graph(GRAPH, {"scaled": ["B", 8], "middle": ["B", 8]})
    values = {value.name: value for node in model.graph for value in node.outputs}
    wanted = [values["middle"], values["result"], values["scaled"], values["middle"]]
    content = with_outputs(model, wanted)
    names = [value.name for value in ir.from_proto(onnx.load_from_string(content)).graph.outputs]
    assert names == ["result", "middle", "scaled"]
    assert list(model.graph.outputs) == [values["result"]]


def test_zeros_of_a_value() -> None:
    lengths, x = small_graph(GRAPH).graph.inputs[1:3]
    for value, dtype, shape in ((lengths, np.int32, (3,)), (x, np.float32, (3, 8))):
        array = zeros(value, {"B": 3})
        assert (array.dtype, array.shape, array.any()) == (dtype, shape, False)
    scalar = small_graph("g (float x) => (float y) { y = Neg (x) }").graph.inputs[0]
    assert sizes(scalar, {}) == []
