"""Thresholds beyond the candidates: selection by weight or by count, without a sort of the vocabulary.

The threshold of top-p is a weighted quantile of the logits: the smallest logit whose strictly larger logits weigh less
than p of the whole. That of top-k is a quantile by count. A pivot is compared with all keys in a single pass; the
weight above it tells on which side of it the threshold lies.

With control flow (`_interpolate`), as Floyd and Rivest select ("Expected time bounds for selection", CACM 18(3), 1975):
two pivots from a sorted sample, then pivots at the place of the weight if it were spread evenly over the bracket, with
the Illinois rule (Dowell and Jarratt, "A modified regula falsi method", BIT 11, 1971); and as soon as no more keys are
left than there are candidates, those are sorted. A vocabulary of 150,000 takes about 6 passes.

Without control flow (`_cut`), 32 pivots cut the bracket in each of 6 passes, and its lower end moves to the next key.
Different keys that are still together then, within 2**-30 of the first bracket, count as tied.

The weight above a pivot is summed as a difference from the weight that is wanted, block by block: small numbers of
either sign, whose rounding in float32 is far below a token's weight.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qsample.contract.tensors import CANDIDATES
from qsample.sampler.blocks import ALIGNMENT, FLOOR, Blocks, block_sums, top_candidates, total
from qsample.sampler.tensor import (
    FLOAT,
    INT64,
    Tensor,
    Tensors,
    axis_size,
    branch,
    constant,
    constants,
    loop,
    maximum,
    minimum,
    op,
    size,
    top,
    where,
)

_PIVOTS, _PASSES = 32, 6
_MOST_PIVOTS, _MOST_STEPS = 10, 400
_SAMPLE_MARGIN = 32  # ranks of the sample between a pivot and the expected threshold
_FAR = 3e38  # from every key
EVERYTHING = -3.4e38  # a threshold that every finite key passes


class Search:
    """Finds thresholds among the keys of some rows."""

    def __init__(self, listed: Tensor | None, *, skipped: bool = False) -> None:
        """listed: [R] int64, the rows that are searched, in a graph without control flow; None: with control flow, the
        rows that a call names. skipped: an If around each search of listed rows skips it if there are none; its
        condition is a shape, known to the host."""
        self._listed, self._skipped = listed, skipped

    def by_weight(
        self,
        keys: Tensor,
        weights: Tensor,
        share: Tensor,
        ends: tuple[Tensor, Tensor],
        searched: Tensor,
    ) -> Tensor:
        """The smallest key whose strictly larger keys weigh less than `share` of the whole: [B, 1] float32.

        keys: [B, n, C] float32, at most 0, -inf for keys that do not count. weights: [B, n, C] float32, at least 0.
        share: [B, 1] float32, in (0, 1). ends: [B, 1] float32 each, a number below every key that has a weight, and the
        largest key. searched: [B, 1] bool; any other row gets a threshold that all keys pass.
        """
        return self._find(searched, _Bracket.of_weights, keys, weights, share, *ends)

    def by_count(self, keys: Tensor, count: Tensor, searched: Tensor) -> Tensor:
        """The `count`-th largest key ([B, 1] float32, at least 1), or one that all keys pass if there are fewer: [B, 1]
        float32. keys, searched: as in `by_weight`; the largest key is 0."""
        return self._find(searched, _Bracket.of_counts, keys, count)

    def _find(
        self, searched: Tensor, begin: Callable[..., _Bracket], keys: Tensor, *given: Tensor
    ) -> Tensor:
        listed = self._listed
        if listed is None:
            return where(searched, _interpolate(begin(keys, *given), searched), EVERYTHING)

        def found() -> Tensors:
            # A number of blocks that needs no padding in each sum.
            own, *more = (value.rows(listed) for value in (keys, *given))
            more = [
                _with_more_blocks(value, 0.0) if len(value.shape) == 3 else value for value in more
            ]
            threshold = _cut(begin(_with_more_blocks(own, FLOOR), *more))
            none = constants(searched, EVERYTHING)
            return (
                where(searched, none.scatter(listed.unsqueeze(), threshold, axis=0), EVERYTHING),
            )

        if not self._skipped:
            return found()[0]
        return branch(
            op("Squeeze", size(listed, 0)) > 0, found, lambda: (constants(searched, EVERYTHING),)
        )[0]


def _with_more_blocks(values: Tensor, filler: float) -> Tensor:
    """[R, n, C] with n a multiple of `ALIGNMENT`."""
    rest = -axis_size(values, 1) % ALIGNMENT
    return op("Pad", values, [0, 0, 0, 0, rest, 0], filler) if rest else values


class _Bracket:
    """Keys [B, 1, n, C] float32, their weights (of that shape; None: 1 each), and the interval of the threshold, [B, 1]
    float32: it is above `low` and at most `high`. at_low, at_high: the excess of all keys, at least 0, and of none,
    below 0. The excess is by how much the keys above a number weigh more than is wanted."""

    def __init__(
        self,
        keys: Tensor,
        weights: Tensor | None,
        wanted: Tensor,
        low: Tensor,
        high: Tensor,
        at_low: Tensor,
    ) -> None:
        self.keys = keys.unsqueeze(1)
        self.weights = None if weights is None else weights.unsqueeze(1)
        self._wanted = wanted
        self.low = low
        self.at_low = at_low
        self.at_high = -(wanted if weights is None else total(wanted))
        # If all keys together weigh too little, all pass.
        self.high = where(at_low < 0, low, high)

    @staticmethod
    def of_weights(
        keys: Tensor, weights: Tensor, share: Tensor, lowest: Tensor, highest: Tensor
    ) -> _Bracket:
        sums = block_sums(weights)
        wanted = sums * maximum(share, 1e-30)
        return _Bracket(keys, weights, wanted, lowest, highest, total(sums - wanted))

    @staticmethod
    def of_counts(keys: Tensor, count: Tensor) -> _Bracket:
        there = (keys > FLOOR).to(FLOAT)
        smallest = (maximum(keys, FLOOR) * there).min(-2, -1, keep=False).unsqueeze()
        number = there.sum(-2, -1, keep=False).unsqueeze()
        below_all = smallest * 1.001 - 2.0**-126
        return _Bracket(keys, None, count, below_all, constants(count, 0.0), number - count)

    def above(self, pivots: Tensor) -> Tensor:
        """1 for keys above each pivot, else 0: [B, P, n, C] float32. pivots: [B, P] float32."""
        return (self.keys > pivots.unsqueeze().unsqueeze()).to(FLOAT)

    def excess(self, above: Tensor) -> Tensor:
        """[B, P] float32, of what `above` gives. It grows with the set of keys, and does not depend on the pivots that
        lead there."""
        if self.weights is None:
            return above.sum(-2, -1, keep=False) - self._wanted
        return total(block_sums(self.weights * above) - self._wanted.unsqueeze(1)).squeeze()

    def measure(self, pivots: Tensor) -> Tensors:
        """The excess of each pivot, the smallest of the keys above it, and the largest of the rest: [B, P] each."""
        # Products with the mask as a number: ONNX Runtime's Where takes ten times as long.
        above, keys = self.above(pivots), maximum(self.keys, FLOOR)
        smallest_above = (keys * above).min(-2, -1, keep=False)
        largest_below = (keys - above * _FAR).max(-2, -1, keep=False)
        return self.excess(above), smallest_above, largest_below


def _cut(bracket: _Bracket) -> Tensor:
    """The threshold by a fixed number of passes, with pivots spread evenly over the bracket: [B, 1]."""
    parts = constant((np.arange(_PIVOTS, dtype=np.float32) / _PIVOTS)[None])
    low, high, keys = bracket.low, bracket.high, maximum(bracket.keys, FLOOR)
    for _ in range(_PASSES):
        pivots = low + (high - low) * parts  # the first one is low
        above = bracket.above(pivots)
        too_little = bracket.excess(above) < 0
        # The smallest key above a pivot; keys are at most 0, and 0 stands for the rest.
        low = where(too_little, low, (keys * above).min(-2, -1, keep=False)).max()
        high = where(too_little, pivots, high).min()
    return low


def _interpolate(bracket: _Bracket, searched: Tensor) -> Tensor:
    """The threshold of the searched rows, [B, 1]."""
    low, high, at_high, few = _narrow(bracket, searched)
    sorted_ = _sort(bracket, low, high, at_high)
    low, high = where(few, sorted_, low), where(few, sorted_, high)
    # Many keys at or near the threshold are left in rows with ties.
    return _step_through(bracket, low, high, searched)


def _narrow(bracket: _Bracket, searched: Tensor) -> Tensors:
    """Move the ends until few keys are between them: low, high, the excess at high, and whether few are: [B, 1] each.
    The threshold is above low and at most high then, unless low is the bracket's."""
    first, second = _sample_pivots(bracket)

    def many(at_low: Tensor, at_high: Tensor) -> Tensor:
        return at_low - at_high > CANDIDATES

    def step(
        number: Tensor,
        low: Tensor,
        high: Tensor,
        at_low: Tensor,
        at_high: Tensor,
        excess_high: Tensor,
        count_low: Tensor,
        count_high: Tensor,
        moved: Tensor,
    ) -> tuple[Tensor, Tensors]:
        # moved: 1 if the last step moved high, -1 if low. If an end moves twice, the other's excess counts half.
        pivot = high - (high - low) * (at_high / (at_high - at_low))
        pivot = where(number.equals(0), first, where(number.equals(1), second, pivot))
        # A row with few keys left stays as it is while other rows go on: it rounds identically in any batch.
        pivot = where(many(count_low, count_high), minimum(maximum(pivot, low), high), high)
        above = bracket.above(pivot)
        found, count = bracket.excess(above), above.sum(-2, -1, keep=False)
        too_little = found < 0
        states = (
            where(too_little, low, pivot),
            where(too_little, pivot, high),
            where(too_little, at_low * (0.75 - 0.25 * moved), found),
            where(too_little, found, at_high * (0.75 + 0.25 * moved)),
            where(too_little, found, excess_high),
            where(too_little, count_low, count),
            where(too_little, count, count_high),
            where(too_little, 1.0, -1.0),
        )
        return (searched & many(states[5], states[6])).any(), states

    none = bracket.low * 0.0
    everything = none + float(axis_size(bracket.keys, 2) * axis_size(bracket.keys, 3))
    begin = (
        bracket.low,
        bracket.high,
        bracket.at_low,
        bracket.at_high,
        bracket.at_high,
        everything,
        none,
        none,
    )
    low, high, _, _, excess, count_low, count_high, _ = loop(
        _MOST_PIVOTS, searched.any(), begin, step
    )
    return low, high, excess, ~many(count_low, count_high)


