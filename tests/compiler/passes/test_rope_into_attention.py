"""Rotary embeddings inside GroupQueryAttention: those by position alone, of sizes that the operator takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler.passes.rope_into_attention import absorb_rope
from qsample.compiler.recipe import lean_passes, run
from qsample.graph.edit import fix_axes, initializer
from qsample.graph.gqa import Slot
from qsample.graph.join import cut_at_logits
from qsample.package import read_package
from qsample.tensors import Array
from tests.helpers.small_graphs import results, small_graph

CAPACITY = 48
LAYERS = 2  # of every tiny model

# One attention whose queries and keys are rotated by cosines that ANGLES computes from `positions`.
ROTARY = """
decode (int64[B,S] input_ids, int32[B] lengths, float[B,S,64] x, float[B,2,32,16] past_key, float[B,2,32,16] past_value)
    => (float[B,S,64] result, float[B,2,32,16] present_key, float[B,2,32,16] present_value)
    <float[8] frequency = {1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005}, int64[1] last = {-1}, int64[2] row = {-1, 8},
     int64 zero = {0}, int64 one = {1}, int32 zero32 = {0}, int32 one32 = {1}, int64[1] one_axis = {1}>
{
    batch = Shape <start = 0, end = 1> (input_ids)
    count = Shape <start = 1, end = 2> (input_ids)
    count0 = Squeeze (count)
    count32 = Cast <to = 6> (count0)
    steps = Range (zero32, count32, one32)
    start = Unsqueeze (lengths, one_axis)
    positions32 = Add (start, steps)
    positions = Cast <to = 1> (positions32)
    column = Unsqueeze (positions, last)
    %s
    cos4 = Cos (angle)
    sin4 = Sin (angle)
    cos = Reshape (cos4, row)
    sin = Reshape (sin4, row)
    tokens = Mul (batch, count)
    tokens0 = Squeeze (tokens)
    index = Range (zero, tokens0, one)
    shape = Concat <axis = 0> (batch, count)
    ids = Reshape (index, shape)
    query = com.microsoft.RotaryEmbedding <num_heads = 4> (x, ids, cos, sin)
    states = Slice (x, zero1, half, minus)
    key = com.microsoft.RotaryEmbedding <num_heads = 2> (states, ids, cos, sin)
    earlier = Sub (count32, one32)
    seen = Add (lengths, earlier)
    result, present_key, present_value = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>
        (query, key, states, past_key, past_value, seen, total)
}
"""
CONSTANTS = "int64[1] zero1 = {0}, int64[1] half = {32}, int64[1] minus = {-1}, int32 total = {32}>"
BY_POSITION = "angle = Mul (column, frequency)"
# Longer sequences turn slower, as a rotary embedding with two sets of frequencies does.
BY_LENGTH = """longest = ReduceMax <keepdims = 0> (positions)
    one_float = Cast <to = 1> (one)
    slower = Add (longest, one_float)
    slow = Div (frequency, slower)
    angle = Mul (column, slow)"""

# All lengths but the shortest have one set of frequencies.
BY_CONTEXT = """longest = ReduceMax <keepdims = 0> (positions)
    two = Add (one, one)
    two_float = Cast <to = 1> (two)
    long = Greater (longest, two_float)
    slow = Div (frequency, two_float)
    chosen = Where (long, slow, frequency)
    angle = Mul (column, chosen)"""


def rotary_graph(angles: str) -> ir.Model:
    text = ROTARY.replace("int64[1] one_axis = {1}>", f"int64[1] one_axis = {{1}}, {CONSTANTS}") % angles
    return small_graph(text, {"query": ["B", "S", 64], "states": ["B", "S", 32], "key": ["B", "S", 32]})


def outputs(model: ir.Model, batch: int, length: int, starts: list[int]) -> list[Array]:
    rng = np.random.default_rng(1)
    feeds = {
        "input_ids": np.zeros((batch, length), np.int64),
        "lengths": np.array(starts, np.int32),
        "x": rng.standard_normal((batch, length, 64), np.float32),
        "past_key": rng.standard_normal((batch, 2, 32, 16), np.float32),
        "past_value": rng.standard_normal((batch, 2, 32, 16), np.float32),
    }
    return results(model, feeds)


def test_rotary_by_position_goes_into_the_attention() -> None:
    plain, lean = rotary_graph(BY_POSITION), rotary_graph(BY_POSITION)
    assert run(lean, [partial(absorb_rope, capacity=32)])
    assert [node.op_type for node in lean.graph if "Rotary" in node.op_type or node.op_type == "Cos"] == []
    for batch, length, starts in ((1, 6, [0]), (1, 6, [9]), (3, 1, [4, 0, 31])):
        for got, wanted in zip(
            outputs(lean, batch, length, starts), outputs(plain, batch, length, starts), strict=True
        ):
            np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_tables_of_an_earlier_run_are_not_taken_for_these() -> None:
    plain, lean = rotary_graph(BY_POSITION), rotary_graph(BY_POSITION)
    for name in ("rope_0_cos", "rope_1_sin"):
        initializer(lean.graph, name, np.zeros((32, 8), np.float32))
    assert run(lean, [partial(absorb_rope, capacity=32)])
    for got, wanted in zip(outputs(lean, 1, 6, [9]), outputs(plain, 1, 6, [9]), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize("angles", [BY_LENGTH, BY_CONTEXT])
def test_rotary_by_more_than_the_position_stays(angles: str) -> None:
    model = rotary_graph(angles)
    assert not absorb_rope(model, 32)
    assert sum(node.op_type == "RotaryEmbedding" for node in model.graph) == 2


@pytest.mark.parametrize("capacity", [2, 3])
def test_the_smallest_contexts(capacity: int) -> None:
    model = rotary_graph(BY_POSITION)
    assert run(model, [partial(absorb_rope, capacity=capacity)])
    assert "RotaryEmbedding" not in {node.op_type for node in model.graph}


def test_rotary_of_odd_sizes_stays() -> None:
    """Heads of 8 are smaller than the operator's own rotation takes."""
    model = rotary_graph(BY_POSITION)
    for node in model.graph:
        if node.op_type == "RotaryEmbedding":
            node.attributes["num_heads"] = ir.AttrInt64("num_heads", 2 * node.attributes.get_int("num_heads", 0))
    assert not absorb_rope(model, 32)


@pytest.mark.parametrize(
    ("model_type", "interleaved", "rotated"),
    [
        ("gpt_neox", 0, 16),
        ("glm", 1, 16),
        pytest.param("cohere", 1, 16, marks=pytest.mark.slow),
        ("llama", 0, 16),
    ],
)
def test_every_form_of_rotation_goes_into_the_attention(
    exported: Callable[..., Path], model_type: str, interleaved: int, rotated: int
) -> None:
    package = read_package(exported(model_type))
    model = cut_at_logits(ir.load(package.path / "decoder.onnx"), package.interface)
    fix_axes(model, {"T": CAPACITY})
    run(model, lean_passes("cpu", CAPACITY))
    assert not {"RotaryEmbedding", "Cos", "Sin", "Neg", "Transpose"} & {node.op_type for node in model.graph}
    attentions = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert len(attentions) == LAYERS
    for node in attentions:
        assert (node.attributes["do_rotary"].value, node.attributes["rotary_interleaved"].value) == (1, interleaved)
        tables = [node.inputs[slot] for slot in (Slot.COS_CACHE, Slot.SIN_CACHE)]
        assert [list(table.shape) for table in tables] == [[CAPACITY, rotated // 2]] * 2
