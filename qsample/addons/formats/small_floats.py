"""Weights that are stored as floats of 4 or 8 bits with scales, for MLX and compressed-tensors.

OCP Microscaling Formats (MX) 1.0 defines e2m1, e4m3 and e8m0:
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from qsample.checkpoints.stored_matrices import (
    FloatMatrix,
    IntegerWeight,
    StoredMatrix,
    unpack_bits,
)

_TWICE_E2M1: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12])
# The levels of 8 bits that stand for twice each number of 4 bits, whose highest bit is the sign.
_E2M1_LEVELS: Final = (128 + np.concatenate([_TWICE_E2M1, -_TWICE_E2M1])).astype(np.uint8)


def e2m1_matrix(layer: str, packed: Tensor, scales: Callable[[slice], Tensor]) -> StoredMatrix:
    """A weight of e2m1 numbers, as integers of 8 bits: these hold twice each number exactly.

    Args:
        layer: the layer's name.
        packed: [N, words], the first number in the low bits.
        scales: a function that gives the scales of some rows, [rows, G] float32.
    """

    def read(rows: slice) -> IntegerWeight:
        levels = _E2M1_LEVELS[unpack_bits(packed[rows].numpy(), 4)]
        return IntegerWeight(8, levels, scales(rows).div(2).numpy())

    inputs = packed[0].nbytes * 2
    return StoredMatrix(layer, (len(packed), inputs), read)


def scaled_matrix(
    layer: str, weight: Tensor, scales: Tensor, block: tuple[int, int]
) -> FloatMatrix:
    """A weight of floats of 8 bits.

    Args:
        layer: the layer's name.
        weight: [N, K] of any dtype.
        scales: a number for each block of the weight.
        block: the rows and columns of a block.
    """

    def read() -> Tensor:
        rows, columns = weight.shape
        block_rows = min(block[0], rows)
        block_columns = min(block[1], columns)
        by_row = as_float32(scales).repeat_interleave(block_rows, 0)[:rows]
        by_number = by_row.repeat_interleave(block_columns, 1)[:, :columns]
        return weight.to(torch.float32) * by_number

    return FloatMatrix(layer, (weight.shape[0], weight.shape[1]), read)


def as_float32(scales: Tensor) -> Tensor:
    """The scales as float32; uint8 holds exponents (e8m0)."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.to(torch.float32)
