"""Parts of graphs, run on numbers of one's own."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.graph.evaluate import GraphPart, inputs_of, sizes
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
