"""The uniforms that decide a row's tokens, from its seed.

They are those of `initial_state.onnx`, which would also fill a cache with zeros each time that a row starts.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from qsample.contract import PHILOX_UNIFORM_SCALE
from qsample.tensors import Array

_MASK: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


def uniforms(seed: int, count: int, stream: int = 0) -> Array:
    """[count] float32 in [0, 1): number t is (word t mod 4 of counter (t div 4, stream, 0, 0) >> 8) * 2**-24.

    Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11); its key is the seed's lower and
    upper 32 bits.
    """
    keys = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    words = [blocks, *(np.full_like(blocks, word) for word in (stream, 0, 0))]
    for _ in range(_ROUNDS):
        products = [words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]]
        words = [
            (products[1] >> _HALF) ^ words[1] ^ np.uint64(keys[0]),
            products[1] & _MASK,
            (products[0] >> _HALF) ^ words[3] ^ np.uint64(keys[1]),
            products[0] & _MASK,
        ]
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, _WEYL, strict=True)]
    bits = np.stack(words, axis=1).ravel()[:count] >> np.uint64(8)
    result: Array = (bits * PHILOX_UNIFORM_SCALE).astype(np.float32)
    return result
