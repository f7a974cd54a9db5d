"""The filters top-k, top-p and min-p: which tokens pass, and their weights.

A token's weight is its unnormalised probability. Each filter keeps the tokens above some value, so their chain in
Hugging Face's order (top-k, then top-p on the renormalised survivors, then min-p) keeps those above the largest of
three. The thresholds of top-k and top-p are logits, not probabilities: tokens whose probabilities merely round to the
same value stay distinct.

top-k: Fan et al. 2018, arXiv:1805.04833. top-p: Holtzman et al. 2020, arXiv:1904.09751. min-p: Nguyen et al. 2024,
arXiv:2407.01082.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FAR = 2**31 - 1  # more than every vocabulary
_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny  # the smallest whose reciprocal is finite


def inverse_temperature(temperature: Tensor) -> Tensor:
    """1 / t, [B, 1] float32, finite and positive. A temperature below 2**-126 counts as 2**-126."""
    return temperature.clamp(min=_LEAST_TEMPERATURE).reciprocal()


def weigh(logits: Tensor, maximum: Tensor, inverse_temperature: Tensor) -> Tensor:
    """The tokens' weights exp((l - max) / t), float32 in [0, 1]: the one expression that every path uses.

    Subtracting first keeps a tiny temperature from overflowing: the maximum has weight 1 whatever t is.

    Args:
        logits: [B, K] or [B, V] float32; maximum: [B, 1] float32, finite; inverse_temperature: [B, 1] float32.
    """
    return torch.exp((logits - maximum) * inverse_temperature)


def kept_count(top_k: Tensor) -> Tensor:
    """How many tokens top-k keeps, ties aside: [B] int32; more than every vocabulary where it is off."""
    return torch.where(top_k > 0, top_k, _FAR)


def top_k_threshold(values: Tensor, kept_count: Tensor) -> Tensor:
    """The smallest of `values` that top-k keeps, [B, 1] float32: the last of them where it keeps more.

    Args:
        values: [B, K] float32, the largest logits, descending. kept_count: [B] int32.
    """
    ranks = torch.arange(values.shape[1], dtype=torch.int32)
    return torch.where(ranks < kept_count[:, None], values, torch.inf).amin(-1, keepdim=True)


def whole_top_k_threshold(values: Tensor, kept_count: Tensor) -> Tensor:
    """The same of all V logits, by reading the one: a rank for each would be a constant of V numbers in the graph."""
    last = kept_count.clamp(max=values.shape[1]) - 1
    return values.gather(1, last.to(torch.int64)[:, None])


def nucleus_weight(top_p: Tensor, total: Tensor) -> Tensor:
    """The least weight of a nucleus, [B] float64: top_p * total, +inf where top_p is off.

    Args:
        top_p: [B] float32, 1 = off. total: [B] float64, the weight of all that passed top-k.
    """
    return torch.where(top_p < 1, top_p.to(torch.float64) * total, torch.inf)


def nucleus_threshold(values: Tensor, weights: Tensor, nucleus_weight: Tensor) -> Tensor:
    """The smallest candidate whose strictly likelier tokens weigh less than `nucleus_weight`, [B, 1] float32.

    Args:
        values: [B, K] float32, descending, the largest logits.
        weights: [B, K] float32, theirs.
        nucleus_weight: [B] float64, top_p times the weight of all tokens; +inf = off.
    """
    weights = weights.to(torch.float64)
    # Of tied tokens the first decides for all: what precedes it is exactly the weight of the strictly likelier ones.
    before = weights.cumsum(-1) - weights
    # The largest stays whatever top_p is.
    return torch.where(before < nucleus_weight[:, None], values, values[:, :1]).amin(-1, keepdim=True)


def keep(logits: Tensor, weights: Tensor, threshold: Tensor, min_p: Tensor) -> Tensor:
    """The weights of the tokens that pass every filter, 0 for the others: float32, of the shape of `weights`.

    Args:
        logits, weights: float32. threshold: [B, 1] float32, of top-k and top-p.
        min_p: [B, 1] float32: the most likely token weighs 1, so p >= min_p * p_max where the weight is >= min_p.
    """
    return torch.where((logits >= threshold) & (weights >= min_p), weights, 0.0)
