"""Logits, weights and a limit enter; the nucleus threshold that a sort would find leaves, without sorting V tokens.

A bracket (lo, hi] around the threshold is narrowed by cuts, each one weighing of the vocabulary: four at quantiles of a
small sorted sample, the others by interpolation. Then the largest tokens of the bracket are sorted. Whether the
threshold is among them is seen from the mass they bring; where it is not, because the weight lies on few tokens and the
sample missed them, more cuts follow. Where these do not do either (thousands of tokens with one value) the caller
sorts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsample.transforms.sampler import candidates
from qsample.transforms.sampler.control import branch

SORT_SIZE = 1024  # tokens of the bracket that are sorted
_SAMPLE_SIZE = 1024
# Ranks of the sample between a cut and where the threshold is expected. The first is four standard deviations of a
# sample's median. Then the masses at both cuts are known, and what is left to chance lies between them.
_SAMPLE_MARGINS = (64, 10)
_LARGE_VOCAB = 160_000
_MARGIN = 0.07  # of the bracket's width, that a cut stays clear of where the threshold is expected
_MORE_CUTS = 4  # pairs
_WEIGHTLESS = 104.0  # exp(-104) is 0 in float32


class _Bracket(NamedTuple):
    """lo, hi: [B, 1] float32. mass_lo, mass_hi: [B, 1] float64, of the tokens above; mass_hi < limit <= mass_lo."""

    lo: Tensor
    hi: Tensor
    mass_lo: Tensor
    mass_hi: Tensor

    def depth(self, limit: Tensor) -> Tensor:
        """How much of the mass between hi and lo is above the threshold: [B, 1] float64, in (0, 1]."""
        return (limit - self.mass_hi) / (self.mass_lo - self.mass_hi)


class _Sample(NamedTuple):
    """values: [B, N] float32, descending. cumulative: [B, N] float64, the mass of each and of those before it."""

    values: Tensor
    cumulative: Tensor


def find_threshold(logits: Tensor, masses: Tensor, start: _Bracket, limit: Tensor, searched: Tensor) -> Tensor:
    """The smallest logit whose strictly larger tokens weigh less than `limit`, or a larger one: [B, 1] float32.

    It is the right one where the tokens at or above it weigh `limit` or more.

    Args:
        logits: [B, V] float32. masses: [B, V] float32, >= 0. start: `initial_bracket`.
        limit: [B, 1] float64, > 0 and at most the sum of the masses.
        searched: [B] bool; of the other rows the result is not read.
    """
    bracket, sample = start, _take_sample(logits, masses)
    for margin in _SAMPLE_MARGINS:
        for cut in _sample_cuts(sample, bracket, limit, margin):
            bracket = _cut(logits, masses, limit, bracket, cut)
    # One row with more than SORT_SIZE tokens left costs the whole batch another round.
    for _ in range(2 if logits.shape[1] <= _LARGE_VOCAB else 3):
        bracket = _cut(logits, masses, limit, bracket, _interpolate(bracket, limit))
    threshold, reached = _sort_rest(logits, masses, limit, bracket)

    def cut_more() -> tuple[Tensor]:
        closer = bracket
        for _ in range(_MORE_CUTS):
            closer = _cut(logits, masses, limit, closer, (closer.lo + closer.hi) / 2)
            closer = _cut(logits, masses, limit, closer, _interpolate(closer, limit))
        return (_sort_rest(logits, masses, limit, closer)[0],)

    (threshold,) = branch((searched & ~reached[:, 0]).any(), cut_more, lambda: (threshold,))
    return threshold


def initial_bracket(maximum: Tensor, temperature: Tensor, total: Tensor) -> _Bracket:
    """Around all that weighs anything.

    Args:
        maximum, temperature: [B, 1] float32, of the logits. total: [B, 1] float64, the sum of the masses.
    """
    lowest = (maximum - _WEIGHTLESS * temperature).clamp(min=torch.finfo(torch.float32).min)
    return _Bracket(lowest, maximum, total, torch.zeros_like(total))


def _take_sample(logits: Tensor, masses: Tensor) -> _Sample:
    stride = max(1, logits.shape[1] // _SAMPLE_SIZE)
    values, places = logits[:, ::stride].sort(dim=-1, descending=True)
    return _Sample(values, masses[:, ::stride].gather(1, places).to(torch.float64).cumsum(-1))


def _sample_cuts(sample: _Sample, bracket: _Bracket, limit: Tensor, margin: int) -> tuple[Tensor, Tensor]:
    """Two logits that likely have the threshold between them, the upper one first: `margin` ranks from where the
    sample, scaled to the masses at the bracket's ends, has it."""
    above_hi, above_lo = (
        torch.where(sample.values > end, sample.cumulative, 0.0).amax(-1, keepdim=True)
        for end in (bracket.hi, bracket.lo)
    )
    expected = above_hi + bracket.depth(limit) * (above_lo - above_hi)
    rank = (sample.cumulative < expected).to(torch.int64).sum(-1, keepdim=True)
    last = sample.values.shape[1] - 1
    upper = sample.values.gather(1, (rank - margin).clamp(0, last))
    return upper, sample.values.gather(1, (rank + margin).clamp(0, last))


def _interpolate(bracket: _Bracket, limit: Tensor) -> Tensor:
    """Where the threshold would be were the mass spread evenly over the bracket; then a little towards the farther end.

    So the threshold most likely stays on the nearer side, and the cut takes the farther one off.
    """
    depth = bracket.depth(limit).to(torch.float32)
    depth = torch.where(depth < 0.5, depth + _MARGIN, depth - _MARGIN)
    return bracket.hi - (bracket.hi - bracket.lo) * depth


def _cut(logits: Tensor, masses: Tensor, limit: Tensor, bracket: _Bracket, cut: Tensor) -> _Bracket:
    """Weigh the tokens above `cut` and move the end of the bracket that the threshold is now known to be inside of."""
    mass = total_mass(masses * (logits > cut))
    inside = (cut > bracket.lo) & (cut < bracket.hi)
    lower, higher = inside & (mass < limit), inside & (mass >= limit)
    return _Bracket(
        torch.where(higher, cut, bracket.lo),
        torch.where(lower, cut, bracket.hi),
        torch.where(higher, mass, bracket.mass_lo),
        torch.where(lower, mass, bracket.mass_hi),
    )


def _sort_rest(logits: Tensor, masses: Tensor, limit: Tensor, bracket: _Bracket) -> tuple[Tensor, Tensor]:
    """The threshold, if it is among the largest tokens of the bracket; and whether it is: [B, 1] bool."""
    inside = (logits > bracket.lo) & (logits <= bracket.hi)
    values, places = torch.where(inside, logits, -torch.inf).topk(min(SORT_SIZE, logits.shape[1]), dim=-1)
    real = values > -torch.inf
    left = masses.gather(1, places).to(torch.float64) * real
    cumulative = left.cumsum(-1)
    before = bracket.mass_hi + (cumulative - left)
    kept = ((before < limit) & real).to(torch.int64).sum(-1, keepdim=True)
    threshold = torch.where(kept > 0, values.gather(1, (kept - 1).clamp(min=0)), bracket.hi)
    return threshold, bracket.mass_hi + cumulative[:, -1:] >= limit


def total_mass(masses: Tensor) -> Tensor:
    """[B, 1] float64. Blocks first, in float32: a float64 copy of everything would cost more than the sum."""
    blocks = candidates.blocks(masses, candidates.block_size(masses.shape[1]), 0.0)
    return blocks.sum(-1).to(torch.float64).sum(-1, keepdim=True)
