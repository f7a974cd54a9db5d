"""Thresholds beyond the candidates: selection by weight or by count, without sorting the
vocabulary.

The threshold of top-p is a weighted quantile of the logits: the smallest logit whose strictly
larger logits weigh less than p of the total. The threshold of top-k is a quantile by count. A pivot
is compared with all keys in a single pass, and the weight above it decides on which side of it the
threshold lies.

With control flow, `_interpolate` selects as Floyd and Rivest do ("Expected time bounds for
selection", CACM 18(3), 1975). The first two pivots come from a sorted sample. Each further pivot is
placed as if the weight were spread evenly over the bracket, with the Illinois rule (Dowell and
Jarratt, "A modified regula falsi method", BIT 11, 1971). As soon as no more keys are left than
there are candidates, these are sorted. A vocabulary of 150,000 takes about 6 passes.

Without control flow, `_cut` divides the bracket with 32 pivots in each of 6 passes, and its lower
end moves to the next key. Different keys that are still together then, within 2**-30 of the first
bracket, count as tied.

The weight above a pivot is summed as a difference from the wanted weight, block by block. These are
small numbers of either sign, whose rounding in float32 is far below the weight of a token.
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

# The search without control flow.
_PIVOTS_PER_PASS = 32
_PASSES = 6
# The search with control flow: at most this many pivots, then at most this many halvings.
_MAX_PIVOTS = 10
_MAX_HALVINGS = 400
# Between each of the first two pivots and the expected threshold, in ranks of the sample.
_SAMPLE_MARGIN = 32
# Subtracted from a key, it moves the key below all others.
_FAR = 3e38
# A threshold that every finite key passes.
EVERYTHING = -3.4e38
# A share of 0 would want no weight at all.
_LEAST_SHARE = 1e-30


class Search:
    """Finds thresholds among the keys of some rows."""

    def __init__(self, listed: Tensor | None, *, skipped: bool = False) -> None:
        """Choose the rows and the method.

        Args:
            listed: [R] int64, the rows that are searched, in a graph without control flow; None in
                a graph with control flow.
            skipped: put an If around each search of listed rows, so that it is skipped without such
                rows. The condition is a shape, which the host knows.
        """
        self._listed = listed
        self._skipped = skipped

    def by_weight(self, keys: WeightedKeys, share: Tensor, searched: Tensor) -> Tensor:
        """The smallest key whose strictly larger keys weigh less than a share of the total.

        Args:
            keys: the keys and their weights.
            share: [B, 1] float32, in (0, 1).
            searched: [B, 1] bool; other rows get a threshold that all keys pass.

        Returns:
            The threshold of each row, [B, 1] float32.
        """
        return self._find(_ByWeight(keys, share), searched)

    def by_count(self, keys: Tensor, count: Tensor, searched: Tensor) -> Tensor:
        """The `count`-th largest key, or a number that all keys pass if there are fewer keys.

        Args:
            keys: [B, n, C] float32, at most 0, -inf for keys that do not count; the largest key of
                each row is 0.
            count: [B, 1] float32, at least 1.
            searched: [B, 1] bool; other rows get a threshold that all keys pass.

        Returns:
            The threshold of each row, [B, 1] float32.
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
        """The search in `rows`, [R] int64, with so many blocks that no sum needs padding."""
        keys = self.keys.keys.rows(rows)
        weights = self.keys.weights.rows(rows)
        share = self.share.rows(rows)
        lowest = self.keys.lowest.rows(rows)
        highest = self.keys.highest.rows(rows)
        weights = _with_more_blocks(weights, 0.0)
        keys = _with_more_blocks(keys, FLOOR)
        return _ByWeight(WeightedKeys(keys, weights, lowest, highest), share)

    def bracket(self) -> _Bracket:
        """The first bracket, which contains all keys."""
        sums = block_sums(self.keys.weights)
        wanted = sums * maximum(self.share, _LEAST_SHARE)
        keys = self.keys
        at_low = total(sums - wanted)
        return _Bracket(keys.keys, keys.weights, wanted, keys.lowest, keys.highest, at_low)


