"""One matrix and its levels: in bfloat16 as close as with exact scales, and nothing lost where nothing has to be."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from qsample.compiler.quantize import methods
from qsample.compiler.quantize.methods import WeightQuantization, quantize_matrix
from qsample.compiler.quantize.rounding import choose_grid, round_to_grid
from tests.helpers.quantized_checkpoints import stored_levels

INPUTS, OUTPUTS = 256, 96


def meaning(
    weight: np.ndarray, way: WeightQuantization
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[K, N] float64: what the blocks stand for; the step and the level of each weight."""
    blocks, scales, zeros = quantize_matrix(weight, way)
    assert scales.dtype == weight.dtype
    assert (zeros is not None) == way.zero_points
    middles = (
        np.full(scales.size, 2 ** (way.bits - 1)) if zeros is None else zeros.astype(np.float64)
    )
    count = len(weight) // way.block_size
    levels = stored_levels(blocks.reshape(OUTPUTS * count, -1), way.bits).astype(np.float64)
    steps = scales.reshape(-1, 1).astype(np.float64)
    parts = ((levels - middles.reshape(-1, 1)) * steps, np.abs(steps) + 0 * levels, levels)
    floats, sizes, integers = (part.reshape(OUTPUTS, len(weight)).T for part in parts)
    return floats, sizes, integers


@pytest.mark.parametrize(("bits", "zero_points"), [(4, False), (4, True), (8, False)])
def test_levels_are_the_nearest_for_the_scales_as_stored(bits: int, zero_points: bool) -> None:
    way = WeightQuantization(bits, 32, zero_points=zero_points)
    weight = np.random.default_rng(0).normal(size=(INPUTS, OUTPUTS)).astype(ml_dtypes.bfloat16)
    exact = weight.astype(np.float64)
    floats, steps, levels = meaning(weight, way)
    inside = (levels > 0) & (levels < 2**bits - 1)
    assert (np.abs(floats - exact) <= 0.5001 * steps)[inside].all()
    assert (np.abs(floats - exact) <= 2.0 * steps).all()
    # Rounding the scales behind the levels would double the error of eight bits.
    error = np.square(floats - exact).mean()
    assert error < 1.1 * np.square(meaning(weight.astype(np.float32), way)[0] - exact).mean()
    assert np.sqrt(error) < 0.5 * np.abs(exact).max() / 2 ** (bits - 1)


def test_blocks_of_zeros_in_bfloat16() -> None:
    weight = np.zeros((INPUTS, OUTPUTS), ml_dtypes.bfloat16)
    weight[:, 3] = 2
    for zero_points in (False, True):
        floats, _, _ = meaning(weight, WeightQuantization(4, 32, zero_points=zero_points))
        np.testing.assert_allclose(floats, weight.astype(np.float64), atol=0.02)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_that_are_small_or_of_one_sign(bits: int, zero_points: bool) -> None:
    """A block's grid has its own range, however small that is, and reaches from 0 to the weights."""
    weight = np.random.default_rng(0).normal(size=(INPUTS, OUTPUTS)).astype(np.float32)
    weight[:, 1] *= 1e-4
    weight[:, 2] *= 1e-7
    weight[:, 3], weight[:, 4], weight[:32, 5] = 0.01, -0.3, 0
    weight[:, 6], weight[:, 7] = 0.5 + 0.01 * weight[:, 6], -2 + 0.1 * weight[:, 7]
    floats, _, _ = meaning(
        weight, WeightQuantization(bits, 32, zero_points=zero_points and bits == 4)
    )
    errors = np.abs(floats - weight).max(axis=0) / np.abs(weight).max(axis=0)
    assert (errors < (0.3 if zero_points else 2 / 2**bits)).all(), "30 % of a range may be left out"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("block_size", [16, 32])
