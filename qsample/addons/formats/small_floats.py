"""Weights that are stored as floats of 4 or 8 bits with scales enter; integers leave if they are exact, else floats.

OCP Microscaling Formats (MX) 1.0 defines e2m1, e4m3 and e8m0: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qsample.checkpoints.integers import IntegerWeight, StoredMatrix, unpack_bits

_TWICE_E2M1: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12])
# Twice each number of 4 bits, the sign highest, as a level of 8 bits.
_LEVELS: Final = (128 + np.concatenate([_TWICE_E2M1, -_TWICE_E2M1])).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class FloatMatrix:
    """The weight of a layer that no integers stand for: `read` computes its `shape` N, K numbers in float32."""

    layer: str
    shape: tuple[int, int]
    read: Callable[[], Tensor]

    def floats(self) -> npt.NDArray[np.float32]:
        """[N, K]."""
        result: npt.NDArray[np.float32] = self.read().numpy()
        return result


def e2m1_matrix(layer: str, packed: Tensor, scales: Callable[[slice], Tensor]) -> StoredMatrix:
    """packed: [N, words], the first number in the low bits. scales: gives [rows, G] float32 of some rows."""

    def read(rows: slice) -> IntegerWeight:
        return IntegerWeight(
            8, _LEVELS[unpack_bits(packed[rows].numpy(), 4)], scales(rows).div(2).numpy()
        )

    return StoredMatrix(layer, (len(packed), packed[0].nbytes * 2), read)


def scaled_matrix(
    layer: str, weight: Tensor, scales: Tensor, block: tuple[int, int]
) -> FloatMatrix:
    """weight: [N, K] of any dtype. scales: a number for each `block` of rows and columns."""

    def read() -> Tensor:
        rows, columns = weight.shape
        by_row = floats_of(scales).repeat_interleave(min(block[0], rows), 0)[:rows]
        return (
            weight.to(torch.float32)
            * by_row.repeat_interleave(min(block[1], columns), 1)[:, :columns]
        )

    return FloatMatrix(layer, (weight.shape[0], weight.shape[1]), read)


def floats_of(scales: Tensor) -> Tensor:
    """float32 scales; uint8 holds exponents (e8m0)."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).to(
        torch.float32
    )
