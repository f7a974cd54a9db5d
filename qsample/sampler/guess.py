"""Steps that may give a row several tokens: the drafter before the model, the verifier after it.

The drafter makes the guesses of each row. They follow the newest token of the row, and the model
reads them in the same call. The verifier keeps the guesses that the sampler draws as well. Guesses
are the `draft_ids` of the host, the tokens that the grammar of the row suggests, or the tokens that
followed when the newest tokens of the row occurred in its text before (prompt lookup; Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding).

A wrong guess costs time, so a row only makes guesses that are likely to pay. Their number grows
with the length of the match, and with how often lookup would have been right at the last places of
the row, which each step evaluates again.

After the model, each place at which a token may be drawn is a row of the sampler, which is the same
as in other packages. Such a row has the parameters and states of its row, the guesses before the
place as inputs, and counts that include them. A place counts if the draw at the place before it
gave the guess and did not end the row. So the tokens and all states after them equal the results of
steps of a single token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.contract.arrays import Array
from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import (
    ALLOWED_TOKENS,
    BATCH,
    CANDIDATES,
    EMIT,
    EXTRA_PARAMETERS,
    GRAMMAR_DEADLINE,
    GRAMMAR_DRAFTS,
    GRAMMAR_STATE,
    GRAMMAR_TABLES,
    INPUT_IDS,
    INPUT_LENGTHS,
    LENGTHS,
    LOGITS,
    LOGPROBS,
    NEW_IDS,
    NEXT_IDS,
    NUM_DRAFT_TOKENS,
    NUM_NEW,
    OUTPUT_COUNTS,
    PARAMETERS,
    ROW_MULTIPLE,
    RUNNING,
    SPECULATION_INPUTS,
    STATEFUL_FILTERS,
    STATUS,
    STOPPED,
    TOKENS,
    TensorSpec,
    retained_name,
)
from qsample.sampler import grammar
from qsample.sampler.adjust import adjusted_logits
from qsample.sampler.build import finished, new_graph, set_outputs
from qsample.sampler.call import Call, count_up
from qsample.sampler.commit import filter_states, next_ids, next_status, next_tokens, results
from qsample.sampler.draw import NO_TOKEN, Draw, draw
from qsample.sampler.tensor import (
    FLOAT,
    INT32,
    INT64,
    SLICE_END,
    Tensor,
    branch,
    building,
    concat,
    constant,
    maximum,
    minimum,
    op,
    size,
    where,
)

# Axes: the tokens of step_ids, those of the model, the draws of all rows, the guesses of a row.
_COLUMNS: Final = "columns"
_PACKED: Final = "packed"
_PLACES: Final = "places"
_WIDTH: Final = "width"
STEP_IDS = TensorSpec("step_ids", "int64", (BATCH, _COLUMNS), "input_ids and guesses, right-padded")
STEP_LENGTHS = TensorSpec(
    "step_lengths", "int32", (BATCH,), "tokens of step_ids that a row reads; 0: an idle row"
)
SEQLENS_K = TensorSpec(
    "step_seqlens_k", "int32", (BATCH,), "index of the last key that a row has after the step"
)
TOKENS_AT = TensorSpec(
    "step_pack", "int64", (1, _PACKED, 2), "row and column in step_ids of each token of the model"
)
PADDED_AT = TensorSpec(
    "step_pad", "int64", (BATCH, _COLUMNS, 2), "0, and which token of the model each of step_ids is"
)
POSITIONS = TensorSpec("step_positions", "int64", (BATCH, _COLUMNS), "of step_ids in their rows")
LAST_AT = TensorSpec(
    "step_choice", "int64", (_PLACES,), "the tokens of the model after which one is drawn"
)
PLACE_ROWS = TensorSpec("step_rows", "int64", (_PLACES,), "the row of each draw")
PLACE_COLUMNS = TensorSpec(
    "step_columns", "int64", (_PLACES,), "how many guesses precede each draw"
)
PLACES = TensorSpec(
    "step_places", "int64", (BATCH, _WIDTH), "the draw after 0, 1, … guesses of a row"
)
GUESS_IDS = TensorSpec("step_guesses", "int64", (BATCH, _WIDTH), "the guesses, -1 after them")
# An output of packages with grammars.
GUESS_STATES = TensorSpec(
    "step_grammar_states", "int32", (BATCH, _WIDTH), "grammar_state after 0, 1, … guesses of a row"
)
_VERIFIER_INPUTS: Final = (STEP_IDS, PLACE_ROWS, PLACE_COLUMNS, PLACES, GUESS_IDS)
_DRAFTER_OUTPUTS: Final = (
    STEP_IDS,
    STEP_LENGTHS,
    SEQLENS_K,
    TOKENS_AT,
    PADDED_AT,
    POSITIONS,
    LAST_AT,
    PLACE_ROWS,
    PLACE_COLUMNS,
    PLACES,
    GUESS_IDS,
)

# The inputs of the sampler that are the same for all rows.
_SHARED_INPUTS: Final = frozenset(spec.name for spec in GRAMMAR_TABLES)
# The lengths of matches, each twice the one before, in tokens.
_MATCH_LENGTHS: Final = (2, 4, 8)
# Before the first guess, a match of each length counts as so many right guesses and _PRIOR_MISSES
# wrong ones.
_PRIOR_HITS: Final = (1, 3, 15)
_PRIOR_MISSES: Final = 2
# The places before the newest token at which lookup is evaluated.
_EVALUATED_PLACES: Final = 7
# The cost of a further token with 1, 2, 3, 4 and more rows that guess, in steps of a single token:
# the model reads its weights once for all tokens, but computes for each
# (docs/benchmarks/speculation.md).
_TOKEN_COSTS: Final = (0.3, 0.4, 0.5, 0.6)


def drafter_spec(interface: Interface, *, packed: bool) -> GraphSpec:
    """The tensors of the drafter; `packed` adds the input ROW_MULTIPLE."""
    max_length = next(spec for spec in PARAMETERS if spec.name == "max_length")
    inputs = [INPUT_IDS, INPUT_LENGTHS, EMIT, max_length, *SPECULATION_INPUTS]
    if interface.features.allowed_tokens:
        inputs.append(ALLOWED_TOKENS)
    for name in interface.features.filters:
        if name in STATEFUL_FILTERS:
            inputs.append(EXTRA_PARAMETERS[name][0])
    states = [LENGTHS, STATUS, TOKENS]
    outputs = list(_DRAFTER_OUTPUTS)
    if interface.features.grammars:
        inputs += [GRAMMAR_DEADLINE, *interface.grammar_tables]
        states.append(GRAMMAR_STATE)
        outputs.append(GUESS_STATES)
    if packed:
        inputs.append(ROW_MULTIPLE)
    return GraphSpec(tuple(inputs), tuple(states), tuple(outputs))


def build_drafter(interface: Interface, *, packed: bool) -> ir.Model:
    """Build the graph before the model, with the tensors of `drafter_spec`.

    A row that does not run, or reads nothing, is idle: the model reads a single token of it, and
    the attention none.

    Args:
        interface: the package, whose `num_speculative_tokens`, G, is above 0.
        packed: whether the model reads the tokens of all rows one after the other, without padding.
            Then the last token is repeated until ROW_MULTIPLE divides the number of tokens, and so
            is the last place of a draw, whose hidden state the head reads. Otherwise, `step_pack`
            and `step_pad` count the padding as well.
    """
    spec = drafter_spec(interface, packed=packed)
    graph, inputs = new_graph(interface, spec)
    with building(graph):
        running = inputs["status"].equals(RUNNING) & (inputs["input_lengths"] > 0)
        guesses = _guesses(interface, inputs, running)
        layout = _layout(inputs, running, guesses, packed=packed)
        if interface.features.grammars:
            layout[GUESS_STATES.name] = _states_along(inputs, guesses)
        set_outputs(graph, interface, spec.outputs, layout)
    return finished(graph)


def _states_along(inputs: Mapping[str, Tensor], guesses: Tensor) -> Tensor:
    """The outputs GUESS_STATES."""
    state = inputs[GRAMMAR_STATE.name]
    shape = op("Concat", size(guesses, 0), size(guesses, 1) + 1, axis=0)
    return branch(
        (state > 0).any(),
        lambda: grammar.states_along(inputs, guesses),
        lambda: op("Expand", state.unsqueeze(), shape),
    )


def _layout(
    inputs: Mapping[str, Tensor], running: Tensor, guesses: Tensor, *, packed: bool
) -> dict[str, Tensor]:
    """The outputs of the drafter by name.

    Args:
        inputs: the inputs of the drafter.
        running: [B] bool, the rows that run and read something.
        guesses: [B, g] int64, the guesses of each row, -1 after them.
        packed: see `build_drafter`.
    """
    count = (guesses >= 0).to(INT64).sum(keep=False)
    ids = concat(inputs["input_ids"], maximum(guesses, 0))
    width = size(guesses, 1)
    columns = count_up(size(ids, 1)).to(INT64)
    read = where(running, inputs["input_lengths"].to(INT64) + count, 0)
    computed = maximum(read, 1)
    stride = computed if packed else op("Expand", size(ids, 1), op("Shape", computed))
    start = stride.cumsum(exclusive=True)

    draws = count + 1
    draw_numbers = op("Range", 0, op("Squeeze", width) + 1, 1)
    places = _rounded_up(op("NonZero", draw_numbers < draws.unsqueeze()), inputs)
    place_rows = op("Squeeze", op("Slice", places, [0], [1], [0]), [0])
    place_columns = op("Squeeze", op("Slice", places, [1], [2], [0]), [0])
    # The token of each row after which its first token is drawn.
    first = start + computed - draws
    end = op("Expand", np.array([[-1]]), op("Concat", size(ids, 0), np.array([1]), axis=0))
    last_column = (stride - 1).unsqueeze()
    lengths = inputs["lengths"].to(INT64)
    room = size(inputs["tokens"], 1) - size(ids, 1)
    is_computed = columns < stride.unsqueeze()
    step_lengths = read.to(INT32)
    # In an idle row, the attention only copies so many keys to an output in other memory. It accepts
    # neither a row without a key nor a row whose padding leaves its buffer.
    keys = where(read > 0, lengths + read, maximum(minimum(lengths, room), 1))
    seqlens_k = (keys - 1).to(INT32)
    tokens = op("Transpose", _rounded_up(op("NonZero", is_computed), inputs), perm=[1, 0])
    tokens_at = tokens.unsqueeze(0)
    padded = (start.unsqueeze() + minimum(columns, last_column)).unsqueeze()
    padded_at = op("Pad", padded, np.array([0, 0, 1, 0, 0, 0]))
    positions = inputs["lengths"].to(INT64).unsqueeze() + columns
    last_at = first.rows(place_rows) + place_columns
    first_draw = draws.cumsum(exclusive=True).unsqueeze()
    return {
        STEP_IDS.name: ids,
        STEP_LENGTHS.name: step_lengths,
        SEQLENS_K.name: seqlens_k,
        TOKENS_AT.name: tokens_at,
        PADDED_AT.name: padded_at,
        POSITIONS.name: positions,
        LAST_AT.name: last_at,
        PLACE_ROWS.name: place_rows,
        PLACE_COLUMNS.name: place_columns,
        PLACES.name: first_draw + minimum(draw_numbers, count.unsqueeze()),
        GUESS_IDS.name: concat(guesses, end),
    }


def _rounded_up(columns: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Columns, [k, n], with the last column repeated until ROW_MULTIPLE divides n.

    Without the input ROW_MULTIPLE, they stay as they are.
    """
    if ROW_MULTIPLE.name not in inputs:
        return columns
    multiple = inputs[ROW_MULTIPLE.name]
    count = op("Squeeze", size(columns, 1))
    indices = op("Range", 0, (count + multiple - 1) / multiple * multiple, 1)
    return op("Gather", columns, minimum(indices, count - 1), axis=1)


