"""The optional outputs of a step: log-probabilities and the sampled distribution."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsample.transforms.sampler import candidates

NO_TOKEN = -1  # in top_logprob_ids, for a row that emitted nothing


class Normaliser(NamedTuple):
    """log-softmax of a logit l is (l - maximum) - log_sum; kept apart because their sum would lose low bits.

    Both [B, 1] float32; NaN where a row has no finite maximum.
    """

    maximum: Tensor
    log_sum: Tensor

    def log_softmax(self, logits: Tensor) -> Tensor:
        return (logits - self.maximum) - self.log_sum


def normaliser(chunks: candidates.Chunks) -> Normaliser:
    """What turns logits into log-probabilities."""
    maximum = chunks.maxima.amax(-1, keepdim=True)
    sums = torch.exp(chunks.values - maximum[:, :, None]).sum(-1).to(torch.float64)
    return Normaliser(maximum, sums.sum(-1, keepdim=True).log().to(torch.float32))


def logprobs(logits: Tensor, normaliser: Normaliser, next_ids: Tensor, emitted: Tensor) -> Tensor:
    """The model's own log-probability of each row's token, [B, 1] float32; 0 for a row that emitted nothing.

    "The model's own": log-softmax of the logits as they came, before masks, biases, penalties, temperature and filters.
    It is what vLLM reports by default (`logprobs_mode="raw_logprobs"`) and what scores a text independently of how it
    was sampled; the distribution that was sampled from is the output `probs`.

    Args:
        logits: [B, V] float32, of the model. next_ids: [B, 1] int64, in [0, V). emitted: [B, 1] bool.
    """
    return torch.where(emitted, normaliser.log_softmax(logits.gather(1, next_ids)), 0.0)


def top_logprobs(
    chunks: candidates.Chunks, normaliser: Normaliser, count: int, emitted: Tensor
) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens by the model's own log-probability, likeliest first, lower ids first on a tie.

    Returns ids [B, M] int32 and log-probabilities [B, M] float32; -1 and 0 for a row that emitted nothing.
    """
    values, ids = candidates.top_candidates(chunks, count)
    ids = torch.where(emitted, ids, NO_TOKEN).to(torch.int32)
    return ids, torch.where(emitted, normaliser.log_softmax(values), 0.0)


def probabilities(weights: Tensor, random: Tensor, greedy: Tensor, ids: Tensor) -> Tensor:
    """The distribution that the tokens were drawn from, [B, V] float32; zeros for a row that emitted nothing.

    Args:
        weights: [B, V] float32, the weights of the survivors, 0 elsewhere.
        random: [B, 1] bool, rows that drew; greedy: [B, 1] bool, rows whose token was the argmax: one-hot at `ids`.
        ids: [B, 1] int64, in [0, V).
    """
    total = weights.to(torch.float64).sum(-1, keepdim=True).to(torch.float32)
    drawn = torch.where(random, weights / total, 0.0)
    return drawn.scatter(1, ids, torch.where(greedy, 1.0, drawn.gather(1, ids)))
