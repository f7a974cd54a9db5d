"""Sizes of the sampler that follow from its vocabulary. Without torch: graphs of any vocabulary are made with them."""

from __future__ import annotations

from typing import Final, NamedTuple

from qsample.contract import CANDIDATES


class Sizes(NamedTuple):
    """num_candidates: K. chunk_size: C."""

    num_candidates: int
    chunk_size: int


_BEST_SIZE: Final = 128
_SORT_SIZE: Final = 1024
# A sample of half the size leaves about three times as many tokens to sort. Counted in 96 rows of normal logits, of
# standard deviations 0.2 to 3 and top_p 0.35 to 0.95: after two interpolated pivots, 99 of 100 rows have at most 618 of
# 151,936 left, and 1,653 with a sample of 512.
_SAMPLE_SIZE: Final = 1024
# About here two interpolated pivots leave as many tokens as are sorted: of 160,000, at most 1,058 in 99 of 100 of those
# rows, and 209 after a third.
_LARGE_VOCAB: Final = 160_000


def choose_sizes(vocab: int) -> Sizes:
    """Sizes for a vocabulary: from the sweep in docs/benchmarks/sampler_sizes.md, on one x86-64 CPU only."""
    return Sizes(CANDIDATES, block_size(vocab))


def block_size(vocab: int) -> int:
    """The size near 128 that cuts the vocabulary without a remainder, if there is one from 64 to 256."""
    divisors = [size for size in range(_BEST_SIZE // 2, 2 * _BEST_SIZE + 1) if vocab % size == 0]
    return min(min(divisors, key=lambda size: abs(size - _BEST_SIZE), default=_BEST_SIZE), vocab)


def sort_size(vocab: int) -> int:
    """How many tokens of a nucleus' bracket are sorted, and likewise of those that top-k keeps."""
    return min(_SORT_SIZE, vocab)


def sample_stride(vocab: int) -> int:
    """Every so many-th token is in the sample that tells where a nucleus ends."""
    return max(1, vocab // _SAMPLE_SIZE)


def is_large(vocab: int) -> bool:
    """Whether the search for a nucleus takes one more pivot."""
    return vocab > _LARGE_VOCAB
