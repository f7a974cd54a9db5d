"""Half precision: what is converted, what keeps its exact positions, and when weights are read."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler.passes.half_precision import HALF_DTYPES, convert_to_half
from qsample.exporters.lowering import align_row_sums
from qsample.graph.edit import lazy_initializer
from tests.helpers.cuda_kernels import KERNELS
from tests.helpers.small_graphs import normal, operators, results, small_graph

GRAPH = """
decode (int32[B,1] lengths, float[B,8] past, float[B] temperature) => (float[B,8] logits, float[B,8] present)
    <float[8] frequency = {1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005}, float[1] half = {0.5}>
{
    positions = Cast <to = 1> (lengths)
    angle = Mul (positions, frequency)
    cos = Cos (angle)
    hidden = MatMul (past, weight)
    rotated = Mul (hidden, cos)
    present = Identity (rotated)
    logits = Mul (rotated, half)
}
"""
WEIGHT = normal(8, 8)


def decoder() -> ir.Model:
    floats = ("positions", "angle", "cos", "hidden", "rotated", "present", "logits")
    text = GRAPH.replace("int32[B,1] lengths", "int32[B,1] lengths, float[8,8] weight")
    return small_graph(text, {name: ["B", 8] for name in floats}, constants={"weight": WEIGHT})


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_weights_states_and_hidden_values_are_converted_and_logits_are_not(dtype: str) -> None:
    model = decoder()
    assert convert_to_half(model, dtype, {"past"})
    half = ir.DataType[dtype.upper()]
    values = {value.name: value for node in model.graph for value in node.outputs}
    dtypes = {name: value.dtype for name, value in values.items()}
    assert {dtypes[name] for name in ("hidden", "rotated", "present")} == {half}
    assert {dtypes[name] for name in ("positions", "angle", "cos", "logits")} == {ir.DataType.FLOAT}
    assert [value.dtype for value in model.graph.inputs[1:]] == [
        half,
        ir.DataType.FLOAT,
    ]  # past and temperature
    assert operators(model) == [
        "Cast",
        "Mul",
        "Cos",
        "Cast",
        "MatMul",
        "Mul",
        "Identity",
        "Mul",
        "Cast",
    ]
    assert model.graph.outputs[0].name == "logits"
    assert model.graph.initializers.keys() == {"frequency", f"weight_{dtype}", f"half_{dtype}"}
    stored = model.graph.initializers[f"weight_{dtype}"].const_value
    np.testing.assert_array_equal(stored.numpy(), WEIGHT.astype(half.numpy()))
    assert not convert_to_half(model, dtype, {"past"})


def test_logits_are_close_and_positions_exact() -> None:
    plain, converted = decoder(), decoder()
    convert_to_half(converted, "float16", {"past"})
    past = normal(3, 8, seed=1)
    feeds = {"lengths": np.array([[5], [2049], [65_519]], np.int32), "past": past}
    feeds["temperature"] = np.zeros(3, np.float32)
    wanted, _ = results(plain, feeds)
    got, _ = results(converted, feeds | {"past": past.astype(np.float16)})
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, wanted, atol=4e-3 * np.abs(wanted).max())


def test_rows_of_a_table_are_rounded_and_numbers_that_ids_choose_are_not() -> None:
    model = small_graph(
        """g (int64[B,S] ids, float[9,8] table, float[9] numbers, float[8,4] head)
            => (float[B,S,4] logits, float[B,S] exact) {
            row = Gather (table, ids)
            logits = MatMul (row, head)
            number = Gather (numbers, ids)
            exact = Neg (number)
        }""",
        {"row": ["B", "S", 8], "number": ["B", "S"]},
        constants={"table": normal(9, 8), "numbers": normal(9), "head": normal(8, 4)},
    )
    assert convert_to_half(model, "float16", set())
    dtypes = {value.name: value.dtype for node in model.graph for value in node.outputs}
    assert (dtypes["row"], dtypes["number"]) == (ir.DataType.FLOAT16, ir.DataType.FLOAT)


def test_no_weight_is_read() -> None:
    model = decoder()

    def fail() -> np.ndarray:
        raise AssertionError("a weight was read")

    weight = model.graph.initializers["weight"]
    weight.const_value = lazy_initializer("weight", (8, 8), ir.DataType.FLOAT, fail).const_value
    assert convert_to_half(model, "bfloat16", {"past"})


def test_an_operator_without_bfloat16_chooses_in_float32() -> None:
    text = """
    route (float[B,8] scores) => (float[B,2] logits, int64[B,2] experts) <int64[1] k = {2}, float[1] two = {2}>
    {
        doubled = Mul (scores, two)
        best, experts = TopK (doubled, k)
        logits = Mul (best, two)
    }
    """
    for dtype, wanted in (
        ("float16", ["Mul", "TopK", "Mul", "Cast"]),
        ("bfloat16", ["Mul", "Cast", "TopK", "Cast", "Mul", "Cast"]),
    ):
        model = small_graph(text, {"doubled": ["B", 8], "best": ["B", 2], "logits": ["B", 2]})
        assert convert_to_half(model, dtype, {"scores"})
        assert operators(model) == wanted
        (top,) = (node for node in model.graph if node.op_type == "TopK")
        assert top.inputs[0].dtype == (
            ir.DataType.FLOAT16 if dtype == "float16" else ir.DataType.FLOAT
        )
        assert model.graph.outputs[0].dtype == ir.DataType.FLOAT


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_sums_of_routing_weights_have_kernels_in_half_precision(dtype: str) -> None:
    """Of 6 experts a token: what they weigh is padded before it is added up."""
    text = """
    route (float[B,6] chosen) => (float[B,1] logits) <int64[1] axes = {-1}, float[1] two = {2}>
    {
        weights = Mul (chosen, two)
        total = ReduceSum <keepdims = 1> (weights, axes)
        logits = Mul (total, two)
    }
    """
    model = small_graph(text, {"weights": ["B", 6], "total": ["B", 1], "logits": ["B", 1]})
    align_row_sums(model)
    assert convert_to_half(model, dtype, {"chosen"})
    assert "Pad" in operators(model)
    for node in model.graph:
        read = node.inputs[0]
        assert read.dtype.name.lower() in KERNELS[node.op_type], node.op_type
    if dtype == "float16":
        chosen = normal(3, 6)
        (got,) = results(model, {"chosen": chosen.astype(np.float16)})
        np.testing.assert_allclose(got, 4 * chosen.sum(-1, keepdims=True), atol=0.1)


RECURRENCE = """
layer (float[B,S,8] x, float[B,2,4,4] memory, float[B,8,3] window)
    => (float[B,S,8] logits, float[B,2,4,4] next_memory, float[B,8,3] next_window)
    <int64[1] start = {-3}, int64[1] stop = {9999}, int64[1] axis = {2}>
{
    projected = MatMul (x, weight)
    channels = Transpose <perm = [0, 2, 1]> (projected)
    mixed, unread = com.microsoft.CausalConvWithState <activation = "silu"> (channels, taps, , window)
    joined = Concat <axis = 2> (window, channels)
    next_window = Slice (joined, start, stop, axis)
    tokens = Transpose <perm = [0, 2, 1]> (mixed)
    gate = MatMul (x, gates)
    soft = Softplus (gate)
    decay = Neg (soft)
    beta = Sigmoid (gate)
    read, next_memory = com.microsoft.LinearAttention
        <q_num_heads = 2, kv_num_heads = 2, scale = 0.5, update_rule = "gated_delta">
        (tokens, tokens, tokens, memory, decay, beta)
    logits = MatMul (read, weight)
}
"""


def recurrence() -> ir.Model:
    text = RECURRENCE.replace(
        "window)\n", "window, float[8,8] weight, float[8,1,4] taps, float[8,2] gates)\n", 1
    )
    floats = [
        line.split(" = ")[0].strip()
        for line in RECURRENCE.splitlines()
        if " = " in line and "<int64" not in line
    ]
    names = [name for names in floats for name in names.split(", ") if not name.startswith("<")]
    sizes = {"weight": (8, 8), "taps": (8, 1, 4), "gates": (8, 2)}
    constants = {
        name: 0.3 * normal(*size, seed=seed) for seed, (name, size) in enumerate(sizes.items())
    }
    return small_graph(text, {name: ["B", "S", None] for name in names}, constants=constants)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_recurrent_layers_stay_float32_between_their_products(dtype: str) -> None:
    model = recurrence()
    assert convert_to_half(model, dtype, {"x"})
    half = ir.DataType[dtype.upper()]
    dtypes = {value.name: value.dtype for node in model.graph for value in node.outputs}
    assert {dtypes[name] for name in ("projected", "gate")} == {half}
    # What the first two products give, what the third takes, and the logits.
    assert sum(node.op_type == "Cast" for node in model.graph) == 4
    exact = (
        "channels",
        "tokens",
        "mixed",
        "joined",
        "next_window",
        "soft",
        "decay",
        "beta",
        "read",
        "next_memory",
        "logits",
    )
    assert {dtypes[name] for name in exact} == {ir.DataType.FLOAT}
    assert [value.dtype for value in model.graph.inputs] == [
        half,
        ir.DataType.FLOAT,
        ir.DataType.FLOAT,
    ]
    for node in model.graph:
        if node.domain == "com.microsoft" or node.op_type in (
            "Softplus",
            "Neg",
            "Sigmoid",
            "Concat",
        ):
            assert {value.dtype for value in node.inputs if value is not None} == {
                ir.DataType.FLOAT
            }


def test_a_recurrence_in_float16_is_close() -> None:
    plain, converted = recurrence(), recurrence()
    convert_to_half(converted, "float16", {"x"})
    feeds = {
        "x": normal(2, 64, 8, seed=5),
        "memory": normal(2, 2, 4, 4, seed=6),
        "window": normal(2, 8, 3, seed=7),
    }
    wanted = results(plain, feeds)
    got = results(converted, feeds | {"x": feeds["x"].astype(np.float16)})
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=4e-3 * np.abs(other).max())
