"""The draw of a graph for replay, without control flow.

It has three parts, each for a list of rows: an empty list makes the tensors of its part empty, and
a device launches nothing for them. So the host replays as much of the graph as its rows need.

1. `processed_rows`: a row takes the argmax of its adjusted logits, or, with a small top-k, draws
   from its candidates.
2. `vocabulary_rows`: a random row that the candidates did not settle draws from the vocabulary.
3. `searched_rows`: the thresholds of top-k, top-p and typical-p in the vocabulary.

The lists of the first two parts have all rows or none, so that a row has the same number in them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from qsample.contract.tensors import NOISE, SEARCHED_ROWS, VOCABULARY_ROWS
from qsample.sampler import blocks
from qsample.sampler.blocks import FLOOR, LARGEST_UNIFORM, Blocks, block_size
from qsample.sampler.call import DrawCall, Uniforms
from qsample.sampler.draw import Outcome, PoolDraws
from qsample.sampler.filters import SharedNumbers
from qsample.sampler.parts import Part
from qsample.sampler.pools import WEIGHT_LIMIT, Candidates, Pool, Vocabulary
from qsample.sampler.search import EVERYTHING, NOTHING, Search, SortedSearch
from qsample.sampler.tensor import (
    FLOAT,
    INT64,
    Tensor,
    TensorRecord,
    axis_size,
    maximum,
    minimum,
    op,
    top,
    where,
)

# In the place of a token that is not drawn yet.
_UNDRAWN: Final = -1


@dataclass(frozen=True)
class LargestLogit(TensorRecord):
    """The largest logit of each row.

    Attributes:
        token: [B, 1] int64, its id; the lowest id of a tie.
        logit: [B, 1] float32, the logit.
        total: [B, 1] float32, the sum of all logits, which only says whether it is a number.
    """

    token: Tensor
    logit: Tensor
    total: Tensor

    def is_above_floor(self) -> Tensor:
        """Whether a token is left: [B, 1] bool; true for +inf."""
        return self.logit > FLOOR

    def is_finite(self) -> Tensor:
        """Whether no logit is NaN or +inf: [B, 1] bool.

        A sum is NaN if any term is NaN, and a sum with a term of +inf is +inf or NaN.
        """
        return self.total < float("inf")


def likeliest(call: DrawCall, logits: Tensor) -> LargestLogit:
    """The largest of the logits, [B, V] float32."""
    if not call.for_webgpu:
        token = logits.argmax()
        return LargestLogit(token, logits.gather(token), logits.sum())
    # WebGPU has a thread for each result of a reduction.
    split = blocks.split(logits, call.vocab, block_size(call.vocab))
    best = split.maxima.argmax()
    token = best * split.size + _take_block(split.values, best).argmax()
    return LargestLogit(token, split.maxima.gather(best), blocks.block_sums(split.values).sum())


@dataclass(frozen=True)
class ProcessedDraw(TensorRecord):
    """The results of the processed rows.

    Attributes:
        token: [P, 1] int64, a token of the vocabulary.
        is_valid: [P, 1] bool, whether the row has such a token.
        outcome: the other values of the draw; they only have a meaning in random rows.
    """

    token: Tensor
    is_valid: Tensor
    outcome: Outcome


def draw_processed(call: DrawCall, adjusted: Tensor, num_candidates: int) -> ProcessedDraw:
    """Choose the token of each processed row.

    Args:
        call: the inputs of the processed rows, and the lists of the other parts.
        adjusted: [P, V] float32, their logits after step 2.
        num_candidates: K, how many of the largest logits are tried before the whole vocabulary.
    """
    largest = likeliest(call, adjusted)
    draws = _CandidateDraws(call, adjusted, largest, num_candidates)
    outcome = draws.outcome()
    # The token of a random row that is undrawn stays below 0.
    token = where(draws.is_random(), outcome.token, largest.token)
    is_valid = largest.is_above_floor() & largest.is_finite() & (token >= 0)
    return ProcessedDraw(maximum(token, 0), is_valid, outcome)


class _ReplayedDraws(PoolDraws):
    """Draws from pools without control flow.

    Attributes:
        adjusted: [P, V] float32, the adjusted logits of the rows.
        largest_logit: the largest of these.
    """

    def __init__(self, call: DrawCall, adjusted: Tensor, largest: LargestLogit) -> None:
        """Prepare the draws.

        Args:
            call: the inputs of the rows.
            adjusted: [P, V] float32, their adjusted logits.
            largest: the largest of these.
        """
        split = blocks.split(adjusted, call.vocab, block_size(call.vocab))
        random = call["temperature"] > 0
        super().__init__(call, split, largest.logit.squeeze(), random, largest.token)
        self.adjusted = adjusted
        self.largest_logit = largest

    def _search(self) -> Search:
        return SortedSearch(self._call[SEARCHED_ROWS.name], for_webgpu=self._call.for_webgpu)

    def _vocabulary(self, searched: Tensor) -> Vocabulary:
        x = self._logits.values - self._largest.unsqueeze().unsqueeze()
        for_webgpu = self._call.for_webgpu
        return FlatVocabulary(x, searched, self._search(), for_webgpu=for_webgpu)

    def is_random(self) -> Tensor:
        """The rows that draw at random: [P, 1] bool."""
        return self._random.unsqueeze()


class _CandidateDraws(_ReplayedDraws):
    """Draws of all processed rows."""

    def __init__(
        self, call: DrawCall, adjusted: Tensor, largest: LargestLogit, num_candidates: int
    ) -> None:
        super().__init__(call, adjusted, largest)
        self._num_candidates = min(num_candidates, call.vocab)
        self._share_numbers()

    @property
    def shared(self) -> SharedNumbers:
        """The numbers that both kinds of pools need."""
        return self._shared

    def outcome(self) -> Outcome:
        """The outcome of all random rows. The token is `_UNDRAWN` in rows that would need a part of
        the graph that the host left out."""
        pool = self._candidates()
        self._apply(self._filters, pool)
        drawn = self._outcome_of(pool, pool.draw(self._uniform(NOISE)))
        drawn = replace(drawn, token=where(pool.is_settled, drawn.token, _UNDRAWN))
        part = Part(self._call[VOCABULARY_ROWS.name], for_webgpu=self._call.for_webgpu)
        return part.run(
            lambda: _BeyondCandidates(self._call, self, part).outcome(drawn),
            drawn,
        )

    def _candidates(self) -> SmallTopK:
        """The K largest logits of each row."""
        call = self._call
        count = self._num_candidates
        if call.for_webgpu:
            values, ids = call.top_of_blocks(self._logits, count)
        else:
            values, ids = top(self.adjusted, count)
        # Kernels may sort NaN below the padding of a row, whose ids are no ids.
        ids = minimum(ids, call.vocab - 1)
        x = values - self.largest_logit.logit
        if call.for_webgpu:
            # Masked values are FLOOR there, which may be close to a low maximum.
            x = where(values > FLOOR, maximum(x, FLOOR), FLOOR)
        return SmallTopK(x, ids, is_whole=count == call.vocab)


class _BeyondCandidates(_ReplayedDraws):
    """Draws from the whole vocabulary, of rows that the candidates do not settle."""

    def __init__(self, call: DrawCall, draws: _CandidateDraws, part: Part) -> None:
        """Take the rows from those of the candidates.

        Args:
            call: the inputs of the processed rows.
            draws: the draws from their candidates.
            part: the rows that draw from the vocabulary.
        """
        adjusted = part.take(draws.adjusted)
        super().__init__(_CallOfPart(call, part), adjusted, part.take(draws.largest_logit))
        self._part = part
        self._shared = part.take(draws.shared)

    def outcome(self, drawn: Outcome) -> Outcome:
        """The outcome of all processed rows. drawn: the outcome of the candidates."""
        before = self._part.take(drawn)
        is_drawn = before.token >= 0
        pool = self._vocabulary(self.is_random() & ~is_drawn)
        self._apply(self._filters, pool)
        found = self._outcome_of(pool, pool.draw(self._uniform(NOISE)))
        # Nothing is left in a row that needs a search and is not listed for it.
        token = where(pool.total() > 0, found.token, _UNDRAWN)
        return self._part.put(drawn, before.where(is_drawn, replace(found, token=token)))


class _CallOfPart(DrawCall):
    """A call with the inputs of a part's rows."""

    def __init__(self, call: DrawCall, part: Part) -> None:
        inputs = part.inputs(call.interface, call.inputs)
        super().__init__(call.interface, inputs, for_webgpu=call.for_webgpu)
        self._uniforms = call.uniforms()
        self._part = part

    def uniforms(self) -> Uniforms:
        return lambda buffer: self._part.take(self._uniforms(buffer))


