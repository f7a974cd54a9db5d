"""One step of the decode contract, from the logits on, in its order: adjust, filter, draw, commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from qsample.contract import (
    CANDIDATES,
    EXTRA_PARAMETERS,
    HUGGING_FACE,
    INVALID_LOGITS,
    LENGTH,
    RUNNING,
    SEARCHED_ROWS,
    STOPPED,
    Interface,
)
from qsample.sampler import adjust, blocks, filters, history, outputs, repetition
from qsample.sampler.blocks import FLOOR, Blocks
from qsample.sampler.philox import uniform
from qsample.sampler.pools import Candidates, Pool, Vocabulary
from qsample.sampler.search import Search
from qsample.sampler.sizes import block_size
from qsample.sampler.tensor import (
    FLOAT,
    INT32,
    INT64,
    Tensor,
    Tensors,
    branch,
    concat,
    log,
    maximum,
    minimum,
    op,
    size,
    where,
)

_REPETITION_FILTERS = ("no_repeat_ngram_size", "bad_words_ids", "dry")
_LN_2 = 0.6931471805599453


class Columns(Mapping[str, Tensor]):
    """Per-row numbers as columns, [B, 1]; made where they are asked for, so that a branch pays for its own."""

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self._rows, self._made = rows, dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            value = self._rows[name]
            self._made[name] = value.unsqueeze() if len(value.shape) == 1 else value
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class Draw(NamedTuple):
    """What a step found for each row.

    Attributes:
        token: [B, 1] int64, of rows that emit, 0 for the others.
        emitted: [B] bool.
        random: [B] bool, rows that drew, and did not take the argmax.
        weights: [B, V] float32, what random rows were drawn from; None unless `probs` was asked for.
        surprise: [B, 1] float32, -log2 of the token's probability; None without Mirostat.
    """

    token: Tensor
    emitted: Tensor
    random: Tensor
    weights: Tensor | None
    surprise: Tensor | None


class Step:
    """One step of all rows.

    Args:
        interface: the vocabulary and the features. `captured`: no If and no Loop, and the input `searched_rows`.
        inputs: the tensors of `Interface.sampler`, by name.
        pad_token_id: `next_ids` of a row that emits nothing.
        num_candidates: K, how many of the largest logits are sorted.
    """

    def __init__(
        self, interface: Interface, inputs: Mapping[str, Tensor], pad_token_id: int, num_candidates: int = CANDIDATES
    ) -> None:
        self._interface, self._inputs, self._pad_token_id = interface, inputs, pad_token_id
        self._vocab = interface.vocab_size
        self._block = block_size(self._vocab)
        self._candidates = min(num_candidates, self._vocab)
        self._captured = interface.captured
        chosen = interface.features
        self._order = [
            step
            for step in filters.ORDERS[chosen.filter_order]
            if step.__name__ in filters.ALWAYS or step.__name__ in chosen.filters
        ]
        # Before top-k, the entropy is that of the vocabulary: the candidates do not have it.
        self._dynamic_first = "dynatemp" in chosen.filters and chosen.filter_order == HUGGING_FACE
        # `lengths` is read once, for the sum: its buffer may be that of its own next value.
        self._total = inputs["lengths"] + inputs["input_lengths"]
        self._start = self._total - inputs["input_lengths"]
        self._running = inputs["status"].equals(RUNNING)
        self._sampling = self._running & inputs["emit"]

    # Draw -----------------------------------------------------------------------------------------------------------

    def adjusted_logits(self) -> Tensor:
        """Step 2: masks, biases, bans and penalties."""
        given, chosen, logits = self._inputs, self._interface.features, self._inputs["logits"]
        if chosen.allowed_tokens:
            logits = adjust.mask_disallowed(logits, given["allowed_tokens"], self._vocab)
        if chosen.logit_bias:
            logits = adjust.add_bias(logits, given["logit_bias_ids"], given["logit_bias"], self._vocab)
        tokens = self._history() if set(_REPETITION_FILTERS) & set(chosen.filters) else None
        if tokens is not None:
            logits = self._forbid(logits, tokens)
        # One scatter for all: if the logits are in a buffer of the graph's own, it is in place.
        logits = logits.scatter(*self._block_and_penalize(logits))
        if tokens is not None and "dry" in chosen.filters:
            logits = self._dry(logits, tokens)
        return logits

    def _block_and_penalize(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The stop ids below the minimum length, and the history with its penalties: ids [B, h] and their logits."""
        given = self._inputs
        repetition, presence, frequency = (given[f"{kind}_penalty"] for kind in ("repetition", "presence", "frequency"))
        penalized = ~(repetition.equals(1.0) & presence.equals(0.0) & frequency.equals(0.0))
        too_short = self._total < given["min_length"]

        def seen() -> Tensor:
            # The history is read as far as some row is penalized for it: not at all if no row is.
            length = op("Squeeze", size(given["tokens"], 1))
            if not self._captured:
                length = minimum(where(penalized, self._start, 0).max(keep=False).to(INT64), length)
            lengths = given["input_lengths"].unsqueeze()
            return history.history_ids(given["tokens"], self._start.unsqueeze(), given["input_ids"], lengths, length)

        def after_penalties(ids: Tensor) -> Tensor:
            row = Columns(given)
            strengths = (row[f"{kind}_penalty"] for kind in ("repetition", "presence", "frequency"))
            return adjust.penalize(logits, ids, given["output_counts"], *strengths)

        def with_stops() -> Tensors:
            ids = seen()
            stops = where(too_short.unsqueeze(), given["stop_ids"], -1).to(INT64)
            ids = concat(ids, where(stops >= 0, stops, ids.last()))
            return ids, adjust.block(after_penalties(ids), ids, stops)

        def without_stops() -> Tensors:
            ids = seen()
            return ids, after_penalties(ids)

        def nothing() -> Tensors:
            return given["input_ids"].columns(0, 0), logits.columns(0, 0)

        if self._captured:
            ids, values = with_stops()
            return ids, values
        some_too_short = too_short.any()
        ids, values = branch(some_too_short, with_stops, nothing)
        more_ids, more_values = branch(penalized.any() & ~some_too_short, without_stops, nothing)
        return concat(ids, more_ids), concat(values, more_values)

    def _history(self) -> repetition.History:
        given, start = self._inputs, self._start.unsqueeze()
        tokens = history.row_tokens(given["tokens"], start, given["input_ids"], given["input_lengths"].unsqueeze())
        capacity = op("Squeeze", size(given["tokens"], 1))
        return repetition.History(tokens, minimum(self._total.unsqueeze().to(INT64), capacity))

    def _forbid(self, logits: Tensor, tokens: repetition.History) -> Tensor:
        names = self._interface.features.filters
        if "bad_words_ids" in names:
            logits = repetition.forbid_bad_words(logits, tokens, self._inputs["bad_words_ids"])
        if "no_repeat_ngram_size" in names:
            ngram, given = self._inputs["no_repeat_ngram_size"], logits

            def banned() -> Tensors:
                return (repetition.forbid_repeated_ngrams(given, tokens, ngram.unsqueeze()),)

            (logits,) = self._branch(ngram > 0, banned, lambda: (given,))
        return logits

    def _dry(self, logits: Tensor, tokens: repetition.History) -> Tensor:
        row = Columns(self._inputs)
        names = [spec.name for spec in EXTRA_PARAMETERS["dry"]]
        on = self._inputs["dry_multiplier"] > 0
        (logits,) = self._branch(
            on,
            lambda: (repetition.dry(logits, tokens, *(Columns(self._inputs)[name] for name in names)),),
            lambda: (logits,),
        )
        del row
        return logits

    def draw(self, adjusted: Tensor) -> Draw:
        """Steps 3 and 4: the argmax of greedy rows; the filters and the draw of random ones."""
        split = blocks.split(adjusted, self._vocab, self._block)
        largest = split.maxima.max(keep=False)
        drawing = self._sampling & blocks.is_valid(split, largest, one_product=self._captured)
        if self._captured:
            drawing = drawing & (self._is_listed() | ~self._needs_search())
        greedy = blocks.argmax(split)
        random = drawing & (self._inputs["temperature"] > 0)
        token, *extras = self._draw_random(split, largest, random, greedy)
        token = where(drawing.unsqueeze(), where(random.unsqueeze(), token, greedy), 0)
        weights = extras.pop(0) if self._interface.features.probs else None
        return Draw(token, drawing, random, weights, extras.pop(0) if self._uses("mirostat") else None)

    def _draw_random(self, split: Blocks, largest: Tensor, random: Tensor, greedy: Tensor) -> Tensors:
        """Draw from the candidates, or from the whole vocabulary if they do not settle the row.

        The candidates settle a row if no other token can be drawn: if top-k keeps no more, or if the last candidate is
        filtered out by a threshold. Without top-k, the total of top-p is that of the vocabulary. Each part is under a
        branch that asks whether any row needs it; a batch of greedy rows takes none.

        Returns:
            Token [B, 1], and what `_results` adds.
        """
        given, row = self._inputs, Columns(self._inputs)
        small = self._has_small_top_k()
        extra = self._extra_filter_is_on()
        has_top_p = given["top_p"] < 1
        narrowed = has_top_p | (given["min_p"] > 0)
        if self._uses("top_n_sigma"):
            narrowed = narrowed | (given["top_n_sigma"] > 0)
        tried = random & (small | (narrowed if extra is None else narrowed & ~extra))
        numbers = dict(given) | {"maximum": largest} | self._shared_numbers(split, largest, random)
        if self._dynamic_first:
            del numbers["dynatemp_range"]  # `temperature` is the dynamic one

        def whole() -> Tensors:
            pool, columns = self._vocabulary(split, numbers, random), Columns(numbers)
            for step in self._order[: self._order.index(filters.top_k)]:
                step(pool, columns)
            return (pool.total(),)

        (total,) = self._branch(tried & ~small & has_top_p, whole, lambda: (largest.unsqueeze(),))

        def from_candidates() -> Tensors:
            columns = Columns(numbers)
            values, ids = blocks.top_candidates(split, self._candidates, replayed=self._captured)
            pool = Candidates(_shift(values, columns["maximum"]), ids, small.unsqueeze(), total)
            self._filter(pool, columns)
            beyond = (pool.weights.last() > 0) | (columns["top_p"] < 1) & (columns["top_k"] > 0)
            unsettled = random.unsqueeze() & ~(tried.unsqueeze() & (small.unsqueeze() | ~beyond))
            return (*self._results(pool, columns), unsettled)

        def nothing() -> Tensors:
            return (greedy, *self._no_results(greedy, split), random.unsqueeze())

        *first, unsettled = self._branch(tried, from_candidates, nothing)

        def from_vocabulary(*, filtered: bool) -> Tensors:
            columns = Columns(numbers)
            pool = self._vocabulary(split, numbers, unsettled)
            if filtered:
                self._filter(pool, columns)
            else:
                filters.temperature(pool, columns)
            return self._settle(unsettled, self._results(pool, columns), tuple(first))

        wide = narrowed | (given["top_k"] > 0)
        wide = unsettled & (wide if extra is None else wide | extra).unsqueeze()
        if self._captured:
            return from_vocabulary(filtered=True)
        # Without filters, rows need no search; next to rows with filters, they go through it unchanged.
        some_wide = wide.any()
        found = branch(some_wide, lambda: from_vocabulary(filtered=True), lambda: tuple(first))
        plain = op("And", unsettled.any(), ~some_wide)
        del row
        return branch(plain, lambda: from_vocabulary(filtered=False), lambda: found)

    def _filter(self, pool: Pool, row: Mapping[str, Tensor]) -> None:
        for step in self._order:
            step(pool, row)

    def _vocabulary(self, split: Blocks, numbers: Mapping[str, Tensor], searched: Tensor) -> Vocabulary:
        x = split.values - numbers["maximum"].unsqueeze().unsqueeze()
        search = Search(self._inputs[SEARCHED_ROWS.name] if self._captured else None)
        return Vocabulary(x, searched, search, replayed=self._captured)

    def _shared_numbers(self, split: Blocks, largest: Tensor, random: Tensor) -> dict[str, Tensor]:
        """Numbers a row, [B, 1], that filters read besides their parameters."""
        numbers = {"uniform": self._uniform("noise", 0)}
        if self._uses("xtc"):
            numbers["xtc_uniform"] = self._uniform("xtc_noise", 1)
        if self._uses("top_n_sigma"):

            def deviation() -> Tensors:
                x = _shift(split.values, largest.unsqueeze().unsqueeze())
                there = (x > FLOOR / 2).to(FLOAT)
                pool = Vocabulary(x, random, Search(None), replayed=self._captured)
                count = maximum(pool.sum(there), 1.0)
                mean = pool.sum(maximum(x, FLOOR / 2) * there) / count
                distance = (x - pool.row(mean)) * there
                return (op("Sqrt", pool.sum(distance * distance) / count),)

            on = random & (self._inputs["top_n_sigma"] > 0)
            (numbers["sigma"],) = self._branch(on, deviation, lambda: (largest.unsqueeze(),))
        if self._dynamic_first:

            def dynamic() -> Tensors:
                row = Columns(dict(self._inputs) | numbers)
                pool = self._vocabulary(split, {"maximum": largest}, random)
                for step in self._order[: self._order.index(filters.temperature)]:
                    step(pool, row)
                return (filters.dynamic_temperature(pool, row),)

            on = random & (self._inputs["dynatemp_range"] > 0)
            (numbers["temperature"],) = self._branch(on, dynamic, lambda: (self._inputs["temperature"].unsqueeze(),))
        return numbers

    def _uniform(self, buffer: str, stream: int) -> Tensor:
        """The uniform number of each row's next position, [B, 1] float32."""
        given = self._inputs
        if self._interface.features.seed:
            return uniform(given["seed"], self._total, stream)
        position = minimum(self._total.to(INT64), op("Squeeze", size(given["tokens"], 1)) - 1)
        return given[buffer].gather(position.unsqueeze())

    def _results(self, pool: Pool, row: Mapping[str, Tensor]) -> Tensors:
        """Token [B, 1] int64; weights [B, V] if they are an output; and the token's surprise in bits for Mirostat."""
        token = pool.draw(row["uniform"])
        results = [token]
        if self._interface.features.probs:
            if isinstance(pool, Candidates):
                results.append(self._no_weights(row["maximum"]).scatter(pool.ids, pool.weights))
            else:
                results.append(pool.weights.reshape(0, -1).columns(0, self._vocab))
        if self._uses("mirostat"):
            results.append(log(pool.total() / pool.weight_of(token)) * (1 / _LN_2))
        return tuple(results)

    def _no_results(self, column: Tensor, split: Blocks) -> Tensors:
        results = []
        if self._interface.features.probs:
            results.append(self._no_weights(column.to(FLOAT)))
        if self._uses("mirostat"):
            results.append(column.to(FLOAT))
        return tuple(results)

    def _no_weights(self, column: Tensor) -> Tensor:
        zero = where(column.equals(column), 0.0, 0.0)  # also of NaN
        return op("Expand", zero, [1, self._vocab])

    def _settle(self, unsettled: Tensor, new: Tensors, old: Tensors) -> Tensors:
        return tuple(where(unsettled, ours, theirs) for ours, theirs in zip(new, old, strict=True))

    def _uses(self, name: str) -> bool:
        return name in self._interface.features.filters

    def _has_small_top_k(self) -> Tensor:
        """Whether the candidates hold all that top-k keeps: [B] bool."""
        top_k = self._inputs["top_k"]
        if self._candidates == self._vocab:
            return top_k.equals(top_k)
        return (top_k > 0) & (top_k <= self._candidates)

    def _extra_filter_is_on(self) -> Tensor | None:
        """Whether a row has a filter that is more than a threshold on the logits: [B] bool; None: no row has."""
        on = None
        for name in self._interface.features.filters:
            if name in _REPETITION_FILTERS or name == "top_n_sigma" or (name == "dynatemp" and self._dynamic_first):
                continue
            first = EXTRA_PARAMETERS[name][0]
            off = self._inputs[first.name].equals(first.off)  # type: ignore[arg-type]
            on = ~off if on is None else on | ~off
        return on

    def _needs_search(self) -> Tensor:
        """Whether a row's parameters ask for a search of the vocabulary, [B] bool."""
        given = self._inputs
        thresholds = (given["top_p"] < 1) | (given["top_k"] > 0)
        if self._uses("typical_p"):
            thresholds = thresholds | (given["typical_p"] < 1)
        return (given["temperature"] > 0) & ~self._has_small_top_k() & thresholds

    def _is_listed(self) -> Tensor:
        """Whether a row is among `searched_rows`, [B] bool."""
        listed = self._inputs[SEARCHED_ROWS.name]
        none = where(self._running, 0.0, 0.0)
        return none.scatter(listed, where(listed >= 0, 1.0, 1.0), axis=0) > 0

    # Commit ---------------------------------------------------------------------------------------------------------

    def commit(self, draw: Draw) -> dict[str, Tensor]:
        """Step 5: the next value of each state, by its name."""
        given, emitted = self._inputs, draw.emitted
        advance = self._running & (emitted | ~given["emit"])
        lengths = where(advance, self._total, self._start)
        new = advance & self._start.equals(0)

        def writes(new: Tensor | None) -> Tensors:
            columns = [value.unsqueeze() for value in (self._start, self._total, lengths)]
            return history.writes(
                given["tokens"],
                *columns,
                given["input_ids"],
                draw.token,
                emitted.unsqueeze(),
                None if new is None else new.unsqueeze(),
            )

        positions, written = self._branch(new, lambda: writes(new), lambda: writes(None))
        counted = emitted.to(FLOAT).unsqueeze()
        states = {
            "lengths": lengths,
            "status": self._next_status(draw),
            "tokens": given["tokens"].scatter(positions, written),
            "output_counts": given["output_counts"].scatter(draw.token, counted, reduction="add"),
        }
        if draw.surprise is not None:
            row = Columns(given)
            mu = filters.largest_surprise(row)
            moved = mu - row["mirostat_eta"] * (draw.surprise - row["mirostat_tau"])
            changes = draw.random & (given["mirostat_tau"] > 0)
            states["mirostat_mu"] = where(changes, moved.squeeze(), given["mirostat_mu"])
        return states

    def _next_status(self, draw: Draw) -> Tensor:
        given = self._inputs
        same = draw.token.equals(given["stop_ids"].to(INT64))
        # CUDA has no maximum of bools.
        stopped = same.to(FLOAT).max(keep=False) > 0 if self._captured else same.max(keep=False)
        capacity = op("Squeeze", size(given["tokens"], 1)).to(INT32)
        full = self._total + 1 >= minimum(given["max_length"], capacity)
        status = where(stopped, _int32(STOPPED), where(full, _int32(LENGTH), _int32(RUNNING)))
        silent = where(self._sampling, _int32(INVALID_LOGITS), _int32(RUNNING))
        return where(self._running, where(draw.emitted, status, silent), given["status"])

    # Outputs --------------------------------------------------------------------------------------------------------

    def results(self, draw: Draw) -> dict[str, Tensor]:
        """`next_ids` and the outputs that were asked for, by name."""
        chosen, emitted = self._interface.features, draw.emitted.unsqueeze()
        token = draw.token if self._pad_token_id == 0 else where(emitted, draw.token, self._pad_token_id)
        results = {"next_ids": token}
        if chosen.logprobs or chosen.top_logprobs:
            logits = self._inputs["logits"]
            split = blocks.split(logits, self._vocab, self._block)
            normalizer = outputs.normalizer(split)
            if chosen.logprobs:
                results["logprobs"] = outputs.logprobs(logits, normalizer, draw.token, emitted)
            if chosen.top_logprobs:
                results["top_logprob_ids"], results["top_logprobs"] = outputs.top_logprobs(
                    split, normalizer, chosen.top_logprobs, emitted, replayed=self._captured
                )
        if draw.weights is not None:
            drawn = (draw.random & draw.emitted).unsqueeze()
            results["probs"] = outputs.probabilities(draw.weights, drawn, emitted & ~drawn, draw.token)
        return results

    def _branch(self, needed: Tensor, then: Callable[[], Tensors], otherwise: Callable[[], Tensors]) -> Tensors:
        """`then()` if some row needs it (`needed`, bool), else `otherwise()`; without control flow, always `then()`."""
        return then() if self._captured else branch(needed.any(), then, otherwise)


def _shift(values: Tensor, largest: Tensor) -> Tensor:
    """L - max, at least `FLOOR`: subtracting first keeps a tiny temperature from overflowing."""
    return maximum(values - largest, FLOOR)


def _int32(number: int) -> Tensor:
    import numpy as np

    from qsample.sampler.tensor import constant

    return constant(np.int32(number))


_ = concat
