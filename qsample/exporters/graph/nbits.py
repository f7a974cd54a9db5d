"""The layout in which ONNX Runtime's MatMulNBits reads weights of a few bits."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
BLOCK_SIZES: Final = (16, 32, 64, 128, 256)


def packed_rows(array: Bytes, bits: int) -> Bytes:
    """[N, n] uint8 with 8 / bits values a byte, the first in the low bits; a row starts with a byte of its own."""
    if bits == 8:
        return array
    array = np.pad(array, ((0, 0), (0, array.shape[1] % 2)))
    return np.bitwise_or(array[:, 0::2], np.left_shift(array[:, 1::2], 4, dtype=np.uint8))
