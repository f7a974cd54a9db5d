"""Step 5 of the contract: the next value of each state."""

from __future__ import annotations

import numpy as np

from qsample.contract import INVALID_LOGITS, LENGTH, RUNNING, STOPPED
from qsample.sampler import filters, history
from qsample.sampler.call import Call, Columns
from qsample.sampler.draw import Draw
from qsample.sampler.tensor import FLOAT, INT64, Tensor, Tensors, constant, minimum, op, where


def next_states(call: Call, draw: Draw) -> dict[str, Tensor]:
    """By the states' names. A row that does not run, or finds no token, stays as it is but for its status."""
    emitted = draw.emitted
    advance = op("Xor", call.running, op("Xor", call.sampling, emitted))  # runs, and is not asked in vain
    lengths = where(advance, call.total, call.start)
    new = advance & call.start.equals(0)

    column = emitted.unsqueeze()

    def writes(new: Tensor | None) -> Tensors:
        start, total, after = (value.unsqueeze() for value in (call.start, call.total, lengths))
        begins = None if new is None else new.unsqueeze()
        return history.writes(
            call["tokens"],
            call.capacity32,
            start,
            total,
            after,
            call["input_ids"],
            draw.token,
            emitted.unsqueeze(),
            begins,
        )

    positions, written = call.branch(new, lambda: writes(new), lambda: writes(None))
    states = {
        "lengths": lengths,
        "status": next_status(call, draw),
        "tokens": call["tokens"].scatter(positions, written),
        "output_counts": call["output_counts"].scatter(draw.token, column.to(FLOAT), reduction="add"),
    }
    if draw.surprise is not None:
        row = Columns(call.inputs)
        mu = filters.largest_surprise(row) - row["mirostat_eta"] * (draw.surprise - row["mirostat_tau"])
        changes = draw.random & (call["mirostat_tau"] > 0)
        states["mirostat_mu"] = where(changes, mu.squeeze(), call["mirostat_mu"])
    return states


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
