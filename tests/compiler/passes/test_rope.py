"""Rotary embeddings that a model writes out: which of them become RotaryEmbedding, and that no number changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.compiler.passes.rope import absorb_rope, fuse_rope
from qsample.compiler.pipeline import apply, lean_phases
from qsample.graph.edit import fix_axes, initializer
from qsample.graph.gqa import Slot
from qsample.graph.join import cut_at_logits
from qsample.package.package import read_package
from tests.helpers.building import run_on
from tests.helpers.small_graphs import check_same, small_graph

HEADS, SIZE, REST = 4, 16, 8
HALVES = """
    first = Slice (x, n0, n8, n3)
    second = Slice (x, n8, n16, n3)
    minus = Neg (second)
    turned = Concat <axis = -1> (minus, first)
"""
NEIGHBOURS = """
    even = Slice (x, n0, n16, n3, n2)
    odd = Slice (x, n1, n16, n3, n2)
    minus = Neg (odd)
    minus_deep = Unsqueeze (minus, n_1)
    even_deep = Unsqueeze (even, n_1)
    pairs = Concat <axis = -1> (minus_deep, even_deep)
    turned = Reshape (pairs, merged)
"""
# Each half by itself, with an angle for each pair.
APART = """
    a, b = Split <axis = -1, num_outputs = 2> (x)
    a_cos = Mul (a, cos)
    b_sin = Mul (b, sin)
    rotated_a = Sub (a_cos, b_sin)
    b_cos = Mul (b, cos)
    a_sin = Mul (a, sin)
    rotated_b = Add (b_cos, a_sin)
    rotated = Concat <axis = -1> (rotated_a, rotated_b)
"""
ONE_OF_A_PAIR = "both = Identity (frequency)"
HALF_AND_HALF = "both = Concat <axis = -1> (frequency, frequency)"
TWO_BY_TWO = """
    column = Unsqueeze (frequency, n_1)
    twice = Concat <axis = -1> (column, column)
    both = Reshape (twice, n16)
"""
ALL = "x = Identity (heads)"
PART = "x = Slice (heads, n0, n16, n3)"
GRAPH = """
decode (int64[B,S] input_ids, int32[B] lengths, float[B,4,S,%d] heads) => (float[B,4,S,%d] result)
    <float[8] frequency = {1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005}, int64[1] n_1 = {-1}, int64[1] n0 = {0},
     int64[1] n1 = {1}, int64[1] n2 = {2}, int64[1] n3 = {3}, int64[1] n8 = {8}, int64[1] n16 = {16},
     int64[4] merged = {0, 0, 0, 16}, int64[1] n24 = {24}, int32 zero = {0}, int32 one = {1}>
{
    %s
    count = Shape <start = 1, end = 2> (input_ids)
    count0 = Squeeze (count)
    count32 = Cast <to = 6> (count0)
    steps = Range (zero, count32, one)
    start = Unsqueeze (lengths, n1)
    positions = Add (start, steps)
    %s
    numbers = Cast <to = 1> (positions_used)
    deep = Unsqueeze (numbers, n_1)
    %s
    angle = Mul (deep, both)
    cos3 = Cos (angle)
    sin3 = Sin (angle)
    cos = Unsqueeze (cos3, n1)
    sin = Unsqueeze (sin3, n1)
    %s
    %s
}
"""
SUM = """
    straight = Mul (x, cos)
    crossed = Mul (turned, sin)
    rotated = Add (straight, crossed)
