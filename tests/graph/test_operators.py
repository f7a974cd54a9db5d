"""MatMulNBits: the bits of its weights, and the zero points that it takes where it is given none."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qsample.graph import operators
from qsample.graph.edit import initializer
from qsample.graph.operators import is_matmul_nbits, middle_zero_points, pack_bits
from tests.helpers.small_graphs import normal, results, small_graph


def test_levels_share_a_byte_and_a_row_starts_with_its_own() -> None:
    levels = np.array([[1, 2, 3], [15, 0, 9]], np.uint8)
    assert pack_bits(levels, 4).tolist() == [[0x21, 0x03], [0x0F, 0x09]]
    assert pack_bits(levels, 8) is levels
    assert pack_bits(levels % 4, 2).tolist() == [[0b111001], [0b010011]]


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_that_are_left_out_are_in_the_middle(bits: int) -> None:
    rows, size, blocks = 6, 16, 3
    rng = np.random.default_rng(0)
    levels = rng.integers(0, 2**bits, (rows * blocks, size), np.uint8)
    scales = rng.uniform(0.1, 1, rows * blocks).astype(np.float32)
    model = small_graph(
        "multiply (float[B,48] x) => (float[B,6] result, float[B,6] same) { "
        f"result = com.microsoft.MatMulNBits <K = 48, N = 6, bits = {bits}, block_size = {size}> (x) "
        f"same = com.microsoft.MatMulNBits <K = 48, N = 6, bits = {bits}, block_size = {size}> (x) }}"
    )
    operands = [
        initializer(model.graph, "blocks", pack_bits(levels, bits).reshape(rows, blocks, -1)),
        initializer(model.graph, "scales", scales),
        initializer(model.graph, "zero_points", middle_zero_points(rows, blocks, bits)),
    ]
    for count, node in zip((2, 3), model.graph, strict=True):
        assert is_matmul_nbits(node)
        node.resize_inputs(1 + count)
        for index, value in enumerate(operands[:count], start=1):
            node.replace_input_with(index, value)
    x = normal(2, 48)
    without, given = results(model, {"x": x})
    np.testing.assert_allclose(without, given, rtol=1e-5, atol=1e-5)
    weight = ((levels.astype(np.float32) - 2 ** (bits - 1)) * scales[:, None]).reshape(rows, -1)
    np.testing.assert_allclose(given, x @ weight.T, rtol=1e-4, atol=1e-3)


def test_other_products() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [2, 2])
    assert not is_matmul_nbits(ir.node("MatMul", [x, x]))
    assert not is_matmul_nbits(ir.node("MatMulNBits", [x]))


def test_numbers_that_onnx_runtime_documents() -> None:
    """accuracy_level is 1 for activations in float32, and 4 for int8; CUDA's kernels have no newer opset."""
    assert (operators.FLOAT32_ACTIVATIONS, operators.INT8_ACTIVATIONS) == (1, 4)
    assert operators.OPSET == 20
