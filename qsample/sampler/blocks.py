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

from qsample.sampler.tensor import (
    DOUBLE,
    Tensor,
    axis_size,
    maximum,
    minimum,
    op,
    size,
    top,
)

# A masked token's logit; -inf would give NaN, and WebGPU's TopK pads with -3.4e38.
FLOOR: Final = -3e38
# In ONNX Runtime, the sum of a row does not depend on the row's place in memory if this divides the
# number of terms.
ALIGNMENT: Final = 16
_BEST_BLOCK_SIZE: Final = 128
# The most numbers that WebGPU's TopK sorts in one dispatch; it sorts 8,192 in 93
# (onnxruntime-ep-webgpu 0.4.0).
_SORTED_AT_ONCE: Final = 2048
# Up to this number, u * total < total holds in float32, too.
LARGEST_UNIFORM: Final = 1.0 - 2.0**-24
# Added to a number below 1 and subtracted again, it rounds the number to 8 bits.
_ROUNDS_TO_8_BITS: Final = 1.5 * 2.0**15


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


def joined(values: Tensor) -> Tensor:
    """The elements of all blocks in a row: [B, n, C] gives [B, n * C]."""
    # The size is not inferred: of no rows, it cannot be.
    return values.reshape(0, axis_size(values, 1) * axis_size(values, 2))


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


def argmax(blocks: Blocks) -> Tensor:
    """The likeliest token of each row, the lowest id of a tie: [B, 1] int64."""
    best = blocks.maxima.argmax()
    return best * blocks.size + take_block(blocks.values, best).argmax()


def top_candidates(blocks: Blocks, count: int) -> tuple[Tensor, Tensor]:
    """The K largest logits, largest first; of equal logits, the lowest ids.

    Args:
        blocks: the logits.
        count: K.

    Returns:
        The logits, [B, K] float32, and their ids, [B, K] int64.
    """
    block_count = min(count, axis_size(blocks.values, 1))
    _, chosen = top(blocks.maxima, block_count)
    chosen, _ = top(chosen, block_count, largest=False)
    values, places = top(take_blocks(blocks.values, chosen).reshape(0, -1), count)
    rank = places / blocks.size
    return values, (chosen.gather(rank) - rank) * blocks.size + places


def replayed_top_candidates(
    blocks: Blocks, count: int, *, for_webgpu: bool
) -> tuple[Tensor, Tensor]:
    """As `top_candidates`, without GatherND, which CUDA does not replay. for_webgpu: select from
    blocks, of logits of at least `FLOOR`, at most 1024 of them."""
    if not for_webgpu:
        # CUDA selects from a whole row as fast as from parts of it.
        return top(joined(blocks.values), count)
    block_count = min(count, axis_size(blocks.values, 1))
    _, chosen = _top_of_parts(blocks.maxima, block_count)
    chosen, _ = top(chosen, block_count, largest=False)
    values = blocks.values
    first_of_row = op("Range", 0, op("Squeeze", size(values, 0)), 1) * axis_size(values, 1)
    all_blocks = values.reshape(-1, blocks.size)
    pool = joined(op("Gather", all_blocks, chosen + first_of_row.unsqueeze(), axis=0))
    top_values, places = _top_of_parts(pool, count)
    rank = places / blocks.size
    return top_values, (chosen.gather(rank) - rank) * blocks.size + places


def _top_of_parts(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of values, [B, n] float32, as `replayed_top_candidates` selects them: in blocks
    again, if WebGPU would not sort n numbers in one dispatch."""
    number = axis_size(values, 1)
    if number <= _SORTED_AT_ONCE:
        return top(maximum(values, FLOOR), count)
    # So small that the chosen blocks are sorted at once.
    in_blocks = split(values, number, _SORTED_AT_ONCE // count)
    return replayed_top_candidates(in_blocks, count, for_webgpu=True)


def take_blocks(values: Tensor, chosen: Tensor) -> Tensor:
    """The blocks `chosen`, [B, k] int64, of `values`, [B, n, C]: [B, k, C]."""
    return op("GatherND", values, chosen.unsqueeze(), batch_dims=1)


def take_block(values: Tensor, chosen: Tensor) -> Tensor:
    """The block `chosen`, [B, 1] int64, of `values`, [B, n, C]: [B, C]."""
    return op("GatherND", values, chosen, batch_dims=1)


def block_sums(values: Tensor) -> Tensor:
    """The sum of each block: [B, n, C] gives [B, n]."""
    return values.sum(keep=False)


def total(values: Tensor) -> Tensor:
    """The sum along the last axis: […, n] gives […, 1]."""
    return aligned(values).sum()


def distances(sums: Tensor, share: Tensor) -> Tensor:
    """How far the start of each block lies before a share of the total: [B, n] float32.

    A product of the share and the total needs more than the 24 bits of a float32. So the sums are
    split into a high part, whose sums are exact in any order, and a low part, and the share is
    split into its first 8 bits and the other 16. A distance is then off by about 2e-10 of the
    total.

    Args:
        sums: [B, n] float32, the weight of each block, at least 0.
        share: [B, 1] float32, in [0, 1); more counts as the largest number below 1.

    Returns:
        The distances, negative for blocks that start behind the share. There may be further
        columns.
    """
    high, low = _split(aligned(sums))
    share = minimum(share, LARGEST_UNIFORM)
    share_high = (share + _ROUNDS_TO_8_BITS) - _ROUNDS_TO_8_BITS
    total_high = high.sum()
    target_low = (share - share_high) * total_high + share * low.sum()
    distance_high = share_high * total_high - high.cumsum(exclusive=True)
    distance_low = target_low - low.cumsum(exclusive=True)
    return distance_high + distance_low


def wide_distances(sums: Tensor, share: Tensor) -> Tensor:
    """As `distances`, in float64 and fewer nodes. WebGPU has no kernels of float64."""
    wide = sums.to(DOUBLE)
    target = minimum(share, LARGEST_UNIFORM).to(DOUBLE) * wide.sum()
    return target - wide.cumsum(exclusive=True)


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split values, [B, n], into multiples of about 2**-15 of their sum and exact remainders.

    Adding a number rounds to its last bit, and subtracting it again is exact: Rump, Ogita and
    Oishi, "Accurate floating-point summation", SIAM J. Sci. Comput. 31(1), 2008.
    """
    unit = values.sum() * 256.0
    high = (values + unit) - unit
    return high, values - high


def aligned(values: Tensor) -> Tensor:
    """The values, […, n], padded with zeros to a multiple of `ALIGNMENT`."""
    missing = -axis_size(values, -1) % ALIGNMENT
    if missing == 0:
        return values
    unpadded = [0] * (2 * len(values.shape) - 1)
    return op("Pad", values, [*unpadded, missing], 0.0)