def test_mxfp4_is_carried_in_eight_bits(block_size: int, dtype: type) -> None:
    """Nothing is rounded again: values of four bits, and a power of two for each 32 of them."""
    rng = np.random.default_rng(0)
    values = rng.choice([0, 0.5, 1, 1.5, 2, 3, 4, 6], (OUTPUTS, INPUTS // 32, 32)) * rng.choice(
        [-1, 1], (OUTPUTS, 1, 32)
    )
    values[3, 1] = 0
    values[4, 0] = [6, -6] * 16
    weight = (
        (values * 2.0 ** rng.integers(-9, 2, (OUTPUTS, INPUTS // 32, 1)))
        .reshape(OUTPUTS, INPUTS)
        .T.astype(dtype)
    )
    floats, _, _ = meaning(weight, WeightQuantization(8, block_size))
    np.testing.assert_array_equal(floats, weight.astype(np.float64))


@pytest.mark.parametrize("weights_per_part", [1, 3 * INPUTS])
def test_exact_blocks_are_found_in_parts_of_any_size(
    weights_per_part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "_WEIGHTS_PER_PART", weights_per_part)
    steps = np.random.default_rng(0).integers(-12, 13, (INPUTS, OUTPUTS)).astype(np.float32)
    floats, _, _ = meaning(steps / 4, WeightQuantization(8, 32))
    np.testing.assert_array_equal(floats, steps / 4)


def test_what_is_no_way_to_quantize() -> None:
    with pytest.raises(ValueError, match=r"block_size is 48; choose one of 16, 32, "):
        WeightQuantization(4, 48)
    with pytest.raises(ValueError, match=r"quantization method is 'best'; choose one of rtn, "):
        WeightQuantization(4, 32, "best")


def lopsided(seed: int = 0) -> np.ndarray:
    """[K, N]: most blocks reach further to one side of 0."""
    rng = np.random.default_rng(seed)
    return (rng.gamma(2, size=(INPUTS, OUTPUTS)) - 1).astype(np.float32)


def test_zero_points_are_closer_to_lopsided_weights() -> None:
    weight = lopsided()
    errors = [
        np.square(
            meaning(weight, WeightQuantization(4, 32, zero_points=zero_points))[0] - weight
        ).mean()
        for zero_points in (False, True)
    ]
    assert errors[1] < 0.6 * errors[0]


def test_a_grid_with_zero_points_is_no_worse_than_the_range_of_the_block() -> None:
    """The reference: scale and zero point of the smallest and the largest weight, in float64."""
    weight = lopsided(1)
    found = meaning(weight, WeightQuantization(4, 32, zero_points=True))[0]
    blocks = weight.T.astype(np.float64).reshape(-1, 32)
    low, high = blocks.min(1, keepdims=True).clip(max=0), blocks.max(1, keepdims=True).clip(min=0)
    step = (high - low) / 15
    zero = np.round(-low / step)
    plain = (np.clip(np.round(blocks / step) + zero, 0, 15) - zero) * step
    assert np.square(found - weight).sum() < 0.97 * np.square(plain - blocks).sum()


def test_weights_that_count_more_are_closer() -> None:
    weight = lopsided(2).T.copy()
    importance = np.ones_like(weight)
    importance[:, ::8] = 1000
    errors = []
    for given in (None, importance):
        grid = choose_grid(weight, 4, 32, given)
        levels = stored_levels(round_to_grid(weight, 4, 32, grid), 4).astype(np.float64)
        floats = (levels - grid.zeros[:, None]) * grid.scales[:, None]
        errors.append(np.square(floats.reshape(weight.shape) - weight)[:, ::8].mean())
    assert errors[1] < 0.8 * errors[0]


def test_weights_that_are_no_numbers_do_not_become_zeros() -> None:
    weight = lopsided(3)
    weight[5, 2], weight[40, 7] = np.nan, np.inf
    scales = quantize_matrix(weight, WeightQuantization(4, 32, zero_points=True)).scales.reshape(
        OUTPUTS, -1
    )
    wrong = ~np.isfinite(scales)
    assert wrong[2, 0]
    assert wrong[7, 1]
    assert wrong.sum() == 2
