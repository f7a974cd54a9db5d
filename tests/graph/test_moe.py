"""Mixtures of experts in a graph: which products choose the experts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from qsample.graph import moe
from tests.helpers.small_graphs import small_graph


def test_the_products_that_choose_experts() -> None:
    """For ONNX Runtime's operator, and for weights that are looked up; not those before them, nor a lookup of rows."""
    shapes = {
        "before": (6, 6),
        "router": (6, 4),
        "other": (6, 4),
        "experts": (4, 6, 5),
        "fc1": (4, 12, 6),
        "rows": (9, 6),
    }
    model = small_graph(
        """
        mixture (float[B,6] x, int64[B] ids, float[6,6] before, float[6,4] router, float[6,4] other,
            float[4,6,5] experts, float[4,12,6] fc1, float[4,6,6] fc2, float[9,6] rows)
            => (float[B,6] y, float[B,6,5] own, float[B,6] z, float[B,6] plain) {
            hidden = MatMul (x, before)
            direct = MatMul (hidden, router)
            plain = com.microsoft.QMoE (hidden, direct, fc1, , fc2)
            scores = MatMul (hidden, router)
            shares = Softmax (scores)
            y = com.microsoft.MoE (hidden, shares, fc1, , fc2)
            others = MatMul (hidden, other)
            best = ArgMax <axis = 1, keepdims = 0> (others)
            own = Gather (experts, best)
            z = Gather (rows, ids)
        }""",
        constants={name: np.zeros(shape, np.float32) for name, shape in shapes.items()},
    )
    nodes = {node.name: node for node in model.graph}
    assert moe.routers(model.graph) == {nodes["scores"], nodes["others"], nodes["direct"]}
    assert moe.mixtures(model.graph) == [nodes["y"]]
    assert moe.gather_of_weights(nodes["own"]) is nodes["own"].inputs[0]
    assert moe.gather_of_weights(nodes["z"]) is None


def test_inputs_have_the_places_of_the_operators() -> None:
    """The contrib operators' documentation numbers them: fc3, which is not used, has those between."""
    assert [(slot.name, slot.value) for slot in moe.Slot] == list(
        zip(("INPUT", "ROUTER", "FC1", "FC1_BIAS", "FC2", "FC2_BIAS"), range(6), strict=True)
    )
    schema = onnxruntime_schema("QMoE")
    names = {
        "INPUT": "input",
        "ROUTER": "router_probs",
        "FC1": "fc1_experts_weights",
        "FC1_SCALES": "fc1_scales",
        "FC1_BIAS": "fc1_experts_bias",
        "FC2": "fc2_experts_weights",
        "FC2_SCALES": "fc2_scales",
        "FC2_BIAS": "fc2_experts_bias",
        "FC1_ZERO_POINTS": "fc1_zero_points",
        "FC2_ZERO_POINTS": "fc2_zero_points",
    }
    assert {slot.name: schema[slot] for slot in moe.QuantizedSlot} == names
    assert {slot.name: onnxruntime_schema("MoE")[slot] for slot in moe.Slot} == {
        name: names[name] for name in ("INPUT", "ROUTER", "FC1", "FC1_BIAS", "FC2", "FC2_BIAS")
    }


def onnxruntime_schema(operator: str) -> list[str]:
    """The names of the inputs of an operator, as the installed ONNX Runtime declares them."""
    (schema,) = [
        schema
        for schema in get_all_operator_schema()
        if (schema.domain, schema.name) == ("com.microsoft", operator)
    ]
    return [value.name for value in schema.inputs]


PACKED = """
mixture (float[B,6] x, float[B,4] router, uint8[4,12,8] l1, float[4,12,1] s1, uint8[4,16,16] l2,
    float[4,16,1] s2, int64[4] experts, int64[4] others, uint8[4,12,1] zeros, float[4,12,16] plain)
    => (float[B,16] y) {{
    {body}
    y = com.microsoft.MoE (x, router, fc1, , fc2)
}}"""
LOOKUPS = (
    "fc1 = com.microsoft.GatherBlockQuantized <bits = 4, block_size = 16> (l1, experts, s1)",
    "fc2 = com.microsoft.GatherBlockQuantized <bits = 8, block_size = 32> (l2, experts, s2)",
)
NUMBERS: dict[str, np.ndarray] = {
    "l1": np.zeros((4, 12, 8), np.uint8),
    "s1": np.zeros((4, 12, 1), np.float32),
    "l2": np.zeros((4, 16, 16), np.uint8),
    "s2": np.zeros((4, 16, 1), np.float32),
    "experts": np.arange(4),
    "others": np.array([0, 1, 3, 2]),
    "zeros": np.zeros((4, 12, 1), np.uint8),
    "plain": np.zeros((4, 12, 16), np.float32),
}