"""
USED_AS_THEY_ARE = "positions_used = Identity (positions)"
BY_TOKEN = "tokens = Cast <to = 6> (input_ids)\n positions_used = Add (positions, tokens)"
WHOLE = "result = Identity (rotated)"
PUT_BACK = (
    "rest = Slice (heads, n16, n24, n3)\n"
    " joined = Concat <axis = -1> (rotated, rest)\n"
    " result = Identity (joined)"
)


def graph(
    turn: str,
    angles: str = HALF_AND_HALF,
    by: str = USED_AS_THEY_ARE,
    *,
    part: bool = False,
    back: str = PUT_BACK,
) -> ir.Model:
    size = SIZE + REST if part else SIZE
    apart = angles == ONE_OF_A_PAIR
    rotation = turn if apart else turn + SUM
    parts = (PART if part else ALL, by, angles, rotation, back if part else WHOLE)
    shapes: dict[str, list[int | str | None]] = {
        name: ["B", HEADS, "S", width]
        for name, width in {
            "x": SIZE,
            "rotated": SIZE,
            "turned": SIZE,
            "rest": REST,
            "joined": size,
        }.items()
    }
    width = SIZE // 2 if apart else SIZE
    shapes |= {name: ["B", 1, "S", width] for name in ("cos", "sin")}
    return small_graph(GRAPH % (size, size, *parts), shapes)


def output_of(model: ir.Model, starts: list[int], length: int) -> np.ndarray:
    size = model.graph.inputs[2].shape[3]  # type: ignore[index]
    feeds = {
        "input_ids": np.zeros((len(starts), length), np.int64),
        "lengths": np.array(starts, np.int32),
    }
    heads = np.random.default_rng(0).standard_normal((len(starts), HEADS, length, size), np.float32)
    feeds["heads"] = heads.astype(model.graph.inputs[2].dtype.numpy())  # type: ignore[union-attr]
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    result: np.ndarray = session.run(None, feeds)[0]
    return result


@pytest.mark.parametrize(
    ("turn", "angles"),
    [(HALVES, HALF_AND_HALF), (NEIGHBOURS, TWO_BY_TWO), (APART, ONE_OF_A_PAIR)],
    ids=["halves", "neighbours", "halves apart"],
)
def test_a_rotation_in_float16(turn: str, angles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    halved = GRAPH.replace("float[B,4,S", "float16[B,4,S")
    for name in ("cos", "sin"):
        halved = halved.replace(
            f"{name} = Unsq", f"{name}16 = Cast <to = 10> ({name}3)\n    {name} = Unsq"
        )
        halved = halved.replace(f"({name}3, n1)", f"({name}16, n1)")
    monkeypatch.setattr(sys.modules[__name__], "GRAPH", halved)
    models = [graph(turn, angles) for _ in range(2)]
    for model in models:
        for node in model.graph:
            for value in node.outputs:
                if value.dtype == ir.DataType.FLOAT:
                    value.type = ir.TensorType(ir.DataType.FLOAT16)
    assert apply(models[1], partial(fuse_rope, halves_apart=True))
    assert {"Neg", "Sub"}.isdisjoint(node.op_type for node in models[1].graph)
    wanted, got = (output_of(model, [3, 9], 4) for model in models)
    np.testing.assert_allclose(got, wanted, atol=4e-3)


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize(
    ("turn", "angles"),
    [(HALVES, HALF_AND_HALF), (NEIGHBOURS, TWO_BY_TWO), (APART, ONE_OF_A_PAIR)],
    ids=["halves", "neighbours", "halves apart"],
)
def test_a_rotation_becomes_one_node(turn: str, angles: str, part: bool) -> None:
    plain, fused = graph(turn, angles, part=part), graph(turn, angles, part=part)
    assert apply(fused, partial(fuse_rope, halves_apart=True))
    (node,) = [node for node in fused.graph if node.op_type == "RotaryEmbedding"]
    assert node.attributes["interleaved"].value == int(turn is NEIGHBOURS)
    assert node.attributes.get_int("rotary_embedding_dim", 0) == (SIZE if part else 0)
    assert not {"straight", "crossed", "turned"} & {
        value.name for node in fused.graph for value in node.outputs
    }
    for starts, length in (([0], 6), ([9], 6), ([4, 0, 31], 1), ([3, 8], 5)):
        np.testing.assert_allclose(
            output_of(fused, starts, length), output_of(plain, starts, length), atol=2e-6
        )
    assert not fuse_rope(fused, halves_apart=True)


def test_halves_apart_stay_unless_asked_for() -> None:
    assert not fuse_rope(graph(APART, ONE_OF_A_PAIR))


@pytest.mark.parametrize(
    "parts",
    [
        (HALVES.replace("Neg", "Identity"),),  # a reflection
        (NEIGHBOURS.replace("(minus_deep, even_deep)", "(even_deep, minus_deep)"), TWO_BY_TWO),
        (HALVES, TWO_BY_TWO),  # the angles of a pair differ
        (NEIGHBOURS, HALF_AND_HALF),
        (HALVES, HALF_AND_HALF, BY_TOKEN),
        (HALVES.replace("Slice (x, n8, n16", "Slice (x, n0, n8"),),
        (APART.replace("Sub", "Add"), ONE_OF_A_PAIR),
        (APART.replace("Mul (a, sin)", "Mul (b, sin)"), ONE_OF_A_PAIR),
        (APART.replace("(rotated_a, rotated_b)", "(rotated_b, rotated_a)"), ONE_OF_A_PAIR),
        (APART.replace("a, b = Split", "b, a = Split"), ONE_OF_A_PAIR),
        (APART, ONE_OF_A_PAIR, BY_TOKEN),
    ],
    ids=[
        "reflected",
        "turned back",
        "other pairs",
        "other halves",
        "by token",
        "one half twice",
        "apart, reflected",
        "apart, one half twice",
        "apart, turned back",
        "apart, the second half first",
        "apart, by token",
    ],
)
def test_what_is_no_rotation_stays(parts: tuple[str, ...]) -> None:
    model = graph(*parts)
    nodes = len(model.graph)
    assert not fuse_rope(model, halves_apart=True)
    assert len(model.graph) == nodes


@pytest.mark.parametrize(
    "back",
    [
        PUT_BACK.replace("(rotated, rest)", "(rest, rotated)"),
        PUT_BACK.replace("n16, n24", "n0, n8"),  # not what lies behind
    ],
    ids=["in another order", "another part"],
)
def test_a_part_that_is_not_put_back_is_rotated_alone(back: str) -> None:
    plain, fused = graph(HALVES, part=True, back=back), graph(HALVES, part=True, back=back)
    assert apply(fused, partial(fuse_rope, halves_apart=True))
    (node,) = [node for node in fused.graph if node.op_type == "RotaryEmbedding"]
    assert "rotary_embedding_dim" not in node.attributes
    np.testing.assert_allclose(output_of(fused, [2, 7], 3), output_of(plain, [2, 7], 3), atol=2e-6)


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
    text = (
        ROTARY.replace("int64[1] one_axis = {1}>", f"int64[1] one_axis = {{1}}, {CONSTANTS}")
        % angles
    )
    return small_graph(
        text, {"query": ["B", "S", 64], "states": ["B", "S", 32], "key": ["B", "S", 32]}
    )


def check_rotations(model: ir.Model, batch: int, length: int, starts: list[int]) -> None:
    """It computes what the graph that rotates by itself does."""
    rng = np.random.default_rng(1)
    feeds = {
        "input_ids": np.zeros((batch, length), np.int64),
        "lengths": np.array(starts, np.int32),
        "x": rng.standard_normal((batch, length, 64), np.float32),
        "past_key": rng.standard_normal((batch, 2, 32, 16), np.float32),
        "past_value": rng.standard_normal((batch, 2, 32, 16), np.float32),
    }
    check_same(model, rotary_graph(BY_POSITION), feeds, atol=1e-6)


def test_rotary_by_position_goes_into_the_attention() -> None:
    lean = rotary_graph(BY_POSITION)
    assert apply(lean, partial(absorb_rope, capacity=32))
    assert [
        node.op_type for node in lean.graph if "Rotary" in node.op_type or node.op_type == "Cos"
    ] == []
    for batch, length, starts in ((1, 6, [0]), (1, 6, [9]), (3, 1, [4, 0, 31])):
        check_rotations(lean, batch, length, starts)


def test_tables_of_an_earlier_run_are_not_taken_for_these() -> None:
    lean = rotary_graph(BY_POSITION)
    for name in ("rope_0_cos", "rope_1_sin"):
        initializer(lean.graph, name, np.zeros((32, 8), np.float32))
    assert apply(lean, partial(absorb_rope, capacity=32))
    check_rotations(lean, 1, 6, [9])


@pytest.mark.parametrize("angles", [BY_LENGTH, BY_CONTEXT])
def test_rotary_by_more_than_the_position_stays(angles: str) -> None:
    model = rotary_graph(angles)
    assert not absorb_rope(model, 32)
    assert sum(node.op_type == "RotaryEmbedding" for node in model.graph) == 2


@pytest.mark.parametrize("capacity", [2, 3])
def test_the_smallest_contexts(capacity: int) -> None:
    model = rotary_graph(BY_POSITION)
    assert apply(model, partial(absorb_rope, capacity=capacity))
    assert "RotaryEmbedding" not in {node.op_type for node in model.graph}


@pytest.mark.parametrize(("heads", "rotated"), [(2, 0), (1, 8)])
def test_rotary_of_odd_sizes_stays(heads: int, rotated: int) -> None:
    """Heads of 8, or a rotated part of 8, are smaller than the operator's own rotation takes."""
    model = rotary_graph(BY_POSITION)
    for node in model.graph:
        if node.op_type == "RotaryEmbedding":
            node.attributes["num_heads"] = ir.AttrInt64(
                "num_heads", heads * node.attributes.get_int("num_heads", 0)
            )
            node.attributes["rotary_embedding_dim"] = ir.AttrInt64("rotary_embedding_dim", rotated)
    assert not absorb_rope(model, 32)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model_type", "interleaved", "rotated"),
    [
        pytest.param("gpt_neox", 0, 16, marks=pytest.mark.slow),
        ("glm", 1, 16),
        pytest.param("cohere", 1, 16, marks=pytest.mark.slow),
        ("llama", 0, 16),
        ("gpt_oss", 0, 16),
    ],
)
def test_every_form_of_rotation_goes_into_the_attention(
    exported: Callable[..., Path], model_type: str, interleaved: int, rotated: int
) -> None:
    """For CUDA. On the CPU, halves that are rotated apart stay as they are."""
    package = read_package(exported(model_type))
    model = cut_at_logits(ir.load(package.path / "decoder.onnx"), package.interface)
    fix_axes(model, {"T": CAPACITY})
    run_on(model, lean_phases("cuda", CAPACITY))
    assert not {"RotaryEmbedding", "Cos", "Sin", "Neg", "Transpose"} & {
        node.op_type for node in model.graph
    }
    attentions = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert len(attentions) == LAYERS
    for node in attentions:
        assert (
            node.attributes["do_rotary"].value,
            node.attributes["rotary_interleaved"].value,
        ) == (1, interleaved)
        tables = [node.inputs[slot] for slot in (Slot.COS_CACHE, Slot.SIN_CACHE)]
        assert [list(table.shape) for table in tables] == [[CAPACITY, rotated // 2]] * 2
