"""Steps 3 and 4 of the contract: the argmax of greedy rows; the filters and the draw of random ones.

A random row is drawn from the candidates, the K largest logits, if they settle it: if no other token can be drawn. That
is so if top-k keeps no more of them, or if a threshold (top-p, min-p, top-n-sigma) filters out the last. Otherwise the
whole vocabulary is filtered. Both are exact.

With control flow, each part is under a branch that asks whether any row needs it; a batch of greedy rows takes none.
The branches are inside each other, so that a step runs the conditions of those parts alone that it comes to.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial, reduce
from typing import NamedTuple

import numpy as np

from qsample.contract.tensors import (
    EXTRA_PARAMETERS,
    HUGGING_FACE,
    NOISE,
    NOISE_STREAM,
    SEARCHED_ROWS,
    STATEFUL,
    XTC_NOISE,
    XTC_STREAM,
    TensorSpec,
)
from qsample.sampler import blocks, filters
from qsample.sampler.blocks import FLOOR, Blocks, block_size
from qsample.sampler.call import Call, Columns
from qsample.sampler.philox import uniforms
from qsample.sampler.pools import Candidates, Pool, Vocabulary
from qsample.sampler.search import Search
from qsample.sampler.tensor import (
    FLOAT,
    Tensor,
    Tensors,
    constant,
    constants,
    maximum,
    minimum,
    op,
    where,
)

_LEAST_REACH = 2.0**-126


class Draw(NamedTuple):
    """The results of a step's draw for each row. token: [B, 1] int64, 0 in rows that emit none. emitted, random: [B]
    bool; random rows drew their token. probs: [B, V] float32, the distribution of random rows; None unless it is an
    output. share: [B, 1] float32, the drawn token's probability before adaptive-p; None unless a state needs it."""

    token: Tensor
    emitted: Tensor
    random: Tensor
    probs: Tensor | None
    share: Tensor | None


def draw(call: Call, adjusted: Tensor, num_candidates: int) -> Draw:
    """The token of each row that has to emit one, from `num_candidates` (K) or all tokens. adjusted: [B, V] float32,
    the logits after step 2."""
    split = blocks.split(adjusted, call.vocab, block_size(call.vocab))
    largest = split.maxima.max(keep=False)
    emitted = call.sampling & blocks.is_valid(split, largest)
    if call.captured:
        emitted = emitted & (_is_listed(call) | ~_needs_search(call, num_candidates))
    random = emitted & (call["temperature"] > 0)
    greedy = blocks.argmax(split, replayed=call.captured)
    token, *more = call.branch(
        random,
        lambda: _RandomRows(call, split, largest, random, greedy, num_candidates).results(),
        lambda: _no_results(call, largest, greedy),
    )
    probs = more.pop(0) if call.features.probs else None
    share = more.pop(0) if call.uses(*STATEFUL) else None
    return Draw(where(emitted.unsqueeze(), token, 0), emitted, random, probs, share)


def _no_results(call: Call, largest: Tensor, greedy: Tensor) -> Tensors:
    """`_RandomRows.results` of rows that draw nothing."""
    probs = [_no_probs(call, greedy)] if call.features.probs else []
    share = [largest.unsqueeze()] if call.uses(*STATEFUL) else []
    return greedy, *probs, *share


def _no_probs(call: Call, greedy: Tensor) -> Tensor:
    return op("Expand", constants(greedy, 0), [1, call.vocab]).to(FLOAT)


