"""Packed queries, keys and values: read whole where they are just the parts of one value, in order."""

from __future__ import annotations

from qsample.compiler.passes.packed_qkv import pack_qkv
from qsample.compiler.recipe import run
from tests.helpers.small_graphs import small_graph

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
    assert run(model, [pack_qkv])
    (attention,) = model.graph
    assert [value and value.name for value in attention.inputs[:3]] == ["x", None, None]


def test_parts_in_another_order_stay() -> None:
    model = small_graph(PACKED % "first, third, second")
    assert not pack_qkv(model)
    assert len(model.graph) == 2
