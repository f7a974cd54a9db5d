"""What cannot be baked is refused in one line that says why, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import qsample
from qsample.errors import QsampleError, UnsupportedModelError
from tests.helpers.foreign import edited

Decoder = Callable[[str], tuple[Path, str | None]]
Edit = Callable[[ir.Model], None]


def renamed(old: str, new: str) -> Edit:
    def edit(model: ir.Model) -> None:
        next(value for value in [*model.graph.inputs, *model.graph.outputs] if value.name == old).name = new

    return edit


def with_input(name: str, shape: list[int | str]) -> Edit:
    def edit(model: ir.Model) -> None:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        model.graph.inputs.append(value)

    return edit


def with_operator(op_type: str, domain: str = "com.microsoft") -> Edit:
    def edit(model: ir.Model) -> None:
        source = model.graph.inputs[0]
        model.graph.append(ir.node(op_type, [source], domain=domain))
        model.graph.outputs.append(model.graph[-1].outputs[0])
        model.graph.outputs[-1].name = "other"

    return edit


def without_cache(model: ir.Model) -> None:
    for value in [value for value in model.graph.inputs if "past" in str(value.name)]:
        value.replace_all_uses_with(ir.Value(name="none"))
        model.graph.inputs.remove(value)


def with_opset(number: int) -> Edit:
    def edit(model: ir.Model) -> None:
        model.graph.opset_imports[""] = number

    return edit


def not_causal(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "GroupQueryAttention":
            node.attributes["causal"] = ir.AttrInt64("causal", 0)


def one_shared_cache(model: ir.Model) -> None:
    first, second = (node for node in model.graph if node.op_type == "GroupQueryAttention")
    second.replace_input_with(3, first.outputs[1])


def mask_used_elsewhere(model: ir.Model) -> None:
    """The mask hides tokens of the embedding, say."""
    graph = model.graph
    mask = next(value for value in graph.inputs if value.name == "attention_mask")
    embedding = next(node for node in graph if node.op_type == "Gather" and node.inputs[1] is graph.inputs[0])
    total = ir.node("ReduceMax", [mask], {"keepdims": 0})
    cast = ir.node("Cast", [total.outputs[0]], {"to": 1})
    scaled = ir.node("Mul", [embedding.outputs[0], cast.outputs[0]])
    embedding.outputs[0].replace_all_uses_with(scaled.outputs[0])
    scaled.replace_input_with(0, embedding.outputs[0])
    graph.insert_after(embedding, [total, cast, scaled])


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (with_input("use_cache_branch", [1]), "merged decoder.*take decoder_with_past_model.onnx"),
        (renamed("input_ids", "inputs_embeds"), "no token embedding.*take a file whose input is input_ids"),
        (with_input("block_table", ["b", "n"]), "paged.*without use_paged_attention"),
        (with_input("past_conv.0", ["b", 8, 3]), "recurrent states.*qsample export"),
        (with_input("past_key_values.0.conv_state", ["b", 8, 3]), "recurrent states.*qsample export"),
        (with_input("beam_idx", ["b"]), "beam search"),
        (with_input("cache_indirection", ["b", "n", "t"]), "beam search"),
        (with_input("cache_position", ["s"]), "positions of its own"),
        (with_input("encoder_hidden_states", ["b", "s", 8]), "not a language model of tokens alone"),
        (with_input("per_layer_inputs", ["b", "s", 8]), "per_layer_inputs is neither"),
        (with_operator("MatMulInteger", ""), "a single scale per tensor.*take its q4, fp16 or fp32 file"),
        (with_operator("PagedAttention"), "paged"),
        (with_operator("MultiHeadAttention"), "attends through MultiHeadAttention"),
        (with_operator("LinearAttention"), "recurrent layers"),
        (without_cache, "no cache.*text-generation-with-past"),
        (renamed("logits", "scores"), "no output logits, only scores"),
        (with_opset(13), "opset is 13.*14 to 23"),
        (with_opset(24), "opset is 24"),
        (not_causal, "not causal"),
        (one_shared_cache, "shares its cache"),
        (mask_used_elsewhere, "attention_mask is used beyond the attention, by ReduceMax"),
    ],
)
def test_one_line_says_why(edit: Edit, why: str, decoder: Decoder, tmp_path: Path) -> None:
    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "edited", edit)
    with pytest.raises(UnsupportedModelError, match=why) as raised:
        qsample.bake(folder, tmp_path / "out", tokenizer=None)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_dynamic_quantization_names_the_files_beside_it(decoder: Decoder, tmp_path: Path) -> None:
    folder, _ = decoder("community_gqa/onnx/model.onnx")
    with pytest.raises(
        UnsupportedModelError, match=r"a single scale per tensor.*; take model\.onnx, model_bnb4\.onnx, "
    ):
        qsample.bake(folder, tmp_path / "out", file="onnx/model_quantized.onnx")
    assert not (tmp_path / "out").exists()


def alibi(model: ir.Model) -> None:
    """Scores that fall with the distance."""
    graph = model.graph
    softmax = next(node for node in graph if node.op_type == "Softmax")
    scores = softmax.inputs[0]
    length = ir.node("Shape", [scores], {"start": 3, "end": 4})
    one = ir.Value(name="alibi.one", const_value=ir.tensor(np.array(1, np.int64), name="alibi.one"))
    zero = ir.Value(name="alibi.zero", const_value=ir.tensor(np.array(0, np.int64), name="alibi.zero"))
    slope = ir.Value(name="alibi.slope", const_value=ir.tensor(np.array(0.1, np.float32), name="alibi.slope"))
    for value in (one, zero, slope):
        graph.register_initializer(value)
    count = ir.node("Squeeze", [length.outputs[0]])
    places = ir.node("Range", [zero, count.outputs[0], one])
    cast = ir.node("Cast", [places.outputs[0]], {"to": 1})
    bias = ir.node("Mul", [cast.outputs[0], slope])
    added = ir.node("Add", [scores, bias.outputs[0]])
    graph.insert_before(softmax, [length, count, places, cast, bias, added])
    softmax.replace_input_with(0, added.outputs[0])


def half_of_the_keys(model: ir.Model) -> None:
    """Scores that are clipped, which no scale says."""
    graph = model.graph
    softmax = next(node for node in graph if node.op_type == "Softmax")
    most = ir.Value(name="most", const_value=ir.tensor(np.array(0.05, np.float32), name="most"))
    graph.register_initializer(most)
    clipped = ir.node("Clip", [softmax.inputs[0], None, most])
    graph.insert_before(softmax, clipped)
    softmax.replace_input_with(0, clipped.outputs[0])


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (alibi, "not a multiple of query keys.*ALiBi"),
        (half_of_the_keys, "not a multiple of query keys"),
    ],
)
def test_plain_attention_that_the_operator_lacks(edit: Edit, why: str, decoder: Decoder, tmp_path: Path) -> None:
    folder = edited(decoder("optimum_llama_18")[0], tmp_path / "edited", edit)
    with pytest.raises(UnsupportedModelError, match=why):
        qsample.bake(folder, tmp_path / "out", tokenizer=None)
    assert not (tmp_path / "out").exists()


def test_a_package_that_is_there_stays(decoder: Decoder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(QsampleError, match="not empty"):
        qsample.bake(decoder("genai_cpu_fp32")[0], out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rope": "long"}, "one rotary table, not a short and a long one"),
        ({"tokenizer": "nowhere"}, "nowhere has no tokenizer.json"),
        ({"file": "model_q4.onnx"}, r"has no model_q4.onnx; it has model.onnx"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, str], why: str, decoder: Decoder, tmp_path: Path) -> None:
    with pytest.raises(QsampleError, match=why):
        qsample.bake(decoder("genai_cpu_fp32")[0], tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()
