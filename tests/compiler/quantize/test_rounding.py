"""Round to nearest: ONNX Runtime's levels at 8 bits, closer ones below."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnxruntime.capi import _pybind_state as library

from qsample.compiler.quantize.rounding import round_to_nearest
from qsample.contract.arrays import Array


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
def test_every_bit_is_that_of_onnxruntime(size: int, dtype: type) -> None:
    """8 bits. 4 bits are searched, but rounded as there if that is as close: zeros, a single number."""
    for inputs, outputs in ((size, 1), (3 * size, 7), (2 * size, 301)):
        matrix = difficult(inputs, outputs, dtype)
        levels, scales = round_to_nearest(matrix.T, 8, size)
        expected, steps = by_onnxruntime(matrix, 8, size)
        np.testing.assert_array_equal(levels.reshape(expected.shape), expected)
        assert scales.tobytes() == steps.tobytes()  # the sign of a zero, too
        levels, scales = (
            part.reshape(outputs, inputs // size, -1)
            for part in round_to_nearest(matrix.T, 4, size)
        )
        expected, steps = by_onnxruntime(matrix, 4, size)
        same = scales[..., 0] == steps
        np.testing.assert_array_equal(levels[same], expected[same])


def meaning(levels: Array, scales: Array, bits: int) -> Array:
    """[blocks, block size] float64."""
    numbers = np.stack([levels >> at & 2**bits - 1 for at in range(0, 8, bits)], -1).reshape(
        len(levels), -1
    )
    return (numbers - 2.0 ** (bits - 1)) * scales.astype(np.float64)[:, None]


def plain(blocks: Array, bits: int) -> Array:
    """Scales [blocks], as stored, that put the farthest weight at the lowest level."""
    high, low = blocks.max(1), blocks.min(1)
    farthest = np.where(high > -low, high, low)
    return (-farthest.astype(np.float32) / np.float32(2 ** (bits - 1))).astype(blocks.dtype)


def error(blocks: Array, scales: Array, bits: int) -> Array:
    """The squared error of each block with the nearest levels for `scales`, float64."""
    weights, steps = blocks.astype(np.float64), scales.astype(np.float64)[:, None]
    end = 2 ** (bits - 1)
    levels = np.clip(np.round(weights / np.where(steps == 0, 1, steps)), -end, end - 1)
    return np.square(levels * steps - weights).sum(1)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("bits", "size"), [(2, 64)])
def test_no_block_is_farther_off_than_with_the_plain_scale(
    bits: int, size: int, dtype: type
) -> None:
    """And all of them hardly farther than the best of 400 scales, each of them refined."""
    rng = np.random.default_rng(bits + size)
    blocks = rng.normal(size=(300, size)) * 10.0 ** rng.integers(-2, 3, (300, 1))
    blocks[:40] = difficult(size, 40, np.float32).T
    blocks[40:60] = np.abs(blocks[40:60])
    blocks[60:80] *= -np.sign(blocks[60:80])
    blocks[80:100, 5] *= 30
    end = 2 ** (bits - 1)
    grid = rng.integers(-end, end, (20, size))
    grid[:, 0] = -end
    blocks[100:120] = grid * 2.0 ** rng.integers(-3, 3, (20, 1))  # levels already
    smallest = 2e-6 if dtype is np.float16 else 1e-36  # float16 stores such a scale in a few steps
    blocks[140:150], blocks[150:160] = rng.normal(size=(2, 10, size)) * np.reshape(
        [smallest, 1 / smallest], (2, 1, 1)
    )
    if dtype is np.float16:
        blocks[150:160] *= smallest**2
    blocks = blocks.astype(dtype)
    levels, scales = round_to_nearest(blocks, bits, size)
    assert scales.dtype == dtype
    found = np.square(meaning(levels, scales, bits) - blocks.astype(np.float64)).sum(1)
    before = error(blocks, plain(blocks, bits), bits)
    assert (found <= before * (1 + 1e-6) + 1e-7 * np.square(blocks.astype(np.float64)).sum(1)).all()
    assert (found[100:120] == 0).all()

    tried = np.concatenate([np.linspace(0.4, 1.7, 200), -np.linspace(0.4, 1.7, 200)])
    least, weights = before, blocks.astype(np.float64)
    for factor in tried:
        steps = plain(blocks, bits).astype(np.float64) * factor
        numbers = np.clip(
            np.round(weights / np.where(steps == 0, 1, steps)[:, None]), -end, end - 1
        )
        squares = np.square(numbers).sum(1)
        fitted = np.where(
            squares > 0, (weights * numbers).sum(1) / np.where(squares > 0, squares, 1), 0
        )
        least = np.minimum(least, error(blocks, fitted, bits))
    usual = slice(160, None)  # random ones
    scale = np.square(weights).sum(1)[usual]
    assert (found[usual] / scale).mean() < 1.03 * (least[usual] / scale).mean()
    assert (found[usual] / scale).mean() < 0.85 * (before[usual] / scale).mean()


def test_no_numbers_spoil_their_block_only() -> None:
    blocks = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    expected = round_to_nearest(blocks, 4, 32)
    blocks[3, 4], blocks[5, 6] = np.nan, np.inf
    for got, wanted in zip(round_to_nearest(blocks, 4, 32), expected, strict=True):
        np.testing.assert_array_equal(np.delete(got, [3, 5], 0), np.delete(wanted, [3, 5], 0))
