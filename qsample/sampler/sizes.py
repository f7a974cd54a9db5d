"""Sizes of the sampler that follow from its vocabulary."""

from __future__ import annotations

from typing import Final

# ONNX Runtime's sums of rows whose size 16 divides do not depend on where a row lies in memory; others do.
ALIGNMENT: Final = 16
_BEST_SIZE: Final = 128


def block_size(vocab: int) -> int:
    """C: the multiple of 16 near 128 that cuts the vocabulary without a remainder, if one from 64 to 256 does.

    From the sweep in docs/benchmarks/sampler_sizes.md, on one x86-64 CPU only.
    """
    sizes = range(_BEST_SIZE // 2, 2 * _BEST_SIZE + 1, ALIGNMENT)
    divisors = [size for size in sizes if vocab % size == 0]
    size = min(divisors, key=lambda size: abs(size - _BEST_SIZE), default=_BEST_SIZE)
    return min(size, -(-vocab // ALIGNMENT) * ALIGNMENT)
