"""A step of a graph for replay: without control flow, in few nodes, and no more than its rows need.

A device launches a kernel for each node, however few numbers it has. So numbers of a row lie side by
side where nodes can share them, and what a step does to a row is looked up: the facts about the row
are digits of a number, its case, and tables have the results of each case.

Every step takes the largest of the model's logits. All else is in parts that an empty list of rows
switches off (`replay_draw`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from qsample.contract.interface import Interface
from qsample.contract.tensors import (
    ADJUSTED_LOGITS,
    BATCH,
    GRAMMAR_STATE,
    INVALID_LOGITS,
    LENGTH,
    NOISE_STREAMS,
    PROCESSED_LOGPROBS,
    PROCESSED_ROWS,
    RUNNING,
    STATUS_NAMES,
    STOPPED,
    retained_name,
)
from qsample.sampler.adjust import adjusted_logits
from qsample.sampler.call import StepCall, count_up
from qsample.sampler.commit import filter_states, results
from qsample.sampler.draw import Draw, Outcome, nothing_drawn
from qsample.sampler.grammar import grammar_state
from qsample.sampler.parts import Numbers, Part
from qsample.sampler.replay_draw import draw_processed, likeliest
from qsample.sampler.tensor import (
    FLOAT,
    INT32,
    INT64,
    Tensor,
    TensorRecord,
    concat,
    constant,
    minimum,
    where,
)

# The numbers that have these values in a row that takes the largest of the model's logits.
_PLAIN: Final = {
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
}
# These states are read at places of the first rows, and the processed rows are the first rows.
_READ_AT_PLACES: Final = ("output_counts", *NOISE_STREAMS)
# The largest status.
_MOST_ENDED: Final = max(STATUS_NAMES)


class ReplayedCall(StepCall):
    """Rows of a step, whose prompts the host has written to `tokens`."""

    def longest(self, needed: Tensor) -> Tensor:
        return self.capacity

    def history(self, length: Tensor) -> Tensor:
        return self["tokens"]

    def newest(self, length: Tensor, count: Tensor) -> Tensor:
        places = count_up(length)
        end = self.total.unsqueeze()
        return ((places >= end - count) & (places < end)).to(FLOAT)

    def row_tokens(self) -> Tensor:
        return self["tokens"].to(INT64)

    def counts(self, ids: Tensor) -> Tensor:
        return self["output_counts"].gather(ids)


class _Case(NamedTuple):
    """What a step finds in a row.

    Attributes:
        proofs: how many of the proofs hold that its token is valid.
        is_full: whether the row has no room behind its token.
        emits: whether the row has to emit a token.
        ended: the status of a row that does not run; 0 for others.
        is_stopped: whether its token is a stop token.
    """

    proofs: int
    is_full: bool
    emits: bool
    ended: int
    is_stopped: bool

    def emitted(self, needed: int) -> bool:
        """Whether the row emits its token. needed: how many proofs there are."""
        return self.ended == RUNNING and self.emits and self.proofs == needed

    def advances(self, needed: int) -> bool:
        """Whether the row keeps this call's inputs."""
        return self.ended == RUNNING and (not self.emits or self.proofs == needed)

    def status(self, needed: int) -> int:
        """The next status of the row."""
        if self.ended != RUNNING:
            return self.ended
        if not self.emits:
            return RUNNING
        if self.proofs < needed:
            return INVALID_LOGITS
        if self.is_stopped:
            return STOPPED
        return LENGTH if self.is_full else RUNNING


# The number of a case, as the sum of its digits. It is odd if no stop token equals the row's token:
# each that does takes away a part of 1, and the fraction is cut off.
_PROOF: Final = 2
_IS_FULL: Final = 16
_EMITS: Final = 32
_ENDS: Final = 64
_NOT_STOPPED: Final = 1
_STOPPED_PART: Final = 2.0**-7
_CASES: Final = [
    _Case(
        proofs=number % _IS_FULL // _PROOF,
        is_full=number % _EMITS >= _IS_FULL,
        emits=number % _ENDS >= _EMITS,
        ended=number // _ENDS,
        is_stopped=number % 2 != _NOT_STOPPED,
    )
    for number in range(4 * _ENDS)
]


