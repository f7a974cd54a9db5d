"""Step 5 of the contract, the next value of each state, and the outputs: ids, log-probabilities, the distribution."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from qsample.contract.tensors import INVALID_LOGITS, LENGTH, RUNNING, STOPPED
from qsample.sampler import blocks, filters
from qsample.sampler.blocks import FLOOR, Blocks, block_size
from qsample.sampler.call import Call, Columns, count_up
from qsample.sampler.draw import Draw
from qsample.sampler.tensor import (
    FLOAT,
    INT32,
    INT64,
    Tensor,
    concat,
    constant,
    exp,
    log,
    maximum,
    minimum,
    op,
    size,
    where,
)

_LEAST_SHARE: Final = 2.0**-126


def next_states(call: Call, draw: Draw) -> dict[str, Tensor]:
    """By the states' names. A row that does not run, or finds no token, keeps everything but its status."""
    emitted = draw.emitted
    advance = op(
        "Xor", call.running, op("Xor", call.sampling, emitted)
    )  # runs, and is not asked in vain
    lengths = where(advance, call.total, call.start)
    new = advance & call.start.equals(0)

    column = emitted.unsqueeze()
    states = {
        "lengths": lengths,
        "status": next_status(call, draw),
        "tokens": next_tokens(call, call.total.unsqueeze(), draw.token, column, lengths, new),
        "output_counts": call["output_counts"].scatter(
            draw.token, column.to(FLOAT), reduction="add"
        ),
    }
    return states | filter_states(call, draw)


def filter_states(call: Call, draw: Draw) -> dict[str, Tensor]:
    """The states of filters, [B] float32: they learn from the probability of a token that was drawn at random."""
    states, row = dict[str, Tensor](), Columns(call.inputs)
    if call.uses("mirostat"):
        assert draw.outcome.share is not None
        # A token that u = 0 draws has perhaps no probability of float32.
        surprise = log(maximum(draw.outcome.share, _LEAST_SHARE)) * (-1 / math.log(2))
        mu = filters.next_largest_surprise(row, surprise)
        changes = draw.random & (call["mirostat_tau"] > 0)
        states["mirostat_mu"] = where(changes, mu.squeeze(), call["mirostat_mu"])
    if call.uses("adaptive_p"):
        assert draw.outcome.share is not None
        error = draw.outcome.share - row["adaptive_target"]
        error = error + row["adaptive_decay"] * (row["adaptive_error"] - error)
        changes = draw.random & (call["adaptive_target"] >= 0)
        states["adaptive_error"] = where(changes, error.squeeze(), call["adaptive_error"])
    return states


def next_tokens(
    call: Call, at: Tensor, drawn: Tensor, emitted: Tensor, lengths: Tensor, new: Tensor
) -> Tensor:
    """The state `tokens`, with the tokens `drawn` [B, n] int64 at the places `at` [B, n] int32 if `emitted` [B, n]
    bool. lengths: [B] int32, `call.total` in rows that record their inputs, else `call.start`. new: [B] bool, rows that
    record inputs from position 0 on."""
    positions, written = call.branch(
        new,
        lambda: _writes(call, at, drawn, emitted, lengths, new),
        lambda: _writes(call, at, drawn, emitted, lengths, None),
    )
    return call["tokens"].scatter(positions.to(INT64) if call.captured else positions, written)


