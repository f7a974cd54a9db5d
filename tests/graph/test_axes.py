"""Named axes with a fixed size: in every shape of a graph, and in none that lacks them."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from qsample.graph.axes import fix_axes
from tests.helpers.small_graphs import small_graph


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
    names = {str(dim) for node in model.graph.all_nodes() for value in node.outputs for dim in value.shape or ()}
    assert not names & {"T", "B"}
    assert list(model.graph.inputs[0].shape or ()) == [2, ir.SymbolicDim("S")]
