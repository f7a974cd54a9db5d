"""Steps 3 and 4 of the contract: greedy rows take the argmax, random rows are filtered and drawn.

A random row is drawn from the candidates, the K largest logits, if these settle it, that is, if no
other token can be drawn: top-k keeps at most K tokens, or a threshold (top-p, min-p, top-n-sigma)
filters out the last candidate. Otherwise the whole vocabulary is filtered. Both ways are exact.

Each part is in a branch that runs only if some row needs it; a batch of greedy rows runs none.
Branches are nested, so a step evaluates only the conditions it reaches. Graphs for replay have no
branches: `replay_draw` draws from the same pools, with the same filters.
"""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from qsample.contract.tensors import (
    HUGGING_FACE,
    NOISE,
    PROCESSED_LOGPROBS,
    STATEFUL_FILTERS,
    XTC_NOISE,
)
from qsample.sampler import blocks, filters
from qsample.sampler.blocks import FLOOR, Blocks, block_size
from qsample.sampler.call import DrawCall
from qsample.sampler.filters import Filter, FilterInputs, SharedNumbers
from qsample.sampler.pools import Candidates, Pool, Vocabulary
from qsample.sampler.search import PivotSearch, Search
from qsample.sampler.tensor import (
    FLOAT,
    Tensor,
    TensorRecord,
    constant,
    constants,
    log_of_column,
    maximum,
    minimum,
    op,
    where,
)

# In the place of a token, where there is none.
NO_TOKEN: Final = -1
# The log-probability of a token that cannot be drawn.
MASKED_LOGPROB: Final = -math.inf
# The smallest probability of a drawn token that counts: float32's smallest normal number.
LEAST_SHARE: Final = 2.0**-126
# The least distance between the largest and the smallest logit by which others are divided.
_LEAST_SPREAD = 2.0**-126


@dataclass(frozen=True)
class Likeliest(TensorRecord):
    """The M likeliest tokens of each row, likeliest first; of equals, the lower ids first.

    Attributes:
        ids: [B, M] int64; -1 in the place of tokens that cannot be drawn.
        logprobs: [B, M] float32, their log-probabilities; -inf in these places.
    """

    ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True)
class Outcome(TensorRecord):
    """The token of each row, and the values of the draw that outputs and states need.

    To add a value, add a field here, compute it in `PoolDraws.outcome_of`, and give the rows that
    draw nothing a placeholder in `nothing_drawn`.

    Attributes:
        token: [B, 1] int64.
        probs: [B, V] float32, the distribution that the token was drawn from; None unless it is an
            output.
        share: [B, 1] float32, the probability of the token before adaptive-p; None unless a state
            needs it.
        logprob: [B, 1] float32, the token's log-probability in the distribution that it was drawn
            from; None unless it is an output.
        top: the likeliest tokens of this distribution; None unless they are an output.
    """

    token: Tensor
    probs: Tensor | None
    share: Tensor | None
    logprob: Tensor | None
    top: Likeliest | None


@dataclass(frozen=True)
class Draw:
    """The results of a step's draw.

    Attributes:
        token: [B, 1] int64, 0 in rows that emit no token.
        emitted: [B] bool, the rows that emit a token.
        random: [B] bool, the rows whose token was drawn at random.
        outcome: the other values of the draw; they only have a meaning in random rows.
        adjusted: [B, V] float32, the logits after step 2.
    """

    token: Tensor
    emitted: Tensor
    random: Tensor
    outcome: Outcome
    adjusted: Tensor


def draw(call: DrawCall, adjusted: Tensor, num_candidates: int) -> Draw:
    """Choose the token of each row that has to emit a token.

    Args:
        call: the inputs of the call.
        adjusted: [B, V] float32, the logits after step 2.
        num_candidates: K, how many of the largest logits are tried before the whole vocabulary.
    """
    logits = blocks.split(adjusted, call.vocab, block_size(call.vocab))
    largest = logits.maxima.max(keep=False)
    emitted = call.sampling & blocks.is_valid(logits, largest)
    random = emitted & (call["temperature"] > 0)
    greedy = blocks.argmax(logits)
    outcome = call.branch(
        random,
        lambda: _RandomRows(call, logits, largest, random, greedy, num_candidates).outcome(),
        lambda: nothing_drawn(call, largest, greedy),
    )
    token = where(emitted.unsqueeze(), outcome.token, 0)
    return Draw(token, emitted, random, outcome, adjusted)


