"""GPTQ (Frantar et al., 2022, https://arxiv.org/abs/2210.17323): a matrix and the second moments of its inputs enter;
levels whose product is close to the matrix's on such inputs leave.

The inputs' columns are rounded one after another. What one loses is made up for, as far as the inputs are correlated,
by those that come after it. A block's scale and zero point are chosen when its first column is reached, from what its
weights are by then. Columns stay in their order: the layout of MatMulNBits has none of its own (act-order).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qsample.compiler.quantize.rounding import Levels, WeightQuantization
from qsample.graph.operators import pack_bits
from qsample.tensors import Array

if TYPE_CHECKING:
    from torch import Tensor

_DAMPING: Final = 0.01  # of the mean of the diagonal, as in the paper
_LAZY: Final = 128  # columns whose corrections of the later ones are put off, and made together
_SHRINKS: Final = tuple(1 - 0.05 * step for step in range(5))  # of a block's range


def gptq(weight: Array, moments: Array, quantization: WeightQuantization) -> Levels:
    """weight: [K, N] of float32 or float16, K a multiple of the block size. moments: [K, K] float64, the sum of x xᵀ
    over inputs x. Returns what `rounding.quantize_matrix` returns; scales have the weight's dtype."""
    import torch

    size, bits = quantization.block_size, quantization.bits
    inputs, outputs = weight.shape
    smallest = np.finfo(weight.dtype).smallest_subnormal
    rows = torch.from_numpy(np.array(weight.T, np.float32, order="C"))
    upper = _inverse_root(moments)
    levels = torch.empty((outputs, inputs), dtype=torch.uint8)
    scales = torch.empty((outputs, inputs // size))
    zeros = torch.empty((outputs, inputs // size))
    for start in range(0, inputs, max(_LAZY, size)):
        stop = min(start + max(_LAZY, size), inputs)
        errors = torch.empty((outputs, stop - start))
        for column in range(start, stop):
            block = column // size
            if column % size == 0:
                scale, zero = _grid(rows[:, column : column + size], bits)
                # A scale too small for float16 would be 0, and its levels 0 / 0.
                stored = np.maximum(scale.numpy().astype(weight.dtype), smallest)
                scales[:, block] = torch.from_numpy(stored.astype(np.float32))
                zeros[:, block] = zero
            scale, zero, values = scales[:, block], zeros[:, block], rows[:, column]
            level = torch.clamp(torch.round(values / scale) + zero, 0, 2**bits - 1)
            levels[:, column] = level.to(torch.uint8)
            error = (values - scale * (level - zero)) / upper[column, column]
            errors[:, column - start] = error
            rows[:, column + 1 : stop].addr_(error, upper[column, column + 1 : stop], alpha=-1)
        rows[:, stop:].addmm_(errors, upper[start:stop, stop:], alpha=-1)
    packed = pack_bits(levels.numpy().reshape(-1, size), bits)
    return packed, scales.numpy().reshape(-1).astype(weight.dtype), zeros.numpy().astype(np.uint8)


def _inverse_root(moments: Array) -> Tensor:
    """The upper triangular U, float32, with UᵀU the inverse of the damped `moments`. An input that was always 0 is
    correlated with none."""
    import torch

    matrix = torch.from_numpy(np.array(moments, np.float64))
    diagonal = matrix.diagonal()
    damping = _DAMPING * float(diagonal.mean()) or 1.0
    diagonal[diagonal == 0] = damping
    diagonal += damping
    lower = torch.linalg.cholesky(matrix)
    del matrix, diagonal
    inverse = torch.cholesky_inverse(lower)
    del lower
    root: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return root.to(torch.float32)


def _grid(blocks: Tensor, bits: int) -> tuple[Any, Any]:
    """Scale and zero point, [N] each, for `blocks` [N, size]: of the ranges tried, that with the least squared error.

    A zero point is a level itself, so a range reaches to 0 where all weights have one sign.
    """
    import torch

    largest = 2**bits - 1
    low, high = blocks.amin(1).clamp(max=0), blocks.amax(1).clamp(min=0)
    best = scale = zero = None
    for shrink in _SHRINKS:
        step = (shrink * (high - low) / largest).clamp(min=torch.finfo(torch.float32).tiny)
        middle = torch.clamp(torch.round(-shrink * low / step), 0, largest)
        rounded = torch.clamp(torch.round(blocks / step[:, None]) + middle[:, None], 0, largest)
        error = ((rounded - middle[:, None]) * step[:, None] - blocks).square().sum(1)
        if best is None or scale is None or zero is None:
            best, scale, zero = error, step, middle
        else:
            better = error < best
            best = torch.where(better, error, best)
            scale, zero = torch.where(better, step, scale), torch.where(better, middle, zero)
    return scale, zero
