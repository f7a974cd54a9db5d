"""Step 5 of the contract: the next value of each state."""

from __future__ import annotations

import numpy as np

from qsample.contract.tensors import INVALID_LOGITS, LENGTH, RUNNING, STOPPED
from qsample.sampler import filters
from qsample.sampler.call import Call, Columns, count_up
from qsample.sampler.draw import Draw
from qsample.sampler.tensor import FLOAT, INT32, INT64, Tensor, concat, constant, minimum, op, size, where


def next_states(call: Call, draw: Draw) -> dict[str, Tensor]:
    """By the states' names. A row that does not run, or finds no token, keeps everything but its status."""
    emitted = draw.emitted
    advance = op("Xor", call.running, op("Xor", call.sampling, emitted))  # runs, and is not asked in vain
    lengths = where(advance, call.total, call.start)
    new = advance & call.start.equals(0)

    column = emitted.unsqueeze()
    states = {
        "lengths": lengths,
        "status": next_status(call, draw),
        "tokens": next_tokens(call, call.total.unsqueeze(), draw.token, column, lengths, new),
        "output_counts": call["output_counts"].scatter(draw.token, column.to(FLOAT), reduction="add"),
    }
    if draw.surprise is not None:
        states["mirostat_mu"] = next_mu(call, draw)
    return states


def next_mu(call: Call, draw: Draw) -> Tensor:
    """[B] float32: the state `mirostat_mu`."""
    assert draw.surprise is not None
    row = Columns(call.inputs)
    mu = filters.largest_surprise(row) - row["mirostat_eta"] * (draw.surprise - row["mirostat_tau"])
    changes = draw.random & (call["mirostat_tau"] > 0)
    return where(changes, mu.squeeze(), call["mirostat_mu"])


def next_tokens(call: Call, at: Tensor, drawn: Tensor, emitted: Tensor, lengths: Tensor, new: Tensor) -> Tensor:
    """The state `tokens`.

    Args:
        call: the inputs.
        at: [B, n] int32, the places of sampled tokens.
        drawn: [B, n] int64, these tokens.
        emitted: [B, n] bool, which of them are recorded.
        lengths: [B] int32, `call.total` in rows that record their inputs, else `call.start`.
        new: [B] bool, rows that record inputs from position 0 on.
    """
    positions, written = call.branch(
        new,
        lambda: _writes(call, at, drawn, emitted, lengths, new),
        lambda: _writes(call, at, drawn, emitted, lengths, None),
    )
    return call["tokens"].scatter(positions, written)


def _writes(
    call: Call, at: Tensor, drawn: Tensor, emitted: Tensor, lengths: Tensor, new: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scatter into `tokens`: this call's inputs, sampled tokens, and into a new row's tail its first token.

    One scatter, so that `tokens` may be updated in place. Every column writes something: those with nothing to record
    write the row's first token to position 0, where it stands already.

    Args: as for `next_tokens`; new: None if no row is new.

    Returns:
        Positions, int64, and tokens, int32: [B, S + n], or [B, S + n + T] with new rows.
    """
    tokens, ids = call["tokens"], call["input_ids"]
    start, after = call.start.unsqueeze(), lengths.unsqueeze()
    begins = None if new is None else new.unsqueeze()
    first = tokens.columns(0, 1)
    positions = start + count_up(size(ids, 1))
    recorded = concat(positions < after, emitted)
    positions = concat(positions, at)
    values = concat(ids, drawn).to(INT32)
    if begins is not None:
        first = where(begins, values.columns(0, 1), first)
        tail = after + emitted.to(INT32).sum() + count_up(size(tokens, 1))
        positions = concat(positions, tail)
        recorded = concat(recorded, begins & (tail >= 0))
        values = concat(values, op("Expand", first, op("Shape", tokens)))
    recorded = recorded & (positions < call.capacity32)
    return where(recorded, positions, 0).to(INT64), where(recorded, values, first)


def next_status(call: Call, draw: Draw) -> Tensor:
    """[B] int32."""
    same = draw.token.equals(call["stop_ids"].to(INT64))
    # CUDA has no maximum of bools.
    stopped = same.to(FLOAT).max(keep=False) > 0 if call.captured else same.max(keep=False)
    full = call.total + 1 >= minimum(call["max_length"], call.capacity32)
    status = where(stopped, _int32(STOPPED), where(full, _int32(LENGTH), _int32(RUNNING)))
    silent = where(call.sampling, _int32(INVALID_LOGITS), _int32(RUNNING))
    return where(call.running, where(draw.emitted, status, silent), call["status"])


def _int32(number: int) -> Tensor:
    return constant(np.array(number, np.int32))
