"""Logits, weights and a target enter; the threshold that a sort would find leaves, without sorting the vocabulary.

Keep a token iff the strictly larger ones together weigh less than the target. With unit weights and target k that is
top-k; with probabilities and target p it is the nucleus.

A bracket (lo, hi] around the threshold is narrowed until few tokens are left in it, and those are sorted. The first two
cuts are quantiles of a small sorted sample, later ones interpolate; every third cut halves the bracket, so that it ends
on any data: either few tokens are left, or lo and hi are neighbouring floats and the tokens between them are all equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsample.transforms.sampler.control import Tensors, repeat_while

_SAMPLE_SIZE = 1024
_SAMPLE_MARGIN = 32  # ranks: two standard deviations of a sample's median
_SORT_SIZE = 1024  # a bracket with no more tokens than this is sorted
_MARGIN = 0.05  # of the bracket's width, that a cut stays clear of where the threshold is expected
_SUM_BLOCK = 128
_LOWEST = float(torch.finfo(torch.float32).min)


class _Bracket(NamedTuple):
    """lo, hi: [B, 1] float32. mass_lo, mass_hi: [B, 1] float64 and count_lo, count_hi: [B, 1] float32, of the tokens
    above them; mass_hi < target <= mass_lo. step: scalar int64, cuts made so far. active: [B, 1] bool, rows to narrow.
    """

    lo: Tensor
    hi: Tensor
    mass_lo: Tensor
    mass_hi: Tensor
    count_lo: Tensor
    count_hi: Tensor
    step: Tensor
    active: Tensor


def find_threshold(logits: Tensor, masses: Tensor, maximum: Tensor, target: Tensor) -> Tensor:
    """The smallest logit whose strictly larger tokens weigh less than `target`, [B, 1] float32; -inf if all do.

    Args:
        logits: [B, V] float32. masses: [B, V] float32, >= 0. maximum: [B, 1] float32, the largest logit.
        target: [B, 1] float64, > 0; +inf keeps everything, at no cost.
    """
    bracket = _start(logits, masses, maximum, target)
    for cut in _sample_cuts(logits, masses, bracket.mass_lo, target):
        bracket = _cut(logits, masses, target, bracket, cut)

    def is_wide(*carried: Tensor) -> Tensor:
        return _Bracket(*carried).active.any()

    def narrow(*carried: Tensor) -> Tensors:
        return tuple(_narrow(logits, masses, target, _Bracket(*carried)))

    bracket = _Bracket(*repeat_while(is_wide, narrow, tuple(bracket)))
    return torch.where(bracket.mass_lo < target, -torch.inf, _finish(logits, masses, target, bracket))


def _start(logits: Tensor, masses: Tensor, maximum: Tensor, target: Tensor) -> _Bracket:
    lo = torch.full_like(maximum, _LOWEST)
    total = _sum(masses)
    none = torch.zeros_like(maximum)
    count = torch.full_like(maximum, logits.shape[1])
    step = torch.zeros((), dtype=torch.int64)
    return _Bracket(lo, maximum, total, torch.zeros_like(total), count, none, step, total >= target)


def _sample_cuts(logits: Tensor, masses: Tensor, total: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Two logits that very likely have the threshold between them, the upper one first."""
    stride = max(1, logits.shape[1] // _SAMPLE_SIZE)
    sample, places = logits[:, ::stride].sort(dim=-1, descending=True)
    cumulative = masses[:, ::stride].gather(1, places).to(torch.float64).cumsum(-1)
    expected = target / total * cumulative[:, -1:]
    rank = (cumulative < expected).to(torch.int64).sum(-1, keepdim=True)
    last = sample.shape[1] - 1
    upper = sample.gather(1, (rank - _SAMPLE_MARGIN).clamp(0, last))
    return upper, sample.gather(1, (rank + _SAMPLE_MARGIN).clamp(0, last))


def _narrow(logits: Tensor, masses: Tensor, target: Tensor, bracket: _Bracket) -> _Bracket:
    """One cut: by interpolation, or in the middle."""
    width = bracket.hi - bracket.lo
    span = (bracket.mass_lo - bracket.mass_hi).clamp(min=1e-300)
    # Where the threshold would be were the mass spread evenly; then a little towards the farther end, so that the
    # threshold stays on the nearer side and the farther one is cut off.
    depth = ((target - bracket.mass_hi) / span).to(torch.float32)
    depth = torch.where(depth < 0.5, depth + _MARGIN, depth - _MARGIN)
    halve = bracket.step % 3 == 2
    middle = bracket.lo * 0.5 + bracket.hi * 0.5
    cut = torch.where(halve, middle, bracket.hi - width * depth)
    # Rounding or an overflow of the width may put the cut outside.
    inside = (cut > bracket.lo) & (cut < bracket.hi)
    return _cut(logits, masses, target, bracket, torch.where(inside, cut, middle))


def _cut(logits: Tensor, masses: Tensor, target: Tensor, bracket: _Bracket, cut: Tensor) -> _Bracket:
    """Weigh the tokens above `cut` and replace the end of the bracket that it is known to be beyond."""
    above = (logits > cut).to(torch.float32)
    mass, count = _sum(masses * above), above.sum(-1, keepdim=True)
    inside = bracket.active & (cut > bracket.lo) & (cut < bracket.hi)
    lower = inside & (mass < target)  # everything above the cut is kept: the threshold is at or below
    raise_ = inside & (mass >= target)
    lo, hi = torch.where(raise_, cut, bracket.lo), torch.where(lower, cut, bracket.hi)
    count_lo = torch.where(raise_, count, bracket.count_lo)
    count_hi = torch.where(lower, count, bracket.count_hi)
    middle = lo * 0.5 + hi * 0.5
    return _Bracket(
        lo,
        hi,
        torch.where(raise_, mass, bracket.mass_lo),
        torch.where(lower, mass, bracket.mass_hi),
        count_lo,
        count_hi,
        bracket.step + 1,
        bracket.active & (count_lo - count_hi > _SORT_SIZE) & (middle > lo) & (middle < hi),
    )


def _finish(logits: Tensor, masses: Tensor, target: Tensor, bracket: _Bracket) -> Tensor:
    """Sort what is left in the bracket and find the threshold there."""
    inside = (logits > bracket.lo) & (logits <= bracket.hi)
    size = min(_SORT_SIZE, logits.shape[1])
    values, places = torch.where(inside, logits, -torch.inf).topk(size, dim=-1)
    left = torch.where(values > -torch.inf, masses.gather(1, places), 0.0).to(torch.float64)
    before = bracket.mass_hi + (left.cumsum(-1) - left)
    kept = ((before < target) & (values > -torch.inf)).to(torch.int64).sum(-1, keepdim=True)
    return torch.where(kept > 0, values.gather(1, (kept - 1).clamp(min=0)), bracket.hi)


def _sum(masses: Tensor) -> Tensor:
    """[B, 1] float64; blocks first, in float32, because a float64 copy of everything costs more than the sum."""
    batch, vocab = masses.shape
    if vocab % _SUM_BLOCK:
        return masses.sum(-1, keepdim=True).to(torch.float64)
    return masses.reshape(batch, -1, _SUM_BLOCK).sum(-1).to(torch.float64).sum(-1, keepdim=True)
