"""Rounds weights to levels: the method rtn. These are passes of NumPy over as many blocks as the processor's cache
holds (`graph.pieces`); other threads run meanwhile.

With zero points, the levels of a block reach from its smallest weight to its largest, or over a part of that range: of
several ranges, the one whose levels are closest to the weights. Without them, levels are symmetric around 0, and the
weight that is farthest from 0 becomes the lowest level, as in ONNX Runtime's `quantize_matmul_8bits`, bit for bit in 8
bits. With 2 bits, other scales are tried, too, each fitted to its levels by least squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from qsample.contract.arrays import Array

# Weights are moved in lanes of this many, as numbers of NumPy's only type of that size.
_LANES: Final = 4
_LANE_DTYPE: Final = np.complex128
# The levels that are tried for the farthest weight besides the lowest; below 0 at the other end. With 4
# bits, the scale of the least squared error moves away from the largest weights, and a real model diverges further.
_LEVELS_OF_FARTHEST_WEIGHT: Final[Mapping[int, tuple[float, ...]]] = {2: (2.6, 3, -2.4)}
# float32 may hide this share of the squared weights.
_NOISE_SHARE: Final = np.float32(1e-5)
# The parts of the range below and above 0 that the levels of a block with a zero point may reach over.
_RANGES: Final = ((1.0, 1.0), (0.9, 0.9), (0.8, 0.8), (1.0, 0.85), (0.85, 1.0))
# Blocks of zeros have this step, so that nothing is divided by 0.
_MIN_STEP: Final = np.float32(1e-12)


def round_to_nearest(weights: Array, bits: int, block_size: int) -> tuple[Array, Array]:
    """Quantize blocks; 0 becomes the middle level.

    Args:
        weights: float32, float16 or bfloat16 in any shape; `block_size` adjacent weights are a block.
        bits: the bits of a level: 2, 4 or 8.
        block_size: a multiple of 4 that divides the last axis.

    Returns:
        The levels, [blocks, block size * bits / 8] uint8, the first of a byte in the low bits; and the scales, [blocks]
        in the dtype of the weights. Levels are the nearest for the scales as stored.
    """
    lanes = _lanes(weights, block_size)
    steps = (
        (-_farthest(lanes) / np.float32(2 ** (bits - 1))).astype(weights.dtype).astype(np.float32)
    )
    with np.errstate(all="ignore"):  # weights that are no numbers, or hardly differ from 0
        lanes *= np.repeat(
            np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps != 0), _LANES
        )
        if bits in _LEVELS_OF_FARTHEST_WEIGHT:
            factors = _closest(lanes, steps, bits, weights.dtype)
            lanes *= np.repeat(1 / factors, _LANES)
            steps *= factors
        return _levels(lanes, bits), steps.astype(weights.dtype)


class Grid(NamedTuple):
    """The levels that blocks may have: scale * (level - zero point).

    Attributes:
        scales: [blocks], in the dtype of the weights.
        zeros: [blocks] uint8, the zero points, in [0, 2^bits).
    """

    scales: Array
    zeros: Array


def choose_grid(
    weights: Array, bits: int, block_size: int, importance: Array | None = None
) -> Grid:
    """The grid with zero points for each block of weights.

    Args:
        weights, bits, block_size: the arguments of `round_to_nearest`.
        importance: float32 in the shape of the weights, at least 0, the weight of each squared error; by default all
            errors count alike.
    """
    lanes = _lanes(weights, block_size)
    counts = None if importance is None else _lanes(importance, block_size)
    top = np.float32(2**bits - 1)
    high = np.maximum(_across(np.maximum, lanes), 0)
    low = np.minimum(_across(np.minimum, lanes), 0)
    gains = np.full_like(high, -1)
    scales = np.zeros_like(high)
    zeros = np.zeros_like(high)
    with np.errstate(all="ignore"):  # weights that are no numbers
        for below, above in _RANGES:
            steps = np.maximum(
                (high * np.float32(above) - low * np.float32(below)) / top, _MIN_STEP
            )
            middles = np.clip(np.rint(low * np.float32(-below) / steps), 0, top)
            levels = lanes * np.repeat(1 / steps, _LANES)
            np.rint(levels, out=levels)
            np.clip(
                levels, np.repeat(-middles, _LANES), np.repeat(top - middles, _LANES), out=levels
            )
            counted = levels if counts is None else levels * counts
            wq, qq = (_joined(np.add, np.einsum("ij,ij->j", by, counted)) for by in (lanes, levels))
            # The scale of the least squared error is wq / qq, and takes wq² / qq off the weights' own squares.
            useful = (qq > 0) & (wq > 0)
            gain = np.divide(wq**2, qq, out=np.zeros_like(wq), where=useful)
            fitted = np.divide(wq, qq, out=np.zeros_like(wq), where=useful)
            better = gain > gains
            gains, scales, zeros = (
                np.where(better, new, old)
                for new, old in ((gain, gains), (fitted, scales), (middles, zeros))
            )
        scales = np.where(
            np.isfinite(high - low), scales, np.float32(np.nan)
        )  # such weights may not become 0
        return Grid(scales.astype(weights.dtype), zeros.astype(np.uint8))


def round_to_grid(weights: Array, bits: int, block_size: int, grid: Grid) -> Array:
    """The nearest levels of `weights`, packed as `round_to_nearest` returns them."""
    lanes = _lanes(weights, block_size)
    steps = grid.scales.astype(np.float32)
    with np.errstate(all="ignore"):  # weights that are no numbers
        lanes *= np.repeat(
            np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps != 0), _LANES
        )
        np.rint(lanes, out=lanes)
        lanes += np.repeat(grid.zeros.astype(np.float32), _LANES)
        return _packed(lanes, bits)


def _lanes(weights: Array, block_size: int) -> Array:
    """A copy of `weights` as [block size / 4, 4 * blocks]: sums and products over many blocks are vector operations."""
    moved = (
        np.ascontiguousarray(weights, np.float32)
        .reshape(-1)
        .view(_LANE_DTYPE)
        .reshape(-1, block_size // _LANES)
    )
    return moved.T.copy().view(np.float32)


def _farthest(lanes: Array) -> Array:
    """The weight of each block that is farthest from 0, from its weights [block size / 4, 4 * blocks]."""
    high = _across(np.maximum, lanes)
    low = _across(np.minimum, lanes)
    farthest = np.where(np.abs(high) > np.abs(low), high, low)
    return np.where(farthest == 0, lanes[0, ::_LANES], farthest)  # of zeros, the first one's sign


def _closest(lanes: Array, steps: Array, bits: int, dtype: np.dtype) -> Array:
    """The scale of each block by its plain one, `steps`: 1, or another one that is closer as `dtype` stores it.

    With weights w in plain steps, levels q have the least squared error with a scale s of wq / qq. Less ww, the error
    is s² qq - 2 s wq, and -(wq)² / qq for that s.
    """
    end = 2 ** (bits - 1)
    rounded = np.empty_like(lanes)
    sums = []
    for place in (end, *_LEVELS_OF_FARTHEST_WEIGHT[bits]):
        np.rint(
            lanes if place == end else np.multiply(lanes, np.float32(place / end), out=rounded),
            out=rounded,
        )
        if place > end - 0.5 or place < 0:
            np.clip(rounded, -end, end - 1, out=rounded)
        sums.append(
            [_joined(np.add, np.einsum("ij,ij->j", by, rounded)) for by in (lanes, rounded)]
        )
    wq, qq = sums[0]
    limit = qq - 2 * wq - _NOISE_SHARE * wq
    for others in sums[1:]:
        better = others[0] ** 2 / others[1] > wq**2 / qq
        wq, qq = np.where(better, others, (wq, qq))
    factors = (wq / qq * steps).astype(dtype).astype(np.float32) / steps
    return np.where((factors * qq - 2 * wq) * factors < limit, factors, np.float32(1))


def _levels(lanes: Array, bits: int) -> Array:
    """The levels of weights in steps, [block size / 4, 4 * blocks], which are overwritten."""
    lanes += np.float32(2 ** (bits - 1))
    lanes += np.float32(0.5)  # separately, as the sum above is rounded, too; halves go up
    return _packed(lanes, bits)


def _packed(lanes: Array, bits: int) -> Array:
    """The bytes of levels [block size / 4, 4 * blocks], which are clipped, and cut to whole numbers."""
    levels = np.clip(lanes, 0, 2**bits - 1, out=lanes).astype(np.uint8).view(np.uint32)
    if bits == 4:
        # The pairs are in the first and the third byte of four.
        pairs = levels | (levels >> 4)
        levels = ((pairs & 0xFF) | ((pairs >> 8) & 0xFF00)).astype(np.uint16)
    elif bits == 2:
        levels = (levels | (levels >> 6) | (levels >> 12) | (levels >> 18)).astype(np.uint8)
    return np.ascontiguousarray(levels.T).view(np.uint8)


def _across(function: np.ufunc, lanes: Array) -> Array:
    """`function` of all weights of a block, for each block."""
    return _joined(function, function.reduce(lanes, axis=0))


def _joined(function: np.ufunc, four: Array) -> Array:
    two = function(four[0::2], four[1::2])
    result: Array = function(two[0::2], two[1::2])
    return result
