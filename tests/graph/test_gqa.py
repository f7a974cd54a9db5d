"""GroupQueryAttention: its inputs by name, and attention windows made smaller, also in masks of plain operators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from qsample.graph.edit import constant
from qsample.graph.gqa import OP_TYPE, Slot, attentions, narrow_windows, set_inputs
from qsample.graph.operators import CONTRIB_DOMAIN
from tests.helpers.small_graphs import results, small_graph

GRAPH = """
decode (float[B,S,64] q, float[B,S,32] k, float[B,2,8,16] past_key, float[B,2,8,16] past_value, int32[B] seen,
        int32 total, float[8,8] cos) => (float[B,S,64] result)
{
    first = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>
        (q, k, k, past_key, past_value, seen, total)
    other = GroupQueryAttention (first)
    negative = Neg (other)
    result = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>
        (negative, k, k, past_key, past_value, seen, total)
}
"""


def test_slots_are_those_of_onnx_runtime() -> None:
    (schema,) = (
        schema
        for schema in get_all_operator_schema()
        if (schema.name, schema.domain) == (OP_TYPE, CONTRIB_DOMAIN)
    )
    # Later versions append inputs (1.32 has query_seqlens); those that are there keep their places.
    assert [slot.name.lower() for slot in Slot] == [value.name for value in schema.inputs][
        : len(Slot)
    ]
    assert list(Slot) == list(range(len(Slot)))


def test_attentions_are_of_onnx_runtimes_domain() -> None:
    graph = small_graph(GRAPH).graph
    assert [node.outputs[0].name for node in attentions(graph)] == ["first", "result"]


def test_inputs_are_set_by_slot_and_those_in_between_are_empty() -> None:
    graph = small_graph(GRAPH).graph
    node = graph.node(0)
    cos = graph.inputs[-1]
    set_inputs(node, {Slot.SIN_CACHE: cos, Slot.KEY: None})
    assert [value and value.name for value in node.inputs] == [
        "q", None, "k", "past_key", "past_value", "seen", "total", None, "cos",
    ]  # fmt: skip
    set_inputs(node, {Slot.QUERY: cos})
    assert (node.inputs[Slot.QUERY], len(node.inputs)) == (cos, 9)


# A window of 4096 as a sliding mask has it, with the sign turned, and as chunks; and numbers that are no window.
MASKS = """masks (int64[B,1,S,1] query, int64[B,1,1,T] key, int64[B,S] other)
=> (bool[B,1,S,T] sliding, bool[B,1,S,T] turned, bool[B,1,S,T] chunks, int64[B,S] sum, int64[B,1,S,1] scaled)
<int64 window = {4096}, int64 minus = {-4096}, int64[1] one = {4096}, int64 four = {4}>
{
   first = Sub (query, window)
   sliding = Greater (key, first)
   also = Add (query, minus)
   turned = Greater (key, also)
   query_chunk = Div (query, window)
   key_chunk = Div (key, one)
   chunks = Equal (query_chunk, key_chunk)
   sum = Add (other, window)
   scaled = Add (query, four)
}"""


def test_masks_of_plain_operators() -> None:
    model = small_graph(MASKS)
    assert narrow_windows(model, {2048: 3}) == 0
    assert narrow_windows(model, {4096: 3}) == 4
    positions = np.arange(10)
    query, key = positions[None, None, :, None], positions[None, None, None]
    sliding, turned, chunks, total, scaled = results(
        model, {"query": query, "key": key, "other": positions[None]}
    )
    np.testing.assert_array_equal(sliding, key > query - 3)
    np.testing.assert_array_equal(turned, key > query - 3)
    np.testing.assert_array_equal(chunks, key // 3 == query // 3)
    np.testing.assert_array_equal(total, positions[None] + 4096)
    np.testing.assert_array_equal(scaled, query + 4)


@pytest.mark.parametrize(("window", "expected"), [(4096, 6), (4095, 4095), (None, -1)])
def test_attention_operators(window: int | None, expected: int) -> None:
    option = "" if window is None else f", local_window_size = {window}"
    model = small_graph(
        "attend (float[B,S,8] q, float[B,S,8] k, float[B,S,8] v) => (float[B,S,8] y)"
        f"{{ y = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2{option}> (q, k, v) }}"
    )
    assert narrow_windows(model, {4096: 6}) == (expected == 6)
    assert attentions(model.graph)[0].attributes.get_int("local_window_size", -1) == expected


def test_constants_that_others_read_stay() -> None:
    model = small_graph(MASKS)
    narrow_windows(model, {4096: 3})
    node = next(node for node in model.graph if node.outputs[0].name == "sum")
    assert isinstance(node.inputs[1], ir.Value)
    number = constant(node.inputs[1])
    assert number.item() == 4096
