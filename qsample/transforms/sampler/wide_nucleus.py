"""The top-p threshold of a nucleus too wide for the candidates: weighted selection by sampled pivots, without a sort.

The threshold is a weighted quantile of the logits. Floyd and Rivest ("Expected time bounds for selection", CACM 18(3),
1975) select a quantile with two pivots from a sorted sample, one on either side, so that few values are left between
them. Here a pivot costs one pass that weighs the vocabulary, and no data is moved:

1. A bracket (lo, hi] around the threshold is narrowed at four pivots from a sample, then at interpolated ones.
2. The largest tokens of the bracket are sorted. Their weight tells whether the threshold is among them.
3. Where it is not, because the weight lies on few tokens and the sample missed them, more pivots follow.
4. Where these fail too (thousands of tokens with one value), the caller sorts the vocabulary.

flashinfer (https://flashinfer.ai/2025/03/10/sampling.html) also narrows a bracket by passes over the vocabulary. There
the pivots are a token drawn at random and the midpoint above it, and a token that passes is taken before the threshold
is known. Here the pivots are deterministic and the threshold is exact: a row's token depends on its logits, parameters
and noise alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsample.transforms.sampler import candidates, filters, sizes
from qsample.transforms.sampler.branching import Tensors, branch, option

WEIGHTLESS = 104.0  # exp(-104) is 0 in float32
# Ranks of the sample between a pivot and where the threshold is expected. The first is four standard deviations of a
# sample's median. Then the weights above both pivots are known, and only what lies between them is left to chance.
_SAMPLE_MARGINS = (64, 10)
_CLEARANCE = 0.07  # of the bracket's width, that a pivot keeps from where the threshold is expected
_MORE_PIVOTS = 4  # pairs


class _Bracket(NamedTuple):
    """lo, hi: [B, 1] float32. above_lo, above_hi: [B, 1] float64, the weight of the larger tokens.

    above_hi < nucleus weight <= above_lo.
    """

    lo: Tensor
    hi: Tensor
    above_lo: Tensor
    above_hi: Tensor

    def depth(self, nucleus_weight: Tensor) -> Tensor:
        """Which part of the weight between hi and lo the nucleus still needs: [B, 1] float64, in (0, 1]."""
        return (nucleus_weight - self.above_hi) / (self.above_lo - self.above_hi)


class _Sample(NamedTuple):
    """values: [B, N] float32, descending. cumulative: [B, N] float64, the weight of each and of those before it."""

    values: Tensor
    cumulative: Tensor


def find_threshold(
    logits: Tensor, weights: Tensor, top_p: Tensor, maximum: Tensor, temperature: Tensor, random: Tensor
) -> tuple[Tensor, Tensor]:
    """The nucleus threshold: the smallest logit whose strictly larger tokens weigh less than top_p of the whole.

    Args:
        logits: [B, V] float32. weights: [B, V] float32, >= 0; 0 for tokens that top-k drops.
        top_p: [B] float32, 1 = off. maximum, temperature: [B] float32, of the logits. random: [B] bool, rows that draw.

    Returns the threshold, [B, 1] float32, -inf where top_p is off; and whether the search failed, [B] bool: what is at
    or above the threshold then weighs too little.
    """
    has_top_p = top_p < 1
    total = total_weight(weights)
    nucleus_weight = filters.nucleus_weight(top_p, total[:, 0])[:, None]
    bracket = _all_with_weight(maximum[:, None], temperature[:, None], total)
    threshold = _search(logits, weights, bracket, nucleus_weight.minimum(total), random & has_top_p)
    threshold = torch.where(has_top_p[:, None], threshold, -torch.inf)
    kept = total_weight(torch.where(logits >= threshold, weights, 0.0))
    return threshold, has_top_p & (kept < nucleus_weight)[:, 0]


def _search(logits: Tensor, weights: Tensor, bracket: _Bracket, nucleus_weight: Tensor, searched: Tensor) -> Tensor:
    """The threshold or, where the search fails, a larger logit: [B, 1] float32.

    Args:
        nucleus_weight: [B, 1] float64, > 0 and at most the sum of the weights.
        searched: [B] bool; of the other rows the result is not read.
    """
    sample = _take_sample(logits, weights)
    for margin in _SAMPLE_MARGINS:
        for pivot in _sample_pivots(sample, bracket, nucleus_weight, margin):
            bracket = _narrow(logits, weights, nucleus_weight, bracket, pivot)
    # One row with more than `sort_size` tokens left costs the whole batch another round.
    for _ in range(2):
        bracket = _narrow(logits, weights, nucleus_weight, bracket, _interpolate(bracket, nucleus_weight))

    def once_more() -> Tensors:
        return _narrow(logits, weights, nucleus_weight, bracket, _interpolate(bracket, nucleus_weight))

    bracket = _Bracket(*option("large_vocabulary", sizes.is_large(logits.shape[1]), once_more, lambda: bracket))
    threshold, reached = _sort_rest(logits, weights, nucleus_weight, bracket)

    def narrow_more() -> tuple[Tensor]:
        closer = bracket
        for _ in range(_MORE_PIVOTS):
            closer = _narrow(logits, weights, nucleus_weight, closer, (closer.lo + closer.hi) / 2)
            closer = _narrow(logits, weights, nucleus_weight, closer, _interpolate(closer, nucleus_weight))
        # Another row's failure changes nothing for those that have theirs.
        return (torch.where(reached, threshold, _sort_rest(logits, weights, nucleus_weight, closer)[0]),)

    (threshold,) = branch((searched & ~reached[:, 0]).any(), narrow_more, lambda: (threshold,))
    return threshold


def _all_with_weight(maximum: Tensor, temperature: Tensor, total: Tensor) -> _Bracket:
    """The bracket of every token whose weight is not 0. maximum, temperature: [B, 1] float32; total: [B, 1] float64."""
    lowest = (maximum - WEIGHTLESS * temperature).clamp(min=torch.finfo(torch.float32).min)
    return _Bracket(lowest, maximum, total, torch.zeros_like(total))


def _take_sample(logits: Tensor, weights: Tensor) -> _Sample:
    """Every so many-th token, sorted."""
    stride = sizes.sample_stride(logits.shape[1])
    values, indices = logits[:, ::stride].sort(dim=-1, descending=True)
    return _Sample(values, weights[:, ::stride].gather(1, indices).to(torch.float64).cumsum(-1))


def _sample_pivots(sample: _Sample, bracket: _Bracket, nucleus_weight: Tensor, margin: int) -> tuple[Tensor, Tensor]:
    """Two logits that likely have the threshold between them, the upper one first: `margin` ranks from where the
    sample, scaled to the weights above the bracket's ends, has it."""
    above_hi, above_lo = (
        torch.where(sample.values > end, sample.cumulative, 0.0).amax(-1, keepdim=True)
        for end in (bracket.hi, bracket.lo)
    )
    expected = above_hi + bracket.depth(nucleus_weight) * (above_lo - above_hi)
    rank = (sample.cumulative < expected).to(torch.int64).sum(-1, keepdim=True)
    last = sample.values.shape[1] - 1
    upper = sample.values.gather(1, (rank - margin).clamp(0, last))
    return upper, sample.values.gather(1, (rank + margin).clamp(0, last))


