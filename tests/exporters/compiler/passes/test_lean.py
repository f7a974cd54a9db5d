"""The graph passes for lean layers: what they leave, that they change no number, and what they leave alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.exporters.compiler.options import CompileOptions
from qsample.exporters.compiler.passes.lean import make_lean
from qsample.exporters.compiler.passes.ort_fusions import fuse
from qsample.exporters.compiler.passes.packed_qkv import pack_attention_inputs
from qsample.exporters.compiler.passes.reshapes import simplify_reshapes
from qsample.exporters.compiler.passes.rope_into_attention import absorb_rotary
from qsample.exporters.compiler.targets.cpu import TARGET
from qsample.exporters.graph.axes import fix_axes
from qsample.exporters.graph.join import cut_at_logits
from qsample.exporters.graph.runner import GraphRunner
from qsample.package import read_package
from qsample.tensors import Array
from tests.helpers.tiny_models import VOCAB_SIZE

CAPACITY = 48
LAYERS = 2  # of every tiny model

LLAMA_LAYER = Counter(MatMul=4, GroupQueryAttention=1, SkipSimplifiedLayerNormalization=2, Split=1, QuickGelu=1, Mul=1)
# Queries and keys are normed a head each, so they leave the packed projection and are seen as heads.
QWEN3_LAYER = LLAMA_LAYER + Counter(Split=1, Reshape=4, SimplifiedLayerNormalization=2)
# The embedding, the first norm, the last token, the head, and the operator's count of tokens, once a step.
ONCE = Counter(
    Gather=1, SimplifiedLayerNormalization=1, GatherElements=1, MatMul=1, Squeeze=3, Shape=2, Cast=5, Equal=2, Or=1
) + Counter(Where=1, Add=1, Sub=2, Unsqueeze=1, Expand=1)


# Its queries, keys and values have biases; half of each head is rotated, neighbours as pairs.
GLM_LAYER = LLAMA_LAYER + Counter(Add=1)


@pytest.mark.parametrize(("model_type", "layer"), [("llama", LLAMA_LAYER), ("qwen3", QWEN3_LAYER), ("glm", GLM_LAYER)])
def test_operators_of_a_layer(
    exported: Callable[..., Path], tmp_path: Path, model_type: str, layer: Counter[str]
) -> None:
    package = read_package(exported(model_type))
    TARGET.compile(package.path / "decoder.onnx", tmp_path, package.interface, CompileOptions(4, CAPACITY))
    decoder = cut_at_logits(ir.load(tmp_path / "decoder.onnx"), package.interface)
    found = Counter(node.op_type for node in decoder.graph)
    assert found == Counter({operator: LAYERS * count for operator, count in layer.items()}) + ONCE


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
    fuse(model, "cpu")
    make_lean(model, CAPACITY)
    assert not {"RotaryEmbedding", "Cos", "Sin", "Neg", "Transpose"} & {node.op_type for node in model.graph}
    attentions = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert len(attentions) == LAYERS
    for node in attentions:
        assert (node.attributes["do_rotary"].value, node.attributes["rotary_interleaved"].value) == (1, interleaved)
        assert [list(node.inputs[place].shape) for place in (7, 8)] == [[CAPACITY, rotated // 2]] * 2


@pytest.mark.parametrize(
    "model_type",
    [
        "gemma3_text",
        "glm",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "phi3",
        "qwen3",
        pytest.param("cohere", marks=pytest.mark.slow),
    ],
)
def test_same_logits(exported: Callable[..., Path], model_type: str) -> None:
    package = read_package(exported(model_type))
    runners = []
    for leaner in (False, True):
        model = cut_at_logits(ir.load(package.path / "decoder.onnx"), package.interface)
        fix_axes(model, {"T": CAPACITY})
        fuse(model, "cpu")
        before = len(model.graph)
        if leaner:
            make_lean(model, CAPACITY)
            assert len(model.graph) < before
            assert not make_lean(model, CAPACITY)
        initial = package.path / "initial_state.onnx"
        runners.append(GraphRunner(model, initial, package.interface, CAPACITY, folder=package.path))
    plain, lean = (generate(runner) for runner in runners)
    # The same float32 operations on the same numbers, so only a fused kernel's order of additions may differ.
    np.testing.assert_allclose(lean, plain, rtol=0, atol=2e-5 * np.abs(plain).max())


def generate(runner: GraphRunner) -> Array:
    """Logits of a ragged batch and three steps after it, and of one row in chunks: every way to count positions."""
    rng = np.random.default_rng(3)
    rows, lengths = 3, np.array([11, 4, 7])
    state = runner.start(rows)
    found = [runner.step(rng.integers(0, VOCAB_SIZE, (rows, 11)), lengths, state)["logits"]]
    found += [runner.step(rng.integers(0, VOCAB_SIZE, (rows, 1)), np.ones(rows), state)["logits"] for _ in range(3)]
    state = runner.start(1)
    found += [runner.step(rng.integers(0, VOCAB_SIZE, (1, n)), np.array([n]), state)["logits"] for n in (9, 1, 12)]
    return np.concatenate(found)


# One attention whose queries and keys are rotated by cosines that ANGLES computes from `positions`.
ROTARY = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
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
    place = Unsqueeze (positions, last)
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
BY_POSITION = "angle = Mul (place, frequency)"
# Longer sequences turn slower, as a rotary embedding with two sets of frequencies does.
BY_LENGTH = """longest = ReduceMax <keepdims = 0> (positions)
    one_float = Cast <to = 1> (one)
    slower = Add (longest, one_float)
    slow = Div (frequency, slower)
    angle = Mul (place, slow)"""


def rotary_graph(angles: str) -> ir.Model:
    model = ir.from_onnx_text(
        ROTARY.replace("int64[1] one_axis = {1}>", f"int64[1] one_axis = {{1}}, {CONSTANTS}") % angles
    )
    shapes = {"query": ["B", "S", 64], "states": ["B", "S", 32], "key": ["B", "S", 32]}
    for node in model.graph:
        for value in node.outputs:
            if value.name in shapes:
                value.shape = ir.Shape(shapes[value.name])
    return model


def run(model: ir.Model, batch: int, length: int, starts: list[int]) -> list[Array]:
    rng = np.random.default_rng(1)
    feeds = {
        "input_ids": np.zeros((batch, length), np.int64),
        "lengths": np.array(starts, np.int32),
        "x": rng.standard_normal((batch, length, 64), np.float32),
        "past_key": rng.standard_normal((batch, 2, 32, 16), np.float32),
        "past_value": rng.standard_normal((batch, 2, 32, 16), np.float32),
    }
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    read = {value.name for value in session.get_inputs()}
    return list(session.run(None, {name: array for name, array in feeds.items() if name in read}))


def test_rotary_by_position_goes_into_the_attention() -> None:
    plain, lean = rotary_graph(BY_POSITION), rotary_graph(BY_POSITION)
    assert absorb_rotary(lean, 32)
    assert [node.op_type for node in lean.graph if "Rotary" in node.op_type or node.op_type == "Cos"] == []
    for batch, length, starts in ((1, 6, [0]), (1, 6, [9]), (3, 1, [4, 0, 31])):
        for got, wanted in zip(run(lean, batch, length, starts), run(plain, batch, length, starts), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_rotary_by_more_than_the_position_stays() -> None:
    model = rotary_graph(BY_LENGTH)
    assert not absorb_rotary(model, 32)
    assert sum(node.op_type == "RotaryEmbedding" for node in model.graph) == 2


def test_rotary_of_odd_sizes_stays() -> None:
    """Heads of 8 are smaller than the operator's own rotation takes."""
    model = rotary_graph(BY_POSITION)
    for node in model.graph:
        if node.op_type == "RotaryEmbedding":
            node.attributes["num_heads"] = ir.AttrInt64("num_heads", 2 * node.attributes.get_int("num_heads", 0))
    assert not absorb_rotary(model, 32)


