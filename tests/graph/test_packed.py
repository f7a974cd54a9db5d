"""Products with packed weights in float32, against float64: 8-bit levels read as 4-bit ones, and offsets."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qsample.graph.packed import in_bytes, in_nibbles, offsets_of
from tests.helpers.small_graphs import operators, results, small_graph

ROWS, INPUTS, OUTPUTS = 5, 512, 24
PRODUCT = """
product (float[B,{inputs}] x, uint8[{outputs},{blocks},{size}] levels, float[{outputs},{blocks}] scales{more})
    => (float[B,{outputs}] y) {{
    y = com.microsoft.MatMulNBits <K={inputs}, N={outputs}, bits=8, block_size={size}{level}> (x, levels, scales{zeros})
}}
"""


def product(
    size: int, *, zero_points: bool, level: int | None = None
) -> tuple[ir.Model, np.ndarray]:
    """A product with 8-bit weights, and these in float64. The first block has a scale of 0."""
    rng, blocks = np.random.default_rng(0), INPUTS // size
    arrays = {
        "levels": rng.integers(0, 256, (OUTPUTS, blocks, size), dtype=np.uint8),
        "scales": rng.uniform(0.001, 0.002, (OUTPUTS, blocks)).astype(np.float32),
    }
    arrays["scales"][0, 0] = 0
    zeros = np.full((OUTPUTS, blocks), 128)
    if zero_points:
        zeros = rng.integers(0, 256, zeros.shape)
        zeros[0, 0] = 128
        arrays["zeros"] = zeros.astype(np.uint8).reshape(-1)
    text = PRODUCT.format(
        inputs=INPUTS,
        outputs=OUTPUTS,
        blocks=blocks,
        size=size,
        more=f", uint8[{OUTPUTS * blocks}] zeros" if zero_points else "",
        zeros=", zeros" if zero_points else "",
        level="" if level is None else f", accuracy_level={level}",
    )
    model = small_graph(text, {"y": ["B", OUTPUTS]}, constants=arrays)
    weight = (arrays["levels"] - zeros[..., None]) * arrays["scales"].astype(np.float64)[..., None]
    return model, weight.reshape(OUTPUTS, INPUTS)


def attributes(node: ir.Node) -> dict[str, int]:
    return {
        name: node.attributes.get_int(name, 0)
        for name in ("K", "N", "bits", "block_size", "accuracy_level")
    }


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_a_byte_is_two_levels(size: int, zero_points: bool) -> None:
    model, weight = product(size, zero_points=zero_points)
    (before,) = model.graph
    arrays = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    inputs, numbers = [value.name for value in before.inputs], attributes(before)

    assert in_nibbles(model)
    (packed,) = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert attributes(packed) == {**numbers, "K": 2 * INPUTS, "bits": 4, "block_size": 2 * size}
    # The same weights, once; factors only for zero points.
    floats = sum(
        value.const_value.dtype == ir.DataType.FLOAT for value in model.graph.initializers.values()
    )
    assert floats == 2 + zero_points  # scales, (1, 16), factors
    np.testing.assert_array_equal(packed.inputs[1].const_value.numpy(), arrays["levels"])
    assert not in_nibbles(model)
    for rows in (1, ROWS, 40):
        x = np.random.default_rng(rows).standard_normal((rows, INPUTS)).astype(np.float32)
        wanted = x.astype(np.float64) @ weight.T
        (got,) = results(model, {"x": x})
        assert np.linalg.norm(got - wanted) < 1e-6 * np.linalg.norm(wanted)

    assert in_bytes(model)
    (after,) = model.graph
    assert attributes(after) == numbers
    assert (after.name, after.outputs[0].name) == (before.name, "y")
    assert [value.name for value in after.inputs[:3]] == inputs[:3]
    assert len(after.inputs) == len(inputs)
    assert set(model.graph.initializers) == {value.name for value in after.inputs[1:]}
    if zero_points:
        np.testing.assert_array_equal(after.inputs[3].const_value.numpy(), arrays["zeros"])
    assert not in_bytes(model)


def test_products_that_round_activations_stay_and_those_without_a_name() -> None:
    model, _ = product(32, zero_points=False, level=4)
    assert not in_nibbles(model)
    model, _ = product(32, zero_points=False)
    model.graph.node(0).name = None
    assert not in_nibbles(model)
    assert operators(model) == ["MatMulNBits"]


SEVERAL = """
several (float[B,64] x, uint8[8,2,32] first, uint8[8,2,32] second, float[8,2] scales, float[2,8] offsets)
    => (float[B,8] total, float[B,8] plain) {
    blocks = Reshape (x, shape)
    sums = ReduceSum <keepdims=0> (blocks, last)
    added = MatMul (sums, offsets)
    product = com.microsoft.MatMulNBits <K=64, N=8, bits=8, block_size=32> (x, first, scales)
    total = Add (product, added)
    plain = com.microsoft.MatMulNBits <K=64, N=8, bits=8, block_size=32> (x, second, scales)
}
"""


def test_products_of_the_same_states_share_them() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "first": rng.integers(0, 256, (8, 2, 32), dtype=np.uint8),
        "second": rng.integers(0, 256, (8, 2, 32), dtype=np.uint8),
        "scales": rng.uniform(0.01, 0.02, (8, 2)).astype(np.float32),
        "offsets": rng.normal(size=(2, 8)).astype(np.float32),
        "shape": np.array([0, 2, 32]),
        "last": np.array([-1]),
    }
    text = SEVERAL.replace("offsets)\n", "offsets, int64[3] shape, int64[1] last)\n", 1)
    model = small_graph(
        text, dict.fromkeys(("product", "total", "plain"), ("B", 8)), constants=arrays
    )
    nodes = {node.outputs[0].name: node for node in model.graph}
    found = offsets_of(nodes["product"])
    assert found is not None
    assert (found.offsets.name, found.product, found.total) == (
        "offsets",
        nodes["added"],
        nodes["total"],
    )
    assert offsets_of(nodes["plain"]) is None
    assert in_nibbles(model)
    assert operators(model).count("Unsqueeze") == 1
    x = rng.standard_normal((3, 64)).astype(np.float32)
    scales = arrays["scales"].astype(np.float64)[..., None]
    first, second = (
        (scales * (arrays[name] - 128.0)).reshape(8, 64) for name in ("first", "second")
    )
    total, plain = results(model, {"x": x})
    sums = x.reshape(3, 2, 32).sum(-1, dtype=np.float64)
    np.testing.assert_allclose(total, x @ first.T + sums @ arrays["offsets"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(plain, x @ second.T, rtol=1e-5, atol=1e-5)
