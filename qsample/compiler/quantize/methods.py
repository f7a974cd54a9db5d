"""Turns a matrix into levels and scales, both symmetric around 0: the method rtn. `gptq` fits them to a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from qsample.compiler.quantize import METHODS
from qsample.compiler.quantize.rounding import round_to_nearest
from qsample.contract.arrays import Array
from qsample.contract.tensors import BLOCK_SIZES
from qsample.graph.operators import pack_bits

_AT_ONCE: Final = 2**22  # weights that are looked at together
_FIRST: Final = 4  # weights of a block that are looked at before all of it

Levels = tuple[Array, Array]
"""Blocks and scales of a matrix, or of the same matrix of several experts: blocks [N, K / block size, bytes], uint8,
of levels that stand for scale * (level - 2^(bits - 1)); scales, one a block, in the dtype of the weights."""


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """How weights are quantized. bits: 4 or 8. block_size: weights of a row that share a scale, one of BLOCK_SIZES.
    method: one of METHODS. mixed: whether the matrices that `weights.sensitive_products` names get 8 bits."""

    bits: int
    block_size: int = 32
    method: str = "rtn"
    mixed: bool = False

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size is {self.block_size}; choose one of {', '.join(map(str, BLOCK_SIZES))}")
        if self.method not in METHODS:
            raise ValueError(f"quantization method is {self.method!r}; choose one of {', '.join(METHODS)}")


def quantize_matrix(weight: Array, quantization: WeightQuantization) -> Levels:
    """Round a matrix [K, N] of float32, float16 or bfloat16 to the nearest levels, K a multiple of the block size."""
    if weight.dtype in (np.float32, np.float16):
        return _round_to_nearest(weight, quantization)
    blocks, scales = _round_to_nearest(weight.astype(np.float32), quantization)
    scales = scales.astype(weight.dtype)
    return _levels_of(scales, weight, quantization).reshape(blocks.shape), scales


def _levels_of(scales: Array, weight: Array, quantization: WeightQuantization) -> Array:
    """The blocks of the levels that are nearest with these very scales. bfloat16 has eight bits of precision: scales
    that are rounded to it after the levels were chosen move the largest 8-bit levels by up to half a step."""
    steps, bits = scales.astype(np.float32).reshape(-1, 1), quantization.bits
    blocks = np.array(weight.T, np.float32, order="C").reshape(-1, quantization.block_size)
    levels = np.round(blocks / np.where(steps == 0, 1, steps) + 2 ** (bits - 1))
    return pack_bits(np.clip(levels, 0, 2**bits - 1).astype(np.uint8), bits)


def _round_to_nearest(weight: Array, quantization: WeightQuantization) -> Levels:
    """The nearest symmetric levels."""
    inputs, outputs = weight.shape
    size, bits = quantization.block_size, quantization.bits
    levels, scales = round_to_nearest(weight.T, bits, size)
    blocks = levels.reshape(outputs, inputs // size, -1)
    if bits == 8:
        _keep_exact_blocks(weight, size, blocks, scales)
    return blocks, scales


def _keep_exact_blocks(weight: Array, block_size: int, blocks: Array, scales: Array) -> None:
    """Put levels and scales into `blocks` and `scales`, in place, for blocks that lose nothing: their weights are all
    less than 128 steps of a power of two. MXFP4's are (OCP Microscaling Formats 1.0): 12 halves of their scale at most.
    """
    inputs, outputs = weight.shape
    all_levels, all_scales = blocks.reshape(outputs, -1), scales.reshape(outputs, -1)
    rows = max(1, _AT_ONCE // inputs)
    for first in range(0, outputs, rows):
        part = slice(first, min(first + rows, outputs))
        weights = np.ascontiguousarray(weight[:, part].T).reshape(-1, block_size)
        _, exponents = np.frexp(np.abs(weights).max(axis=1, keepdims=True))
        steps = np.ldexp(np.ones_like(weights[:, :1]), exponents - 7)
        exact = np.flatnonzero(steps[:, 0] > 0)
        for count in (_FIRST, block_size):  # a few weights rule out nearly all blocks
            levels = weights[exact, :count] / steps[exact]
            whole = (levels == np.round(levels)).all(axis=1)
            exact, levels = exact[whole], levels[whole]
        all_levels[part].reshape(-1, block_size)[exact] = (levels + 128).astype(np.uint8)
        all_scales[part].reshape(-1)[exact] = steps[exact, 0]
