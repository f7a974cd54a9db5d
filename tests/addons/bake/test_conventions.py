"""The names and layouts of other exporters' decoders, and which of them are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from qsample.addons.bake import conventions
from qsample.addons.bake.conventions import (
    CALLS,
    REFUSED_INPUTS,
    REFUSED_OPERATORS,
    REFUSED_SLOTS,
    ForeignGraph,
    Layer,
    is_onnx_attention,
    is_plain_attention,
    layer_number,
    refusal,
)
from qsample.graph.gqa import Slot

FLOAT = ir.DataType.FLOAT


def named(name: str, dims: list[int | str] | None = None) -> ir.Value:
    return ir.Value(name=name, shape=None if dims is None else ir.Shape(dims))


def test_the_inputs_of_calls() -> None:
    """As optimum, onnxruntime-genai, transformers and mobius name them."""
    assert {*CALLS} == {
        "input_ids",
        "attention_mask",
        "position_ids",
        "num_logits_to_keep",
        "logits_to_keep",
        "write_indices",
        "nonpad_kv_seqlen",
    }
    assert (conventions.LOGITS, conventions.OLDEST_OPSET, conventions.NEWEST_OPSET) == (
        "logits",
        14,
        24,
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("use_cache_branch", "merged decoder"),
        ("inputs_embeds", "no token embedding"),
        ("block_table", "paged"),
        ("slot_mapping", "paged"),
        ("k_block", "paged"),
        ("k_blocks", "paged"),
        ("beam_idx", "beam search"),
        ("beam_width", "beam search"),
        ("cache_indirection", "beam search"),
        ("encoder_hidden_states", "not a language model of tokens alone"),
        ("pixel_values", "not a language model of tokens alone"),
        ("pixel_values_videos", "not a language model of tokens alone"),
        ("audio_features", "not a language model of tokens alone"),
        ("input_features", "not a language model of tokens alone"),
        ("cache_position", "separate positions"),
        ("input_ids", None),
        ("past_key_values.0.key", None),
    ],
)
def test_inputs_that_are_refused(name: str, words: str | None) -> None:
    found = [why for pattern, why in REFUSED_INPUTS.items() if re.fullmatch(pattern, name)]
    assert len(found) == (0 if words is None else 1)
    assert words is None or words in found[0]


def test_operators_that_are_refused() -> None:
    reasons = {
        "a single scale per tensor": "MatMulInteger DynamicQuantizeMatMul MatMulIntegerToFloat "
        "DynamicQuantizeLinear",
        "its cache is paged": "PagedAttention",
        "that may go through tokens": "Loop Scan",
        "it attends through": "MultiHeadAttention DecoderMaskedMultiHeadAttention SparseAttention "
        "DecoderAttention Attention",
    }
    found = {
        words: {name for name, why in REFUSED_OPERATORS.items() if words in why}
        for words in reasons
    }
    assert found == {words: {*names.split()} for words, names in reasons.items()}
    assert {*REFUSED_SLOTS} == {Slot.K_SCALE, Slot.V_SCALE}
    assert conventions.STATES == {
        "CausalConvWithState": "conv_state",
        "LinearAttention": "recurrent_state",
    }


@pytest.mark.parametrize(
    ("name", "is_state"),
    [("past_conv.0", True), ("recurrent_state_1", True), ("x.ssm", True), ("past.0.key", False)],
)
def test_names_of_recurrent_states(name: str, is_state: bool) -> None:
    assert bool(re.fullmatch(conventions.RECURRENT_STATE_NAME, name)) is is_state


def test_a_refusal_is_a_line() -> None:
    error = refusal(Path("m.onnx"), " it\n has   no cache ")
    assert str(error) == "m.onnx cannot be baked: it has no cache"


def attention(op_type: str, domain: str, inputs: int, **options: Any) -> ir.Node:
    values = [named(f"i{index}") for index in range(inputs)]
    for index in options.pop("left_out", ()):
        values[index] = None  # type: ignore[call-overload]
    outputs = options.pop("outputs", 1)
    return ir.node(op_type, values, options, domain=domain, num_outputs=outputs)


def test_attention_of_onnx() -> None:
    assert is_onnx_attention(attention("Attention", "", 3))
    assert not is_onnx_attention(attention("Attention", "com.microsoft", 3))
    assert not is_onnx_attention(attention("Softmax", "", 1))


@pytest.mark.parametrize(
    ("node", "is_plain"),
    [
        (attention("MultiHeadAttention", "com.microsoft", 3), True),
        (attention("MultiHeadAttention", "com.microsoft", 6, left_out=(3, 4)), True),
        (attention("MultiHeadAttention", "com.microsoft", 4), False),
        (attention("MultiHeadAttention", "com.microsoft", 2), False),
        (attention("MultiHeadAttention", "com.microsoft", 7, left_out=(3, 4, 5)), False),
        (attention("MultiHeadAttention", "com.microsoft", 3, outputs=3), False),
        (attention("MultiHeadAttention", "com.microsoft", 3, unidirectional=1), False),
        (attention("MultiHeadAttention", "com.microsoft", 3, unidirectional=0), True),
        (attention("Attention", "", 3), False),
    ],
)
def test_plain_attention_of_onnx_runtime(node: ir.Node, is_plain: bool) -> None:
    assert is_plain_attention(node) is is_plain


@pytest.mark.parametrize(
    ("name", "index", "number"),
    [("past_key_values.12.key", 3, 12), ("key_0", 3, 0), ("7.2", 3, 7), ("key", 3, 3)],
)
def test_numbers_of_layers(name: str, index: int, number: int) -> None:
    assert layer_number(named(name), index) == number


def layer(dims: list[int | str] | None, size: int | None = None) -> Layer:
    past = named("past", dims)
    return Layer(0, past, named("pv"), named("k"), named("v"), 2, 4, size=size)


@pytest.mark.parametrize(
    ("dims", "size", "shape"),
    [
        (["B", 2, "P", 4], None, (1, 2, 5, 4)),
        (["B", 2, 48, 4], 48, (1, 2, 48, 4)),
        (["B", "P", 8], None, (1, 5, 8)),
        (["B", 48, 8], 48, (1, 48, 8)),
        (None, None, (1, 2, 5, 4)),
    ],
)
def test_shapes_of_caches(
    dims: list[int | str] | None, size: int | None, shape: tuple[int, ...]
) -> None:
    assert layer(dims, size).shape(5) == shape


def test_a_graph_of_layers() -> None:
    graph = ir.Graph([named("input_ids"), named("position_ids")], [], nodes=[])
    model = ir.Model(graph, ir_version=8)
    layers = (layer(None), layer(None, 48), layer(None, 32))
    foreign = ForeignGraph(Path("m"), model, layers, named("logits"), 9, FLOAT)
    assert (foreign.size, foreign.graph, foreign.changed) == (32, graph, False)
    assert foreign.recurrences == ()
    assert foreign.input("position_ids") is graph.inputs[1]
    assert foreign.input("attention_mask") is None
    assert ForeignGraph(Path("m"), model, layers[:1], named("x"), 9, FLOAT).size is None
    assert [value.name for value in layers[0].pasts] == ["past", "pv"]
    assert [value.name for value in layers[0].presents] == ["k", "v"]
    first = layers[0]
    assert (first.ring, first.attention, first.new, first.new_is_flat) == (None, None, None, False)
