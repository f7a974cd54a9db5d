"""Step 5 of the contract: the next value of each state, and the outputs.

The outputs are ids, log-probabilities and the distribution that the token was drawn from.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from qsample.contract.tensors import (
    GRAMMAR_STATE,
    INVALID_LOGITS,
    LENGTH,
    RAW_LOGPROBS,
    RUNNING,
    STOPPED,
)
from qsample.sampler import blocks, filters
from qsample.sampler.blocks import FLOOR, Blocks, block_size
from qsample.sampler.call import Call, Columns, DrawCall, count_up
from qsample.sampler.draw import LEAST_SHARE, MASKED_LOGPROB, NO_TOKEN, Draw
from qsample.sampler.grammar import grammar_state
from qsample.sampler.tensor import (
    FLOAT,
    INT32,
    INT64,
    Tensor,
    concat,
    constant,
    exp,
    log_of_column,
    maximum,
    minimum,
    op,
    size,
    where,
)


def next_states(call: Call, draw: Draw) -> dict[str, Tensor]:
    """The next value of each state, by name.

    A row that does not run, or that has to emit a token and finds none, keeps everything except its
    status.
    """
    emitted = draw.emitted.unsqueeze()
    found_none = op("Xor", call.sampling, draw.emitted)
    advances = op("Xor", call.running, found_none)
    lengths = where(advances, call.total, call.start)
    begins = advances & call.start.equals(0)
    status = next_status(call, draw)
    tokens = next_tokens(call, call.total.unsqueeze(), draw.token, emitted, lengths, begins)
    counts = call["output_counts"].scatter(draw.token, emitted.to(FLOAT), reduction="add")
    states = {
        "lengths": lengths,
        "status": status,
        "tokens": tokens,
        "output_counts": counts,
    }
    if call.features.grammars:
        states[GRAMMAR_STATE.name] = grammar_state(call, draw.token, draw.emitted)
    return states | filter_states(call, draw)


def filter_states(call: DrawCall, draw: Draw) -> dict[str, Tensor]:
    """The next states of filters, [B] float32 each, by name.

    They follow the probability of the token, in rows that drew it at random.
    """
    states: dict[str, Tensor] = {}
    row = Columns(call.inputs)
    if call.uses("mirostat"):
        assert draw.outcome.share is not None
        # The probability of a token that u = 0 draws may round to 0 in float32.
        surprise = log_of_column(maximum(draw.outcome.share, LEAST_SHARE)) * (-1 / math.log(2))
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
    call: Call, at: Tensor, drawn: Tensor, emitted: Tensor, lengths: Tensor, begins: Tensor
) -> Tensor:
    """The next value of the state `tokens`: [B, T] int32.

    Args:
        call: the inputs of the call.
        at: [B, n] int32, the positions of the sampled tokens.
        drawn: [B, n] int64, the sampled tokens.
        emitted: [B, n] bool, which of them are written.
        lengths: [B] int32, `call.total` in rows that record their inputs, otherwise `call.start`.
        begins: [B] bool, rows that record inputs from position 0 on.
    """
    positions, written = call.branch(
        begins,
        lambda: _writes(call, at, drawn, emitted, lengths, begins),
        lambda: _writes(call, at, drawn, emitted, lengths, None),
    )
    return call["tokens"].scatter(positions, written)


def _writes(
    call: Call, at: Tensor, drawn: Tensor, emitted: Tensor, lengths: Tensor, begins: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scatter into `tokens`.

    It writes this call's inputs, the sampled tokens, and a row's first token to the tail of a row
    that begins. All of that is a single scatter, so that `tokens` may be updated in place. Columns
    without anything to record write the row's first token to position 0, where it already is.

    Args:
        call, at, drawn, emitted, lengths: the arguments of `next_tokens`.
        begins: [B] bool, as for `next_tokens`; None if no row begins.

    Returns:
        Positions and tokens, int32, [B, S + n]; [B, S + n + T] with rows that begin.
    """
    tokens = call["tokens"]
    ids = call["input_ids"]
    start = call.start.unsqueeze()
    end = lengths.unsqueeze()
    begins_column = None if begins is None else begins.unsqueeze()
    first = tokens.columns(0, 1)
    positions = start + count_up(size(ids, 1))
    recorded = concat(positions < end, emitted)
    positions = concat(positions, at)
    values = concat(ids, drawn).to(INT32)
    if begins_column is not None:
        first = where(begins_column, values.columns(0, 1), first)
        tail = end + emitted.to(INT32).sum() + count_up(size(tokens, 1))
        positions = concat(positions, tail)
        recorded = concat(recorded, begins_column & (tail >= 0))
        values = concat(values, op("Expand", first, op("Shape", tokens)))
    recorded = recorded & (positions < call.capacity32)
    return where(recorded, positions, 0), where(recorded, values, first)


def next_status(call: Call, draw: Draw) -> Tensor:
    """The next value of the state `status`: [B] int32."""
    stopped = draw.token.equals(call["stop_ids"].to(INT64)).max(keep=False)
    full = call.total + 1 >= minimum(call["max_length"], call.capacity32)
    status = where(stopped, _int32(STOPPED), where(full, _int32(LENGTH), _int32(RUNNING)))
    without_token = where(call.sampling, _int32(INVALID_LOGITS), call["status"])
    return where(draw.emitted, status, without_token)


def _int32(number: int) -> Tensor:
    return constant(np.array(number, np.int32))


def next_ids(draw: Draw, pad_token_id: int) -> Tensor:
    """The token of each row, or the pad id: [B, 1] int64."""
    # A row that emits nothing has token 0.
    if pad_token_id == 0:
        return draw.token
    return where(draw.emitted.unsqueeze(), draw.token, pad_token_id)


