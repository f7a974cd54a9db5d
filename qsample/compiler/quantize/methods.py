"""Turns a matrix into levels and scales: the method rtn. `gptq` fits them to a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from qsample.compiler.quantize import METHODS
from qsample.compiler.quantize.rounding import choose_grid, round_to_grid, round_to_nearest
from qsample.contract.arrays import Array
from qsample.contract.tensors import BLOCK_SIZES

_WEIGHTS_PER_PART: Final = 2**22
# A block whose first weights settle the question is not read to its end.
_FIRST_WEIGHTS: Final = 4


class Levels(NamedTuple):
    """A matrix, or the same matrix of several experts, in levels that stand for scale * (level - zero point).

    blocks: [N, K / block size, bytes], uint8, packed. scales: one a block, in the dtype of the weights. zeros: one a
    block, uint8 and not packed; None if all are in the middle, 2^(bits - 1).
    """

    blocks: Array
    scales: Array
    zeros: Array | None = None


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """How weights are quantized. bits: 2, 4 or 8. block_size: weights of a row that share a scale, one of
    BLOCK_SIZES. method: one of METHODS. zero_points: whether each block has one; for 4 bits."""

    bits: int
    block_size: int = 32
    method: str = "rtn"
    zero_points: bool = False

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"block_size is {self.block_size}; choose one of {', '.join(map(str, BLOCK_SIZES))}"
            )
        if self.method not in METHODS:
            raise ValueError(
                f"quantization method is {self.method!r}; choose one of {', '.join(METHODS)}"
            )


def quantize_matrix(weight: Array, quantization: WeightQuantization) -> Levels:
    """Round a matrix [K, N] of float32, float16 or bfloat16 to the nearest levels, K a multiple of the block size."""
    inputs, outputs = weight.shape
    size = quantization.block_size
    bits = quantization.bits
    if quantization.zero_points:
        grid = choose_grid(weight.T, bits, size)
        levels = round_to_grid(weight.T, bits, size, grid)
        return Levels(levels.reshape(outputs, inputs // size, -1), grid.scales, grid.zeros)
    levels, scales = round_to_nearest(weight.T, bits, size)
    blocks = levels.reshape(outputs, inputs // size, -1)
    if bits == 8:
        _keep_exact_blocks(weight, size, blocks, scales)
    return Levels(blocks, scales)


def _keep_exact_blocks(weight: Array, block_size: int, blocks: Array, scales: Array) -> None:
    """Put levels and scales into `blocks` and `scales`, in place, for blocks that lose nothing: their weights are all
    less than 128 steps of a power of two. MXFP4's are (OCP Microscaling Formats 1.0): 12 halves of their scale at most.
    """
    inputs, outputs = weight.shape
    all_levels = blocks.reshape(outputs, -1)
    all_scales = scales.reshape(outputs, -1)
    rows = max(1, _WEIGHTS_PER_PART // inputs)
    for first in range(0, outputs, rows):
        part = slice(first, min(first + rows, outputs))
        weights = np.ascontiguousarray(weight[:, part].T, np.float32).reshape(-1, block_size)
        _, exponents = np.frexp(np.abs(weights).max(axis=1, keepdims=True))
        steps = (
            np.ldexp(np.float32(1), exponents - 7).astype(scales.dtype).astype(np.float32)
        )  # 0 if it has none
        exact = np.flatnonzero(steps[:, 0] > 0)
        for count in (_FIRST_WEIGHTS, block_size):  # a few weights rule out nearly all blocks
            levels = weights[exact, :count] / steps[exact]
            whole = (levels == np.round(levels)).all(axis=1)
            exact = exact[whole]
            levels = levels[whole]
        all_levels[part].reshape(-1, block_size)[exact] = (levels + 128).astype(np.uint8)
        all_scales[part].reshape(-1)[exact] = steps[exact, 0]
