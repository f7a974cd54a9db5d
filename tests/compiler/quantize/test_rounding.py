"""Round to nearest: the levels of ONNX Runtime's quantizer, bit for bit, whatever parts a matrix is quantized in."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from onnxruntime.capi import _pybind_state as library

from qsample.compiler.quantize import blocks as blocks_module
from qsample.compiler.quantize.blocks import QuantizedWeight
from qsample.compiler.quantize.methods import WeightQuantization, quantize_matrix
from qsample.compiler.quantize.rounding import round_to_nearest
from qsample.contract.arrays import Array
from qsample.graph.edit import constant_value
from qsample.graph.save import save_graph
from qsample.graph.weights import JoinedTensor, StoredTensor


def by_onnxruntime(matrix: Array, bits: int, size: int) -> tuple[Array, Array]:
    """Levels [N, K / size, bytes] and scales [N, K / size] of a matrix [K, N]."""
    inputs, outputs = matrix.shape
    count = inputs // size
    levels = np.zeros((outputs, count, size * bits // 8), np.uint8)
    scales = np.zeros(outputs * count, matrix.dtype)
    unused = np.zeros(outputs * -(-count * bits // 8), np.uint8)
    quantize = library.quantize_matmul_4bits if bits == 4 else library.quantize_matmul_8bits
    quantize(levels, np.ascontiguousarray(matrix), scales, unused, size, outputs, inputs, True)
    return levels, scales.reshape(outputs, count)


def difficult(inputs: int, outputs: int, dtype: type) -> Array:
    """Weights with blocks of zeros of both signs, of a single number, of ties, of tiny numbers and with an outlier."""
    rng = np.random.default_rng(inputs + outputs)
    matrix = rng.normal(size=(inputs, outputs)).astype(dtype)
    columns = rng.permutation(outputs)
    for column, block in zip(
        columns,
        (
            np.zeros(16),
            [-0.0, *[0.0] * 15],
            [0.0, *[-0.0] * 15],
            np.full(16, -0.3),
            np.linspace(-8, 7.5, 16),
            [50] * 16,
        ),
        strict=False,
    ):
        matrix[:16, column] = block
    matrix[:, columns[-1]] *= dtype(1e-6)
    matrix[16:, columns[-1]] *= 0
    matrix[0, columns[0]] = 0
    return matrix


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("size", [16, 32, 256])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_bit_is_that_of_onnxruntime(bits: int, size: int, dtype: type) -> None:
    for inputs, outputs in ((size, 1), (3 * size, 7), (2 * size, 301)):
        matrix = difficult(inputs, outputs, dtype)
        levels, scales = round_to_nearest(matrix.T, bits, size)
        expected, steps = by_onnxruntime(matrix, bits, size)
        np.testing.assert_array_equal(levels.reshape(expected.shape), expected)
        assert scales.tobytes() == steps.tobytes()  # the sign of a zero, too


def written(weight: QuantizedWeight, folder: Path) -> dict[str, Array]:
    """The initializers of `weight` that a product and a lookup read, from a file."""
    rows, count = weight.rows * (weight.experts or 1), weight.row_blocks
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="g")
    weight.operands((rows, count, weight.block_bytes), (rows * count,))
    weight.operands((rows, count, weight.block_bytes), (rows, count, 1), "block_scales")
    weight.register(graph)
    save_graph(ir.Model(graph, ir_version=10), folder / "graph.onnx")
    values = ir.load(folder / "graph.onnx").graph.initializers.values()
    return {str(value.name): value.const_value.numpy() for value in values if value.const_value is not None}


def stored(matrix: Array, *, transposed: bool) -> StoredTensor:
    return StoredTensor(ir.Tensor(matrix), "w", transposed=transposed)


@pytest.mark.parametrize("at_once", [1, 5 * 64, 1 << 18])
@pytest.mark.parametrize("bits", [4, 8])
def test_parts_of_a_matrix_have_the_levels_of_the_whole(
    bits: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "PIECE", at_once)
    rng = np.random.default_rng(3)
    rows = [rng.normal(size=(outputs, 64)).astype(ml_dtypes.bfloat16) for outputs in (37, 12)]
    joined = JoinedTensor([stored(part, transposed=True) for part in rows], 1, (64, 49), "w")
    way = WeightQuantization(bits, 32)
    found = written(QuantizedWeight(constant_value("w", joined), way, outputs_first=False), tmp_path)
    levels, scales = by_onnxruntime(np.concatenate(rows).astype(np.float32).T, bits, 32)
    np.testing.assert_array_equal(found["w_blocks"], levels)
    np.testing.assert_array_equal(found["w_scales"], scales.reshape(-1))
    np.testing.assert_array_equal(found["w_block_scales"], scales[:, :, None])


def test_experts_and_padded_rows_and_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "PIECE", 500)
    way = WeightQuantization(4, 32)
    experts = np.random.default_rng(4).normal(size=(3, 21, 50)).astype(np.float32)
    value = constant_value("w", ir.Tensor(experts))
    found = written(QuantizedWeight(value, way, outputs_first=True, rows=40, columns=64), tmp_path)
    for expert, matrix in enumerate(np.pad(experts, ((0, 0), (0, 19), (0, 14)))):
        levels, scales = quantize_matrix(matrix.T, way)
        own = slice(40 * expert, 40 * expert + 40)
        np.testing.assert_array_equal(found["w_blocks"][own], levels.reshape(40, 2, 16))
        np.testing.assert_array_equal(found["w_block_scales"][own, :, 0], scales.reshape(40, 2))