def test_weights_that_are_computed_from_integers() -> None:
    model = small_graph(PACKED.format(body="\n".join(LOOKUPS)), constants=NUMBERS)
    (node,) = moe.mixtures(model.graph)
    values = model.graph.initializers
    assert moe.packed_weights(node) == [
        ((4, 12, 16), values["l1"], values["s1"], 4, 16),
        ((4, 16, 16), values["l2"], values["s2"], 8, 32),
    ]
    assert moe.packed_weights(node)[1].block_size == 32


@pytest.mark.parametrize(
    ("first", "constants"),
    [
        ("fc1 = Identity (plain)", NUMBERS),
        (LOOKUPS[0].replace("experts", "others"), NUMBERS),  # in another order
        (LOOKUPS[0].replace("s1)", "s1, zeros)"), NUMBERS),
        (LOOKUPS[0], {name: array for name, array in NUMBERS.items() if name != "l1"}),
        (LOOKUPS[0].replace("experts", "given"), NUMBERS),
        (LOOKUPS[0].replace("com.microsoft", "some.domain"), NUMBERS),
    ],
)
def test_other_weights(first: str, constants: dict[str, np.ndarray]) -> None:
    text = PACKED.format(body="\n".join((first, LOOKUPS[1])))
    if "given" in first:
        text = text.replace("float[B,6] x,", "float[B,6] x, int64[4] given,")
    model = small_graph(text, constants=constants)
    (node,) = moe.mixtures(model.graph)
    assert moe.packed_matrices(node.inputs[2]) is None
    assert [one.bits for one in moe.packed_weights(node)] == [8], "those of fc2 alone"
    assert moe.packed_matrices(None) is None
    assert moe.packed_matrices(node.inputs[0]) is None, "an input of the graph"


def test_a_lookup_has_four_bits_unless_it_says_so() -> None:
    text = PACKED.format(body="\n".join(LOOKUPS).replace("bits = 4, ", ""))
    model = small_graph(text, constants=NUMBERS)
    first, _ = moe.packed_weights(moe.mixtures(model.graph)[0])
    assert (first.bits, first.shape) == (4, (4, 12, 16))


@pytest.mark.parametrize(
    ("dtype", "shape", "attributes", "has_matrices"),
    [
        (np.float32, (4, 6, 5), "", True),
        (np.float16, (4, 6, 5), "<axis = 0>", True),
        (ml_dtypes.bfloat16, (4, 6, 5), "", True),
        (np.float32, (4, 6, 5), "<axis = 1>", False),
        (np.float32, (4, 6), "", False),
        (np.float32, (4, 6, 5, 2), "", False),
        (np.int64, (4, 6, 5), "", False),
        (np.float64, (4, 6, 5), "", False),
    ],
)
def test_a_lookup_of_matrices(
    dtype: type, shape: tuple[int, ...], attributes: str, has_matrices: bool
) -> None:
    sizes = ",".join(map(str, shape))
    model = small_graph(
        f"g (int64[B] ids, float[{sizes}] w) => (float[B] y) {{ y = Gather {attributes} (w, ids) }}",
        constants={"w": np.zeros(shape, dtype)},
    )
    weights = model.graph.initializers["w"]
    assert moe.gather_of_weights(model.graph[0]) is (weights if has_matrices else None)


def test_weights_that_are_no_constant_are_not_looked_up() -> None:
    for operator in ("Gather", "GatherElements"):
        model = small_graph(
            f"g (int64[B] ids, float[4,6,5] w) => (float[B,6,5] y) {{ y = {operator} (w, ids) }}"
        )
        assert moe.gather_of_weights(model.graph[0]) is None
