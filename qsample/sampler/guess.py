"""Steps that may give a row several tokens: the guesses of each row, before the model, and which of them are kept.

A row's guesses follow its newest token; the model reads them in the same call, and the verifier keeps the guesses that
the sampler draws, too. They are the host's `draft_ids`, or what followed when the row's newest tokens stood in its text
before (prompt lookup; Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).

A wrong guess costs time. So the number of guesses is the number that is likely to pay: the more, the longer the match
and the more often lookup would have been right at the row's last places, as each step judges anew.

After the model, each place at which a token may be drawn is a row of the sampler, the same sampler as in other
packages: it gets the row's parameters and states, the guesses before the place as inputs, and counts that include them.
A place counts if the draw before it gave its guess and did not end the row. So the tokens, and every state after them,
equal the results of steps of one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
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
    STATEFUL,
    STATUS,
    STOPPED,
    TOKENS,
    TensorSpec,
    retained_name,
)
from qsample.sampler.adjust import adjusted_logits
from qsample.sampler.build import finished, new_graph, set_outputs
from qsample.sampler.call import Call, count_up
from qsample.sampler.commit import NO_TOKEN, filter_states, next_status, next_tokens, results
from qsample.sampler.draw import draw
from qsample.sampler.tensor import (
    FLOAT,
    INT32,
    INT64,
    Tensor,
    Tensors,
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

_COLUMNS, _PACKED, _PLACES, _WIDTH = "columns", "packed", "places", "width"
STEP_IDS = TensorSpec("step_ids", "int64", (BATCH, _COLUMNS), "input_ids and guesses, right-padded")
READ = TensorSpec(
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
VERIFIED = (STEP_IDS, PLACE_ROWS, PLACE_COLUMNS, PLACES, GUESS_IDS)  # that the verifier reads
OUTPUTS = (STEP_IDS, READ, SEQLENS_K, TOKENS_AT, PADDED_AT, POSITIONS, LAST_AT, *VERIFIED[1:])

_LEVELS: Final = (2, 4, 8)  # tokens of a match
_PRIORS: Final = (
    1,
    3,
    15,
)  # right guesses that a match of each level counts as, next to _MISSES wrong ones
_MISSES: Final = 2
_JUDGED: Final = 7  # places before the newest token at which lookup is judged
# Steps of one token that a further token costs with 1, 2, 3, 4 and more rows that guess: the model reads its weights
# once for all tokens, but computes for each (docs/benchmarks/speculation.md).
_COSTS: Final = (0.3, 0.4, 0.5, 0.6)
_END: Final = 2**31 - 1  # of an axis of any size


def drafter_spec(interface: Interface, *, packed: bool) -> GraphSpec:
    """The inputs of the graph that `interface` has, ROW_MULTIPLE if `packed`, and OUTPUTS."""
    max_length = next(spec for spec in PARAMETERS if spec.name == "max_length")
    inputs = [INPUT_IDS, INPUT_LENGTHS, EMIT, max_length, *SPECULATION_INPUTS]
    if interface.features.allowed_tokens:
        inputs.append(ALLOWED_TOKENS)
    inputs += [EXTRA_PARAMETERS[name][0] for name in interface.features.filters if name in STATEFUL]
    inputs += [ROW_MULTIPLE] if packed else []
    return GraphSpec(tuple(inputs), (LENGTHS, STATUS, TOKENS), OUTPUTS)


def build_drafter(interface: Interface, *, packed: bool) -> ir.Model:
    """The graph before the model, by `drafter_spec`, with `num_speculative_tokens`, G, above 0.

    packed: the model reads the tokens of all rows one after the other, without padding; the last is repeated if their
    number is not a multiple of ROW_MULTIPLE, and so is the last place of a draw, of which the head sees the hidden
    state. Otherwise `step_pack` and `step_pad` count the padding as well.

    A row that does not run, or reads nothing, is idle: the model gets a single token of it, and the attention none.
    """
    spec = drafter_spec(interface, packed=packed)
    graph, inputs = new_graph(interface, spec)
    with building(graph):
        running = inputs["status"].equals(RUNNING) & (inputs["input_lengths"] > 0)
        guesses = _guesses(interface, inputs, running)
        set_outputs(
            graph, interface, spec.outputs, _layout(inputs, running, guesses, packed=packed)
        )
    return finished(graph)


def _layout(
    inputs: Mapping[str, Tensor], running: Tensor, guesses: Tensor, *, packed: bool
) -> dict[str, Tensor]:
    """OUTPUTS. running: [B] bool. guesses: [B, g] int64, -1 after the last of each row."""
    count = (guesses >= 0).to(INT64).sum(keep=False)
    ids = concat(inputs["input_ids"], maximum(guesses, 0))
    width, columns = size(guesses, 1), count_up(size(ids, 1)).to(INT64)
    read = where(running, inputs["input_lengths"].to(INT64) + count, 0)
    computed = maximum(read, 1)
    stride = computed if packed else op("Expand", size(ids, 1), op("Shape", computed))
    start = stride.cumsum(exclusive=True)

    draws = count + 1
    found = _rounded_up(
        op("NonZero", op("Range", 0, op("Squeeze", width) + 1, 1) < draws.unsqueeze()), inputs
    )
    rows, column = (
        op("Squeeze", part, [0]) for part in (op("Slice", found, [i], [i + 1], [0]) for i in (0, 1))
    )
    first = start + computed - draws  # a row's token after which the first is drawn
    end = op("Expand", np.array([[-1]]), op("Concat", size(ids, 0), np.array([1]), axis=0))
    stop = (stride - 1).unsqueeze()
    lengths, room = inputs["lengths"].to(INT64), size(inputs["tokens"], 1) - size(ids, 1)
    inside = columns < stride.unsqueeze()
    return {
        STEP_IDS.name: ids,
        READ.name: read.to(INT32),
        # The attention copies only so many keys of an idle row to an output in other memory. It takes no row without a
        # key, and none whose padding leaves its buffer.
        SEQLENS_K.name: (
            where(read > 0, lengths + read, maximum(minimum(lengths, room), 1)) - 1
        ).to(INT32),
        TOKENS_AT.name: op(
            "Transpose", _rounded_up(op("NonZero", inside), inputs), perm=[1, 0]
        ).unsqueeze(0),
        PADDED_AT.name: op(
            "Pad",
            (start.unsqueeze() + minimum(columns, stop)).unsqueeze(),
            np.array([0, 0, 1, 0, 0, 0]),
        ),
        POSITIONS.name: inputs["lengths"].to(INT64).unsqueeze() + columns,
        LAST_AT.name: first.rows(rows) + column,
        PLACE_ROWS.name: rows,
        PLACE_COLUMNS.name: column,
        PLACES.name: draws.cumsum(exclusive=True).unsqueeze()
        + minimum(op("Range", 0, op("Squeeze", width) + 1, 1), count.unsqueeze()),
        GUESS_IDS.name: concat(guesses, end),
    }


def _rounded_up(found: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """`found` [k, n], with its last column again until ROW_MULTIPLE divides n, if the graph has it."""
    if ROW_MULTIPLE.name not in inputs:
        return found
    multiple, count = inputs[ROW_MULTIPLE.name], op("Squeeze", size(found, 1))
    columns = op("Range", 0, (count + multiple - 1) / multiple * multiple, 1)
    return op("Gather", found, minimum(columns, count - 1), axis=1)


def _guesses(interface: Interface, inputs: Mapping[str, Tensor], running: Tensor) -> Tensor:
    """[B, g] int64, -1 after the last guess of each row; g, at most G, is the largest number of guesses of a row.

    1. Guesses are for steps of one token: there are none if S is not 1.
    2. A row guesses if it samples, its mask allows every token, and no filter of STATEFUL is on: a mask is for a single
       place, and their states change with each token.
    3. The token drawn after the last guess has a place below the capacity and `max_length`.
    4. The buffer of no row with `status` 0 ends within the columns of the step.
    """
    most = interface.features.num_speculative_tokens
    may = running & inputs["emit"] & inputs["input_lengths"].equals(1)
    if ALLOWED_TOKENS.name in inputs:
        mask = inputs[ALLOWED_TOKENS.name]
        may = may & mask.min(keep=False).equals(-1) & mask.max(keep=False).equals(-1)
    if "mirostat_tau" in inputs:
        may = may & ~(inputs["mirostat_tau"] > 0)
    if "adaptive_target" in inputs:
        may = may & ~(inputs["adaptive_target"] >= 0)
    drafts = inputs["draft_ids"]
    drafted = drafts.columns(0, 1).squeeze() >= 0
    looked_up = may & (inputs["prompt_lookup_num_tokens"] > 0) & ~drafted
    wanted = (may & drafted) | looked_up
    single = size(inputs["input_ids"], 1).equals(1)
    capacity = size(inputs["tokens"], 1).to(INT32)

    def none() -> Tensor:
        return inputs["input_ids"].columns(0, 0)

    def some() -> Tensor:
        valid = (drafts >= 0) & (drafts < interface.vocab_size)
        own_count = (~valid).to(INT32).cumsum().equals(0).to(INT32).sum(keep=False)
        found, found_count = branch(
            looked_up.any(),
            lambda: _looked_up(inputs, looked_up, wanted, most),
            lambda: (drafts.to(INT64), inputs["lengths"] * 0),
        )
        ids = where(drafted.unsqueeze(), drafts.to(INT64), found)
        count = where(drafted, own_count, found_count)
        left = capacity - inputs["lengths"]
        own_room = minimum(inputs["max_length"] - inputs["lengths"], left) - 2
        room = where(inputs["status"].equals(RUNNING), left, capacity).min(keep=False) - 1
        count = where(wanted, maximum(op("Min", count, own_room, room), 0), 0)
        ids = where(count_up(constant(np.array([most]))) < count.unsqueeze(), ids, -1)
        return ids.columns(0, count.to(INT64).max(keep=False))

    return branch(op("And", wanted.any(), op("Squeeze", single)), some, none)


def _looked_up(
    inputs: Mapping[str, Tensor], looked_up: Tensor, wanted: Tensor, most: int
) -> Tensors:
    """Guesses [B, G] int64, and how many of each row are worth their time: [B] int32. For steps of one token. A text is
    compared with the last tokens of the row, in windows of 2, then 4, then 8 tokens: each is made of two windows of
    half its size. Of the longest matches, the newest counts. What follows it is guessed, and if that ends, is repeated
    from there. The same is done for the places before the newest token, to judge the guesses."""
    lengths = inputs["lengths"].to(INT64)
    used = lengths.max(keep=False) + 1
    at = count_up(used.reshape(1) + _LEVELS[-1])  # [P]: windows begin at each place of the text
    newest = inputs["lengths"].unsqueeze()
    text = op("Pad", inputs["tokens"].columns(0, used).to(INT64), np.array([0, 0, 0, _LEVELS[-1]]))
    text = where(at.equals(newest), inputs["input_ids"], text)  # [B, P]

    reach, judged = _JUDGED + _LEVELS[-1], _JUDGED + 1
    places = newest - constant(
        np.arange(reach - 1, -1, -1, dtype=np.int32)
    )  # [B, reach], the newest last
    ends = where(places >= 0, text.gather(maximum(places, 0).to(INT64)), -1)
    windows = ends.unsqueeze(2).equals(
        text.unsqueeze(1)
    )  # [B, reach, P]: each place, each token of the text
    source, level = places.columns(0, judged) * 0 - 1, places.columns(0, judged) * 0
    for index, length in enumerate(_LEVELS, 1):
        windows = _longer(windows, length // 2)
        last = op(
            "Slice", windows, [-judged], [_END], [1]
        )  # the matches that end at a judged place
        end = op("Slice", at, [length - 1], [_END], [0])
        earlier = end < places.columns(reach - judged, reach).unsqueeze()
        found = where(last & earlier, end, -1).max(keep=False)
        level, source = where(found >= 0, index, level), where(found >= 0, found, source)

    guessed = text.gather((source + 1).to(INT64))
    tried = source.columns(0, _JUDGED) >= 0
    right = tried & guessed.columns(0, _JUDGED).equals(ends.columns(reach - _JUDGED, reach))
    hits, tries = (flags.to(INT32).sum() for flags in (right, tried))
    level, source = level.last(), source.last()
    guessing = minimum(wanted.to(INT32).sum(keep=False), len(_COSTS)) - 1
    judged_as = (value.to(INT64) for value in (level, hits, tries, level * 0 + guessing))
    count = op("GatherND", constant(_worthwhile(most)), concat(*judged_as))
    period = newest - source
    offset = op("Mod", constant(np.arange(most, dtype=np.int32)), period)
    ids = text.gather((source + 1 + offset).to(INT64))
    return ids, where(looked_up, minimum(count, inputs["prompt_lookup_num_tokens"]), 0)


def _worthwhile(most: int) -> Array:
    """The guesses, up to `most`, that gain more tokens than they cost, by level, hits, tries and rows that guess. If q
    is the chance of each guess, the k-th is right with q ** k."""
    table = np.zeros((len(_LEVELS) + 1, _JUDGED + 1, _JUDGED + 1, len(_COSTS)), np.int32)
    for (level, hits, tries, rows), _ in np.ndenumerate(table):
        if level and hits <= tries:
            prior = _PRIORS[level - 1]
            chances = ((hits + prior) / (tries + prior + _MISSES)) ** np.arange(1, most + 1)
            table[level, hits, tries, rows] = (chances > _COSTS[rows]).sum()
    return table


def _longer(windows: Tensor, length: int) -> Tensor:
    """Windows of twice the `length`, [B, n - length, P - length] bool: each of two of `windows` [B, n, P]."""
    first = op("Slice", windows, [0, 0], [-length, -length], [1, 2])
    return first & op("Slice", windows, [length, length], [_END, _END], [1, 2])


def verifier_spec(interface: Interface) -> GraphSpec:
    """The sampler's inputs, VERIFIED and states; logits are [V] after each draw's tokens."""
    plain = interface.without_guesses().sampler
    return GraphSpec((*plain.inputs, *VERIFIED), plain.states, interface.sampler_outputs)


def build_verifier(interface: Interface, pad_token_id: int) -> ir.Model:
    """The sampler of a package with `Features.num_speculative_tokens`, from the logits on: see `verifier_spec`."""
    spec, plain = verifier_spec(interface), interface.without_guesses()
    places = replace(LOGITS, axes=PLACE_ROWS.axes + LOGITS.axes[1:])
    spec = replace(spec, inputs=(places, *spec.inputs[1:]))
    graph, inputs = new_graph(interface, spec)
    with building(graph):
        # A row that reads nothing is idle, as one that ended is.
        idle = inputs["input_lengths"] < 1
        rows = {
            **inputs,
            "status": where(idle, constant(np.array(STOPPED, np.int32)), inputs["status"]),
        }
        call, at_place = Call(plain, rows), Call(plain, _Places(plain, rows))
        drawn = draw(at_place, adjusted_logits(at_place), CANDIDATES)
        statuses = next_status(at_place, drawn)

        place, guesses = inputs[PLACES.name], inputs[GUESS_IDS.name]
        token, emitted, status = (
            values.rows(place) for values in (drawn.token.squeeze(), drawn.emitted, statuses)
        )
        goes_on = emitted & token.equals(guesses) & status.equals(RUNNING)  # no token is -1
        reached = (~goes_on).to(INT32).cumsum(exclusive=True).equals(0)
        kept = reached & emitted
        count = kept.to(INT32).sum(keep=False)
        last = reached.to(INT64).sum() - 1

        advance = call.running & ((count > 0) | ~call.sampling)  # runs, and is not asked in vain
        lengths = where(advance, call.total, call.start)
        new, more = advance & call.start.equals(0), maximum(count - 1, 0)
        at = call.total.unsqueeze() + count_up(size(token, 1))
        states = {
            LENGTHS.name: lengths + more,
            STATUS.name: where(call.running, status.gather(last).squeeze(), inputs["status"]),
            TOKENS.name: next_tokens(call, at, token, kept, lengths, new),
            OUTPUT_COUNTS.name: inputs[OUTPUT_COUNTS.name].scatter(
                token, kept.to(FLOAT), reduction="add"
            ),
        }
        for name, state in filter_states(
            at_place, drawn
        ).items():  # rows whose state changes have no guesses
            states[name] = state.rows(place.columns(0, 1).squeeze())

        newest = where(
            (count > 0).unsqueeze(), token.gather(more.unsqueeze().to(INT64)), pad_token_id
        )
        checked = (guesses >= 0).to(INT32).sum(keep=False)
        found = {NEXT_IDS.name: newest, NUM_NEW.name: count, NUM_DRAFT_TOKENS.name: checked}
        found[NEW_IDS.name] = _in_columns(interface, where(kept, token, pad_token_id), pad_token_id)
        for name, value in results(at_place, drawn, pad_token_id).items():
            if name == LOGPROBS.name:
                found[name] = _in_columns(
                    interface, where(kept, value.squeeze().rows(place), 0.0), 0.0
                )
            elif name != NEXT_IDS.name:
                nothing = NO_TOKEN if value.dtype == INT32 else 0.0
                found[name] = _in_columns(
                    interface, where(kept.unsqueeze(), value.rows(place), nothing), nothing
                )
        found |= {retained_name(name): state for name, state in states.items()}
        set_outputs(graph, interface, spec.results, found)
    return finished(graph)


def _in_columns(interface: Interface, values: Tensor, filler: float) -> Tensor:
    """`values` [B, n, ...] and behind them `filler`, up to J columns."""
    missing = interface.features.num_speculative_tokens + 1 - size(values, 1)
    none = np.zeros(len(values.shape) - 2, np.int64)
    pads = op("Concat", np.zeros(len(values.shape) + 1, np.int64), missing, none, axis=0)
    return op("Pad", values, pads, op("CastLike", filler, values))


class _Places(Mapping[str, Tensor]):
    """The sampler's inputs at each place. They are made whenever they are read: each branch makes them anew."""

    def __init__(self, interface: Interface, rows: Mapping[str, Tensor]) -> None:
        spec = interface.sampler
        self._names, self._rows = [*spec.input_names], rows

    def __getitem__(self, name: str) -> Tensor:
        rows, columns = self._rows[PLACE_ROWS.name], self._rows[PLACE_COLUMNS.name]
        if name == LOGITS.name:
            return self._rows[name]
        if name == INPUT_IDS.name:
            return self._rows[STEP_IDS.name].rows(rows)
        value = self._rows[name].rows(rows)
        if name == INPUT_LENGTHS.name:
            return value + columns.to(INT32)
        if name != OUTPUT_COUNTS.name:
            return value
        guesses = self._rows[GUESS_IDS.name].rows(rows)
        before = count_up(size(guesses, 1)).to(INT64) < columns.unsqueeze()
        return value.scatter(where(before, guesses, 0), before.to(FLOAT), reduction="add")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
