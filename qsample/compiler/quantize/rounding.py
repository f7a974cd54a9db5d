"""Rounds weights to the nearest symmetric levels: the method rtn.

The levels are those of ONNX Runtime's `quantize_matmul_4bits` and `quantize_matmul_8bits`, bit for bit. Those read a
matrix column by column and hold Python's lock, which makes them three times slower than a few passes of NumPy over as
many blocks as the processor's cache holds.
"""

from __future__ import annotations

import numpy as np

from qsample.tensors import Array


def round_to_nearest(weights: Array, bits: int, block_size: int) -> tuple[Array, Array]:
    """Quantize blocks of weights.

    The weight that is farthest from 0 becomes the lowest level, -8 or -128, and 0 the middle level.

    Args:
        weights: of float32 or float16, in any shape; `block_size` weights in a row are a block.
        bits: 4 or 8.
        block_size: divides the last axis.

    Returns:
        Levels [blocks, block size * bits / 8], uint8, of two in a byte the first one in the low bits; scales [blocks],
        dtype of the weights.
    """
    blocks = weights.reshape(-1, block_size)
    # One column a block: sums and products over many blocks are vector operations then.
    columns = np.empty((block_size, len(blocks)), np.float32)
    columns[...] = blocks.T
    scales = _scales(columns, bits, weights.dtype)
    steps = scales.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # weights that are no numbers, or hardly differ from 0
        columns *= np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps != 0)
        columns += np.float32(2 ** (bits - 1))
        columns += np.float32(0.5)  # on its own, as the sum above is rounded, too; halves go up
        levels: Array = np.clip(columns, 0, 2**bits - 1, out=columns).astype(np.uint8)
    if bits == 4:
        levels = levels[0::2] | (levels[1::2] << 4)
    return np.ascontiguousarray(levels.T), scales


def _scales(columns: Array, bits: int, dtype: np.dtype) -> Array:
    """The steps between the levels of each column."""
    high, low = columns.max(axis=0), columns.min(axis=0)
    farthest = np.where(np.abs(high) > np.abs(low), high, low)
    farthest = np.where(farthest == 0, columns[0], farthest)  # of zeros, the first one's sign
    scales: Array = (-farthest / np.float32(2 ** (bits - 1))).astype(dtype)
    return scales