PACKED = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
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
    model = ir.from_onnx_text(PACKED % "first, second, third")
    assert pack_attention_inputs(model)
    (attention,) = model.graph
    assert [value and value.name for value in attention.inputs[:3]] == ["x", None, None]


def test_parts_in_another_order_stay() -> None:
    model = ir.from_onnx_text(PACKED % "first, third, second")
    assert not pack_attention_inputs(model)
    assert len(model.graph) == 2


RESHAPES = """
<ir_version: 10, opset_import: ["" : 20]>
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
    model = ir.from_onnx_text(RESHAPES % (4, target))
    for node in model.graph:
        if node.outputs[0].name in ("split", "doubled"):
            node.outputs[0].shape = ir.Shape(shape)
        elif node.outputs[0].name == "middle":
            node.outputs[0].shape = ir.Shape(["B", "S", 4, 16])
    return model


def test_reshapes_between_known_shapes() -> None:
    """A computed target becomes a constant one, and of two reshapes in a row the first goes."""
    model = reshapes("shape", ["B", "S", 2, 32])
    assert simplify_reshapes(model)
    assert [node.op_type for node in model.graph] == ["Reshape", "Add", "Reshape"]
    target = model.graph.node(0).inputs[1]
    assert target is not None
    assert target.const_value is not None
    assert target.const_value.numpy().tolist() == [0, 0, 2, 32]
    assert not simplify_reshapes(model)


def test_reshapes_of_unknown_shape_stay() -> None:
    model = reshapes("shape", [None, None, None, 32])
    assert not simplify_reshapes(model)
    assert [node.op_type for node in model.graph] == ["Reshape", "Add", "Reshape", "Reshape"]
