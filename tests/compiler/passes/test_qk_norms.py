"""Norms of queries and keys inside GroupQueryAttention: which of them go there. Only CUDA's kernel runs the result."""

from __future__ import annotations

import pytest

from qsample.compiler.passes.qk_norms import absorb_qk_norms
from qsample.compiler.recipe import run
from qsample.graph.gqa import Slot
from tests.helpers.small_graphs import operators, small_graph

GRAPH = """
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
SHAPES = {"q_normed": ["B", "S", 4, 16], "k_normed": ["B", "S", 2, 16]}


def test_both_norms_become_inputs_of_the_attention() -> None:
    model = small_graph(GRAPH, SHAPES)
    assert run(model, [absorb_qk_norms])
    assert operators(model) == ["GroupQueryAttention"]
    (attention,) = model.graph
    names = {slot: value.name for slot, value in zip(Slot, attention.inputs, strict=True) if value is not None}
    assert (names[Slot.QUERY], names[Slot.KEY]) == ("q", "k")
    assert (names[Slot.Q_NORM_WEIGHT], names[Slot.K_NORM_WEIGHT]) == ("q_weight", "k_weight")
    assert names.keys().isdisjoint((Slot.POSITION_IDS, Slot.ATTENTION_BIAS, Slot.HEAD_SINK, Slot.K_SCALE, Slot.V_SCALE))
    assert attention.attributes.get_float("qk_norm_epsilon", 0.0) == pytest.approx(0.001)
    assert not absorb_qk_norms(model)


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
    ids=["not rotated inside", "epsilons differ", "another norm", "one norm", "weight of another size"],
)
def test_other_norms_stay(old: str, new: str) -> None:
    assert old in GRAPH
    assert not absorb_qk_norms(small_graph(GRAPH.replace(old, new), SHAPES))


def test_norms_of_unknown_heads_stay() -> None:
    assert not absorb_qk_norms(small_graph(GRAPH))