def nothing_drawn(call: DrawCall, largest: Tensor, greedy: Tensor) -> Outcome:
    """The outcome of rows that draw nothing: the greedy token, [B, 1], and unused numbers.

    Args:
        call: the inputs of the call.
        largest: [B] float32, any numbers.
        greedy: [B, 1] int64, the tokens.
    """
    return Outcome(
        token=greedy,
        probs=_no_probs(call, greedy) if call.features.probs else None,
        share=largest.unsqueeze() if call.uses(*STATEFUL_FILTERS) else None,
        logprob=largest.unsqueeze() if _has_processed_logprob(call) else None,
        top=_no_likeliest(call, greedy) if _has_processed_top(call) else None,
    )


def _has_processed_logprob(call: DrawCall) -> bool:
    features = call.features
    return features.logprobs and features.logprobs_mode == PROCESSED_LOGPROBS


def _has_processed_top(call: DrawCall) -> bool:
    features = call.features
    return features.top_logprobs > 0 and features.logprobs_mode == PROCESSED_LOGPROBS


def _no_likeliest(call: DrawCall, greedy: Tensor) -> Likeliest:
    ids = op("Expand", constants(greedy, NO_TOKEN), [1, call.features.top_logprobs])
    return Likeliest(ids, ids.to(FLOAT))


def _no_probs(call: DrawCall, greedy: Tensor) -> Tensor:
    return op("Expand", constants(greedy, 0), [1, call.vocab]).to(FLOAT)


def _one() -> Tensor:
    """A placeholder of 1, with which filters that are off stay finite: [1, 1] float32."""
    return constant(np.ones((1, 1), np.float32))


@dataclass(frozen=True)
class _Attempt(TensorRecord):
    """The result of drawing from the candidates.

    Attributes:
        outcome: the outcome of the rows that the candidates settle; other rows have the greedy
            token.
        unsettled: [B] bool, the random rows that need the whole vocabulary.
    """

    outcome: Outcome
    unsettled: Tensor


class PoolDraws(ABC):
    """Draws of some rows, from pools of both kinds: what `draw` and `replay_draw` share."""

    def __init__(
        self, call: DrawCall, logits: Blocks, largest: Tensor, random: Tensor, greedy: Tensor
    ) -> None:
        """Prepare the numbers that both kinds of pools need.

        Args:
            call: the inputs of the rows.
            logits: the adjusted logits.
            largest: [B] float32, the largest logit of each row.
            random: [B] bool, the random rows.
            greedy: [B, 1] int64, the token of all other rows.
        """
        self._call = call
        self._logits = logits
        self._largest = largest
        self._random = random
        self._greedy = greedy
        self._filters = filters.filters_of(call.features)
        # Before top-k, the temperature follows the entropy of the whole vocabulary, which the
        # candidates do not have.
        self._has_early_dynatemp = (
            call.uses("dynatemp") and call.features.filter_order == HUGGING_FACE
        )
        self._uniform = call.uniforms()
        # Inputs are read here, once, so that the branches share them.
        self._parameters = dict(call.inputs)
        self._shared = SharedNumbers()

    @abstractmethod
    def _search(self) -> Search:
        """The search of thresholds in the whole vocabulary."""

    def _outcome_of(self, pool: Pool, token: Tensor) -> Outcome:
        """The outcome of drawing `token`, [B, 1] int64, from the rest of the pool."""
        call = self._call
        return Outcome(
            token,
            probs=self._probs(pool) if call.features.probs else None,
            share=pool.share_of(token) if call.uses(*STATEFUL_FILTERS) else None,
            logprob=_logprob(pool, token) if _has_processed_logprob(call) else None,
            top=_likeliest(pool, call.features.top_logprobs) if _has_processed_top(call) else None,
        )

    def _probs(self, pool: Pool) -> Tensor:
        """The pool's distribution over the vocabulary, [B, V] float32."""
        # A pool's sums do not depend on the batch; a sum over [B, V] would.
        probs = pool.weights / pool.row(pool.sum(pool.weights))
        if isinstance(pool, Candidates):
            # ONNX Runtime 1.31 sorts NaN behind the padding of the vocabulary, whose ids are no ids.
            ids = minimum(pool.ids, self._call.vocab - 1)
            return _no_probs(self._call, self._greedy).scatter(ids, probs)
        return blocks.joined(probs).columns(0, self._call.vocab)

    def _apply(self, steps: Sequence[Filter], pool: Pool) -> None:
        row = FilterInputs(self._parameters, self._shared)
        for step in steps:
            step.apply(pool, row)

    def _vocabulary(self, searched: Tensor) -> Vocabulary:
        """All tokens, before any filter. searched: [B, 1] bool, the rows whose thresholds
        matter."""
        x = self._logits.values - self._largest.unsqueeze().unsqueeze()
        return Vocabulary(x, searched, self._search())

    def _vocabulary_before(self, step: Filter) -> Vocabulary:
        """All tokens, after the filters that precede `step`."""
        pool = self._vocabulary(self._random.unsqueeze())
        self._apply(self._filters[: self._filters.index(step)], pool)
        return pool

    def _share_numbers(self) -> None:
        """Compute the numbers that are the same for both pools.

        The temperature is last: the filters before it read the other numbers.
        """
        call = self._call
        if call.uses("xtc"):
            self._shared = replace(self._shared, xtc_uniform=self._uniform(XTC_NOISE))
        if call.uses("top_n_sigma"):
            needed = self._random & (call["top_n_sigma"] > 0)
            # Rows that draw nothing need a positive number, too: otherwise no token would be left.
            deviation = call.branch(needed, self._deviation, _one)
            self._shared = replace(self._shared, deviation=deviation)
        if self._has_early_dynatemp:
            needed = self._random & (call["dynatemp_range"] > 0)
            temperature = call.branch(
                needed, self._dynamic_temperature, lambda: call["temperature"].unsqueeze()
            )
            self._shared = replace(self._shared, temperature=temperature)

    def _dynamic_temperature(self) -> Tensor:
        pool = self._vocabulary_before(filters.TEMPERATURE)
        return filters.dynamic_temperature(pool, FilterInputs(self._parameters, self._shared))

    def _deviation(self) -> Tensor:
        """The standard deviation of each row's unmasked logits, [B, 1] float32."""
        pool = self._vocabulary(self._random.unsqueeze())
        there = (pool.x > FLOOR).to(FLOAT)
        x = maximum(pool.x, FLOOR) * there
        # Logits are divided by the lowest, because sums of large logits and of their squares
        # overflow.
        lowest = minimum(pool.least(x), -_LEAST_SPREAD)
        share = op("Div", x, lowest)
        count = maximum(pool.sum(there), 1.0)
        distance = (share - pool.row(pool.sum(share) / count)) * there
        deviation = op("Sqrt", pool.sum(distance * distance) / count)
        return deviation * -lowest.squeeze()


