"""Transposes of heads: they move behind norms, rotations and splits, cancel there, and stay before anything else."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler.passes.attention import (
    absorb_qk_norms,
    pack_qkv,
    remove_head_transposes,
    simplify_reshapes,
)
from qsample.compiler.pipeline import apply
from qsample.graph.gqa import Slot
from tests.helpers.small_graphs import check_same, normal, operators, results, small_graph

HEADS = """
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
    weight, cos, sin = (
        ", ".join(f"{number:.3f}" for number in np.abs(normal(count))) for count in (16, 24, 24)
    )
    shapes = {name: ["B", 4, "S", 16] for name in ("heads", "normed", "last")}
    return small_graph(
        HEADS % (size, weight, cos, sin, middle),
        shapes | {name: ["B", 4, "S", size] for name in ("first", "last")},
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
    assert apply(without, remove_head_transposes)
    assert operators(without) == [*left, "Neg"]
    feeds = {"x": normal(2, 3, 4, 16), "positions": np.array([[0, 1, 2], [2, 1, 0]])}
    check_same(without, plain, feeds, atol=1e-6)
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
    text = HEADS.replace("int64[2] halves", "int64[2] two = {2, 2}, int64[2] halves")
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
    apply(without, remove_head_transposes)
    assert [value.name for value in without.graph.outputs] == ["result", name]
    feeds = {"x": normal(2, 3, 4, 16), "positions": np.array([[0, 1, 2], [2, 1, 0]])}
    check_same(without, plain, feeds, atol=1e-6)


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
    assert apply(model, simplify_reshapes)
    assert operators(model) == ["Reshape", "Add", "Reshape"]
    target = model.graph.node(0).inputs[1]
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
    assert apply(model, simplify_reshapes)
    assert operators(model) == ["Reshape"]
    (result,) = results(model, {"x": x})
    assert np.array_equal(result, x.reshape(6, 64))


PACKED = """
decode (float[B,S,128] x, float[B,2,32,16] past_key, float[B,2,32,16] past_value, int32[B] seen, int32 total)
    => (float[B,S,64] result, float[B,2,32,16] present_key, float[B,2,32,16] present_value)
    <int64[3] sizes = {64, 32, 32}>
{
    first, second, third = Split <axis = -1> (x, sizes)
    result, present_key, present_value = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>
        (%s, past_key, past_value, seen, total)
}
"""


def test_packed_projection_is_read_whole() -> None:
    model = small_graph(PACKED % "first, second, third")
    assert apply(model, pack_qkv)
    (attention,) = model.graph
    assert [value and value.name for value in attention.inputs[:3]] == ["x", None, None]


def test_parts_in_another_order_stay() -> None:
    model = small_graph(PACKED % "first, third, second")
    assert not pack_qkv(model)
    assert len(model.graph) == 2


NORMS = """
decode (float[B,S,64] q, float[B,S,32] k, float[B,S,32] v, float[B,2,8,16] past_key, float[B,2,8,16] past_value,
        int32[B] seen, int32 total, float[8,8] cos, float[8,8] sin, float[16] q_weight, float[16] k_weight)
    => (float[B,S,64] result)
    <int64[4] heads = {0, 0, -1, 16}, int64[3] merged_q = {0, 0, 64}, int64[3] merged_k = {0, 0, 32}>
{
    q_heads = Reshape (q, heads)
    k_heads = Reshape (k, heads)
    q_normed = SimplifiedLayerNormalization <axis = -1, epsilon = 0.001> (q_heads, q_weight)
    k_normed = SimplifiedLayerNormalization <axis = -1, epsilon = 0.001> (k_heads, k_weight)
    query = Reshape (q_normed, merged_q)
    key = Reshape (k_normed, merged_k)
    result = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2, do_rotary = 1>
        (query, key, v, past_key, past_value, seen, total, cos, sin)
}
"""
NORM_SHAPES = {
    **{name: ["B", "S", 4, 16] for name in ("q_heads", "q_normed")},
    **{name: ["B", "S", 2, 16] for name in ("k_heads", "k_normed")},
}


def test_both_norms_become_inputs_of_the_attention() -> None:
    model = small_graph(NORMS, NORM_SHAPES)
    assert apply(model, absorb_qk_norms)
    assert operators(model) == ["GroupQueryAttention"]
    (attention,) = model.graph
    names = {
        slot: value.name
        for slot, value in zip(Slot, attention.inputs, strict=False)
        if value is not None
    }
    assert (names[Slot.QUERY], names[Slot.KEY]) == ("q", "k")
    assert (names[Slot.Q_NORM_WEIGHT], names[Slot.K_NORM_WEIGHT]) == ("q_weight", "k_weight")
    assert names.keys().isdisjoint(
        (Slot.POSITION_IDS, Slot.ATTENTION_BIAS, Slot.HEAD_SINK, Slot.K_SCALE, Slot.V_SCALE)
    )
    assert attention.attributes.get_float("qk_norm_epsilon", 0.0) == pytest.approx(0.001)
    assert not absorb_qk_norms(model)


def test_heads_that_no_reshape_split_are_merged_before_the_attention() -> None:
    """As in a model whose heads have a query and a gate side by side."""
    text = NORMS.replace("float[B,S,64] q", "float[B,S,4,32] q").replace(
        "q_heads = Reshape (q, heads)", "q_heads, gate = Split <axis = 3, num_outputs = 2> (q)"
    )
    model = small_graph(text, NORM_SHAPES)
    assert apply(model, absorb_qk_norms)
    assert operators(model) == ["Split", "Reshape", "GroupQueryAttention"]
    _, merge, attention = model.graph
    assert attention.inputs[Slot.QUERY] is merge.outputs[0]
    assert list(merge.outputs[0].shape or ()) == ["B", "S", 64]
    assert attention.inputs[Slot.KEY].name == "k"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("do_rotary = 1", "do_rotary = 0"),  # then the graph rotates, behind the norms
        ("epsilon = 0.001> (k_heads", "epsilon = 0.01> (k_heads"),
        (
            "SimplifiedLayerNormalization <axis = -1, epsilon = 0.001> (q_heads",
            "LayerNormalization <axis = -1> (q_heads",
        ),
        ("(k_normed, merged_k)", "(k, merged_k)"),  # a key without a norm
        ("float[16] k_weight", "float[1] k_weight"),
    ],
    ids=[
        "not rotated inside",
        "epsilons differ",
        "another norm",
        "one norm",
        "weight of another size",
    ],
)
def test_other_norms_stay(old: str, new: str) -> None:
    assert old in NORMS
    assert not absorb_qk_norms(small_graph(NORMS.replace(old, new), NORM_SHAPES))


def test_norms_of_unknown_heads_stay() -> None:
    assert not absorb_qk_norms(small_graph(NORMS))
