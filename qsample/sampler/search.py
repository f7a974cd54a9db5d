"""Thresholds beyond the candidates: selection by weight or by count.

The threshold of top-p is a weighted quantile of the logits: the smallest logit whose strictly
larger logits weigh less than p of the total. The threshold of top-k is a quantile by count. A pivot
is compared with all keys in a single pass, and the weight above it decides on which side of it the
threshold lies.

`_interpolate` selects as Floyd and Rivest do ("Expected time bounds for selection", CACM 18(3),
1975). The first two pivots come from a sorted sample. Each further pivot is placed as if the weight
were spread evenly over the bracket, with the Illinois rule (Dowell and Jarratt, "A modified regula
falsi method", BIT 11, 1971). As soon as no more keys are left than there are candidates, these are
sorted. A vocabulary of 150,000 takes about 6 passes.

`SortedSearch` is for graphs without control flow: it sorts the vocabulary.

The weight above a pivot is summed as a difference from the wanted weight, block by block. These are
small numbers of either sign, whose rounding in float32 is far below the weight of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from qsample.contract.tensors import CANDIDATES
from qsample.sampler.blocks import (
    FLOOR,
    Blocks,
    block_sums,
    distances,
    joined,
    top_candidates,
    total,
    wide_distances,
)
from qsample.sampler.tensor import (
    FLOAT,
    INT64,
    Tensor,
    TensorRecord,
    axis_size,
    constants,
    if_any,
    loop,
    maximum,
    minimum,
    op,
    top,
    where,
)

# At most this many pivots, then at most this many halvings.
_MAX_PIVOTS = 10
_MAX_HALVINGS = 400
# Between each of the first two pivots and the expected threshold, in ranks of the sample.
_SAMPLE_MARGIN = 32
# Subtracted from a key, it moves the key below all others.
_FAR = 3e38
# A threshold that every finite key passes.
EVERYTHING = -3.4e38
# A threshold that no key passes.
NOTHING = 1.0
# A share of 0 would want no weight at all.
_LEAST_SHARE = 1e-30


class Search(ABC):
    """Finds thresholds among the keys of rows."""

    @abstractmethod
    def by_weight(self, keys: WeightedKeys, share: Tensor, searched: Tensor) -> Tensor:
        """The smallest key whose strictly larger keys weigh less than a share of the total.

        Args:
            keys: the keys and their weights.
            share: [B, 1] float32, in (0, 1).
            searched: [B, 1] bool; other rows get a threshold that all keys pass.

        Returns:
            The threshold of each row, [B, 1] float32.
        """

    @abstractmethod
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


class PivotSearch(Search):
    """A search with control flow, which compares pivots with all keys."""

    def by_weight(self, keys: WeightedKeys, share: Tensor, searched: Tensor) -> Tensor:
        sums = block_sums(keys.weights)
        wanted = sums * maximum(share, _LEAST_SHARE)
        at_low = total(sums - wanted)
        bracket = _Bracket(keys.keys, keys.weights, wanted, keys.lowest, keys.highest, at_low)
        return where(searched, _interpolate(bracket, searched), EVERYTHING)

    def by_count(self, keys: Tensor, count: Tensor, searched: Tensor) -> Tensor:
        there = (keys > FLOOR).to(FLOAT)
        smallest = (maximum(keys, FLOOR) * there).min(-2, -1, keep=False).unsqueeze()
        number = there.sum(-2, -1, keep=False).unsqueeze()
        below_all = smallest * 1.001 - 2.0**-126
        highest = constants(count, 0.0)
        bracket = _Bracket(keys, None, count, below_all, highest, number - count)
        return where(searched, _interpolate(bracket, searched), EVERYTHING)


class SortedSearch(Search):
    """A search that sorts the keys of listed rows; an empty list costs nothing."""

    def __init__(self, listed: Tensor, *, for_webgpu: bool) -> None:
        """Choose the rows.

        Args:
            listed: [R] int64, the rows that are searched. Other rows that need the search get a
                threshold that no key passes.
            for_webgpu: see `build_sampler`.
        """
        self._listed = listed
        self._for_webgpu = for_webgpu
        self._distances = distances if for_webgpu else wide_distances

    def by_weight(self, keys: WeightedKeys, share: Tensor, searched: Tensor) -> Tensor:
        def found() -> Tensor:
            ordered, order = self._sorted(keys.keys)
            weights = joined(keys.weights.rows(self._listed)).gather(order)
            blocks = axis_size(keys.keys, 1)
            in_blocks = weights.reshape(0, blocks, axis_size(keys.keys, 2))
            room = self._distances(block_sums(in_blocks), share.rows(self._listed))
            before = in_blocks.cumsum(exclusive=True)
            passes = before < room.to(FLOAT).columns(0, blocks).unsqueeze()
            # The passing keys come first. Keys that equal the last of them pass, too.
            last = passes.to(FLOAT).sum(-2, -1, keep=False).unsqueeze() - 1.0
            return ordered.gather(maximum(last, 0.0).to(INT64))

        return self._spread(found, searched)

    def by_count(self, keys: Tensor, count: Tensor, searched: Tensor) -> Tensor:
        def found() -> Tensor:
            ordered, _ = self._sorted(keys)
            last = float(axis_size(ordered, 1) - 1)
            place = op("Clip", count.rows(self._listed) - 1.0, 0.0, last)
            return ordered.gather(place.to(INT64))

        return self._spread(found, searched)

    def _sorted(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The keys of the listed rows, largest first, [R, V] float32, and their places, int64."""
        flat = maximum(joined(keys.rows(self._listed)), FLOOR)
        return top(flat, axis_size(flat, 1))

    def _spread(self, found: Callable[[], Tensor], searched: Tensor) -> Tensor:
        """The thresholds of all rows, from those that `found` computes for the listed rows."""

        def spread() -> Tensor:
            missing = where(searched, NOTHING, EVERYTHING)
            thresholds = missing.scatter(self._listed.unsqueeze(), found(), axis=0)
            return where(searched, thresholds, EVERYTHING)

        if not self._for_webgpu:
            return spread()
        return if_any(self._listed, spread, lambda: where(searched, NOTHING, EVERYTHING))


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
    keys, ids = top_candidates(Blocks(values, values.max(keep=False)), count)
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
