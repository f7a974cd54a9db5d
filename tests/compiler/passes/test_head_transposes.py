"""Transposes of heads: they move behind norms, rotations and splits, cancel there, and stay before anything else."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler.passes.head_transposes import remove_head_transposes
from qsample.compiler.recipe import run
from tests.helpers.small_graphs import normal, operators, results, small_graph

GRAPH = """
attend (float[B,S,4,16] x, int64[B,S] positions) => (float[B,S,4,%d] result)
    <float[16] weight = {%s}, float[3,8] cos = {%s}, float[3,8] sin = {%s}, int64[2] halves = {8, 8}>
{
    heads = Transpose <perm = [0, 2, 1, 3]> (x)
    %s
    merged = Transpose <perm = [0, 2, 1, 3]> (last)
    result = Neg (merged)
}
"""
NORM = "last = SimplifiedLayerNormalization <axis = -1> (heads, weight)"
ROTATION = "last = com.microsoft.RotaryEmbedding (heads, positions, cos, sin)"
BOTH = f"{NORM.replace('last', 'normed')}\n    {ROTATION.replace('heads', 'normed')}"
PARTS = "first, last = Split <axis = 3> (heads, halves)"
MIDDLES = [(NORM, 16), (ROTATION, 16), (BOTH, 16), (PARTS, 8)]


def attention(middle: str, size: int = 16) -> ir.Model:
    weight, cos, sin = (", ".join(f"{number:.3f}" for number in np.abs(normal(count))) for count in (16, 24, 24))
    shapes = {name: ["B", 4, "S", 16] for name in ("heads", "normed", "last")}
    return small_graph(
        GRAPH % (size, weight, cos, sin, middle), shapes | {name: ["B", 4, "S", size] for name in ("first", "last")}
    )


@pytest.mark.parametrize(
    ("middle", "size", "left"),
    [
        (NORM, 16, ["SimplifiedLayerNormalization"]),
        (ROTATION, 16, ["Reshape", "RotaryEmbedding", "Reshape"]),
        (BOTH, 16, ["SimplifiedLayerNormalization", "Reshape", "RotaryEmbedding", "Reshape"]),
        (PARTS, 8, ["Split"]),
    ],
    ids=["norm", "rotation", "both", "split"],
)
def test_both_transposes_go(middle: str, size: int, left: list[str]) -> None:
    plain, without = attention(middle, size), attention(middle, size)
    assert run(without, [remove_head_transposes])
    assert operators(without) == [*left, "Neg"]
    feeds = {"x": normal(2, 3, 4, 16), "positions": np.array([[0, 1, 2], [2, 1, 0]])}
    for got, wanted in zip(results(without, feeds), results(plain, feeds), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert not remove_head_transposes(without)


@pytest.mark.parametrize(
    "middle",
    [
        "last = Softmax <axis = 2> (heads)",
        NORM.replace("-1", "1").replace("weight", "x"),
        PARTS.replace("axis = 3", "axis = 1").replace("halves", "two"),
    ],
    ids=["softmax", "norm over other axes", "split of the heads"],
)
def test_they_stay_around_what_reads_heads_one_way(middle: str) -> None:
    text = GRAPH.replace("int64[2] halves", "int64[2] two = {2, 2}, int64[2] halves")
    model = small_graph(
        text % (16, *(", ".join("0" * count) for count in (16, 24, 24)), middle),
        {name: ["B", 4, "S", 16] for name in ("heads", "last")},
    )
    nodes = operators(model)
    assert not remove_head_transposes(model)
    assert operators(model) == nodes


def test_they_stay_where_the_sizes_are_unknown() -> None:
    model = attention(NORM)
    model.graph.inputs[0].shape = ir.Shape(["B", "S", "H", 16])
    assert not remove_head_transposes(model)


@pytest.mark.parametrize(
    ("middle", "size", "name"),
    [
        *((middle, size, name) for middle, size in MIDDLES for name in ("heads", "last", "merged")),
        (BOTH, 16, "normed"),
        (PARTS, 8, "first"),
    ],
)
def test_an_output_of_the_graph_stays(middle: str, size: int, name: str) -> None:
    plain, without = attention(middle, size), attention(middle, size)
    for model in (plain, without):
        (kept,) = (value for node in model.graph for value in node.outputs if value.name == name)
        kept.type = ir.TensorType(ir.DataType.FLOAT)
        model.graph.outputs.append(kept)
    run(without, [remove_head_transposes])
    assert [value.name for value in without.graph.outputs] == ["result", name]
    feeds = {"x": normal(2, 3, 4, 16), "positions": np.array([[0, 1, 2], [2, 1, 0]])}
    for got, wanted in zip(results(without, feeds), results(plain, feeds), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)