def _interpolate(bracket: _Bracket, nucleus_weight: Tensor) -> Tensor:
    """Where the threshold would be if the weight were spread evenly over the bracket, moved towards the farther end.

    So the threshold most likely stays on the nearer side, and the pivot takes the farther one off.
    """
    depth = bracket.depth(nucleus_weight).to(torch.float32)
    depth = torch.where(depth < 0.5, depth + _CLEARANCE, depth - _CLEARANCE)
    return bracket.hi - (bracket.hi - bracket.lo) * depth


def _narrow(logits: Tensor, weights: Tensor, nucleus_weight: Tensor, bracket: _Bracket, pivot: Tensor) -> _Bracket:
    """Weigh the tokens above `pivot`, which tells on which side of it the threshold is, and move that end of the
    bracket to it."""
    above = total_weight(weights * (logits > pivot))
    inside = (pivot > bracket.lo) & (pivot < bracket.hi)
    lower, higher = inside & (above < nucleus_weight), inside & (above >= nucleus_weight)
    return _Bracket(
        torch.where(higher, pivot, bracket.lo),
        torch.where(lower, pivot, bracket.hi),
        torch.where(higher, above, bracket.above_lo),
        torch.where(lower, above, bracket.above_hi),
    )


def _sort_rest(logits: Tensor, weights: Tensor, nucleus_weight: Tensor, bracket: _Bracket) -> tuple[Tensor, Tensor]:
    """The threshold, if it is among the largest tokens of the bracket; and whether it is: [B, 1] bool."""
    inside = (logits > bracket.lo) & (logits <= bracket.hi)
    values, ids = torch.where(inside, logits, -torch.inf).topk(sizes.sort_size(logits.shape[1]), dim=-1)
    real = values > -torch.inf
    sorted_weights = weights.gather(1, ids).to(torch.float64) * real
    cumulative = sorted_weights.cumsum(-1)
    before = bracket.above_hi + (cumulative - sorted_weights)
    kept = ((before < nucleus_weight) & real).to(torch.int64).sum(-1, keepdim=True)
    threshold = torch.where(kept > 0, values.gather(1, (kept - 1).clamp(min=0)), bracket.hi)
    return threshold, bracket.above_hi + cumulative[:, -1:] >= nucleus_weight


def total_weight(weights: Tensor) -> Tensor:
    """[B, 1] float64. Blocks first, in float32: a float64 copy of everything would cost more than the sum."""
    blocks = candidates.blocks(weights, sizes.block_size(weights.shape[1]), 0.0)
    return blocks.sum(-1).to(torch.float64).sum(-1, keepdim=True)
