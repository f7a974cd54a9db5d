"""After a model whose steps may give a row several tokens: which guesses the sampler draws, too, and the commit.

Each place at which a token may be drawn is a row of the sampler, which is the same as that of other packages: it gets
the row's parameters and states, the guesses before the place as inputs, and counts that include them. A place counts if
the draw before it gave its guess and did not end the row. So the tokens, and every state after them, are those of steps
of one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import (
    CANDIDATES,
    INPUT_IDS,
    INPUT_LENGTHS,
    LENGTHS,
    LOGITS,
    LOGPROBS,
    MIROSTAT_MU,
    NEW_IDS,
    NEXT_IDS,
    NUM_DRAFT_TOKENS,
    NUM_NEW,
    OUTPUT_COUNTS,
    RUNNING,
    STATUS,
    STOPPED,
    TOKENS,
    retained_name,
)
from qsample.sampler.adjust import adjusted_logits
from qsample.sampler.build import finished, new_graph, set_outputs
from qsample.sampler.call import Call, count_up
from qsample.sampler.commit import next_mu, next_status, next_tokens
from qsample.sampler.draw import draw
from qsample.sampler.guess import GUESS_IDS, PLACE_COLUMNS, PLACE_ROWS, PLACES, STEP_IDS, VERIFIED
from qsample.sampler.outputs import NO_TOKEN, results
from qsample.sampler.tensor import FLOAT, INT32, INT64, Tensor, building, constant, maximum, op, size, where


def verifier_spec(interface: Interface) -> GraphSpec:
    """The sampler's inputs, `guess.VERIFIED` and states; logits are [V] after each draw's tokens."""
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
        rows = {**inputs, "status": where(idle, constant(np.array(STOPPED, np.int32)), inputs["status"])}
        call, at_place = Call(plain, rows), Call(plain, _Places(plain, rows))
        drawn = draw(at_place, adjusted_logits(at_place), CANDIDATES)
        statuses = next_status(at_place, drawn)

        place, guesses = inputs[PLACES.name], inputs[GUESS_IDS.name]
        token, emitted, status = (values.rows(place) for values in (drawn.token.squeeze(), drawn.emitted, statuses))
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
            OUTPUT_COUNTS.name: inputs[OUTPUT_COUNTS.name].scatter(token, kept.to(FLOAT), reduction="add"),
        }
        if drawn.surprise is not None:  # such a row has no guesses
            states[MIROSTAT_MU.name] = next_mu(at_place, drawn).rows(place.columns(0, 1).squeeze())

        newest = where((count > 0).unsqueeze(), token.gather(more.unsqueeze().to(INT64)), pad_token_id)
        checked = (guesses >= 0).to(INT32).sum(keep=False)
        found = {NEXT_IDS.name: newest, NUM_NEW.name: count, NUM_DRAFT_TOKENS.name: checked}
        found[NEW_IDS.name] = _in_columns(interface, where(kept, token, pad_token_id), pad_token_id)
        for name, value in results(at_place, drawn, pad_token_id).items():
            if name == LOGPROBS.name:
                found[name] = _in_columns(interface, where(kept, value.squeeze().rows(place), 0.0), 0.0)
            elif name != NEXT_IDS.name:
                nothing = NO_TOKEN if value.dtype == INT32 else 0.0
                found[name] = _in_columns(interface, where(kept.unsqueeze(), value.rows(place), nothing), nothing)
        retained = [replace(state, name=retained_name(state.name)) for state in spec.states if not state.read_only]
        found |= {retained_name(name): state for name, state in states.items()}
        set_outputs(graph, interface, [*spec.outputs, *retained], found)
    return finished(graph)


def _in_columns(interface: Interface, values: Tensor, filler: float) -> Tensor:
    """`values` [B, n, ...] and behind them `filler`, up to J columns."""
    missing = interface.features.num_speculative_tokens + 1 - size(values, 1)
    none = np.zeros(len(values.shape) - 2, np.int64)
    pads = op("Concat", np.zeros(len(values.shape) + 1, np.int64), missing, none, axis=0)
    return op("Pad", values, pads, op("CastLike", filler, values))


class _Places(Mapping[str, Tensor]):
    """The sampler's inputs at each place. They are made whenever they are read: a branch makes its own."""

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
