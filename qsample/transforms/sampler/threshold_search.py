"""Logits, weights and a limit enter; the nucleus threshold that a sort would find leaves, without sorting V tokens.

A bracket (lo, hi] around the threshold is narrowed by a fixed number of cuts, each one weighing of the vocabulary: two
at quantiles of a small sorted sample, the others by interpolation. Then the largest tokens of the bracket are sorted.
Whether that found the threshold is seen for certain from the mass that it keeps; where it did not (data made for it, or
thousands of tokens with one value) the caller sorts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsample.transforms.sampler import candidates

SORT_SIZE = 1024  # tokens of the bracket that are sorted
_SAMPLE_SIZE = 1024
_SAMPLE_MARGIN = 64  # ranks: four standard deviations of a sample's median
_LARGE_VOCAB = 160_000
_MARGIN = 0.05  # of the bracket's width, that a cut stays clear of where the threshold is expected


class _Bracket(NamedTuple):
    """lo, hi: [B, 1] float32. mass_lo, mass_hi: [B, 1] float64, of the tokens above; mass_hi < limit <= mass_lo."""

    lo: Tensor
    hi: Tensor
    mass_lo: Tensor
    mass_hi: Tensor


def find_threshold(logits: Tensor, masses: Tensor, start: _Bracket, limit: Tensor) -> Tensor:
    """The smallest logit whose strictly larger tokens weigh less than `limit`, or a larger one: [B, 1] float32.

    It is the right one where the tokens at or above it weigh `limit` or more.

    Args:
        logits: [B, V] float32. masses: [B, V] float32, >= 0. start: `initial_bracket`.
        limit: [B, 1] float64, > 0 and at most the sum of the masses.
    """
    bracket = start
    for cut in _sample_cuts(logits, masses, bracket.mass_lo, limit):
        bracket = _cut(logits, masses, limit, bracket, cut)
    # A row with more than SORT_SIZE tokens left may send the whole batch to the full sort. With these cuts none of 32
    # rows of normal logits did, of 152,000 and of 262,144 tokens; with one less and half the margin, one did.
    for _ in range(3 if logits.shape[1] <= _LARGE_VOCAB else 4):
        bracket = _cut(logits, masses, limit, bracket, _interpolate(bracket, limit))
    return _sort_rest(logits, masses, limit, bracket)


def initial_bracket(maximum: Tensor, total: Tensor) -> _Bracket:
    """Around everything. maximum: [B, 1] float32, the largest logit; total: [B, 1] float64, the sum of the masses."""
    lowest = torch.full_like(maximum, torch.finfo(torch.float32).min)
    return _Bracket(lowest, maximum, total, torch.zeros_like(total))


def _sample_cuts(logits: Tensor, masses: Tensor, total: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Two logits that very likely have the threshold between them, the upper one first."""
    stride = max(1, logits.shape[1] // _SAMPLE_SIZE)
    sample, places = logits[:, ::stride].sort(dim=-1, descending=True)
    cumulative = masses[:, ::stride].gather(1, places).to(torch.float64).cumsum(-1)
    expected = limit / total * cumulative[:, -1:]
    rank = (cumulative < expected).to(torch.int64).sum(-1, keepdim=True)
    last = sample.shape[1] - 1
    upper = sample.gather(1, (rank - _SAMPLE_MARGIN).clamp(0, last))
    return upper, sample.gather(1, (rank + _SAMPLE_MARGIN).clamp(0, last))


def _interpolate(bracket: _Bracket, limit: Tensor) -> Tensor:
    """Where the threshold would be were the mass spread evenly over the bracket; then a little towards the farther end.

    So the threshold most likely stays on the nearer side, and the cut takes the farther one off.
    """
    depth = ((limit - bracket.mass_hi) / (bracket.mass_lo - bracket.mass_hi)).to(torch.float32)
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


def _sort_rest(logits: Tensor, masses: Tensor, limit: Tensor, bracket: _Bracket) -> Tensor:
    """The threshold, if it is among the largest tokens of the bracket."""
    inside = (logits > bracket.lo) & (logits <= bracket.hi)
    values, places = torch.where(inside, logits, -torch.inf).topk(min(SORT_SIZE, logits.shape[1]), dim=-1)
    real = values > -torch.inf
    left = masses.gather(1, places).to(torch.float64) * real
    before = bracket.mass_hi + (left.cumsum(-1) - left)
    kept = ((before < limit) & real).to(torch.int64).sum(-1, keepdim=True)
    return torch.where(kept > 0, values.gather(1, (kept - 1).clamp(min=0)), bracket.hi)


def total_mass(masses: Tensor) -> Tensor:
    """[B, 1] float64. Blocks first, in float32: a float64 copy of everything would cost more than the sum."""
    blocks = candidates.blocks(masses, candidates.block_size(masses.shape[1]), 0.0)
    return blocks.sum(-1).to(torch.float64).sum(-1, keepdim=True)
