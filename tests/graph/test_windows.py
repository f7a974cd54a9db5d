"""Attention windows made smaller: in masks of plain operators and in GroupQueryAttention, and nowhere else."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qsample.graph.edit import constant
from qsample.graph.gqa import attentions
from qsample.graph.windows import narrow_windows
from tests.helpers.small_graphs import results, small_graph

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
    sliding, turned, chunks, total, scaled = results(model, {"query": query, "key": key, "other": positions[None]})
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
    assert number is not None
    assert number.item() == 4096