def _writes(
    call: Call, at: Tensor, drawn: Tensor, emitted: Tensor, lengths: Tensor, new: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scatter into `tokens`, with the arguments of `next_tokens` (new: None if no row is new): positions and tokens
    int32, [B, S + n], or [B, S + n + T] with new rows. It writes this call's inputs, sampled tokens, and into a
    new row's tail its first token; at once, so that `tokens` may be updated in place. Columns with nothing to record
    write the row's first token to position 0, where it is."""
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
    return where(recorded, positions, 0), where(recorded, values, first)


def next_status(call: Call, draw: Draw) -> Tensor:
    """[B] int32."""
    same = draw.token.equals(call["stop_ids"].to(INT64))
    # CUDA has no maximum of bools.
    stopped = same.to(FLOAT).max(keep=False) > 0 if call.captured else same.max(keep=False)
    full = call.total + 1 >= minimum(call["max_length"], call.capacity32)
    status = where(stopped, _int32(STOPPED), where(full, _int32(LENGTH), _int32(RUNNING)))
    return where(draw.emitted, status, where(call.sampling, _int32(INVALID_LOGITS), call["status"]))


def _int32(number: int) -> Tensor:
    return constant(np.array(number, np.int32))


NO_TOKEN: Final = -1  # in top_logprob_ids, for a row that emitted nothing
_MASKED: Final = -math.inf  # the log-probability of a token that cannot be drawn


def results(call: Call, draw: Draw, pad_token_id: int) -> dict[str, Tensor]:
    """`next_ids` and the outputs of the features, by name."""
    chosen, emitted = call.features, draw.emitted.unsqueeze()
    # A row that emits nothing has token 0.
    found = {
        "next_ids": draw.token if pad_token_id == 0 else where(emitted, draw.token, pad_token_id)
    }
    if chosen.logprobs or chosen.top_logprobs:
        split = blocks.split(call["logits"], call.vocab, block_size(call.vocab))
        shares = normalizer(split)
        if chosen.logprobs:
            found["logprobs"] = logprobs(call["logits"], shares, draw.token, emitted)
        if chosen.top_logprobs:
            found["top_logprob_ids"], found["top_logprobs"] = top_logprobs(
                split, shares, chosen.top_logprobs, emitted, replayed=call.captured
            )
    if draw.outcome.probs is not None:
        drawn = draw.random.unsqueeze()
        found["probs"] = probabilities(draw.outcome.probs, drawn, emitted & ~drawn, draw.token)
    return found


class Normalizer(NamedTuple):
    """log-softmax of a logit l is (l - maximum) - log_sum; kept apart because their sum would lose low bits. Both are
    [B, 1] float32, NaN if a row has no finite maximum."""

    maximum: Tensor
    log_sum: Tensor

    def log_softmax(self, logits: Tensor) -> Tensor:
        return (logits - self.maximum) - self.log_sum


def normalizer(split: Blocks) -> Normalizer:
    """The numbers that turn logits into log-probabilities."""
    maximum = split.maxima.max()
    sums = blocks.block_sums(exp(split.values - maximum.unsqueeze()))
    return Normalizer(maximum, log(blocks.total(sums)))


def logprobs(logits: Tensor, normalizer: Normalizer, next_ids: Tensor, emitted: Tensor) -> Tensor:
    """The model's log-probability of each row's token, [B, 1] float32; 0 for a row that emitted nothing. It is of the
    logits as they came, before masks, biases, penalties, temperature and filters, as vLLM reports by default
    (`logprobs_mode="raw_logprobs"`): it scores a text independently of how it was sampled. `probs` is the distribution
    that was sampled from."""
    return where(emitted, normalizer.log_softmax(logits.gather(next_ids)), 0.0)


def top_logprobs(
    split: Blocks, normalizer: Normalizer, count: int, emitted: Tensor, *, replayed: bool
) -> tuple[Tensor, Tensor]:
    """The `count` tokens with the largest `logprobs`, largest first, lower ids first on a tie: ids [B, M] int32 and
    log-probabilities [B, M] float32; -1 and 0 for a row that emitted nothing."""
    values, ids = blocks.top_candidates(split, count, replayed=replayed)
    found = where(values > FLOOR, normalizer.log_softmax(values), _MASKED)
    return where(emitted, ids.to(INT32), NO_TOKEN), where(emitted, found, 0.0)


def probabilities(drawn_from: Tensor, drawn: Tensor, greedy: Tensor, ids: Tensor) -> Tensor:
    """The distribution that the tokens were drawn from, [B, V] float32: `drawn_from` in rows that drew; a single 1 in
    greedy rows, at `ids` [B, 1] int64; zeros in rows that emitted nothing."""
    probs = where(drawn, drawn_from, 0.0)
    return probs.scatter(ids, where(greedy, 1.0, probs.gather(ids)))
