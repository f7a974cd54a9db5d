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

from dataclasses import dataclass

import numpy as np

from qsample.contract.tensors import CANDIDATES
from qsample.sampler.blocks import ALIGNMENT, FLOOR, Blocks, block_sums, top_candidates, total
from qsample.sampler.tensor import (
    FLOAT,
    INT64,
    Tensor,
    TensorRecord,
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
        """Choose the rows and the method.

        Args:
            listed: [R] int64, the rows that are searched, in a graph without control flow; None: with control flow,
                and each search says which rows it is for.
            skipped: put an If around each search of listed rows, which skips it if there are none; its condition is a
                shape, known to the host.
        """
        self._listed = listed
        self._skipped = skipped

    def by_weight(self, keys: WeightedKeys, share: Tensor, searched: Tensor) -> Tensor:
        """The smallest key whose strictly larger keys weigh less than `share` of the whole: [B, 1] float32.

        Args:
            keys: the keys and their weights.
            share: [B, 1] float32, in (0, 1).
            searched: [B, 1] bool; any other row gets a threshold that all keys pass.
        """
        return self._find(_ByWeight(keys, share), searched)

    def by_count(self, keys: Tensor, count: Tensor, searched: Tensor) -> Tensor:
        """The `count`-th largest key, or a number that all keys pass if there are fewer: [B, 1] float32.

        Args:
            keys: [B, n, C] float32, at most 0, -inf for keys that do not count; the largest of a row is 0.
            count: [B, 1] float32, at least 1.
            searched: [B, 1] bool; any other row gets a threshold that all keys pass.
        """
        return self._find(_ByCount(keys, count), searched)

    def _find(self, query: _ByWeight | _ByCount, searched: Tensor) -> Tensor:
        listed = self._listed
        if listed is None:
            return where(searched, _interpolate(query.bracket(), searched), EVERYTHING)

        def found() -> Tensor:
            threshold = _cut(query.of_rows(listed).bracket())
            everything = constants(searched, EVERYTHING)
            thresholds = everything.scatter(listed.unsqueeze(), threshold, axis=0)
            return where(searched, thresholds, EVERYTHING)

        if not self._skipped:
            return found()
        return branch(
            op("Squeeze", size(listed, 0)) > 0, found, lambda: constants(searched, EVERYTHING)
        )


@dataclass(frozen=True, slots=True)
class WeightedKeys:
    """Keys with weights.

    Attributes:
        keys: [B, n, C] float32, at most 0, -inf for keys that do not count.
        weights: [B, n, C] float32, at least 0.
        lowest: [B, 1] float32, a number below every key that has a weight.
        highest: [B, 1] float32, the largest key.
    """

    keys: Tensor
    weights: Tensor
    lowest: Tensor
    highest: Tensor


@dataclass(frozen=True, slots=True)
class _ByWeight:
    """A search for the threshold of a share of the weight: the arguments of `Search.by_weight`."""

    keys: WeightedKeys
    share: Tensor

    def of_rows(self, rows: Tensor) -> _ByWeight:
        """The search in `rows`, [R] int64, with a number of blocks that needs no padding in each sum."""
        keys = self.keys.keys.rows(rows)
        weights = self.keys.weights.rows(rows)
        share = self.share.rows(rows)
        lowest = self.keys.lowest.rows(rows)
        highest = self.keys.highest.rows(rows)
        weights = _with_more_blocks(weights, 0.0)
        keys = _with_more_blocks(keys, FLOOR)
        return _ByWeight(WeightedKeys(keys, weights, lowest, highest), share)

    def bracket(self) -> _Bracket:
        """The first bracket: all keys."""
        sums = block_sums(self.keys.weights)
        wanted = sums * maximum(self.share, 1e-30)
        keys = self.keys
        at_low = total(sums - wanted)
        return _Bracket(keys.keys, keys.weights, wanted, keys.lowest, keys.highest, at_low)


@dataclass(frozen=True, slots=True)
class _ByCount:
    """A search for the threshold of a number of keys: the arguments of `Search.by_count`."""

    keys: Tensor
    count: Tensor

    def of_rows(self, rows: Tensor) -> _ByCount:
        """The search in `rows`, [R] int64, with a number of blocks that needs no padding in each sum."""
        keys = self.keys.rows(rows)
        count = self.count.rows(rows)
        return _ByCount(_with_more_blocks(keys, FLOOR), count)

    def bracket(self) -> _Bracket:
        """The first bracket: all keys."""
        there = (self.keys > FLOOR).to(FLOAT)
        smallest = (maximum(self.keys, FLOOR) * there).min(-2, -1, keep=False).unsqueeze()
        number = there.sum(-2, -1, keep=False).unsqueeze()
        below_all = smallest * 1.001 - 2.0**-126
        highest = constants(self.count, 0.0)
        return _Bracket(self.keys, None, self.count, below_all, highest, number - self.count)


def _with_more_blocks(values: Tensor, filler: float) -> Tensor:
    """[R, n, C] with n a multiple of `ALIGNMENT`."""
    rest = -axis_size(values, 1) % ALIGNMENT
    return op("Pad", values, [0, 0, 0, 0, rest, 0], filler) if rest else values


class _Bracket:
    """Keys, what they weigh, and an interval that holds the threshold.

    The excess of a number is by how much the keys above it weigh more than is wanted.

    Attributes:
        keys: [B, 1, n, C] float32.
        weights: [B, 1, n, C] float32; None: 1 each.
        low, high: [B, 1] float32; the threshold is above `low` and at most `high`.
        at_low: [B, 1] float32, the excess of all keys.
        at_high: [B, 1] float32, the excess of no key, below 0.
    """

    def __init__(
        self,
        keys: Tensor,
        weights: Tensor | None,
        wanted: Tensor,
        low: Tensor,
        high: Tensor,
        at_low: Tensor,
    ) -> None:
        """Begin with an interval around all keys.

        Args:
            keys: [B, n, C] float32.
            weights: [B, n, C] float32; None: 1 each.
            wanted: the weight that is wanted: in each block, [B, n]; of counts, [B, 1].
            low: [B, 1] float32, a number below all keys that weigh something.
            high: [B, 1] float32, the largest key.
            at_low: [B, 1] float32, the excess of all keys.
        """
        self.keys = keys.unsqueeze(1)
        self.weights = None if weights is None else weights.unsqueeze(1)
        self._wanted = wanted
        self.low = low
        self.at_low = at_low
        self.at_high = -(wanted if weights is None else total(wanted))
        # If all keys together weigh too little, all pass.
        self.high = where(at_low < 0, low, high)

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
    narrow = _narrow(bracket, searched)
    few = ~narrow.holds_many()
    sorted_ = _sort(bracket, narrow)
    low = where(few, sorted_, narrow.low)
    high = where(few, sorted_, narrow.high)
    # Many keys at or near the threshold are left in rows with ties.
    return _step_through(bracket, low, high, searched)


@dataclass(frozen=True)
class _Interval(TensorRecord):
    """The interval of a threshold while it is narrowed: [B, 1] float32 each.

    Attributes:
        low, high: the threshold is above `low` and at most `high`.
        at_low, at_high: the excess at the ends, from which the next pivot is computed: half of it counts after each
            further step that moves the other end only.
        excess_high: the excess at `high`, exactly.
        above_low, above_high: how many keys are above each end.
        moved: the end that the last step moved: 1 for high, -1 for low, 0 before the first step.
    """

    low: Tensor
    high: Tensor
    at_low: Tensor
    at_high: Tensor
    excess_high: Tensor
    above_low: Tensor
    above_high: Tensor
    moved: Tensor

    def holds_many(self) -> Tensor:
        """Whether more keys than there are candidates lie within: [B, 1] bool."""
        return self.above_low - self.above_high > CANDIDATES


def _narrow(bracket: _Bracket, searched: Tensor) -> _Interval:
    """Move the ends until few keys are between them; `low` may stay the bracket's."""
    first, second = _sample_pivots(bracket)

    def step(number: Tensor, interval: _Interval) -> tuple[Tensor, _Interval]:
        low, high = interval.low, interval.high
        at_low, at_high = interval.at_low, interval.at_high
        pivot = high - (high - low) * (at_high / (at_high - at_low))
        pivot = where(number.equals(0), first, where(number.equals(1), second, pivot))
        # A row with few keys left stays as it is while other rows go on: it rounds identically in any batch.
        pivot = where(interval.holds_many(), minimum(maximum(pivot, low), high), high)
        above = bracket.above(pivot)
        excess = bracket.excess(above)
        count = above.sum(-2, -1, keep=False)
        too_little = excess < 0
        # The Illinois rule: if an end moves twice, the other end's excess counts half.
        narrowed = _Interval(
            low=where(too_little, low, pivot),
            high=where(too_little, pivot, high),
            at_low=where(too_little, at_low * (0.75 - 0.25 * interval.moved), excess),
            at_high=where(too_little, excess, at_high * (0.75 + 0.25 * interval.moved)),
            excess_high=where(too_little, excess, interval.excess_high),
            above_low=where(too_little, interval.above_low, count),
            above_high=where(too_little, count, interval.above_high),
            moved=where(too_little, 1.0, -1.0),
        )
        return (searched & narrowed.holds_many()).any(), narrowed

    none = bracket.low * 0.0
    everything = none + float(axis_size(bracket.keys, 2) * axis_size(bracket.keys, 3))
    begin = _Interval(
        low=bracket.low,
        high=bracket.high,
        at_low=bracket.at_low,
        at_high=bracket.at_high,
        excess_high=bracket.at_high,
        above_low=everything,
        above_high=none,
        moved=none,
    )
    return loop(_MOST_PIVOTS, searched.any(), begin, step)


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


def _sort(bracket: _Bracket, interval: _Interval) -> Tensor:
    """The threshold, if no more keys than there are candidates lie in the interval: [B, 1]."""
    outside = bracket.above(interval.high) * _FAR
    values = (bracket.keys - outside).squeeze(1)
    count = min(CANDIDATES, axis_size(values, 1) * axis_size(values, 2))
    keys, ids = top_candidates(Blocks(values, values.max(keep=False)), count, replayed=False)
    inside = keys > interval.low
    weights = inside.to(FLOAT)
    if bracket.weights is not None:
        weights = weights * bracket.weights.reshape(0, -1).gather(ids)
    passes = inside & (interval.excess_high + weights.cumsum(exclusive=True) < 0)
    return where(passes, keys, keys.columns(0, 1)).min()


def _step_through(bracket: _Bracket, low: Tensor, high: Tensor, searched: Tensor) -> Tensor:
    """The threshold, by halving the interval with its ends at existing keys, until it is a single key: [B, 1]."""

    def step(number: Tensor, ends: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        low, high = ends
        middle = _inside(low + (high - low) * 0.5, low, high)
        excess, smallest_above, largest_below = bracket.measure(middle)
        too_little = excess < 0
        low = where(too_little, low, smallest_above)
        high = where(too_little, largest_below, high)
        return unsettled(low, high), (low, high)

    def unsettled(low: Tensor, high: Tensor) -> Tensor:
        return (searched & (low < high)).any()

    threshold, _ = loop(_MOST_STEPS, unsettled(low, high), (low, high), step)
    return threshold


def _inside(pivots: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The pivots, at least `low` and below `high`: at most the next number below `high`; `high` is not positive."""
    return maximum(minimum(pivots, high * (1 + 2.0**-23) - 2.0**-126), low)