@dataclass(frozen=True)
class _Choice(TensorRecord):
    """The token of each row.

    Attributes:
        token: [B, 1] int64, a token of the vocabulary.
        digits: [B, d] float32, digits of the row's case; the first ones are its proofs.
        outcome: the other values of the draw.
        adjusted: [B, V] float32, the logits after step 2; None unless an output reads them.
    """

    token: Tensor
    digits: Tensor
    outcome: Outcome
    adjusted: Tensor | None


def replayed_step(
    interface: Interface,
    inputs: Mapping[str, Tensor],
    pad_token_id: int,
    num_candidates: int,
    *,
    for_webgpu: bool,
) -> dict[str, Tensor]:
    """The outputs and the next states of a step, by name.

    Args:
        interface: the dimensions and options of the graph.
        inputs: the inputs and states by name.
        pad_token_id: the value of `next_ids` in a row that emits nothing.
        num_candidates: K.
        for_webgpu: see `build_sampler`.
    """
    total = inputs["lengths"] + inputs["input_lengths"]
    call = ReplayedCall(interface, inputs, total, for_webgpu=for_webgpu)
    return _Step(call, pad_token_id, num_candidates).tensors()


class _Step:
    """A step of all rows."""

    def __init__(self, call: ReplayedCall, pad_token_id: int, num_candidates: int) -> None:
        self._call = call
        self._pad_token_id = pad_token_id
        self._num_candidates = num_candidates
        self._numbers = Numbers.of(call.inputs, _float_names(call.interface))
        self._num_proofs = sum(name in _PLAIN for name in self._numbers.names) + 2

    def tensors(self) -> dict[str, Tensor]:
        """The outputs and the next states, by the names of outputs."""
        call = self._call
        choice = self._processed(self._plain())
        token = choice.token
        token32 = token.to(INT32)
        case = self._case(choice.digits, token32)
        needed = self._num_proofs
        emitted = _looked_up([each.emitted(needed) for each in _CASES], np.bool_, case)
        advances = _looked_up([each.advances(needed) for each in _CASES], np.bool_, case)
        end = where(emitted, call.total, call.capacity32).unsqueeze()
        count = emitted.to(FLOAT).unsqueeze()
        random = emitted & (call["temperature"] > 0)
        adjusted = call["logits"] if choice.adjusted is None else choice.adjusted
        draw = Draw(token, emitted, random, choice.outcome, adjusted)
        states = {
            "lengths": where(advances, call.total, call["lengths"]),
            "status": _looked_up([each.status(needed) for each in _CASES], np.int32, case),
            "tokens": where(count_up(call.capacity) >= end, token32, call["tokens"]),
            "output_counts": call["output_counts"].scatter(token, count, reduction="add"),
            **filter_states(call, draw),
        }
        if call.features.grammars:
            states[GRAMMAR_STATE.name] = grammar_state(call, token, emitted)
        next_ids = where(emitted.unsqueeze(), token, self._pad_token_id)
        outputs = results(call, draw, next_ids)
        outputs |= {retained_name(name): state for name, state in states.items()}
        if choice.adjusted is not None:
            outputs[ADJUSTED_LOGITS.name] = choice.adjusted
        return outputs

    def _plain(self) -> _Choice:
        """The choice of rows that take the largest of the model's logits."""
        call = self._call
        logits = call["logits"]
        largest = likeliest(call, logits)
        plain = np.array([[_PLAIN.get(name, 0.0) for name in self._numbers.names]], np.float32)
        is_plain = self._numbers.values.equals(constant(plain))
        # As many of these hold as the status says: other numbers end a row, too.
        ended = call["status"].unsqueeze() > constant(np.arange(_MOST_ENDED, dtype=np.int32)[None])
        limit = minimum(call["max_length"], call.capacity32)
        is_full = (call.total + 1 >= limit).unsqueeze()
        emits = call["emit"].unsqueeze()
        is_above = largest.is_above_floor()
        facts = concat(is_plain, is_above, largest.is_finite(), is_full, ended, emits)
        # The last digit has the 1 of a token that is no stop token.
        parts = [*self._proof_digits(), _IS_FULL, *[_ENDS] * _MOST_ENDED, _EMITS]
        yes = np.array([parts], np.float32)
        no = np.zeros_like(yes)
        yes[0, -1] += _NOT_STOPPED
        no[0, -1] += _NOT_STOPPED
        digits = where(facts, constant(yes), constant(no))
        outcome = nothing_drawn(call, largest.logit.squeeze(), largest.token)
        reads_adjusted = self._reads_adjusted()
        return _Choice(largest.token, digits, outcome, logits if reads_adjusted else None)

    def _proof_digits(self) -> list[int]:
        """The digits of the first facts: that each number is plain, that a token is left, and that
        no logit is NaN or +inf. Numbers that make no difference to a plain row prove nothing."""
        of_numbers = [_PROOF if name in _PLAIN else 0 for name in self._numbers.names]
        return [*of_numbers, _PROOF, _PROOF]

    def _reads_adjusted(self) -> bool:
        """Whether an output of the graph, or a test, reads the adjusted logits of all rows."""
        features = self._call.features
        has_logprobs = features.logprobs or features.top_logprobs > 0
        if has_logprobs:
            return features.logprobs_mode == PROCESSED_LOGPROBS
        return not self._call.for_webgpu

    def _processed(self, plain: _Choice) -> _Choice:
        """The choice of all rows, from that of plain rows."""
        part = Part(self._call[PROCESSED_ROWS.name], for_webgpu=self._call.for_webgpu)
        return part.run(lambda: self._process(plain, part), plain)

    def _process(self, plain: _Choice, part: Part) -> _Choice:
        """The choice of all rows. part: the processed rows."""
        call = self._call
        inputs = part.inputs(call.interface, call.inputs, self._numbers, _READ_AT_PLACES)
        total = part.take(call.total)
        of_rows = ReplayedCall(call.interface, inputs, total, for_webgpu=call.for_webgpu)
        adjusted = adjusted_logits(of_rows)
        drawn = draw_processed(of_rows, adjusted, self._num_candidates)
        # All proofs of a processed row are in the place of the first.
        digits = self._proof_digits()
        parts = np.zeros((1, len(digits)), np.float32)
        parts[0, 0] = sum(digits)
        proofs = where(drawn.is_valid, constant(parts), 0.0)
        return _Choice(
            part.put(plain.token, drawn.token),
            part.put_first_columns(plain.digits, proofs),
            part.put(plain.outcome, drawn.outcome),
            part.put(plain.adjusted, adjusted) if plain.adjusted is not None else None,
        )

    def _case(self, digits: Tensor, token: Tensor) -> Tensor:
        """The number of each row's case: [B] int32. token: [B, 1] int32."""
        is_stop = self._call["stop_ids"].equals(token)
        taken_away = where(is_stop, constant(np.array(-_STOPPED_PART, np.float32)), 0.0)
        return concat(digits, taken_away).sum(keep=False).to(INT32)


def _float_names(interface: Interface) -> list[str]:
    """The inputs and states with a float32 number for each row."""
    specs = (*interface.sampler.inputs, *interface.sampler.states)
    return [spec.name for spec in specs if spec.dtype == "float32" and spec.axes == (BATCH,)]


def _looked_up(results_of_cases: Sequence[int], dtype: type, case: Tensor) -> Tensor:
    """The result of each row's case, [B]. case: [B] int32."""
    return constant(np.array(results_of_cases, dtype)).rows(case)