def results(call: DrawCall, draw: Draw, next_ids: Tensor) -> dict[str, Tensor]:
    """`next_ids`, [B, 1] int64, and the outputs of the features, by name."""
    features = call.features
    emitted = draw.emitted.unsqueeze()
    outputs = {"next_ids": next_ids}
    if features.logprobs or features.top_logprobs > 0:
        if features.logprobs_mode == RAW_LOGPROBS:
            outputs |= logprob_outputs(call, draw, call["logits"], emitted)
        else:
            undrawn = logprob_outputs(call, draw, draw.adjusted, emitted)
            outputs |= processed_logprob_outputs(draw, undrawn)
    if draw.outcome.probs is not None:
        drawn = draw.random.unsqueeze()
        greedy = emitted & ~drawn
        outputs["probs"] = probabilities(draw.outcome.probs, drawn, greedy, draw.token)
    return outputs


def logprob_outputs(
    call: DrawCall, draw: Draw, logits: Tensor, emitted: Tensor
) -> dict[str, Tensor]:
    """`logprobs` and `top_logprobs` of logits, by name; those that the package has.

    Args:
        call, draw: the call and its draw.
        logits: [B, V] float32.
        emitted: [B, 1] bool; other rows get 0, and ids of -1.
    """
    features = call.features
    split = blocks.split(logits, call.vocab, block_size(call.vocab))
    shares = normalizer(split)
    outputs = {}
    if features.logprobs:
        outputs["logprobs"] = logprobs(logits, shares, draw.token, emitted)
    if features.top_logprobs > 0:
        top = call.top_of_blocks(split, features.top_logprobs)
        ids, values = top_logprobs(*top, shares, emitted)
        outputs["top_logprob_ids"] = ids
        outputs["top_logprobs"] = values
    return outputs


def processed_logprob_outputs(draw: Draw, undrawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """`logprobs` and `top_logprobs` of the distribution that the token was drawn from, by name.

    As in vLLM, greedy rows have those of the logits after masks, biases and penalties.

    Args:
        draw: the draw.
        undrawn: the outputs for rows that draw nothing.
    """
    drawn = draw.random.unsqueeze()
    outputs = dict(undrawn)
    if draw.outcome.logprob is not None:
        outputs["logprobs"] = where(drawn, draw.outcome.logprob, undrawn["logprobs"])
    if draw.outcome.top is not None:
        values = undrawn["top_logprobs"]
        ids = where(values > MASKED_LOGPROB, undrawn["top_logprob_ids"], NO_TOKEN)
        outputs["top_logprob_ids"] = where(drawn, draw.outcome.top.ids.to(INT32), ids)
        outputs["top_logprobs"] = where(drawn, draw.outcome.top.logprobs, values)
    return outputs


class Normalizer(NamedTuple):
    """The numbers that make log-probabilities of logits: (l - maximum) - log_sum.

    They are two numbers because their sum would lose low bits.

    Attributes:
        maximum: [B, 1] float32, the largest logit; not finite if a row has no finite maximum.
        log_sum: [B, 1] float32, the logarithm of the sum of exp(l - maximum); NaN in such a row.
    """

    maximum: Tensor
    log_sum: Tensor

    def log_softmax(self, logits: Tensor) -> Tensor:
        return (logits - self.maximum) - self.log_sum


def normalizer(split: Blocks) -> Normalizer:
    """The normalizer of logits in blocks."""
    maximum = split.maxima.max()
    sums = blocks.block_sums(exp(split.values - maximum.unsqueeze()))
    return Normalizer(maximum, log_of_column(blocks.total(sums)))


def logprobs(logits: Tensor, normalizer: Normalizer, next_ids: Tensor, emitted: Tensor) -> Tensor:
    """The log-probability of each row's token: [B, 1] float32.

    By default, as in vLLM (`logprobs_mode="raw_logprobs"`), it is computed from the model's own
    logits, before masks, biases, penalties, temperature and filters, so it scores a text
    independently of how the text was sampled.

    Args:
        logits: [B, V] float32, the logits.
        normalizer: the normalizer of these logits.
        next_ids: [B, 1] int64, the tokens.
        emitted: [B, 1] bool; other rows get 0.
    """
    return where(emitted, normalizer.log_softmax(logits.gather(next_ids)), 0.0)


def top_logprobs(
    values: Tensor, ids: Tensor, normalizer: Normalizer, emitted: Tensor
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the tokens with the largest logits.

    Args:
        values: [B, M] float32, the largest logits.
        ids: [B, M] int64, their tokens.
        normalizer: the normalizer of the logits.
        emitted: [B, 1] bool; other rows get ids of -1 and log-probabilities of 0.

    Returns:
        The ids, [B, M] int32, and the log-probabilities, [B, M] float32.
    """
    log_probabilities = where(values > FLOOR, normalizer.log_softmax(values), MASKED_LOGPROB)
    return where(emitted, ids.to(INT32), NO_TOKEN), where(emitted, log_probabilities, 0.0)


def probabilities(drawn_from: Tensor, drawn: Tensor, greedy: Tensor, ids: Tensor) -> Tensor:
    """The distribution that the tokens come from: [B, V] float32; zeros in rows without a token.

    Args:
        drawn_from: [B, V] float32, the distribution of random rows.
        drawn: [B, 1] bool, the random rows.
        greedy: [B, 1] bool, the greedy rows, whose distribution is a single 1 at their token.
        ids: [B, 1] int64, the tokens.
    """
    probs = where(drawn, drawn_from, 0.0)
    return probs.scatter(ids, where(greedy, 1.0, probs.gather(ids)))
