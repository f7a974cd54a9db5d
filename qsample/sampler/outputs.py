"""The optional outputs of a step: log-probabilities and the sampled distribution."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from qsample.sampler import blocks
from qsample.sampler.blocks import FLOOR, Blocks, block_size
from qsample.sampler.call import Call
from qsample.sampler.draw import Draw
from qsample.sampler.tensor import INT32, Tensor, exp, log, where

NO_TOKEN: Final = -1  # in top_logprob_ids, for a row that emitted nothing
_MASKED: Final = -math.inf  # the log-probability of a token that cannot be drawn


def results(call: Call, draw: Draw, pad_token_id: int) -> dict[str, Tensor]:
    """`next_ids` and the outputs of the features, by name."""
    chosen, emitted = call.features, draw.emitted.unsqueeze()
    # A row that emits nothing has token 0.
    found = {"next_ids": draw.token if pad_token_id == 0 else where(emitted, draw.token, pad_token_id)}
    if chosen.logprobs or chosen.top_logprobs:
        split = blocks.split(call["logits"], call.vocab, block_size(call.vocab))
        shares = normalizer(split)
        if chosen.logprobs:
            found["logprobs"] = logprobs(call["logits"], shares, draw.token, emitted)
        if chosen.top_logprobs:
            found["top_logprob_ids"], found["top_logprobs"] = top_logprobs(
                split, shares, chosen.top_logprobs, emitted, replayed=call.captured
            )
    if draw.probs is not None:
        drawn = draw.random.unsqueeze()
        found["probs"] = probabilities(draw.probs, drawn, emitted & ~drawn, draw.token)
    return found


class Normalizer(NamedTuple):
    """log-softmax of a logit l is (l - maximum) - log_sum; kept apart because their sum would lose low bits.

    Attributes:
        maximum, log_sum: [B, 1] float32; NaN if a row has no finite maximum.
    """

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
    """The model's own log-probability of each row's token, [B, 1] float32; 0 for a row that emitted nothing.

    "The model's own": log-softmax of the logits as they came, before masks, biases, penalties, temperature and filters.
    vLLM reports it by default (`logprobs_mode="raw_logprobs"`), and it scores a text independently of how it was
    sampled; the distribution that was sampled from is the output `probs`.

    Args:
        logits: [B, V] float32, of the model.
        normalizer: of the same logits.
        next_ids: [B, 1] int64, in [0, V).
        emitted: [B, 1] bool.
    """
    return where(emitted, normalizer.log_softmax(logits.gather(next_ids)), 0.0)


def top_logprobs(
    split: Blocks, normalizer: Normalizer, count: int, emitted: Tensor, *, replayed: bool
) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens by the model's own log-probability, likeliest first, lower ids first on a tie.

    Returns:
        Ids [B, M] int32 and log-probabilities [B, M] float32; -1 and 0 for a row that emitted nothing.
    """
    values, ids = blocks.top_candidates(split, count, replayed=replayed)
    found = where(values > FLOOR, normalizer.log_softmax(values), _MASKED)
    return where(emitted, ids.to(INT32), NO_TOKEN), where(emitted, found, 0.0)


def probabilities(drawn_from: Tensor, drawn: Tensor, greedy: Tensor, ids: Tensor) -> Tensor:
    """The distribution that the tokens were drawn from, [B, V] float32; zeros for a row that emitted nothing.

    Args:
        drawn_from: [B, V] float32, the distribution of rows that drew; any number in others.
        drawn: [B, 1] bool, rows that drew.
        greedy: [B, 1] bool, rows whose token was the argmax: a single 1 at `ids`.
        ids: [B, 1] int64, in [0, V).
    """
    probs = where(drawn, drawn_from, 0.0)
    return probs.scatter(ids, where(greedy, 1.0, probs.gather(ids)))
