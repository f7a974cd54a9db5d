"""Rounds weights to symmetric levels: the method rtn. These are passes of NumPy over as many blocks as the processor's
cache holds (`graph.pieces`); other threads run meanwhile.

8 bits: the weight that is farthest from 0 becomes the lowest level, as in ONNX Runtime's `quantize_matmul_8bits`, bit
for bit. Fewer bits: of the scales that put it near the lowest level, the one whose levels are closest to the weights,
fitted to them by least squares, if it is closer than that of the lowest level.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from qsample.contract.arrays import Array

_LANES: Final = 4  # weights that are moved together
_MOVED: Final = np.complex128  # NumPy's only type of their size
# The places of the farthest weight, in levels, that are tried besides the lowest; below 0 at the other end. More of
# them take 1 or 2 % off the squared error (random and trained weights, blocks of 32 to 160).
_TRIED: Final[Mapping[int, tuple[float, ...]]] = {2: (2.6, 3, -2.4), 4: (7.25, 8.5, 9)}
_NOISE: Final = np.float32(1e-5)  # of the squared weights: what float32 may hide


def round_to_nearest(weights: Array, bits: int, block_size: int) -> tuple[Array, Array]:
    """Quantize blocks; 0 becomes the middle level.

    weights: float32, float16 or bfloat16, in any shape; `block_size` of them in a row are a block. bits: 2, 4 or 8.
    block_size: divides the last axis; a multiple of 4. Returns levels [blocks, block size * bits / 8], uint8, the first
    one of a byte in the low bits; scales [blocks], dtype of the weights. Levels are the nearest for the scales as
    stored.
    """
    moved = np.ascontiguousarray(weights, np.float32).reshape(-1).view(_MOVED).reshape(-1, block_size // _LANES)
    # [block size / 4, blocks, 4]: sums and products over many blocks are vector operations then.
    lanes = moved.T.copy().view(np.float32)
    steps = (-_farthest(lanes) / np.float32(2 ** (bits - 1))).astype(weights.dtype).astype(np.float32)
    with np.errstate(all="ignore"):  # weights that are no numbers, or hardly differ from 0
        lanes *= np.repeat(np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps != 0), _LANES)
        if bits in _TRIED:
            factors = _closest(lanes, steps, bits, weights.dtype)
            lanes *= np.repeat(1 / factors, _LANES)
            steps *= factors
        return _levels(lanes, bits), steps.astype(weights.dtype)


def _farthest(lanes: Array) -> Array:
    """The weight of each block that is farthest from 0, from its weights [block size / 4, 4 * blocks]."""
    high, low = _across(np.maximum, lanes), _across(np.minimum, lanes)
    farthest = np.where(np.abs(high) > np.abs(low), high, low)
    return np.where(farthest == 0, lanes[0, ::_LANES], farthest)  # of zeros, the first one's sign


def _closest(lanes: Array, steps: Array, bits: int, dtype: np.dtype) -> Array:
    """The scale of each block by its plain one, `steps`: 1, or another one that is closer as `dtype` stores it.

    With weights w in plain steps, levels q have the least squared error with a scale s of wq / qq. Less ww, the error
    is s² qq - 2 s wq, and -(wq)² / qq for that s.
    """
    end, rounded = 2 ** (bits - 1), np.empty_like(lanes)
    sums = []
    for place in (end, *_TRIED[bits]):
        np.rint(lanes if place == end else np.multiply(lanes, np.float32(place / end), out=rounded), out=rounded)
        if place > end - 0.5 or place < 0:
            np.clip(rounded, -end, end - 1, out=rounded)
        sums.append([_joined(np.add, np.einsum("ij,ij->j", by, rounded)) for by in (lanes, rounded)])
    wq, qq = sums[0]
    limit = qq - 2 * wq - _NOISE * wq
    for others in sums[1:]:
        better = others[0] ** 2 / others[1] > wq**2 / qq
        wq, qq = np.where(better, others, (wq, qq))
    factors = (wq / qq * steps).astype(dtype).astype(np.float32) / steps
    return np.where((factors * qq - 2 * wq) * factors < limit, factors, np.float32(1))


def _levels(lanes: Array, bits: int) -> Array:
    """The levels of weights in steps, [block size / 4, 4 * blocks], which are overwritten."""
    lanes += np.float32(2 ** (bits - 1))
    lanes += np.float32(0.5)  # separately, as the sum above is rounded, too; halves go up
    levels = np.clip(lanes, 0, 2**bits - 1, out=lanes).astype(np.uint8).view(np.uint32)
    if bits == 4:
        pairs = levels | (levels >> 4)  # in the first and the third byte of four
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