class _Selected(Pool):
    """A pool whose filters select weights in place of multiplying them: a node less each."""

    def _apply(self) -> None:
        passed = self._passed
        before = None if passed is None else self._selected()
        super()._apply()
        if passed is not None and before is not None:
            self._weights = where(passed, before, 0.0)

    def _selected(self) -> Tensor:
        """The weights before the newest filters."""
        if self._weights is not None:
            return self._weights
        weights = self.all_weights
        return weights if self._kept is None else weights * self._kept


class SmallTopK(_Selected, Candidates):
    """The candidates, which settle the rows whose top-k is at most their number.

    Attributes:
        is_settled: [P, 1] bool, known after top-k.
    """

    is_settled: Tensor

    def __init__(self, x: Tensor, ids: Tensor, *, is_whole: bool) -> None:
        """Make a pool of candidates.

        Args:
            x: [P, K] float32, l - max.
            ids: [P, K] int64, their ids.
            is_whole: whether they are the whole vocabulary, which settles every row.
        """
        super().__init__(x, ids, complete=x, whole=x)
        self._other_threshold = EVERYTHING if is_whole else NOTHING

    def total(self) -> Tensor:
        return self.sum(self.weights)

    def kth_largest(self, k: Tensor) -> Tensor:
        # The thresholds of k = 0, 1, … K, and of more.
        padded = op("Pad", self.x, [0, 1, 0, 1], self._other_threshold)
        threshold = padded.gather(minimum(k, axis_size(padded, 1) - 1))
        self.is_settled = threshold <= 0
        return threshold

    def sum(self, values: Tensor) -> Tensor:
        return blocks.total(values)

    def nucleus(self, keys: Tensor | None, share: Tensor) -> Tensor:
        if keys is not None:
            return super().nucleus(keys, share)
        # In fewer nodes for top-p: the candidates are in order, and the largest x is 0.
        weights = self.weights
        before = weights.cumsum(exclusive=True)
        limit = where(share < 1, share * self.sum(weights), WEIGHT_LIMIT)
        return where(before < limit, self.x, 0.0).min()

    def draw(self, uniform: Tensor) -> Tensor:
        ordered, order = top(self.ids, axis_size(self.ids, 1), largest=False)
        sums = self.weights.gather(order).cumsum()
        is_reached = sums > minimum(uniform, LARGEST_UNIFORM) * sums.last()
        return ordered.gather(is_reached.to(FLOAT).argmax())


