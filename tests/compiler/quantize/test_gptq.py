"""GPTQ beside the paper's algorithm in plain NumPy, and what it is for: closer products on the inputs given."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.compiler.quantize.gptq import gptq
from qsample.compiler.quantize.rounding import Levels, WeightQuantization, quantize_matrix
from qsample.tensors import Array
from tests.compiler.quantize.test_weights import levels

INPUTS, OUTPUTS = 192, 40  # more columns than are corrected at once


def correlated_inputs(tokens: int = 600, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(INPUTS, INPUTS)) * np.exp(-np.arange(INPUTS) / 40)[:, None]
    return rng.normal(size=(tokens, INPUTS)) @ mixing


def dequantized(found: Levels, way: WeightQuantization) -> Array:
    """[K, N] float64."""
    packed, scales, zero_points = found
    count = INPUTS // way.block_size
    numbers = levels(packed.reshape(OUTPUTS, count, -1), way.bits)
    zeros = 2 ** (way.bits - 1) if way.method == "rtn" else zero_points.reshape(OUTPUTS, count, 1).astype(np.int64)
    return ((numbers - zeros) * scales.astype(np.float64).reshape(OUTPUTS, count, 1)).reshape(OUTPUTS, INPUTS).T


def reference(weight: Array, moments: Array, found: Levels, way: WeightQuantization) -> tuple[Array, Array]:
    """Levels [N, K] by the paper's equations (2) and (3), one weight after another and the inverse made anew for the
    columns that are left; with the grids of `found`. And how far each weight is from a rounding boundary, in steps."""
    scales = found[1].reshape(OUTPUTS, -1).astype(np.float64)
    zeros = found[2].reshape(OUTPUTS, -1).astype(np.float64)
    damped = moments + 0.01 * np.diag(moments).mean() * np.eye(INPUTS)
    rows = weight.T.astype(np.float64).copy()
    chosen, margins = np.zeros(rows.shape), np.zeros(rows.shape)
    for column in range(INPUTS):
        inverse = np.linalg.inv(damped[column:, column:])
        scale, zero = scales[:, column // way.block_size], zeros[:, column // way.block_size]
        exact = rows[:, column] / scale + zero
        level = np.clip(np.round(exact), 0, 2**way.bits - 1)
        chosen[:, column], margins[:, column] = level, np.abs(np.abs(exact - np.floor(exact)) - 0.5)
        error = (rows[:, column] - (level - zero) * scale) / inverse[0, 0]
        rows[:, column:] -= np.outer(error, inverse[0])
    return chosen, margins


@pytest.mark.parametrize("way", [WeightQuantization(4, 32, "gptq"), WeightQuantization(8, 64, "gptq")], ids=str)
def test_levels_are_those_of_the_paper(way: WeightQuantization) -> None:
    inputs = correlated_inputs()
    weight = np.random.default_rng(1).normal(size=(INPUTS, OUTPUTS)).astype(np.float32)
    moments = inputs.T @ inputs
    found = gptq(weight, moments, way)
    expected, margins = reference(weight, moments, found, way)
    got = levels(found[0].reshape(OUTPUTS, -1), way.bits)
    # Once float32 rounds a weight to the other side of a boundary, the rest of its row is another one.
    same_so_far = np.cumsum(got != expected, axis=1) == 0
    first = (~same_so_far).argmax(1)
    differs = ~same_so_far.all(1)
    assert (margins[np.arange(OUTPUTS), first][differs] < 2e-3 * 2 ** (way.bits - 4)).all()
    assert differs.mean() <= 0.3


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_products_are_closer_than_with_rounding(bits: int, dtype: type) -> None:
    """On the inputs given and on others like them."""
    weight = np.random.default_rng(2).normal(size=(INPUTS, OUTPUTS)).astype(dtype)
    inputs, others = correlated_inputs(), correlated_inputs()[::-1] + 0.01
    losses = {}
    for method in ("rtn", "hqq", "gptq"):
        way = WeightQuantization(bits, 32, method)
        found = gptq(weight, inputs.T @ inputs, way) if method == "gptq" else quantize_matrix(weight, way)
        error = dequantized(found, way) - weight.astype(np.float64)
        assert found[1].dtype == dtype
        losses[method] = [np.square(x @ error).mean() for x in (inputs, others)]
    assert (np.array(losses["gptq"]) < 0.5 * np.array(losses["hqq"])).all()
    assert (np.array(losses["gptq"]) < 0.5 * np.array(losses["rtn"])).all()


def test_inputs_that_are_never_there_and_none_at_all() -> None:
    weight = np.random.default_rng(3).normal(size=(INPUTS, OUTPUTS)).astype(np.float32)
    weight[:, 0] = 0
    weight[:, 1] = np.abs(weight[:, 1])  # of one sign
    way = WeightQuantization(4, 32, "gptq")
    inputs = correlated_inputs()
    inputs[:, 5:60] = 0
    for moments in (inputs.T @ inputs, np.zeros((INPUTS, INPUTS))):
        result = dequantized(gptq(weight, moments, way), way)
        assert np.isfinite(result).all()
        assert (result[:, 0] == 0).all()
        assert np.abs(result - weight)[5:60].max() < 0.5  # rounded all the same


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_blocks_of_zeros(dtype: type) -> None:
    """Their scale is too small for float16; the columns behind them are made up for as ever."""
    weight = np.random.default_rng(3).normal(size=(INPUTS, OUTPUTS)).astype(dtype)
    weight[:32] = 0
    inputs, way = correlated_inputs(), WeightQuantization(4, 32, "gptq")
    found = gptq(weight, inputs.T @ inputs, way)
    error = dequantized(found, way) - weight.astype(np.float64)
    assert np.array_equal(error[:32], np.zeros((32, OUTPUTS)))
    assert np.abs(error).max() < 1
