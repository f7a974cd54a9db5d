"""Reshapes: which of them go, which get a constant target, and which stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qsample.compiler.passes.reshapes import simplify_reshapes
from qsample.compiler.recipe import run
from tests.helpers.small_graphs import normal, operators, results, small_graph

RESHAPES = """
chain (float[B,S,64] x, int64[%s] shape) => (float[B,S,64] result)
    <int64[4] heads = {0, 0, 4, 16}, int64[3] merged = {0, 0, 64}>
{
    split = Reshape (x, %s)
    doubled = Add (split, split)
    middle = Reshape (doubled, heads)
    result = Reshape (middle, merged)
}
"""


def reshapes(target: str, shape: list[int | str | None]) -> ir.Model:
    shapes = {"split": shape, "doubled": shape, "middle": ["B", "S", 4, 16]}
    return small_graph(RESHAPES % (4, target), shapes)


def test_reshapes_between_known_shapes() -> None:
    """A computed target becomes a constant one, and of two reshapes in a row the first goes."""
    model = reshapes("shape", ["B", "S", 2, 32])
    assert run(model, [simplify_reshapes])
    assert operators(model) == ["Reshape", "Add", "Reshape"]
    target = model.graph.node(0).inputs[1]
    assert target is not None
    assert target.const_value is not None
    assert target.const_value.numpy().tolist() == [0, 0, 2, 32]
    assert not simplify_reshapes(model)


def test_reshapes_of_unknown_shape_stay() -> None:
    model = reshapes("shape", [None, None, None, 32])
    assert not simplify_reshapes(model)
    assert operators(model) == ["Reshape", "Add", "Reshape", "Reshape"]


def test_a_target_that_keeps_an_axis_of_the_reshape_that_goes() -> None:
    """0 copies an axis of what is read: of the flattened rows before, of [B, S, 64] after."""
    model = small_graph(
        """
        flattened (float[B,S,64] x) => (float[rows,64] result)
            <int64[3] split = {-1, 4, 16}, int64[2] merged = {0, 64}>
        {
            heads = Reshape (x, split)
            result = Reshape (heads, merged)
        }
        """,
        {"heads": ["rows", 4, 16], "result": ["rows", 64]},
    )
    x = normal(2, 3, 64)
    assert run(model, [simplify_reshapes])
    assert operators(model) == ["Reshape"]
    (result,) = results(model, {"x": x})
    assert np.array_equal(result, x.reshape(6, 64))
