"""The thresholds of top-k and top-p by radix selection: a fixed number of passes, for graphs without control flow.

A token's key is the distance of its logit from the largest one, an integer: the range that can be drawn from is cut
into 2**30 cells. The threshold is a quantile of the keys, of their number for top-k and of their weight for top-p.
Three passes find its cell, 10 bits each: a histogram of the tokens in the cell found so far, summed up to the quantile
(radix selection; Alabi et al., "Fast k-selection algorithms for graphics processing units", JEA 17, 2012).

A cell whose tokens all have one logit gives the exact threshold, ties included. Others are told: that takes two logits
within 2**-30 of the range, which float32 tells apart only near 0, and half precision hardly ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qsample.transforms.sampler.wide_nucleus import WEIGHTLESS

_BITS = 10
_PASSES = 3
_BINS = 1 << _BITS
_LAST = (1 << _BITS * _PASSES) - 1  # the cell of what cannot be drawn
_LEAST_RANGE = 1e-30  # of logits that are all alike


class Threshold(NamedTuple):
    """value: [R, 1] float32, the smallest logit that passes; to be read where `exact`, [R, 1] bool, holds.

    passed: [R, V] bool, the tokens at or above it.
    """

    value: Tensor
    exact: Tensor
    passed: Tensor


def find_threshold(
    logits: Tensor, keys: Tensor, weights: Tensor, choose_target: Callable[[Tensor], Tensor]
) -> Threshold:
    """The smallest logit whose strictly larger tokens weigh less than the target.

    Args:
        logits: [R, V] float32. keys: [R, V] int64, theirs. weights: [R, V] float64, >= 0; ones, to count tokens.
        choose_target: gives the target, [R, 1] float64, > 0, from the sum of the weights, [R, 1] float64.
    """
    cumulative = _cumulative(_high_bits(keys, 1), weights)
    target = choose_target(cumulative[:, -1:])
    cell = _first_reaching(cumulative, target)
    for number in range(2, _PASSES + 1):
        # What is above the cell counts in bin 0, so that the target stays; what is below it in the last bin.
        start = cell * _BINS - 1
        cumulative = _cumulative((_high_bits(keys, number) - start).clamp(0, _BINS + 1), weights)
        cell = start + _first_reaching(cumulative, target)
    inside = keys == cell
    highest = torch.where(inside, logits, -torch.inf).amax(-1, keepdim=True)
    lowest = torch.where(inside, logits, torch.inf).amin(-1, keepdim=True)
    # A threshold among what cannot be drawn drops nothing that could be.
    beyond = cell == _LAST
    return Threshold(torch.where(beyond, -torch.inf, highest), beyond | (highest == lowest), keys <= cell)


def make_keys(logits: Tensor, maximum: Tensor, temperature: Tensor) -> Tensor:
    """[R, V] int64 in [0, 2**30): the larger, the smaller the logit.

    Args:
        logits: [R, V] float32. maximum: [R, 1] float32, the largest of them. temperature: [R, 1] float32.
    """
    weightless = logits <= maximum - WEIGHTLESS * temperature
    lowest = torch.where(weightless, maximum, logits).amin(-1, keepdim=True).to(torch.float64)
    highest = maximum.to(torch.float64)
    scale = (_LAST - 1) / (highest - lowest).clamp(min=_LEAST_RANGE)
    # In float64: float32 would round the differences, and merge logits.
    distance = (highest - logits.to(torch.float64)) * scale
    # No clamp, which keeps a NaN: a row that does not draw may have one, and that has to be a cell as well.
    return torch.where(distance < _LAST, distance, float(_LAST)).to(torch.int64)


def _high_bits(keys: Tensor, number: int) -> Tensor:
    """What a key's first `number` passes tell."""
    size = 1 << _BITS * (_PASSES - number)
    return keys if size == 1 else torch.div(keys, size, rounding_mode="floor")


def _cumulative(bins: Tensor, weights: Tensor) -> Tensor:
    """The weight of each bin and of those before it: [R, 2**10 + 2] float64."""
    empty = torch.zeros(weights.shape[0], _BINS + 2, dtype=torch.float64)
    return empty.scatter_add(1, bins, weights).cumsum(-1)


def _first_reaching(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index of the first cumulative sum that reaches the target, [R, 1] int64."""
    # Counted in float32, which CUDA sums in one kernel, and integers in three.
    return (cumulative < target).to(torch.float32).sum(-1, keepdim=True).to(torch.int64)
