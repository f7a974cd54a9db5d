"""Candidates or logits and the filter parameters enter; one threshold per row leaves: a token survives iff l >= it.

Each filter keeps the tokens above some value, so their chain in Hugging Face's order (top-k, then top-p on the
renormalised survivors, then min-p) keeps those above the largest of three thresholds. Thresholds are logits, not
probabilities: tokens whose probabilities merely round to the same value stay distinct.

top-k: Fan et al. 2018, arXiv:1805.04833. top-p: Holtzman et al. 2020, arXiv:1904.09751. min-p: Nguyen et al. 2024,
arXiv:2407.01082.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weights(logits: Tensor, maximum: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities exp((l - max) / t), float32 in [0, 1]: the one expression that every path uses.

    Subtracting first keeps a tiny temperature from overflowing: the maximum has weight 1 whatever t is.

    Args:
        logits: [B, K] or [B, V] float32; maximum: [B, 1] float32, finite; temperature: [B, 1] float32, > 0.
    """
    return torch.exp((logits - maximum) / temperature)


def top_k_threshold(values: Tensor, top_k: Tensor) -> Tensor:
    """The top_k-th largest logit, [B, 1] float32; -inf where top_k is off (0) or beyond the candidates.

    Args:
        values: [B, K] float32, the largest logits, descending.
        top_k: [B, 1] int32.
    """
    known = (top_k > 0) & (top_k <= values.shape[1])
    kth = values.gather(1, torch.where(known, top_k - 1, 0).to(torch.int64))
    return torch.where(known, kth, -torch.inf)


def nucleus_limit(top_p: Tensor, total: Tensor) -> Tensor:
    """How much strictly likelier tokens may weigh, [B, 1] float64: top_p * total, +inf where top_p is 1 or more.

    Args:
        top_p: [B, 1] float32; total: [B, 1] float64, the weight of all tokens that passed top-k.
    """
    return torch.where(top_p < 1, top_p.to(torch.float64) * total, torch.inf)


def nucleus_threshold(values: Tensor, masses: Tensor, limit: Tensor) -> Tensor:
    """The smallest candidate whose strictly likelier tokens weigh less than `limit`, [B, 1] float32.

    Args:
        values: [B, K] float32, descending, the largest logits.
        masses: [B, K] float32, their weights.
        limit: [B, 1] float64, top_p times the weight of all tokens; +inf = off.
    """
    masses = masses.to(torch.float64)
    # Of tied tokens the first decides for all: what precedes it is exactly the mass of the strictly likelier ones.
    before = masses.cumsum(-1) - masses
    kept = (before < limit).to(torch.int64).sum(-1, keepdim=True)
    return values.gather(1, kept.clamp(min=1) - 1)


def min_p_threshold(maximum: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """The logit of a token min_p times as likely as the most likely one, [B, 1] float32; -inf where min_p is 0.

    exp((l - max) / t) >= min_p solved for l, in float64 because the sum would lose the low bits of the logarithm.
    """
    log_min_p = min_p.to(torch.float64).log()
    threshold = (maximum.to(torch.float64) + temperature.to(torch.float64) * log_min_p).to(torch.float32)
    return torch.minimum(threshold, maximum)