class FlatVocabulary(_Selected, Vocabulary):
    """The vocabulary, without GatherND, which CUDA does not replay."""

    def __init__(self, x: Tensor, searched: Tensor, search: Search, *, for_webgpu: bool) -> None:
        """Make a pool of the vocabulary.

        Args:
            x, searched, search: see `Vocabulary`.
            for_webgpu: see `build_sampler`.
        """
        super().__init__(x, searched, search)
        self._for_webgpu = for_webgpu

    def draw(self, uniform: Tensor) -> Tensor:
        sums = blocks.block_sums(self.weights)
        distances = blocks.distances if self._for_webgpu else blocks.wide_distances
        distance = distances(sums, uniform)
        # The target lies in the last block that starts at or before it.
        last_block = float(axis_size(self.x, 1) - 1)
        block = op("Clip", (distance >= 0).to(FLOAT).sum() - 1.0, 0.0, last_block).to(INT64)
        inside = _take_block(self.weights, block).cumsum()
        # By rounding, the target may lie just behind the block.
        remainder = minimum(distance.gather(block).to(FLOAT), inside.last() * LARGEST_UNIFORM)
        place = (inside > remainder).to(FLOAT).argmax()
        return block * axis_size(self.x, 2) + place

    def likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        weights = self.weights
        in_blocks = Blocks(weights, weights.max(keep=False))
        return blocks.replayed_top_candidates(in_blocks, count, for_webgpu=self._for_webgpu)


def _take_block(values: Tensor, chosen: Tensor) -> Tensor:
    """The block `chosen`, [B, 1] int64, of `values`, [B, n, C]: [B, C]."""
    places = op("Expand", chosen.unsqueeze(), [1, 1, axis_size(values, 2)])
    return values.gather(places).squeeze(1)
