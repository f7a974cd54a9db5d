"""What cannot be baked is refused in one line that says why, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import qsample
from qsample.addons.bake import attention
from qsample.errors import QsampleError, UnsupportedModelError
from qsample.graph.gqa import Slot
from tests.helpers.foreign import edited, read

Decoder = Callable[[str], tuple[Path, str | None]]
Edit = Callable[[ir.Model], None]


def renamed(old: str, new: str) -> Edit:
    def edit(model: ir.Model) -> None:
        next(
            value for value in [*model.graph.inputs, *model.graph.outputs] if value.name == old
        ).name = new

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


def with_one_token(model: ir.Model) -> None:
    model.graph.inputs[0].shape = ir.Shape(["batch_size", 1])


def not_causal(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "GroupQueryAttention":
            node.attributes["causal"] = ir.AttrInt64("causal", 0)


def heads_as_text(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "GroupQueryAttention":
            node.attributes["num_heads"] = ir.AttrString("num_heads", "\x1b[2J")


def one_shared_cache(model: ir.Model) -> None:
    first, second = (node for node in model.graph if node.op_type == "GroupQueryAttention")
    second.replace_input_with(3, first.outputs[1])


def mask_used_elsewhere(model: ir.Model) -> None:
    """The mask hides tokens of the embedding, say."""
    graph = model.graph
    mask = next(value for value in graph.inputs if value.name == "attention_mask")
    embedding = next(
        node for node in graph if node.op_type == "Gather" and node.inputs[1] is graph.inputs[0]
    )
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
        (
            renamed("input_ids", "inputs_embeds"),
            "no token embedding.*take a file whose input is input_ids",
        ),
        (with_input("block_table", ["b", "n"]), "paged.*without use_paged_attention"),
        (with_input("past_conv.0", ["b", 8, 3]), "recurrent states.*qsample export"),
        (
            with_input("past_key_values.0.conv_state", ["b", 8, 3]),
            "recurrent states.*qsample export",
        ),
        (with_input("beam_idx", ["b"]), "beam search"),
        (with_input("cache_indirection", ["b", "n", "t"]), "beam search"),
        (with_input("cache_position", ["s"]), "separate positions"),
        (
            with_input("encoder_hidden_states", ["b", "s", 8]),
            "not a language model of tokens alone",
        ),
        (with_input("per_layer_inputs", ["b", "s", 8]), "per_layer_inputs is neither"),
        (
            with_input("\x1b[2Jred\nqsample: done\x07", [1, 2]),
            r"input \\x1b\[2Jred qsample: done\\x07 is neither",
        ),
        (
            with_operator("MatMulInteger", ""),
            "a single scale per tensor.*take its q4, fp16 or fp32 file",
        ),
        (with_operator("PagedAttention"), "paged"),
        (with_operator("MultiHeadAttention"), "attends through MultiHeadAttention"),
        (with_operator("LinearAttention"), "does not keep a state of its own"),
        (with_operator("Scan", ""), "has a Scan that may go through tokens.*qsample export"),
        (without_cache, "no cache.*text-generation-with-past"),
        (renamed("logits", "scores"), "no output logits, only scores"),
        (with_opset(13), "opset is 13.*14 to 24"),
        (with_opset(25), "opset is 25"),
        (with_one_token, r"number of tokens is fixed.*multi_token_decode=True"),
        (not_causal, "not causal"),
        (heads_as_text, "not as its operators are defined .*num_heads"),
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
        UnsupportedModelError,
        match=r"a single scale per tensor.*; take model\.onnx, model_bnb4\.onnx, ",
    ):
        qsample.bake(folder, tmp_path / "out", file="onnx/model_quantized.onnx")
    assert not (tmp_path / "out").exists()


def with_functions(*bodies: list[str]) -> Edit:
    """Functions f0, f1, ..., each of a chain of calls; the graph calls the first."""

    def edit(model: ir.Model) -> None:
        model.graph.opset_imports["test"] = 1
        for number, body in enumerate(bodies):
            first = value = ir.Value(name="a")
            nodes = []
            for op_type in body:
                nodes.append(
                    ir.node(op_type, [value], domain="test" if op_type.startswith("f") else "")
                )
                value = nodes[-1].outputs[0]
            imports = {"": 17, "test": 1}
            graph = ir.Graph([first], [value], nodes=nodes, opset_imports=imports)
            function = ir.Function("test", f"f{number}", "", graph=graph, attributes=[])
            model.functions[function.identifier()] = function
        with_operator("f0", "test")(model)

    return edit


@pytest.mark.parametrize(
    ("bodies", "why"),
    [
        ([["f0"]], "its functions call one another in a circle"),
        ([["f1"], ["f0"]], "its functions call one another in a circle"),
        (
            [*([f"f{number}"] * 2 for number in range(1, 60)), ["Identity"]],
            r"stand for \d+ nodes, .* at most 50000",
        ),
        ([["Identity"]], "functions cannot be inlined .*Opset mismatch"),
    ],
)
def test_functions_that_cannot_be_inlined(
    bodies: list[list[str]], why: str, decoder: Decoder, tmp_path: Path
) -> None:
    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "edited", with_functions(*bodies))
    with pytest.raises(UnsupportedModelError, match=why):
        qsample.bake(folder, tmp_path / "out", tokenizer=None)


class Before:
    """New nodes before `node`; arrays become constants."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self.graph, self.node, self.constants = graph, node, 0

    def __call__(
        self, op_type: str, *inputs: ir.Value | np.ndarray | None, **attributes: int
    ) -> ir.Value:
        values = [
            self.constant(value) if isinstance(value, np.ndarray) else value for value in inputs
        ]
        made = ir.node(op_type, values, attributes)
        self.graph.insert_before(self.node, made)
        return made.outputs[0]

    def constant(self, array: np.ndarray) -> ir.Value:
        self.constants += 1
        name = f"test.{self.constants}"
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        self.graph.register_initializer(value)
        return value

    def places(self, values: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The positions of keys [T] and queries [S, 1]; values: [..., S, T]."""
        zero, one = np.array(0), np.array(1)
        total = self("Squeeze", self("Shape", values, start=3, end=4))
        count = self("Squeeze", self("Shape", values, start=2, end=3))
        queries = self("Range", self("Sub", total, count), total, one)
        return self("Range", zero, total, one), self("Unsqueeze", queries, np.array([1]))


def with_scores(change: Callable[[Before, ir.Value], ir.Value]) -> Edit:
    """Other scores in the first layer."""

    def edit(model: ir.Model) -> None:
        softmax = next(node for node in model.graph if node.op_type == "Softmax")
        assert softmax.inputs[0] is not None
        softmax.replace_input_with(0, change(Before(model.graph, softmax), softmax.inputs[0]))

    return edit


def alibi(op: Before, scores: ir.Value) -> ir.Value:
    """Scores that fall with the distance."""
    keys, _ = op.places(scores)
    return op("Add", scores, op("Mul", op("Cast", keys, to=1), np.array(0.1, np.float32)))


def clipped(op: Before, scores: ir.Value) -> ir.Value:
    return op("Clip", scores, None, np.array(0.05, np.float32))


def chunks(op: Before, scores: ir.Value, size: int = 640) -> ir.Value:
    """Llama 4's: a token sees those of its own chunk, which at a chunk's last token looks like a window."""
    keys, queries = op.places(scores)
    same = op("Equal", op("Div", keys, np.array(size)), op("Div", queries, np.array(size)))
    return op("Where", same, scores, np.array(-1e9, np.float32))


def window_for_late_tokens(op: Before, scores: ir.Value) -> ir.Value:
    """A window that only tokens from 1,000 on have."""
    keys, queries = op.places(scores)
    near = op("Less", op("Sub", queries, keys), np.array(700))
    return op(
        "Where",
        op("Or", near, op("Less", queries, np.array(1000))),
        scores,
        np.array(-1e9, np.float32),
    )


def smaller_for_late_tokens(op: Before, scores: ir.Value) -> ir.Value:
    """Scores that are scaled from a depth on that no prompt of the parity gate reaches."""
    _, queries = op.places(scores)
    late = op("Cast", op("GreaterOrEqual", queries, np.array(400)), to=1)
    return op(
        "Mul",
        scores,
        op("Sub", np.array(1, np.float32), op("Mul", late, np.array(0.5, np.float32))),
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (alibi, "not a multiple of query keys.*ALiBi"),
        (clipped, "not a multiple of query keys"),
        (smaller_for_late_tokens, "not a multiple of query keys"),
        (chunks, "mask of layer 0 is not causal, with or without a window"),
        (window_for_late_tokens, "mask of layer 0 is not causal, with or without a window"),
    ],
)
def test_plain_attention_that_the_operator_lacks(
    change: Callable[[Before, ir.Value], ir.Value], why: str, decoder: Decoder, tmp_path: Path
) -> None:
    folder = edited(decoder("optimum_llama_18")[0], tmp_path / "edited", with_scores(change))
    with_context(folder, 1280)
    with pytest.raises(UnsupportedModelError, match=why):
        qsample.bake(folder, tmp_path / "out", tokenizer=None)
    assert not (tmp_path / "out").exists()


def with_context(folder: Path, tokens: int) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": tokens}))


@pytest.mark.parametrize(
    ("hides", "window", "repeats"),
    [(None, -1, True), (3, 3, True), (None, 3, True), (2, 3, False), (3, -1, False)],
)
def test_a_bias_may_repeat_the_mask(hides: int | None, window: int, repeats: bool) -> None:
    """Causal with the window of the attention, or hiding less. hides: the window of the bias, if any."""
    query, key = np.arange(5, 9)[:, None], np.arange(9)
    seen = (key <= query) & (True if hides is None else key > query - hides)
    for hidden, is_hidden in ((-1e9, True), (-0.5, False)):
        bias = np.where(seen, 0.0, hidden)[None, None]
        assert attention._repeats_the_mask(bias, 5, window) == (repeats and is_hidden)


def test_a_bias_of_chunks_is_not_taken_for_a_window(decoder: Decoder, tmp_path: Path) -> None:
    def edit(model: ir.Model) -> None:
        node = next(node for node in model.graph if node.op_type == "GroupQueryAttention")
        op = Before(model.graph, node)
        new = op("Shape", model.graph.inputs[0], start=1, end=2)
        total = op("Add", new, op("Shape", node.inputs[Slot.PAST_KEY], start=2, end=3))
        node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", 32)
        node.resize_inputs(max(len(node.inputs), Slot.ATTENTION_BIAS + 1))
        sizes = op("Concat", np.array([1, 1]), new, total, axis=0)
        node.replace_input_with(Slot.ATTENTION_BIAS, chunks(op, op("ConstantOfShape", sizes), 32))

    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "edited", edit)
    with pytest.raises(
        UnsupportedModelError, match="layer 0 adds an attention bias that is not a causal mask"
    ):
        attention.drop_causal_biases(read(folder), 128)


@pytest.mark.parametrize(
    ("file", "changes", "why"),
    [
        ("config.json", {"layer_types": 5}, "config.json: layer_types is 5; it must be a list"),
        (
            "config.json",
            {"vocab_size": 2**40},
            "config.json: vocab_size is 1099511627776; it must be at most",
        ),
        (
            "config.json",
            {"hidden_size": "160"},
            "config.json: hidden_size is '160'; it must be an integer",
        ),
        (
            "config.json",
            {"max_position_embeddings": float("inf")},
            "max_position_embeddings is inf; it must be an int",
        ),
        ("config.json", {"max_position_embeddings": 5}, "knows 5 positions .* needs 6 to be"),
        (
            "config.json",
            {"text_config": [1]},
            r"config.json: text_config is \[1\]; it must be an object",
        ),
        (
            "genai_config.json",
            {"model": {"decoder": [1]}},
            r"genai_config.json: decoder is \[1\]; it must be an object",
        ),
        ("tokenizer_config.json", None, "tokenizer_config.json is not a JSON object"),
        (
            "genai_config.json",
            {"search": 1},
            "genai_config.json: search is 1; it must be an object",
        ),
    ],
)
def test_settings_of_another_kind(
    file: str, changes: dict[str, object] | None, why: str, decoder: Decoder, tmp_path: Path
) -> None:
    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "edited", lambda model: None)
    path = folder / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(changes if changes is None else before | changes))
    with pytest.raises(QsampleError, match=why):
        qsample.bake(folder, tmp_path / "out")
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
def test_arguments_that_do_not_fit(
    changes: dict[str, str], why: str, decoder: Decoder, tmp_path: Path
) -> None:
    with pytest.raises(QsampleError, match=why):
        qsample.bake(decoder("genai_cpu_fp32")[0], tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()
