"""What is written out in several nodes becomes one, and computes the same; what only looks like it stays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes import common as common_passes

from qsample.compiler.passes.launches import (
    choose_before_softmax,
    fuse_decays,
    fuse_gated_norms,
    fuse_gated_sums,
    index_by_int32,
    look_up_one_hots,
    merge_parts,
)
from qsample.compiler.pipeline import apply
from tests.helpers.small_graphs import check_same, normal, operators, results, small_graph

Pass = Callable[[ir.Model], bool]
Shapes = dict[str, list[int | str | None]]


def check_stays(model: ir.Model, change: Pass) -> None:
    before = operators(model)
    assert not change(model)
    assert operators(model) == before


PARTS = """
parts (float[B,S,20] x) => (float[B,S,M] result, float[B,S,N] rest)
    <int64[4] sizes = {2, 4, 8, 6}>
{
    a, b, c, d = Split <axis = -1> (x, sizes)
    joined = Concat <axis = 2> (a, b, c)
    result = Neg (joined)
    rest = Neg (d)
}
"""


def test_parts_that_are_put_together_again_are_one() -> None:
    model = small_graph(PARTS)
    assert apply(model, merge_parts)
    assert operators(model) == ["Split", "Neg", "Neg"]
    check_same(model, small_graph(PARTS), {"x": normal(2, 3, 20)})
    assert not merge_parts(model)


def test_all_parts_are_what_was_split() -> None:
    text = PARTS.replace("(a, b, c)", "(a, b, c, d)").replace("Neg (d)", "Abs (x)")
    model = small_graph(text)
    assert apply(model, merge_parts)
    assert operators(model) == ["Neg", "Abs"]
    check_same(model, small_graph(text), {"x": normal(2, 3, 20)})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(a, b, c)", "(b, a, c)"),
        ("(a, b, c)", "(a, c)"),
        ("axis = 2", "axis = 1"),
        ("Neg (d)", "Neg (c)"),
        ("(a, b, c)", "(x, x, x)"),
        ("Neg (d)", "Identity (joined)\n    other = Concat <axis = 2> (a, b)"),
    ],
    ids=["another order", "a gap", "another axis", "a part read elsewhere", "no parts", "twice"],
)
def test_other_parts_stay(old: str, new: str) -> None:
    assert old in PARTS
    check_stays(small_graph(PARTS.replace(old, new)), merge_parts)


ROUTER = """
route (float[N,8] logits) => (float[N,3] weights, int64[N,3] ids)
    <int64[1] count = {3}, int64[1] last = {-1}>
{
    probabilities = Softmax <axis = -1> (logits)
    chosen, ids = TopK <axis = -1> (probabilities, count)
    total = ReduceSum <keepdims = 1> (chosen, last)
    weights = Div (chosen, total)
}
"""
ROUTER_SHAPES: Shapes = {
    "probabilities": ["N", 8],
    "chosen": ["N", 3],
    "total": ["N", 1],
    "weights": ["N", 3],
}


def test_a_router_takes_the_softmax_of_the_chosen() -> None:
    model = small_graph(ROUTER, ROUTER_SHAPES)
    assert apply(model, choose_before_softmax)
    assert operators(model) == ["TopK", "Softmax"]
    logits = normal(16, 8)
    check_same(model, small_graph(ROUTER), {"logits": logits}, rtol=1e-6)
    # In float64, apart from the graph: each weight by its definition.
    weights, ids = results(model, {"logits": logits})
    powers = np.exp(np.take_along_axis(logits, ids, -1).astype(np.float64))
    np.testing.assert_allclose(weights, powers / powers.sum(-1, keepdims=True), rtol=1e-6)
    assert not choose_before_softmax(model)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Softmax <axis = -1>", "Sigmoid"),
        ("Softmax <axis = -1>", "Softmax <axis = 0>"),
        ("TopK <axis = -1>", "TopK <axis = -1, largest = 0>"),
        ("(chosen, total)", "(total, chosen)"),
        ("keepdims = 1> (chosen, last)", "keepdims = 1> (probabilities, last)"),
        ("ReduceSum", "ReduceMax"),
    ],
    ids=["sigmoid", "over tokens", "the smallest", "upside down", "sum of all", "by the largest"],
)
def test_other_routers_stay(old: str, new: str) -> None:
    assert old in ROUTER
    check_stays(small_graph(ROUTER.replace(old, new), ROUTER_SHAPES), choose_before_softmax)


def test_a_router_whose_probabilities_are_read_elsewhere_stays() -> None:
    text = ROUTER.replace("=> (", "=> (float[N,8] all, ")
    text = text.replace("weights = Div", "all = Neg (probabilities)\n    weights = Div")
    check_stays(small_graph(text, ROUTER_SHAPES), choose_before_softmax)


NORM = """
norm (float[N,4] x, float[N,4] gate) => (float[N,4] result) <float[4] weight = {1, 1.5, 2, 2.5}>
{
    normed = SimplifiedLayerNormalization <axis = -1, epsilon = 0.25> (x, weight)
    sigmoid = Sigmoid (gate)
    silu = Mul (gate, sigmoid)
    result = Mul (normed, silu)
}
"""
NORM_SHAPES: Shapes = {name: ["N", 4] for name in ("normed", "sigmoid", "silu", "result")}


@pytest.mark.parametrize(
    ("product", "activation"),
    [("normed, silu", "silu"), ("silu, normed", "silu"), ("normed, sigmoid", "sigmoid")],
)
def test_a_gated_norm_is_one_operator(product: str, activation: str) -> None:
    text = NORM.replace("normed, silu", product)
    model = small_graph(text, NORM_SHAPES)
    common_passes.RemoveUnusedNodesPass()(model)
    assert apply(model, fuse_gated_norms)
    (node,) = model.graph
    assert node.attributes["activation"].as_string() == activation
    x, gate = normal(5, 4), normal(5, 4, seed=1)
    (got,) = results(model, {"x": x, "gate": gate})
    check_same(model, small_graph(text), {"x": x, "gate": gate}, rtol=2e-6, atol=1e-7)
    root = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 0.25)
    factor = (gate if activation == "silu" else 1) / (1 + np.exp(-gate.astype(np.float64)))
    wanted = x / root * (1 + np.arange(4) / 2) * factor
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-7)
    assert not fuse_gated_norms(model)


def test_a_norm_without_attributes_has_onnx_runtimes_defaults() -> None:
    text = NORM.replace("<axis = -1, epsilon = 0.25> ", "")
    model = small_graph(text, NORM_SHAPES)
    assert apply(model, fuse_gated_norms)
    feeds = {"x": 0.01 * normal(5, 4), "gate": normal(5, 4, seed=1)}
    check_same(model, small_graph(text), feeds, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Mul (gate, sigmoid)", "Mul (x, sigmoid)"),
        ("Mul (normed, silu)", "Mul (normed, normed)"),
        ("Mul (gate, sigmoid)", "Add (gate, sigmoid)"),
        ("Sigmoid (gate)", "Tanh (gate)"),
        ("axis = -1", "axis = 0"),
        ("SimplifiedLayerNormalization", "LayerNormalization"),
        ("float[N,4] gate", "float[1,4] gate"),
    ],
    ids=[
        "another gate",
        "a square",
        "a sum",
        "tanh",
        "over tokens",
        "another norm",
        "one gate for all",
    ],
)
def test_other_products_stay(old: str, new: str) -> None:
    assert old in NORM
    check_stays(small_graph(NORM.replace(old, new), NORM_SHAPES), fuse_gated_norms)


@pytest.mark.parametrize("value", ["normed", "silu"])
def test_a_norm_and_a_silu_that_are_read_elsewhere_stay(value: str) -> None:
    text = NORM.replace("(float[N,4] result)", "(float[N,4] result, float[N,4] other)")
    text = text.replace("result = Mul", f"other = Neg ({value})\n    result = Mul")
    check_stays(small_graph(text, NORM_SHAPES), fuse_gated_norms)


SOFTPLUS = "soft = Softplus (total)"
THRESHOLD = """small = Softplus (total)
    is_far = Greater (total, twenty)
    soft = Where (is_far, total, small)"""
DECAYS = """
layer (float[B,S,4] a, float[B,S,4] b, bool[B,S,1] real, float[B,S,16] q, float[B,4,4,4] memory)
    => (float[B,S,16] result, float[B,4,4,4] next)
    <float[4] bias = {0.5, -1, 2, 0}, float[4] scale = {-1, -0.5, -2, -8}, float zero = {0}, float twenty = {20},
     float two = {2}>
{
    rate = Sigmoid (b)
    %s
    rates = Where (real, %s, zero)
    total = Add (a, bias)
    %s
    decay = Mul (scale, soft)
    decays = Where (real, decay, zero)
    result, next = com.microsoft.LinearAttention
        <q_num_heads = 4, kv_num_heads = 4, scale = 0.5, update_rule = "gated_delta">
        (q, q, q, memory, decays, rates)
}
"""
DECAY_SHAPES: Shapes = {
    name: ["B", "S", 4]
    for name in ("rate", "rates", "twice", "total", "small", "soft", "decay", "decays")
}


def decays(softplus: str = SOFTPLUS, *, twice: bool = False) -> str:
    doubled = "twice = Mul (rate, two)" if twice else ""
    return DECAYS % (doubled, "twice" if twice else "rate", softplus)


def inputs_of_decays() -> dict[str, np.ndarray]:
    """Numbers before the softplus on both sides of its threshold; the last token of the second row is padding."""
    real = np.ones((2, 3, 1), bool)
    real[1, 2] = False
    return {
        "a": 15 * normal(2, 3, 4),
        "b": normal(2, 3, 4, seed=1),
        "real": real,
        "q": 0.3 * normal(2, 3, 16, seed=2),
        "memory": normal(2, 4, 4, 4, seed=3),
    }


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("softplus", [SOFTPLUS, THRESHOLD], ids=["plain", "with a threshold"])
def test_decays_and_rates_are_one_operator(softplus: str, twice: bool) -> None:
    text = decays(softplus, twice=twice)
    model = small_graph(text, DECAY_SHAPES)
    assert apply(model, fuse_decays)
    wanted = ["LinearAttentionGate", "LinearAttention", "Where", "Where", *["Mul"] * twice]
    assert sorted(operators(model)) == sorted(wanted)
    check_same(model, small_graph(text), inputs_of_decays(), rtol=1e-5, atol=1e-6)
    assert not fuse_decays(model)


@pytest.mark.parametrize(
    ("old", "new", "rates"),
    [
        ("Sigmoid (b)", "Clip (b, zero, two)", "Clip"),
        ("float[B,S,4] b", "float[B,S,1] b", "Sigmoid"),
    ],
    ids=["rates of another function", "a rate for all heads"],
)
def test_decays_alone_are_one_operator(old: str, new: str, rates: str) -> None:
    text = decays().replace(old, new)
    model = small_graph(text, DECAY_SHAPES)
    assert apply(model, fuse_decays)
    assert rates in operators(model)
    (gate,) = [node for node in model.graph if node.op_type == "LinearAttentionGate"]
    assert len(gate.inputs) - 2 == len(gate.outputs) == 1
    feeds = inputs_of_decays()
    feeds["b"] = feeds["b"] if old == "Sigmoid (b)" else feeds["b"][..., :1]
    check_same(model, small_graph(text), feeds, rtol=1e-5, atol=1e-6)


def test_decays_in_half_precision_stay() -> None:
    model = small_graph(decays(), DECAY_SHAPES)
    model.graph.inputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
    check_stays(model, fuse_decays)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Softplus (total)", "Exp (total)"),
        ("Add (a, bias)", "Sub (a, bias)"),
        ("Mul (scale, soft)", "Mul (a, soft)"),
        ("float[4] bias = {0.5, -1, 2, 0}", "float[1] bias = {0.5}"),
        ("Mul (scale, soft)", "Mul (scale, small)\n    zeros = Mul (soft, zero)"),
    ],
    ids=["exp", "a difference", "another scale", "one bias for all", "read elsewhere"],
)
def test_other_decays_stay(old: str, new: str) -> None:
    softplus = SOFTPLUS if "small" not in new else f"{SOFTPLUS}\n    small = Identity (soft)"
    text = decays(softplus)
    assert old in text
    check_stays(small_graph(text.replace(old, new), DECAY_SHAPES), fuse_decays)


def test_a_low_threshold_stays() -> None:
    check_stays(
        small_graph(decays(THRESHOLD).replace("twenty = {20}", "twenty = {5}"), DECAY_SHAPES),
        fuse_decays,
    )


SUM = """
shared (float[N,8] x, float[N,8] y, float[N,1] gate) => (float[N,8] result)
{
    scaled = Mul (gate, y)
    result = Add (x, scaled)
}
"""
SUM_SHAPES: Shapes = {"scaled": ["N", 8], "result": ["N", 8]}


@pytest.mark.parametrize("product", ["gate, y", "y, gate"])
@pytest.mark.parametrize("total", ["x, scaled", "scaled, x"])
def test_a_gated_sum_is_one_operator(product: str, total: str) -> None:
    text = SUM.replace("gate, y", product).replace("x, scaled", total)
    model = small_graph(text, SUM_SHAPES)
    assert apply(model, fuse_gated_sums)
    assert operators(model) == ["GatedAdd"]
    feeds = {"x": normal(5, 8), "y": normal(5, 8, seed=1), "gate": normal(5, 1, seed=2)}
    (got,) = results(model, feeds)
    np.testing.assert_array_equal(got, feeds["x"] + feeds["y"] * feeds["gate"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("float[N,1] gate", "float[N,8] gate"),
        ("float[N,1] gate", "float[1,1] gate"),
        ("float[N,8] x", "float[1,8] x"),
        ("Mul", "Div"),
        ("Add", "Sub"),
        ("Add (x, scaled)", "Add (scaled, scaled)"),
    ],
    ids=["a gate for each", "a gate for all", "one x for all", "quotient", "difference", "twice"],
)
def test_other_sums_stay(old: str, new: str) -> None:
    assert old in SUM
    check_stays(small_graph(SUM.replace(old, new), SUM_SHAPES), fuse_gated_sums)


def test_of_two_gated_terms_one_is_fused() -> None:
    text = SUM.replace("(x, scaled)", "(other, scaled)").replace(
        "scaled = ", "other = Mul (x, gate)\n    scaled = "
    )
    model = small_graph(text, {"other": ["N", 8], **SUM_SHAPES})
    assert apply(model, fuse_gated_sums)
    assert sorted(operators(model)) == ["GatedAdd", "Mul"]


def test_sums_of_integers_stay() -> None:
    check_stays(
        small_graph(SUM.replace("float[", "int64["), SUM_SHAPES, ir.DataType.INT64), fuse_gated_sums
    )


ONE_HOTS = """
experts (float[N,4] logits) => (float16[M,4] result)
    <int64[4] numbers = {0, 1, 2, 3}, int64[1] count = {2}, int64[2] column = {-1, 1}>
{
    weights, ids = TopK (logits, count)
    chosen = Reshape (ids, column)
    is_expert = Equal (chosen, numbers)
    wide = Cast <to = 1> (is_expert)
    half = Cast <to = 10> (wide)
    result = Neg (half)
}
"""


def one_hots(text: str = ONE_HOTS) -> ir.Model:
    model = small_graph(text, {"chosen": ["M", 1]}, ir.DataType.INT64)
    for node in model.graph:
        if node.op_type == "Cast":
            node.outputs[0].type = ir.TensorType(ir.DataType(node.attributes.get_int("to", 0)))
    return model


def test_chosen_experts_are_rows_of_a_unit_matrix() -> None:
    model = one_hots()
    assert apply(model, look_up_one_hots)
    assert operators(model) == ["TopK", "Reshape", "Gather", "Reshape", "Neg"]
    (got,) = results(model, {"logits": np.array([[1, 3, 2, 0], [5, 0, 1, 9]], np.float32)})
    np.testing.assert_array_equal(got, -np.eye(4, dtype=np.float16)[[1, 2, 3, 0]])
    assert not look_up_one_hots(model)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{0, 1, 2, 3}", "{1, 2, 3, 4}"),
        ("float[N,4] logits", "float[N,5] logits"),
        (
            "ids = TopK (logits, count)",
            "other = TopK (logits, count)\n    ids = Cast <to = 7> (weights)",
        ),
        ("Equal", "Less"),
        (
            "wide = Cast <to = 1>",
            "wide = Where (is_expert, logits, logits)\n    unread = Cast <to = 1>",
        ),
    ],
    ids=["other numbers", "fewer numbers", "no choice", "another comparison", "no cast"],
)
def test_other_comparisons_stay(old: str, new: str) -> None:
    assert old in ONE_HOTS
    check_stays(one_hots(ONE_HOTS.replace(old, new)), look_up_one_hots)


def test_indices_that_are_no_column_stay() -> None:
    model = one_hots(ONE_HOTS.replace("{-1, 1}", "{-1, 4}"))
    column = next(node for node in model.graph if node.op_type == "Reshape").outputs[0]
    column.shape = ir.Shape(["M", 4])
    check_stays(model, look_up_one_hots)


INDICES = """
last (float[B,S,8] x, int32[B] lengths) => (float[B,M,8] result)
    <int64 one = {1}, int64[2] axes = {1, 2}, int64[3] shape = {1, 1, 8}>
{
    wide = Cast <to = 7> (lengths)
    index = Sub (wide, one)
    deep = Unsqueeze (index, axes)
    indices = Expand (deep, shape)
    result = GatherElements <axis = 1> (x, indices)
}
"""


def indices(text: str = INDICES) -> ir.Model:
    model = small_graph(text)
    for node in list(model.graph)[:4]:
        node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    return model


def test_indices_stay_int32() -> None:
    model = indices()
    assert apply(model, index_by_int32)
    assert operators(model) == ["Sub", "Unsqueeze", "Expand", "GatherElements"]
    assert {node.outputs[0].dtype for node in list(model.graph)[:3]} == {ir.DataType.INT32}
    check_same(
        model, indices(), {"x": normal(2, 5, 8), "lengths": np.array([2, 5], dtype=np.int32)}
    )
    assert not index_by_int32(model)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Sub (wide, one)", "Mod (wide, one)"),
        ("Sub (wide, one)", "Sub (one, wide)"),
        ("Sub (wide, one)", "Sub (wide, wide)"),
        ("result = Gather", "count = Neg (wide)\n    result = Gather"),
        ("GatherElements <axis = 1> (x, indices)", "Gather <axis = 1> (x, indices)"),
    ],
    ids=["another operator", "the other way", "of itself", "read elsewhere", "Gather"],
)
def test_numbers_of_another_use_stay_int64(old: str, new: str) -> None:
    assert old in INDICES
    check_stays(indices(INDICES.replace(old, new)), index_by_int32)