def _guesses(interface: Interface, inputs: Mapping[str, Tensor], running: Tensor) -> Tensor:
    """The guesses of each row, -1 after them: [B, g] int64, with at most G columns.

    1. Only steps of a single token have guesses: there are none if S is not 1.
    2. A row guesses if it samples, its mask allows every token, and no filter of STATEFUL_FILTERS is on. A
       mask is for a single place, and the states of these filters change with each token.
    3. The token that is drawn after the last guess lies below the capacity and `max_length`.
    4. The columns of the step fit into the buffer of each row with `status` 0.
    """
    most = interface.features.num_speculative_tokens
    may_guess = running & inputs["emit"] & inputs["input_lengths"].equals(1)
    if ALLOWED_TOKENS.name in inputs:
        mask = inputs[ALLOWED_TOKENS.name]
        may_guess = may_guess & mask.min(keep=False).equals(-1) & mask.max(keep=False).equals(-1)
    if "mirostat_tau" in inputs:
        may_guess = may_guess & ~(inputs["mirostat_tau"] > 0)
    if "adaptive_target" in inputs:
        may_guess = may_guess & ~(inputs["adaptive_target"] >= 0)
    drafts = inputs["draft_ids"]
    has_draft = drafts.columns(0, 1).squeeze() >= 0
    has_suggestion = _has_suggestion(interface, inputs, has_draft)
    looks_up = may_guess & (inputs["prompt_lookup_num_tokens"] > 0) & ~has_suggestion
    guessing = (may_guess & has_suggestion) | looks_up
    single = size(inputs["input_ids"], 1).equals(1)
    capacity = size(inputs["tokens"], 1).to(INT32)

    def none() -> Tensor:
        return inputs["input_ids"].columns(0, 0)

    def some() -> Tensor:
        valid = (drafts >= 0) & (drafts < interface.vocab_size)
        draft_count = (~valid).to(INT32).cumsum().equals(0).to(INT32).sum(keep=False)
        lookup_ids, lookup_count = branch(
            looks_up.any(),
            lambda: _looked_up(inputs, looks_up, guessing, most),
            lambda: (drafts.to(INT64), inputs["lengths"] * 0),
        )
        ids = lookup_ids
        count = lookup_count
        if interface.features.grammars:
            grammar_ids, grammar_count = grammar.drafts(inputs, most)
            ids = where((grammar_count > 0).unsqueeze(), grammar_ids, ids)
            count = where(grammar_count > 0, grammar_count, count)
        ids = where(has_draft.unsqueeze(), drafts.to(INT64), ids)
        count = where(has_draft, draft_count, count)
        left = capacity - inputs["lengths"]
        room = minimum(inputs["max_length"] - inputs["lengths"], left) - 2
        is_running = inputs["status"].equals(RUNNING)
        room_of_all = where(is_running, left, capacity).min(keep=False) - 1
        count = where(guessing, maximum(op("Min", count, room, room_of_all), 0), 0)
        ids = where(count_up(constant(np.array([most]))) < count.unsqueeze(), ids, -1)
        return ids.columns(0, count.to(INT64).max(keep=False))

    return branch(op("And", guessing.any(), op("Squeeze", single)), some, none)