class _RandomRows:
    """The random rows of one call. greedy: [B, 1] int64, the token of all other rows."""

    def __init__(
        self,
        call: Call,
        split: Blocks,
        largest: Tensor,
        random: Tensor,
        greedy: Tensor,
        num_candidates: int,
    ) -> None:
        self._call, self._split, self._largest, self._greedy = call, split, largest, greedy
        self._random = random
        self._num_candidates = min(num_candidates, call.vocab)
        chosen = (*filters.ALWAYS, *call.features.filters)
        self._filters = [
            step for step in filters.ORDERS[call.features.filter_order] if step.__name__ in chosen
        ]
        # Before top-k, the entropy counts the whole vocabulary, and the candidates do not know it.
        self._dynamic_first = call.uses("dynatemp") and call.features.filter_order == HUGGING_FACE
        self._small = filters.has_small_top_k(call, num_candidates)
        self._has_top_k = call["top_k"] > 0
        self._narrowed = (call["top_p"] < 1) | (call["min_p"] > 0)
        if call.uses("top_n_sigma"):
            self._narrowed = self._narrowed | (call["top_n_sigma"] > 0)
        self._extra = self._extra_filters()
        self._seeded = self._uniforms_of_seed() if call.features.seed else {}
        self._numbers = dict(call.inputs) | {"maximum": largest}
        self._add_shared_numbers()

    def results(self) -> Tensors:
        """Token [B, 1] of every row; and of random ones the probabilities and the share, if they are wanted."""
        call, small = self._call, self._small
        narrowed = self._narrowed if self._extra is None else self._narrowed & ~self._extra
        # After a larger top-k, the total of top-p is not known.
        beyond = self._has_top_k & (call["top_p"] < 1)
        tried = self._random & (small | (narrowed & ~beyond))
        needs_total = tried & ~small & (call["top_p"] < 1)

        def from_candidates() -> Tensors:
            # In the other rows, filters that are off read it.
            (total,) = call.branch(needs_total, self._total, self._any_number)
            return self._from_candidates(tried, total)

        def not_tried() -> Tensors:
            return *_no_results(call, self._largest, self._greedy), self._random

        *found, unsettled = call.branch(tried, from_candidates, not_tried)

        def from_vocabulary(*left_out: filters.Filter) -> Tensors:
            return self._from_vocabulary(
                found, unsettled, [step for step in self._filters if step not in left_out]
            )

        if call.captured:
            return from_vocabulary()
        # A row goes unchanged through filters that another row needs.
        filtered = self._narrowed if self._extra is None else self._narrowed | self._extra

        def without_top_k() -> Tensors:
            unfiltered = [step for step in self._filters if step is not filters.temperature]
            return call.branch(
                unsettled & filtered,
                partial(from_vocabulary, filters.top_k),
                partial(from_vocabulary, *unfiltered),
            )

        def all_of_it() -> Tensors:
            return call.branch(unsettled & self._has_top_k, from_vocabulary, without_top_k)

        return call.branch(unsettled, all_of_it, partial(tuple, found))

    def _from_candidates(self, tried: Tensor, total: Tensor) -> Tensors:
        """The results of rows that the candidates settle; and which random rows they do not, [B] bool."""
        row = Columns(self._numbers)
        values, ids = blocks.top_candidates(
            self._split, self._num_candidates, replayed=self._call.captured
        )
        small = self._small.unsqueeze()
        x = maximum(values - row["maximum"], FLOOR)
        if self._call.captured:  # a masked token's value may be close to a low maximum
            x = where(values > FLOOR, x, FLOOR)
        pool = Candidates(x, ids, small, total)
        self._filtered(pool, self._filters)
        settled = tried.unsqueeze() & (small | pool.weights.last().equals(0.0))
        token, *more = self._results(pool)
        return where(settled, token, self._greedy), *more, self._random & ~settled.squeeze()

    def _from_vocabulary(
        self, found: Sequence[Tensor], unsettled: Tensor, chosen: Sequence[filters.Filter]
    ) -> Tensors:
        rows = unsettled.unsqueeze()
        pool = self._filtered(self._vocabulary(rows), chosen)
        return tuple(
            where(rows, new, old) for new, old in zip(self._results(pool), found, strict=True)
        )

    def _filtered(self, pool: Pool, chosen: Sequence[filters.Filter]) -> Pool:
        row = Columns(self._numbers)
        for step in chosen:
            step(pool, row)
        return pool

    def _total(self) -> Tensors:
        """The weight of the whole vocabulary, for top-p: [B, 1]."""
        return (self._before(filters.top_k).total(),)

    def _any_number(self) -> Tensors:
        """A number that no row needs; 1, so that filters that are off are finite."""
        return (constant(np.ones((1, 1), np.float32)),)

    def _before(self, last: filters.Filter) -> Pool:
        """The vocabulary after the filters that precede `last`."""
        pool = self._vocabulary(self._random.unsqueeze())
        return self._filtered(pool, self._filters[: self._filters.index(last)])

    def _vocabulary(self, searched: Tensor) -> Vocabulary:
        listed = self._call[SEARCHED_ROWS.name] if self._call.captured else None
        search = Search(listed, skipped=self._call.for_webgpu)
        return Vocabulary(self._shifted(), searched, search, replayed=self._call.captured)

    def _shifted(self) -> Tensor:
        """The difference of each logit from the largest of its row: [B, n, C]."""
        return self._split.values - self._largest.unsqueeze().unsqueeze()

    def _results(self, pool: Pool) -> Tensors:
        token = pool.draw(self._uniform(NOISE))
        results = [token]
        if self._call.features.probs:
            # Here and not over [B, V]: the pools' sums do not depend on the batch.
            probs = pool.weights / pool.row(pool.sum(pool.weights))
            if isinstance(pool, Candidates):
                results.append(_no_probs(self._call, self._greedy).scatter(pool.ids, probs))
            else:
                results.append(probs.reshape(0, -1).columns(0, self._call.vocab))
        if self._call.uses(*STATEFUL):
            results.append(pool.share_of(token))
        return tuple(results)

    def _uniform(self, buffer: TensorSpec) -> Tensor:
        """The number that decides each row's next token, or whether XTC applies: [B, 1] float32."""
        if self._call.features.seed:
            return self._seeded[buffer.name]
        return self._call[buffer.name].gather(self._call.position().unsqueeze())

    def _uniforms_of_seed(self) -> dict[str, Tensor]:
        """The numbers that a graph with a seed needs, under the names of the buffers that hold them otherwise."""
        call, streams = self._call, {NOISE.name: NOISE_STREAM}
        if call.uses("xtc"):
            streams[XTC_NOISE.name] = XTC_STREAM
        return dict(
            zip(
                streams,
                uniforms(call["seed"], call.position(), list(streams.values())),
                strict=True,
            )
        )

    def _add_shared_numbers(self) -> None:
        """Numbers that filters read in addition to a row's parameters, and that are the same for both pools."""
        call, numbers = self._call, self._numbers
        if call.uses("xtc"):
            numbers["xtc_uniform"] = self._uniform(XTC_NOISE)
        if call.uses("top_n_sigma"):
            on = self._random & (call["top_n_sigma"] > 0)
            # Of rows that draw nothing, too: a distance below 0 would leave them no token at all.
            (numbers["sigma"],) = call.branch(on, self._deviation, self._any_number)
        if self._dynamic_first:

            def dynamic() -> Tensors:
                return (
                    filters.dynamic_temperature(
                        self._before(filters.temperature), Columns(numbers)
                    ),
                )

            on = self._random & (call["dynatemp_range"] > 0)
            (temperature,) = call.branch(on, dynamic, lambda: tuple(call.columns("temperature")))
            numbers["temperature"] = temperature
            del numbers["dynatemp_range"]

    def _deviation(self) -> Tensors:
        """The standard deviation of each row's unmasked logits, [B, 1]."""
        pool = self._before(self._filters[0])
        there = (pool.x > FLOOR).to(FLOAT)
        x = maximum(pool.x, FLOOR) * there
        # As shares of the lowest: sums of large logits and their squares are not finite.
        lowest = minimum(pool.least(x), -_LEAST_REACH)
        share = op("Div", x, lowest)
        count = maximum(pool.sum(there), 1.0)
        distance = (share - pool.row(pool.sum(share) / count)) * there
        deviation = op("Sqrt", pool.sum(distance * distance) / count)
        return (deviation * -lowest.squeeze(),)

    def _extra_filters(self) -> Tensor | None:
        """Whether a row has a filter that is more than a threshold on the logits: [B] bool; None: no row can."""
        names = {step.__name__ for step in self._filters} - {*filters.ALWAYS, "top_n_sigma"}
        if self._call.uses("dynatemp") and not self._dynamic_first:
            names.add("dynatemp")
        first = [EXTRA_PARAMETERS[name][0] for name in sorted(names)]
        on = [~self._call[parameter.name].equals(parameter.off or 0.0) for parameter in first]
        return reduce(operator.or_, on) if on else None


def _needs_search(call: Call, num_candidates: int) -> Tensor:
    """Whether a row's parameters ask for a search of the vocabulary, [B] bool."""
    thresholds = (call["top_p"] < 1) | (call["top_k"] > 0)
    if call.uses("typical_p"):
        thresholds = thresholds | (call["typical_p"] < 1)
    return (call["temperature"] > 0) & ~filters.has_small_top_k(call, num_candidates) & thresholds


def _is_listed(call: Call) -> Tensor:
    """Whether a row is among `searched_rows`, [B] bool."""
    listed = call[SEARCHED_ROWS.name]
    return constants(call.running, 0.0).scatter(listed, constants(listed, 1).to(FLOAT), axis=0) > 0