class _RandomRows(PoolDraws):
    """The random rows of a call with control flow."""

    def __init__(
        self,
        call: DrawCall,
        logits: Blocks,
        largest: Tensor,
        random: Tensor,
        greedy: Tensor,
        num_candidates: int,
    ) -> None:
        """Compute the conditions of the branches and the numbers that both pools share.

        Args:
            call, logits, largest, random, greedy: see `PoolDraws`.
            num_candidates: K; at most V of them are used.
        """
        super().__init__(call, logits, largest, random, greedy)
        self._num_candidates = min(num_candidates, call.vocab)
        self._has_small_top_k = filters.has_small_top_k(call, num_candidates)
        self._has_top_k = call["top_k"] > 0
        self._has_threshold = self._find_thresholds()
        self._has_other_filter = self._find_other_filters()
        self._share_numbers()

    def _search(self) -> Search:
        return PivotSearch()

    def outcome(self) -> Outcome:
        """The outcome of all random rows; the other rows have the greedy token."""
        attempt = self._try_candidates()
        # Filters that are off leave a row unchanged, so they may run for another row's sake.
        filtered = self._has_threshold
        if self._has_other_filter is not None:
            filtered = filtered | self._has_other_filter
        return self._call.branch(
            attempt.unsettled,
            lambda: self._draw_unsettled(attempt, filtered),
            lambda: attempt.outcome,
        )

    def _try_candidates(self) -> _Attempt:
        """Draw the rows that the candidates settle."""
        call = self._call
        narrowed = self._has_threshold
        if self._has_other_filter is not None:
            narrowed = narrowed & ~self._has_other_filter
        # Behind a top-k above K, the total that top-p needs is unknown.
        unknown_total = self._has_top_k & (call["top_p"] < 1)
        tried = self._random & (self._has_small_top_k | (narrowed & ~unknown_total))
        needs_total = tried & ~self._has_small_top_k & (call["top_p"] < 1)
        return call.branch(
            tried,
            lambda: self._from_candidates(tried, needs_total),
            lambda: _Attempt(
                nothing_drawn(call, self._largest, self._greedy), unsettled=self._random
            ),
        )

    def _from_candidates(self, tried: Tensor, needs_total: Tensor) -> _Attempt:
        """Draw from the K largest logits.

        Args:
            tried: [B] bool, the rows that the candidates may settle.
            needs_total: [B] bool, the rows whose top-p needs the weight of the whole vocabulary.
        """
        call = self._call
        # Rows that do not need the total still pass through disabled filters, so it must be finite.
        total = call.branch(needs_total, self._total_before_top_k, _one)
        values, ids = blocks.top_candidates(self._logits, self._num_candidates)
        small = self._has_small_top_k.unsqueeze()
        x = maximum(values - self._largest.unsqueeze(), FLOOR)
        pool = Candidates(x, ids, small, total)
        self._apply(self._filters, pool)
        settled = tried.unsqueeze() & (small | pool.weights.last().equals(0.0))
        drawn = self._outcome(pool)
        outcome = replace(drawn, token=where(settled, drawn.token, self._greedy))
        return _Attempt(outcome, unsettled=self._random & ~settled.squeeze())

    def _draw_unsettled(self, attempt: _Attempt, filtered: Tensor) -> Outcome:
        """Draw the unsettled rows from the vocabulary, with only those filters that some row needs.

        Args:
            attempt: the result of drawing from the candidates.
            filtered: [B] bool, the rows with a filter other than the temperature and top-k.
        """
        without_top_k = [step for step in self._filters if step is not filters.TOP_K]
        return self._call.branch(
            attempt.unsettled & self._has_top_k,
            lambda: self._from_vocabulary(attempt, self._filters),
            lambda: self._call.branch(
                attempt.unsettled & filtered,
                lambda: self._from_vocabulary(attempt, without_top_k),
                lambda: self._from_vocabulary(attempt, [filters.TEMPERATURE]),
            ),
        )

    def _from_vocabulary(self, attempt: _Attempt, steps: Sequence[Filter]) -> Outcome:
        """Draw the unsettled rows from all tokens; the other rows keep their outcome."""
        unsettled = attempt.unsettled.unsqueeze()
        pool = self._vocabulary(unsettled)
        self._apply(steps, pool)
        return self._outcome(pool).where(unsettled, attempt.outcome)

    def _outcome(self, pool: Pool) -> Outcome:
        """Draw a token of each row from the tokens that the filters left in the pool."""
        return self._outcome_of(pool, pool.draw(self._uniform(NOISE)))

    def _total_before_top_k(self) -> Tensor:
        """The weight of the whole vocabulary, for top-p: [B, 1] float32."""
        return self._vocabulary_before(filters.TOP_K).total()

    def _find_thresholds(self) -> Tensor:
        """The rows with a threshold that may filter out the last candidate: [B] bool."""
        call = self._call
        found = (call["top_p"] < 1) | (call["min_p"] > 0)
        if call.uses("top_n_sigma"):
            found = found | (call["top_n_sigma"] > 0)
        return found

    def _find_other_filters(self) -> Tensor | None:
        """The rows with a filter for which the candidates do not suffice: [B] bool.

        None if the graph has no such filter.
        """
        steps = [step for step in self._filters if not step.candidates_suffice]
        if self._call.uses("dynatemp") and not self._has_early_dynatemp:
            steps.append(filters.DYNATEMP)
        steps.sort(key=lambda step: step.name)
        conditions = [step.is_on(self._call) for step in steps]
        return functools.reduce(operator.or_, conditions) if conditions else None


def _logprob(pool: Pool, token: Tensor) -> Tensor:
    """The log-probability of each row's token, [B, 1] float32. token: [B, 1] int64."""
    return _log_shares(pool, pool.at(pool.weights, token))


def _likeliest(pool: Pool, count: int) -> Likeliest:
    """The tokens of a pool with the largest log-probabilities. count: M."""
    weights, ids = pool.likeliest(count)
    there = weights >= LEAST_SHARE
    logprobs = where(there, _log_shares(pool, weights), MASKED_LOGPROB)
    return Likeliest(where(there, ids, NO_TOKEN), logprobs)


def _log_shares(pool: Pool, weights: Tensor) -> Tensor:
    """The logarithms of shares of a pool's total, [B, n] float32, from weights of this shape."""
    # The weight of a token that u = 0 draws may round to 0 in float32.
    column = maximum(weights, LEAST_SHARE).unsqueeze()
    return log_of_column(column).squeeze() - log_of_column(pool.sum(pool.weights))
