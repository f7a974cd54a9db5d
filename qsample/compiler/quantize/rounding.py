"""Rounds weights to the nearest symmetric levels: the method rtn.

The levels equal the results of ONNX Runtime's `quantize_matmul_4bits` and `quantize_matmul_8bits`, bit for bit. Those
read a matrix against its order in memory; here, passes of NumPy over as many blocks as the processor's cache holds take
a quarter of the time, and other threads run meanwhile.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from qsample.contract.arrays import Array

_LANES: Final = 4  # weights that are moved together
_MOVED: Final = np.complex128  # NumPy's only type of their size


def round_to_nearest(weights: Array, bits: int, block_size: int) -> tuple[Array, Array]:
    """Quantize blocks: the weight that is farthest from 0 becomes the lowest level, -8 or -128, and 0 the middle level.

    weights: float32 or float16, in any shape; `block_size` of them in a row are a block. bits: 4 or 8. block_size:
    divides the last axis; a multiple of 4. Returns levels [blocks, block size * bits / 8], uint8, of two in a byte the
    first one in the low bits; scales [blocks], dtype of the weights.
    """
    numbers = np.ascontiguousarray(weights, np.float32).reshape(-1)
    # [block size / 4, blocks, 4]: sums and products over many blocks are vector operations then.
    moved = numbers.view(_MOVED).reshape(-1, block_size // _LANES).T.copy()
    lanes = moved.view(np.float32)
    scales = _scales(lanes, bits, weights.dtype)
    steps = scales.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # weights that are no numbers, or hardly differ from 0
        lanes *= np.repeat(np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps != 0), _LANES)
        lanes += np.float32(2 ** (bits - 1))
        lanes += np.float32(0.5)  # separately, as the sum above is rounded, too; halves go up
        levels = np.clip(lanes, 0, 2**bits - 1, out=lanes).astype(np.uint8).view(np.uint32)
    if bits == 4:
        pairs = levels | (levels >> 4)  # in the first and the third byte of four
        levels = ((pairs & 0xFF) | ((pairs >> 8) & 0xFF00)).astype(np.uint16)
    return np.ascontiguousarray(levels.T).view(np.uint8), scales


def _scales(lanes: Array, bits: int, dtype: np.dtype) -> Array:
    """The steps between the levels of each block, from its weights [block size / 4, 4 * blocks]."""
    high, low = _across(np.maximum, lanes), _across(np.minimum, lanes)
    farthest = np.where(np.abs(high) > np.abs(low), high, low)
    farthest = np.where(farthest == 0, lanes[0, ::_LANES], farthest)  # of zeros, the first one's sign
    scales: Array = (-farthest / np.float32(2 ** (bits - 1))).astype(dtype)
    return scales


def _across(function: np.ufunc, lanes: Array) -> Array:
    """`function` of all weights of a block, for each block."""
    four = function.reduce(lanes, axis=0)
    two = function(four[0::2], four[1::2])
    result: Array = function(two[0::2], two[1::2])
    return result
