"""Logits in blocks: their maxima, the argmax, the K largest logits; and sums in a fixed order.

Selection by blocks is exact: if a block is not among the K blocks with the largest maxima, those K
maxima are at least as large as each of its elements. Selected blocks are put in ascending order, so
that ties go to the lowest id.

Sums are float32, in an order that depends only on the number of terms, so that a row rounds
identically in any batch: ONNX Runtime's CumSum adds from the first to the last term, and the order
of its ReduceSum over a multiple of 16 terms does not depend on the row's place in memory. Such a
sum never falls if a term grows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from qsample.sampler.tensor import Tensor, axis_size, maximum, op, size, top

# A masked token's logit; -inf would give NaN, and WebGPU's TopK pads with -3.4e38.
FLOOR: Final = -3e38
# In ONNX Runtime, the sum of a row does not depend on the row's place in memory if this divides the
# number of terms.
ALIGNMENT: Final = 16
_BEST_BLOCK_SIZE: Final = 128


class Blocks(NamedTuple):
    """Logits in n blocks of C elements.

    Attributes:
        values: [B, n, C] float32, -inf beyond the vocabulary.
        maxima: [B, n] float32, the largest value of each block.
    """

    values: Tensor
    maxima: Tensor

    @property
    def size(self) -> int:
        return axis_size(self.values, 2)


def block_size(vocab: int) -> int:
    """C, the size of a block: a multiple of 16 near 128.

    A size from 64 to 256 that divides the vocabulary is preferred. The sweep is in
    docs/benchmarks/sampler_sizes.md, on a single x86-64 CPU.
    """
    sizes = range(_BEST_BLOCK_SIZE // 2, 2 * _BEST_BLOCK_SIZE + 1, ALIGNMENT)
    divisors = [size for size in sizes if vocab % size == 0]
    size = min(divisors, key=lambda size: abs(size - _BEST_BLOCK_SIZE), default=_BEST_BLOCK_SIZE)
    aligned_vocab = -(-vocab // ALIGNMENT) * ALIGNMENT
    return min(size, aligned_vocab)


def split(logits: Tensor, vocab: int, block: int) -> Blocks:
    """Cut logits, [B, V] float32, into blocks of `block` elements."""
    count = -(-vocab // block)
    if vocab % block != 0:
        logits = op("Pad", logits, [0, 0, 0, count * block - vocab], -np.inf)
    values = logits.reshape(0, count, block)
    return Blocks(values, values.max(keep=False))


def is_valid(blocks: Blocks, largest: Tensor) -> Tensor:
    """Whether a row has neither NaN nor +inf, and a logit above `FLOOR`: [B] bool.

    A sum is NaN if any term is NaN, whereas ONNX Runtime's ReduceMax drops NaN. If the largest
    logit is infinite, the sum is infinite with the same sign, and their difference is NaN. A sum
    that overflows is infinite and not NaN, unless the row has logits beyond 2**110 of either sign.

    Args:
        blocks: the logits.
        largest: [B] float32, the largest logit of each row.
    """
    difference = block_sums(blocks.values).sum(keep=False) - largest
    return difference.equals(difference) & (largest > FLOOR)


def argmax(blocks: Blocks, *, replayed: bool) -> Tensor:
    """The likeliest token of each row, the lowest id of a tie: [B, 1] int64."""
    best = blocks.maxima.argmax()
    return best * blocks.size + take_block(blocks.values, best, replayed=replayed).argmax()


def top_candidates(blocks: Blocks, count: int, *, replayed: bool) -> tuple[Tensor, Tensor]:
    """The K largest logits, largest first; of equal logits, the lowest ids.

    Args:
        blocks: the logits.
        count: K.
        replayed: make logits at least `FLOOR`, for WebGPU, and use no GatherND, because CUDA does
            not replay it.

    Returns:
        The logits, [B, K] float32, and their ids, [B, K] int64.
    """

    def bounded(values: Tensor) -> Tensor:
        return maximum(values, FLOOR) if replayed else values

    block_count = min(count, axis_size(blocks.values, 1))
    _, chosen = top(bounded(blocks.maxima), block_count)
    chosen, _ = top(chosen, block_count, largest=False)
    pool = take_blocks(blocks.values, chosen, replayed=replayed).reshape(0, -1)
    values, places = top(bounded(pool), count)
    rank = places / blocks.size
    return values, (chosen.gather(rank) - rank) * blocks.size + places


def take_blocks(values: Tensor, chosen: Tensor, *, replayed: bool) -> Tensor:
    """The blocks `chosen`, [B, k] int64, of `values`, [B, n, C]: [B, k, C]."""
    if not replayed:
        return op("GatherND", values, chosen.unsqueeze(), batch_dims=1)
    first_of_row = op("Range", 0, op("Squeeze", size(values, 0)), 1) * axis_size(values, 1)
    all_blocks = values.reshape(-1, axis_size(values, 2))
    return op("Gather", all_blocks, chosen + first_of_row.unsqueeze(), axis=0)


def take_block(values: Tensor, chosen: Tensor, *, replayed: bool) -> Tensor:
    """The block `chosen`, [B, 1] int64, of `values`, [B, n, C]: [B, C]."""
    if not replayed:
        return op("GatherND", values, chosen, batch_dims=1)
    return values.gather(op("Expand", chosen.unsqueeze(), [1, 1, axis_size(values, 2)])).squeeze(1)


def block_sums(values: Tensor) -> Tensor:
    """The sum of each block: [B, n, C] gives [B, n]."""
    return values.sum(keep=False)


def total(values: Tensor) -> Tensor:
    """The sum along the last axis: […, n] gives […, 1]."""
    return aligned(values).sum()


def aligned(values: Tensor) -> Tensor:
    """The values, […, n], padded with zeros to a multiple of `ALIGNMENT`."""
    missing = -axis_size(values, -1) % ALIGNMENT
    if missing == 0:
        return values
    unpadded = [0] * (2 * len(values.shape) - 1)
    return op("Pad", values, [*unpadded, missing], 0.0)