@dataclass(frozen=True, slots=True)
class _ByCount:
    """A search for the threshold of a number of keys: the arguments of `Search.by_count`."""

    keys: Tensor
    count: Tensor

    def of_rows(self, rows: Tensor) -> _ByCount:
        """The search in `rows`, [R] int64, with so many blocks that no sum needs padding."""
        keys = self.keys.rows(rows)
        count = self.count.rows(rows)
        return _ByCount(_with_more_blocks(keys, FLOOR), count)

    def bracket(self) -> _Bracket:
        """The first bracket, which contains all keys."""
        counts = (self.keys > FLOOR).to(FLOAT)
        smallest = (maximum(self.keys, FLOOR) * counts).min(-2, -1, keep=False).unsqueeze()
        number = counts.sum(-2, -1, keep=False).unsqueeze()
        below_all = smallest * 1.001 - 2.0**-126
        highest = constants(self.count, 0.0)
        return _Bracket(self.keys, None, self.count, below_all, highest, number - self.count)


def _with_more_blocks(values: Tensor, filler: float) -> Tensor:
    """Values in blocks, [R, n, C], with blocks of `filler` added until `ALIGNMENT` divides n."""
    missing = -axis_size(values, 1) % ALIGNMENT
    return op("Pad", values, [0, 0, 0, 0, missing, 0], filler) if missing > 0 else values


