"""The grammar of a row: the tokens that its automaton allows, and its state after a token.

A grammar is a finite automaton over classes of tokens. The tables of the contract hold the automata
of all bound grammars. Row 0 of them is the state of a row without a grammar, which allows every
token and leads to itself, so such a row is no special case.

The automaton knows the fewest tokens from each state to the end of an answer. A token is allowed
only if the answer can be completed after it, within the limit of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qsample.contract.tensors import (
    GRAMMAR_CLASSES,
    GRAMMAR_DEADLINE,
    GRAMMAR_DISTANCES,
    GRAMMAR_DRAFTS,
    GRAMMAR_LATE,
    GRAMMAR_MAPS,
    GRAMMAR_STATE,
    GRAMMAR_TRANSITIONS,
    MOST_SPECULATIVE_TOKENS,
)
from qsample.sampler.call import StepCall, count_up
from qsample.sampler.tensor import (
    INT32,
    INT64,
    Tensor,
    TensorRecord,
    constant,
    loop,
    maximum,
    minimum,
    op,
    size,
    where,
)

# A state from which this many tokens end an answer may end now: its stop token is the only one.
_MAX_FINAL_DISTANCE = 1


def current_state(inputs: Mapping[str, Tensor], total: Tensor) -> Tensor:
    """The state of each row before its next token: [B] int32.

    Args:
        inputs: the inputs of the graph by name.
        total: [B] int32, how many tokens each row has.
    """
    return _in_time(inputs, inputs[GRAMMAR_STATE.name], total)


def _in_time(inputs: Mapping[str, Tensor], state: Tensor, total: Tensor) -> Tensor:
    """The states, [B] int32, or those that replace them once the deadline of a row has passed."""
    is_late = total >= inputs[GRAMMAR_DEADLINE.name]
    return where(is_late, inputs[GRAMMAR_LATE.name].rows(state), state)


def next_state(inputs: Mapping[str, Tensor], state: Tensor, token: Tensor) -> Tensor:
    """The state after a token: [B] int32; -1 if the grammar does not allow the token.

    Args:
        inputs: the inputs of the graph by name.
        state: [B] int32, the result of `current_state`.
        token: [B] int64, the token of each row.
    """
    # The classes of each row's token in all maps, of which the state chooses one.
    classes = op("Gather", inputs[GRAMMAR_CLASSES.name], token, axis=1)
    class_map = inputs[GRAMMAR_MAPS.name].rows(state).unsqueeze(0)
    token_class = classes.gather(class_map, axis=0).squeeze(0)
    row = inputs[GRAMMAR_TRANSITIONS.name].rows(state)
    return row.gather(token_class.unsqueeze()).squeeze()


def grammar_state(call: StepCall, token: Tensor, emitted: Tensor) -> Tensor:
    """The next value of the state `grammar_state`: [B] int32.

    A stop token has no transition, and leaves the state as it is.

    Args:
        call: the inputs of the call.
        token: [B, 1] int64, the sampled token of each row.
        emitted: [B] bool, the rows that sampled one.
    """
    before = call[GRAMMAR_STATE.name]

    def advanced() -> Tensor:
        state = current_state(call.inputs, call.total)
        after = next_state(call.inputs, state, token.squeeze())
        return where(emitted & (after >= 0), after, before)

    return call.branch(before > 0, advanced, lambda: before)


def masked(call: StepCall, logits: Tensor) -> Tensor:
    """The logits, -inf for the tokens that the grammar of a row does not allow: [B, V] float32."""
    change = call.branch(
        call[GRAMMAR_STATE.name] > 0, lambda: _change(call, logits), lambda: _no_change()
    )
    # ONNX Runtime does both in place if it owns the buffer of the logits.
    return logits.masked_by(change.mask).scatter(change.stop_ids, change.stop_logits)


@dataclass(frozen=True)
class _Change(TensorRecord):
    """What grammars change in the logits.

    Attributes:
        mask: [B, V] float32, 0 for the tokens that a grammar allows and -inf for others, added to
            the logits; [1, 1] without grammars.
        stop_ids: [B, E] int64, the stop tokens of each row, some of them repeated; [0, 1] without
            grammars.
        stop_logits: float32, their logits, in the same shape.
    """

    mask: Tensor
    stop_ids: Tensor
    stop_logits: Tensor


def _no_change() -> _Change:
    """Nothing to change, because no row has a grammar."""
    return _Change(
        mask=constant(np.zeros((1, 1), np.float32)),
        stop_ids=constant(np.zeros((0, 1), np.int64)),
        stop_logits=constant(np.zeros((0, 1), np.float32)),
    )


def _change(call: StepCall, logits: Tensor) -> _Change:
    """What grammars change in `logits`, [B, V] float32."""
    state = current_state(call.inputs, call.total)
    following = call[GRAMMAR_TRANSITIONS.name].rows(state)
    distances = call[GRAMMAR_DISTANCES.name]
    limit = minimum(call["max_length"], call.capacity32)
    left = maximum(limit - call.total, 1).unsqueeze()
    distance_after = op("Gather", distances, maximum(following, 0))
    is_allowed = (following >= 0) & (distance_after < left)
    by_class = where(is_allowed, constant(np.array(0, np.float32)), -np.inf)
    class_map = call[GRAMMAR_MAPS.name].rows(state)
    mask = by_class.gather(call[GRAMMAR_CLASSES.name].rows(class_map))

    # Padding repeats a stop token of the row. A row without any gets back the logit of token 0.
    stop_ids = call["stop_ids"]
    largest = stop_ids.max()
    ids = where(stop_ids < 0, maximum(largest, 0), stop_ids).to(INT64)
    distance = distances.rows(state)
    may_end = ((distance >= 0) & (distance <= _MAX_FINAL_DISTANCE)).unsqueeze()
    stop_mask = where(may_end, constant(np.array(0, np.float32)), -np.inf)
    stop_mask = where(largest >= 0, stop_mask, mask.columns(0, 1))
    return _Change(mask, ids, logits.gather(ids) + stop_mask)


def states_along(inputs: Mapping[str, Tensor], guesses: Tensor) -> Tensor:
    """The value of `grammar_state` after 0, 1, … guesses of a row: [B, n + 1] int32.

    After a guess that a grammar does not allow, the states of that row mean nothing, because no
    draw is such a guess.

    Args:
        inputs: the inputs of the graph by name.
        guesses: [B, n] int64, the guesses of each row, -1 after them.
    """
    total = inputs["lengths"] + inputs["input_lengths"]
    width = size(guesses, 1)
    columns = count_up(width + 1)
    state = inputs[GRAMMAR_STATE.name]
    along = op("Expand", state.unsqueeze(), op("Concat", size(guesses, 0), width + 1, axis=0))

    def step(number: Tensor, states: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        before, so_far = states
        place = number.to(INT32)
        guess = maximum(op("Gather", guesses, number, axis=1), 0)
        current = _in_time(inputs, before, total + place)
        after = maximum(next_state(inputs, current, guess), 0)
        so_far = where(columns > place, after.unsqueeze(), so_far)
        return number + 1 < op("Squeeze", width), (after, so_far)

    has_guesses = op("Squeeze", width) > 0
    _, states = loop(MOST_SPECULATIVE_TOKENS, has_guesses, (state, along), step)
    return states


def drafts(inputs: Mapping[str, Tensor], most: int) -> tuple[Tensor, Tensor]:
    """The tokens that the grammar of each row suggests.

    Args:
        inputs: the inputs of the graph by name, of a step of a single token.
        most: G, the largest number of guesses of a row.

    Returns:
        The guesses, [B, G] int64, and how many of them count, [B] int32.
    """
    total = inputs["lengths"] + inputs["input_lengths"]
    columns = constant(np.arange(most, dtype=np.int32))
    state = inputs[GRAMMAR_STATE.name]
    ids = inputs["input_ids"].columns(0, 1) * constant(np.zeros((1, most), np.int64)) - 1

    def step(number: Tensor, states: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        before, so_far = states
        place = number.to(INT32)
        current = _in_time(inputs, before, total + place)
        # A row whose drafts have ended stays at state 0, which has none.
        draft = inputs[GRAMMAR_DRAFTS.name].rows(current).to(INT64)
        after = next_state(inputs, current, maximum(draft, 0))
        after = where((draft >= 0) & (after >= 0), after, 0)
        so_far = where(columns.equals(place), draft.unsqueeze(), so_far)
        return (draft >= 0).any(), (after, so_far)

    has_grammar = (state > 0).any()
    _, ids = loop(most, has_grammar, (state, ids), step)
    return ids, (ids >= 0).to(INT32).sum(keep=False)