def _has_suggestion(
    interface: Interface, inputs: Mapping[str, Tensor], has_draft: Tensor
) -> Tensor:
    """Whether the host or the grammar of a row has a guess: [B] bool. has_draft: [B] bool, whether
    the host has one."""
    if not interface.features.grammars:
        return has_draft
    total = inputs["lengths"] + inputs["input_lengths"]
    state = grammar.current_state(inputs, total)
    return has_draft | (inputs[GRAMMAR_DRAFTS.name].rows(state) >= 0)


def _looked_up(
    inputs: Mapping[str, Tensor], looks_up: Tensor, guessing: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Guesses by prompt lookup, for steps of a single token.

    The text is compared with the end of the row in windows of 2, then 4, then 8 tokens; each window
    is made of two windows of half its length. Of the longest matches, the newest counts. The tokens
    that follow it are guessed; if the text ends, they are repeated from the match on. The same is
    done for the places before the newest token, to evaluate how often lookup is right.

    Args:
        inputs: the inputs of the drafter.
        looks_up: [B] bool, the rows that guess by lookup.
        guessing: [B] bool, all rows that guess.
        most: G, the largest number of guesses of a row.

    Returns:
        The guesses, [B, G] int64, and how many of them are worth their time, [B] int32.
    """
    longest = _MATCH_LENGTHS[-1]
    lengths = inputs["lengths"].to(INT64)
    used = lengths.max(keep=False) + 1
    # Windows begin at each of the P places of the text.
    begins = count_up(used.reshape(1) + longest)
    newest = inputs["lengths"].unsqueeze()
    text = op("Pad", inputs["tokens"].columns(0, used).to(INT64), np.array([0, 0, 0, longest]))
    text = where(begins.equals(newest), inputs["input_ids"], text)

    # The newest places of the row, the newest last; and those of them at which a match may end.
    reach = _EVALUATED_PLACES + longest
    ends_count = _EVALUATED_PLACES + 1
    places = newest - constant(np.arange(reach - 1, -1, -1, dtype=np.int32))
    tokens = where(places >= 0, text.gather(maximum(places, 0).to(INT64)), -1)
    # Whether the token at each place equals each token of the text: [B, reach, P].
    windows = tokens.unsqueeze(2).equals(text.unsqueeze(1))
    source = places.columns(0, ends_count) * 0 - 1
    level = places.columns(0, ends_count) * 0
    for index, length in enumerate(_MATCH_LENGTHS, 1):
        windows = _longer(windows, length // 2)
        matches = op("Slice", windows, [-ends_count], [SLICE_END], [1])
        match_end = op("Slice", begins, [length - 1], [SLICE_END], [0])
        is_earlier = match_end < places.columns(reach - ends_count, reach).unsqueeze()
        newest_match = where(matches & is_earlier, match_end, -1).max(keep=False)
        level = where(newest_match >= 0, index, level)
        source = where(newest_match >= 0, newest_match, source)

    followers = text.gather((source + 1).to(INT64))
    has_match = source.columns(0, _EVALUATED_PLACES) >= 0
    predicted = followers.columns(0, _EVALUATED_PLACES)
    is_right = has_match & predicted.equals(tokens.columns(reach - _EVALUATED_PLACES, reach))
    hits = is_right.to(INT32).sum()
    tries = has_match.to(INT32).sum()
    level = level.last()
    source = source.last()
    cost_index = minimum(guessing.to(INT32).sum(keep=False), len(_TOKEN_COSTS)) - 1
    costs = level * 0 + cost_index
    table = constant(_worthwhile_counts(most))
    table_indices = concat(level.to(INT64), hits.to(INT64), tries.to(INT64), costs.to(INT64))
    count = op("GatherND", table, table_indices)
    period = newest - source
    offset = op("Mod", constant(np.arange(most, dtype=np.int32)), period)
    ids = text.gather((source + 1 + offset).to(INT64))
    return ids, where(looks_up, minimum(count, inputs["prompt_lookup_num_tokens"]), 0)


def _worthwhile_counts(most: int) -> Array:
    """The number of guesses, up to `most`, that gain more tokens than they cost.

    If a guess is right with probability q, the k-th guess is kept with probability q ** k.

    Returns:
        int32, by the length of the match (0: none, then the index in _MATCH_LENGTHS plus 1), the
        right guesses and all guesses at the evaluated places, and the index in _TOKEN_COSTS.
    """
    evaluations = _EVALUATED_PLACES + 1
    shape = (len(_MATCH_LENGTHS) + 1, evaluations, evaluations, len(_TOKEN_COSTS))
    table = np.zeros(shape, np.int32)
    for (level, hits, tries, rows), _ in np.ndenumerate(table):
        if level and hits <= tries:
            prior = _PRIOR_HITS[level - 1]
            chance = (hits + prior) / (tries + prior + _PRIOR_MISSES)
            chances = chance ** np.arange(1, most + 1)
            table[level, hits, tries, rows] = (chances > _TOKEN_COSTS[rows]).sum()
    return table


def _longer(windows: Tensor, length: int) -> Tensor:
    """Windows of twice the length, each made of two windows.

    Args:
        windows: [B, n, P] bool, whether windows of `length` tokens match.
        length: the length of these windows.

    Returns:
        [B, n - length, P - length] bool.
    """
    first = op("Slice", windows, [0, 0], [-length, -length], [1, 2])
    second = op("Slice", windows, [length, length], [SLICE_END, SLICE_END], [1, 2])
    return first & second


def verifier_inputs(interface: Interface) -> tuple[TensorSpec, ...]:
    """The outputs of the drafter that the verifier reads."""
    if interface.features.grammars:
        return (*_VERIFIER_INPUTS, GUESS_STATES)
    return _VERIFIER_INPUTS


def verifier_spec(interface: Interface) -> GraphSpec:
    """The tensors of the verifier: those of the sampler, and `verifier_inputs`.

    The logits are [V] after each token at which one is drawn.
    """
    plain = interface.without_guesses().sampler
    inputs = (*plain.inputs, *verifier_inputs(interface))
    return GraphSpec(inputs, plain.states, interface.sampler_outputs)


def build_verifier(interface: Interface, pad_token_id: int) -> ir.Model:
    """Build the sampler of a package with `num_speculative_tokens`, from the logits on.

    Args:
        interface: the package; the graph has the tensors of `verifier_spec`.
        pad_token_id: the value of `next_ids` in a row that emits nothing.
    """
    spec = verifier_spec(interface)
    plain = interface.without_guesses()
    logits = replace(LOGITS, axes=PLACE_ROWS.axes + LOGITS.axes[1:])
    spec = replace(spec, inputs=(logits, *spec.inputs[1:]))
    graph, inputs = new_graph(interface, spec)
    with building(graph):
        # A row that reads nothing is idle, as a row that has ended.
        is_idle = inputs["input_lengths"] < 1
        status = where(is_idle, constant(np.array(STOPPED, np.int32)), inputs["status"])
        rows = {**inputs, "status": status}
        call = Call(plain, rows)
        at_place = Call(plain, _Places(plain, rows))
        drawn = draw(at_place, adjusted_logits(at_place), CANDIDATES)
        draws = _place_draws(inputs, drawn, next_status(at_place, drawn))
        states = _states(call, inputs, draws)
        if interface.features.grammars:
            states[GRAMMAR_STATE.name] = _grammar_states(at_place, drawn, inputs, draws)
        for name, state in filter_states(at_place, drawn).items():
            # A row whose state changes has no guesses, so its first place is its only place.
            states[name] = state.rows(inputs[PLACES.name].columns(0, 1).squeeze())
        outputs = _new_tokens(interface, inputs, draws, pad_token_id)
        for name, value in results(at_place, drawn, next_ids(drawn, pad_token_id)).items():
            if name != NEXT_IDS.name:
                outputs[name] = _by_row(interface, inputs, draws, name, value)
        outputs |= {retained_name(name): state for name, state in states.items()}
        set_outputs(graph, interface, spec.results, outputs)
    return finished(graph)


@dataclass(frozen=True)
class _PlaceDraws:
    """The draws of each row in the order of its places, and which of them are kept.

    Attributes:
        token: [B, n] int64, the drawn tokens.
        status: [B, n] int32, the status after each place.
        kept: [B, n] bool, the draws that ordinary steps would have made.
        count: [B] int32, the number of kept draws.
        last: [B, 1] int64, the last place that counts.
    """

    token: Tensor
    status: Tensor
    kept: Tensor
    count: Tensor
    last: Tensor

    def further(self) -> Tensor:
        """The number of kept draws after the first: [B] int32."""
        return maximum(self.count - 1, 0)


def _place_draws(inputs: Mapping[str, Tensor], drawn: Draw, status: Tensor) -> _PlaceDraws:
    """Compare the draw at each place with the guess that follows it.

    Args:
        inputs: the inputs of the verifier.
        drawn: the draws at all places.
        status: the status after each place.
    """
    place = inputs[PLACES.name]
    tokens = drawn.token.squeeze()
    token = tokens.rows(place)
    emitted = drawn.emitted.rows(place)
    status = status.rows(place)
    # No token is -1, which follows the last guess.
    goes_on = emitted & token.equals(inputs[GUESS_IDS.name]) & status.equals(RUNNING)
    reached = (~goes_on).to(INT32).cumsum(exclusive=True).equals(0)
    kept = reached & emitted
    count = kept.to(INT32).sum(keep=False)
    last = reached.to(INT64).sum() - 1
    return _PlaceDraws(token, status, kept, count, last)


def _states(call: Call, inputs: Mapping[str, Tensor], draws: _PlaceDraws) -> dict[str, Tensor]:
    """The next states of the rows by name, except those of filters."""
    # A row does not advance if it has to emit a token and finds none.
    advances = call.running & ((draws.count > 0) | ~call.sampling)
    lengths = where(advances, call.total, call.start)
    begins = advances & call.start.equals(0)
    further = draws.further()
    at = call.total.unsqueeze() + count_up(size(draws.token, 1))
    new_lengths = lengths + further
    status = where(call.running, draws.status.gather(draws.last).squeeze(), inputs["status"])
    tokens = next_tokens(call, at, draws.token, draws.kept, lengths, begins)
    counts = inputs[OUTPUT_COUNTS.name]
    return {
        LENGTHS.name: new_lengths,
        STATUS.name: status,
        TOKENS.name: tokens,
        OUTPUT_COUNTS.name: counts.scatter(draws.token, draws.kept.to(FLOAT), reduction="add"),
    }


def _grammar_states(
    at_place: Call, drawn: Draw, inputs: Mapping[str, Tensor], draws: _PlaceDraws
) -> Tensor:
    """The next value of `grammar_state`: [B] int32, the state after the last kept draw."""
    after = grammar.grammar_state(at_place, drawn.token, drawn.emitted).rows(inputs[PLACES.name])
    last = after.gather(draws.further().unsqueeze().to(INT64)).squeeze()
    return where(draws.count > 0, last, inputs[GRAMMAR_STATE.name])


def _new_tokens(
    interface: Interface, inputs: Mapping[str, Tensor], draws: _PlaceDraws, pad_token_id: int
) -> dict[str, Tensor]:
    """The outputs with the new tokens and their numbers, by name."""
    has_token = (draws.count > 0).unsqueeze()
    newest = draws.token.gather(draws.further().unsqueeze().to(INT64))
    next_ids = where(has_token, newest, pad_token_id)
    checked = (inputs[GUESS_IDS.name] >= 0).to(INT32).sum(keep=False)
    new_ids = where(draws.kept, draws.token, pad_token_id)
    return {
        NEXT_IDS.name: next_ids,
        NUM_NEW.name: draws.count,
        NUM_DRAFT_TOKENS.name: checked,
        NEW_IDS.name: _in_columns(interface, new_ids, pad_token_id),
    }


def _by_row(
    interface: Interface, inputs: Mapping[str, Tensor], draws: _PlaceDraws, name: str, value: Tensor
) -> Tensor:
    """An output of the sampler, which has a row for each place, with the places of each row in
    columns.

    Args:
        interface: the package.
        inputs: the inputs of the verifier.
        draws: the draws of each row.
        name: the output.
        value: the output of all places.
    """
    place = inputs[PLACES.name]
    if name == LOGPROBS.name:
        values = where(draws.kept, value.squeeze().rows(place), 0.0)
        return _in_columns(interface, values, 0.0)
    filler = NO_TOKEN if value.dtype == INT32 else 0.0
    values = where(draws.kept.unsqueeze(), value.rows(place), filler)
    return _in_columns(interface, values, filler)


def _in_columns(interface: Interface, values: Tensor, filler: float) -> Tensor:
    """Values, [B, n, …], followed by `filler` up to J columns: [B, J, …]."""
    missing = interface.features.num_speculative_tokens + 1 - size(values, 1)
    none = np.zeros(len(values.shape) - 2, np.int64)
    pads = op("Concat", np.zeros(len(values.shape) + 1, np.int64), missing, none, axis=0)
    return op("Pad", values, pads, op("CastLike", filler, values))


class _Places(Mapping[str, Tensor]):
    """The sampler's inputs at each place, by name. Each read makes them anew, in the current
    branch."""

    def __init__(self, interface: Interface, rows: Mapping[str, Tensor]) -> None:
        self._names = interface.sampler.input_names
        self._rows = rows

    def __getitem__(self, name: str) -> Tensor:
        rows = self._rows[PLACE_ROWS.name]
        columns = self._rows[PLACE_COLUMNS.name]
        if name == LOGITS.name:
            return self._rows[name]
        if name == INPUT_IDS.name:
            return self._rows[STEP_IDS.name].rows(rows)
        if name in _SHARED_INPUTS:
            return self._rows[name]
        if name == GRAMMAR_STATE.name:
            states = self._rows[GUESS_STATES.name].rows(rows)
            return states.gather(columns.unsqueeze()).squeeze()
        value = self._rows[name].rows(rows)
        if name == INPUT_LENGTHS.name:
            return value + columns.to(INT32)
        if name == OUTPUT_COUNTS.name:
            return self._with_guesses(value, rows, columns)
        return value

    def _with_guesses(self, counts: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """The output counts with the guesses before each place."""
        guesses = self._rows[GUESS_IDS.name].rows(rows)
        before = count_up(size(guesses, 1)).to(INT64) < columns.unsqueeze()
        return counts.scatter(where(before, guesses, 0), before.to(FLOAT), reduction="add")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