def _sample_pivots(bracket: _Bracket) -> tuple[Tensor, Tensor]:
    """Two numbers that likely have the threshold between them, the upper first: from the first key of each block."""
    first = op("Slice", bracket.keys, [0], [1], [3]).reshape(0, -1)
    keys, order = top(first, axis_size(first, 1))
    if bracket.weights is None:
        weights = (keys > FLOOR).to(FLOAT)
    else:
        weights = op("Slice", bracket.weights, [0], [1], [3]).reshape(0, -1).gather(order)
    sums = weights.cumsum()
    expected = sums.last() * (bracket.at_high / (bracket.at_high - bracket.at_low))
    rank = (sums < expected).to(FLOAT).sum()
    last = axis_size(first, 1) - 1
    ends = (
        op("Clip", rank + margin, 0.0, float(last)).to(INT64)
        for margin in (-_SAMPLE_MARGIN, _SAMPLE_MARGIN)
    )
    upper, lower = (keys.gather(end) for end in ends)
    return upper, lower


def _sort(bracket: _Bracket, low: Tensor, high: Tensor, excess_high: Tensor) -> Tensor:
    """The threshold, if no more than the candidates are between low and high: [B, 1]."""
    outside = bracket.above(high) * _FAR
    values = (bracket.keys - outside).squeeze(1)
    count = min(CANDIDATES, axis_size(values, 1) * axis_size(values, 2))
    keys, ids = top_candidates(Blocks(values, values.max(keep=False)), count, replayed=False)
    inside = keys > low
    weights = inside.to(FLOAT)
    if bracket.weights is not None:
        weights = weights * bracket.weights.reshape(0, -1).gather(ids)
    passes = inside & (excess_high + weights.cumsum(exclusive=True) < 0)
    return where(passes, keys, keys.columns(0, 1)).min()


def _step_through(bracket: _Bracket, low: Tensor, high: Tensor, searched: Tensor) -> Tensor:
    """The threshold, by halving the bracket with its ends at existing keys, until it is a single key: [B, 1]."""

    def step(number: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensors]:
        excess, above, below = bracket.measure(_inside(low + (high - low) * 0.5, low, high))
        too_little = excess < 0
        ends = where(too_little, low, above), where(too_little, below, high)
        return unsettled(*ends), ends

    def unsettled(low: Tensor, high: Tensor) -> Tensor:
        return (searched & (low < high)).any()

    return loop(_MOST_STEPS, unsettled(low, high), (low, high), step)[0]


def _inside(pivots: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The pivots, at least `low` and below `high`: at most the next number below `high`; `high` is not positive."""
    return maximum(minimum(pivots, high * (1 + 2.0**-23) - 2.0**-126), low)
