"""Logits in blocks: their maxima, the argmax, the K largest; and sums in one order.

Selection by blocks is exact: an element of a block that is not among the K with the largest maxima has K elements that
are at least as large, namely those maxima. Chosen blocks are put in ascending order so that ties go to the lowest id.

Sums are float32, in an order that depends on the number of terms alone, so that a row rounds identically in any batch:
ONNX Runtime's CumSum adds from the first to the last, and the order of its ReduceSum over a multiple of 16 does not
depend on the row's place in memory. No such sum falls if a term grows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from qsample.sampler.tensor import Tensor, axis_size, maximum, op, size, top

FLOOR: Final = (
    -3e38
)  # stands for a masked token's logit; -inf would give NaN, and WebGPU's TopK pads with -3.4e38
# ONNX Runtime's sums of rows whose size 16 divides do not depend on a row's place in memory; other shapes do.
ALIGNMENT: Final = 16
_BEST_SIZE: Final = 128


class Blocks(NamedTuple):
    """Logits in n blocks of C: `values` [B, n, C] float32, -inf beyond the vocabulary, and `maxima` [B, n] float32."""

    values: Tensor
    maxima: Tensor

    @property
    def size(self) -> int:
        return axis_size(self.values, 2)


def block_size(vocab: int) -> int:
    """C: the multiple of 16 near 128 that cuts the vocabulary without a remainder, if a number from 64 to 256 does;
    from the sweep in docs/benchmarks/sampler_sizes.md, on a single x86-64 CPU."""
    sizes = range(_BEST_SIZE // 2, 2 * _BEST_SIZE + 1, ALIGNMENT)
    divisors = [size for size in sizes if vocab % size == 0]
    size = min(divisors, key=lambda size: abs(size - _BEST_SIZE), default=_BEST_SIZE)
    return min(size, -(-vocab // ALIGNMENT) * ALIGNMENT)


def split(logits: Tensor, vocab: int, block: int) -> Blocks:
    """Cut logits [B, V] float32 into blocks."""
    count = -(-vocab // block)
    if vocab % block:
        logits = op("Pad", logits, [0, 0, 0, count * block - vocab], -np.inf)
    values = logits.reshape(0, count, block)
    return Blocks(values, values.max(keep=False))


def is_valid(blocks: Blocks, largest: Tensor) -> Tensor:
    """Whether a row holds neither NaN nor +inf, and a logit above `FLOOR`: [B] bool. A sum is NaN if any term is; ONNX
    Runtime's ReduceMax drops NaN. If the largest is infinite, so is the sum, with the same sign, and their difference
    is NaN. A sum that overflows is infinite and not NaN, unless logits beyond 2**110 of either sign are in the row."""
    difference = block_sums(blocks.values).sum(keep=False) - largest
    return difference.equals(difference) & (largest > FLOOR)


def argmax(blocks: Blocks, *, replayed: bool) -> Tensor:
    """The most likely token of each row, the lowest id of a tie: [B, 1] int64."""
    best = blocks.maxima.argmax()
    return best * blocks.size + take_block(blocks.values, best, replayed=replayed).argmax()


def top_candidates(blocks: Blocks, count: int, *, replayed: bool) -> tuple[Tensor, Tensor]:
    """The `count` largest logits [B, K] float32, largest first, and their ids [B, K] int64; at equal values the lowest
    ids. replayed: at least `FLOOR`, for WebGPU, and without GatherND, because CUDA does not replay it."""

    def bounded(values: Tensor) -> Tensor:
        return maximum(values, FLOOR) if replayed else values

    most = min(count, axis_size(blocks.values, 1))
    _, chosen = top(bounded(blocks.maxima), most)
    chosen, _ = top(chosen, most, largest=False)
    pool = take_blocks(blocks.values, chosen, replayed=replayed).reshape(0, -1)
    values, places = top(bounded(pool), count)
    rank = places / blocks.size
    return values, (chosen.gather(rank) - rank) * blocks.size + places


def take_blocks(values: Tensor, chosen: Tensor, *, replayed: bool) -> Tensor:
    """Blocks `chosen` ([B, k] int64) of `values` [B, n, C]: [B, k, C]."""
    if not replayed:
        return op("GatherND", values, chosen.unsqueeze(), batch_dims=1)
    first = op("Range", 0, op("Squeeze", size(values, 0)), 1) * axis_size(values, 1)
    return op(
        "Gather", values.reshape(-1, axis_size(values, 2)), chosen + first.unsqueeze(), axis=0
    )


def take_block(values: Tensor, chosen: Tensor, *, replayed: bool) -> Tensor:
    """Block `chosen` ([B, 1] int64) of `values` [B, n, C]: [B, C]."""
    if not replayed:
        return op("GatherND", values, chosen, batch_dims=1)
    return values.gather(op("Expand", chosen.unsqueeze(), [1, 1, axis_size(values, 2)])).squeeze(1)


def block_sums(values: Tensor) -> Tensor:
    """[B, n, C] gives [B, n]."""
    return values.sum(keep=False)


def total(values: Tensor) -> Tensor:
    """[…, n] gives […, 1]."""
    return aligned(values).sum()


def aligned(values: Tensor) -> Tensor:
    """[…, n], padded with zeros to a multiple of `ALIGNMENT`."""
    rest = -axis_size(values, -1) % ALIGNMENT
    return op("Pad", values, [0] * (2 * len(values.shape) - 1) + [rest], 0.0) if rest else values