class _Bracket:
    """Keys, their weights, and an interval that contains the threshold.

    The excess of a number is the weight of the keys above it, minus the wanted weight.

    Attributes:
        keys: [B, 1, n, C] float32.
        weights: [B, 1, n, C] float32; None if each key weighs 1.
        low: [B, 1] float32; the threshold is above it.
        high: [B, 1] float32; the threshold is at most this.
        at_low: [B, 1] float32, the excess of `low`: of all keys.
        at_high: [B, 1] float32, the excess of `high`: of no key, so below 0.
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
            weights: [B, n, C] float32; None if each key weighs 1.
            wanted: the wanted weight, [B, n] float32, a part for each block; without weights,
                [B, 1].
            low: [B, 1] float32, a number below all keys with a weight.
            high: [B, 1] float32, the largest key.
            at_low: [B, 1] float32, the excess of all keys.
        """
        self.keys = keys.unsqueeze(1)
        self.weights = None if weights is None else weights.unsqueeze(1)
        self._wanted = wanted
        self.low = low
        self.at_low = at_low
        self.at_high = -(wanted if weights is None else total(wanted))
        # If all keys together weigh less than wanted, all pass.
        self.high = where(at_low < 0, low, high)

    def above(self, pivots: Tensor) -> Tensor:
        """1 for the keys above each pivot, [B, P] float32, and 0 for others: [B, P, n, C]
        float32."""
        return (self.keys > pivots.unsqueeze().unsqueeze()).to(FLOAT)

    def excess(self, above: Tensor) -> Tensor:
        """The excess of each pivot: [B, P] float32.

        It grows with the set of keys above the pivot, and does not depend on the pivot otherwise.

        Args:
            above: the result of `above`, [B, P, n, C].
        """
        if self.weights is None:
            return above.sum(-2, -1, keep=False) - self._wanted
        differences = block_sums(self.weights * above) - self._wanted.unsqueeze(1)
        return total(differences).squeeze()

    def measure(self, pivots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The excess of each pivot, the smallest key above it, and the largest other key.

        Args:
            pivots: [B, P] float32.

        Returns:
            [B, P] float32 each.
        """
        above = self.above(pivots)
        keys = maximum(self.keys, FLOOR)
        # The mask is a factor, because ONNX Runtime's Where takes ten times as long.
        smallest_above = (keys * above).min(-2, -1, keep=False)
        largest_below = (keys - above * _FAR).max(-2, -1, keep=False)
        return self.excess(above), smallest_above, largest_below


def _cut(bracket: _Bracket) -> Tensor:
    """The threshold by a fixed number of passes, with evenly spaced pivots: [B, 1] float32."""
    fractions = np.arange(_PIVOTS_PER_PASS, dtype=np.float32) / _PIVOTS_PER_PASS
    parts = constant(fractions[None])
    low = bracket.low
    high = bracket.high
    keys = maximum(bracket.keys, FLOOR)
    for _ in range(_PASSES):
        # The first pivot is `low`.
        pivots = low + (high - low) * parts
        above = bracket.above(pivots)
        too_little = bracket.excess(above) < 0
        # The lower end moves to the smallest key above the last pivot with enough weight. Keys are
        # at most 0, and 0 stands for the keys below a pivot.
        low = where(too_little, low, (keys * above).min(-2, -1, keep=False)).max()
        high = where(too_little, pivots, high).min()
    return low


def _interpolate(bracket: _Bracket, searched: Tensor) -> Tensor:
    """The threshold of the searched rows by a number of passes that depends on the keys: [B, 1]."""
    narrow = _narrow(bracket, searched)
    few = ~narrow.has_many_keys()
    sorted_threshold = _sort(bracket, narrow)
    low = where(few, sorted_threshold, narrow.low)
    high = where(few, sorted_threshold, narrow.high)
    # In rows with ties, many keys at or near the threshold are left.
    return _step_through(bracket, low, high, searched)


@dataclass(frozen=True)
class _Interval(TensorRecord):
    """The interval of the threshold while it is narrowed: [B, 1] float32 each.

    Attributes:
        low: the threshold is above it, or it is the low end of the bracket.
        high: the threshold is at most this.
        at_low: the excess of `low` from which the next pivot is computed; the Illinois rule halves
            it if only `high` moves.
        at_high: the same of `high`.
        excess_high: the excess of `high`, exactly.
        above_low: the number of keys above `low`.
        above_high: the number of keys above `high`.
        moved: the end that the last step moved: 1 for `high`, -1 for `low`, 0 before the first
            step.
    """

    low: Tensor
    high: Tensor
    at_low: Tensor
    at_high: Tensor
    excess_high: Tensor
    above_low: Tensor
    above_high: Tensor
    moved: Tensor

    def has_many_keys(self) -> Tensor:
        """Whether more keys than there are candidates lie in the interval: [B, 1] bool."""
        return self.above_low - self.above_high > CANDIDATES


def _narrow(bracket: _Bracket, searched: Tensor) -> _Interval:
    """Move the ends of the bracket until few keys are between them."""
    first, second = _sample_pivots(bracket)

    def step(number: Tensor, interval: _Interval) -> tuple[Tensor, _Interval]:
        low = interval.low
        high = interval.high
        at_low = interval.at_low
        at_high = interval.at_high
        pivot = high - (high - low) * (at_high / (at_high - at_low))
        pivot = where(number.equals(0), first, where(number.equals(1), second, pivot))
        # A row with few keys keeps its ends while other rows go on, so it rounds identically in any
        # batch.
        pivot = where(interval.has_many_keys(), minimum(maximum(pivot, low), high), high)
        above = bracket.above(pivot)
        excess = bracket.excess(above)
        count = above.sum(-2, -1, keep=False)
        too_little = excess < 0
        # The Illinois rule: if the same end moves twice, the excess of the other end is halved.
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
        return (searched & narrowed.has_many_keys()).any(), narrowed

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
    return loop(_MAX_PIVOTS, searched.any(), begin, step)


def _sample_pivots(bracket: _Bracket) -> tuple[Tensor, Tensor]:
    """Two pivots that likely have the threshold between them, the upper first.

    The sample is the first key of each block.
    """
    first = op("Slice", bracket.keys, [0], [1], [3]).reshape(0, -1)
    keys, order = top(first, axis_size(first, 1))
    if bracket.weights is None:
        weights = (keys > FLOOR).to(FLOAT)
    else:
        weights = op("Slice", bracket.weights, [0], [1], [3]).reshape(0, -1).gather(order)
    sums = weights.cumsum()
    expected = sums.last() * (bracket.at_high / (bracket.at_high - bracket.at_low))
    rank = (sums < expected).to(FLOAT).sum()
    last = float(axis_size(first, 1) - 1)
    upper = keys.gather(op("Clip", rank + -_SAMPLE_MARGIN, 0.0, last).to(INT64))
    lower = keys.gather(op("Clip", rank + _SAMPLE_MARGIN, 0.0, last).to(INT64))
    return upper, lower


def _sort(bracket: _Bracket, interval: _Interval) -> Tensor:
    """The threshold in an interval with no more keys than there are candidates: [B, 1] float32."""
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
    """The threshold by halving an interval until it is a single key: [B, 1] float32.

    Both ends move to existing keys in each step.
    """

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

    threshold, _ = loop(_MAX_HALVINGS, unsettled(low, high), (low, high), step)
    return threshold


def _inside(pivots: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The pivots, moved to [low, high): at most to the next number below `high`, which is at most
    0."""
    return maximum(minimum(pivots, high * (1 + 2.0**-23) - 2.0**-126), low)
