"""The noise buffers of the contract, by Philox4x32-10 in ONNX.

Number t of stream s is u = (x >> 8) * 2**-24, where x is word t mod 4 of the counter (t div 4, s,
0, 0) under the key (seed mod 2**32, seed div 2**32). Source: Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC'11, https://doi.org/10.1145/2063384.2063405.

The graph computes with int64 words and BitwiseXor, of which only the CPU has kernels.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np

from qsample.contract.tensors import PHILOX_UNIFORM_SCALE
from qsample.sampler.tensor import FLOAT, Tensor, constant, op, size

ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL_INCREMENTS: Final = (0x9E3779B9, 0xBB67AE85)
WORDS_PER_COUNTER: Final = 4

# Words are int64, in [0, 2**32).
_Counter: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
_Key: TypeAlias = tuple[Tensor, Tensor]


def noise_buffer(seed: Tensor, capacity: Tensor, stream: int) -> Tensor:
    """The first numbers of every row from a stream: [B, T] float32, in [0, 1). For the CPU.

    Args:
        seed: [B] int64, any value.
        capacity: T, a scalar int64, at least 1.
        stream: the stream, 0 to 2**32 - 1.
    """
    low = op("Mod", seed, 2**32)
    high = op("Mod", (seed - low) / 2**32, 2**32)
    blocks = (capacity + (WORDS_PER_COUNTER - 1)) / WORDS_PER_COUNTER
    counter = (op("Range", 0, blocks, 1), _word(stream), _word(0), _word(0))
    words = philox(counter, (low.unsqueeze(), high.unsqueeze()))
    stacked = op("Concat", *(word.unsqueeze() for word in words), axis=-1)
    flat = op("Reshape", stacked, op("Concat", size(seed, 0), [-1], axis=0))
    return (flat / 2**8).columns(0, capacity).to(FLOAT) * PHILOX_UNIFORM_SCALE


def philox(counter: _Counter, key: _Key) -> _Counter:
    """Philox4x32-10: the four random words of a counter of four words under a key of two; shapes
    broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_ in range(ROUNDS):
        if round_ > 0:
            k0 = op("Mod", k0 + WEYL_INCREMENTS[0], 2**32)
            k1 = op("Mod", k1 + WEYL_INCREMENTS[1], 2**32)
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0 = op("BitwiseXor", op("BitwiseXor", high1, c1), k0)
        c2 = op("BitwiseXor", op("BitwiseXor", high0, c3), k1)
        c1 = low1
        c3 = low0
    return c0, c1, c2, c3


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of the 64-bit product.

    The multiplier is split into halves, so that no number exceeds 2**49.
    """
    upper = word * (multiplier >> 16)
    lower = word * (multiplier & 0xFFFF)
    high = (upper + lower / 2**16) / 2**16
    low = op("Mod", op("Mod", upper, 2**16) * 2**16 + lower, 2**32)
    return high, low


def _word(number: int) -> Tensor:
    return constant(np.array([number], np.int64))
