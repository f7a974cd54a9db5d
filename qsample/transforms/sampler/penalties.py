"""Masks, biases and penalties on the logits.

Every mask is added, never written over: -inf + NaN and -inf + inf are NaN, so an invalid logit stays visible to the
validity check that follows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_BYTE_BITS = 8
_BYTE_VALUES = 256
_WORD_BYTES = 4


def byte_masks() -> Tensor:
    """[256, 8] float32, for `mask_disallowed`: row b holds 0 where a bit of byte b is set and -inf where it is not."""
    bytes_ = torch.arange(_BYTE_VALUES)[:, None]
    bits = bytes_ // 2 ** torch.arange(_BYTE_BITS)[None] % 2
    return torch.where(bits == 1, 0.0, -torch.inf)


def mask_disallowed(logits: Tensor, allowed_tokens: Tensor, masks: Tensor) -> Tensor:
    """Set the logits of tokens that the bitmask forbids to -inf.

    Args:
        logits: [B, V] float32.
        allowed_tokens: [B, ceil(V / 32)] int32; bit i of word w allows token 32 w + i; -1 allows all 32.
        masks: `byte_masks()`. A table, because bit shifts have no kernel on some execution providers.
    """
    scales = torch.tensor([_BYTE_VALUES**i for i in range(_WORD_BYTES)])
    # Floored division and modulo give a negative word's two's complement bytes. Not torch.div: its export divides in
    # float32, which has no room for 32 bits.
    bytes_ = (allowed_tokens.to(torch.int64)[:, :, None] // scales) % _BYTE_VALUES
    mask = functional.embedding(bytes_, masks).reshape(logits.shape[0], -1)
    return logits + mask[:, : logits.shape[1]]


def add_bias(logits: Tensor, ids: Tensor, bias: Tensor) -> Tensor:
    """Add `bias` at `ids`; the biases of an id that occurs twice add up.

    Args:
        logits: [B, V] float32.
        ids: [B, N] int32; entries outside [0, V) are padding.
        bias: [B, N] float32; -inf forbids a token.
    """
    valid = (ids >= 0) & (ids < logits.shape[1])
    amounts = torch.where(valid, bias, torch.zeros_like(bias))
    return logits.scatter_add(1, torch.where(valid, ids, torch.zeros_like(ids)).to(torch.int64), amounts)


def blocked_stops(stop_ids: Tensor, too_short: Tensor) -> Tensor:
    """The stop ids that rows may not draw, [B, E] int64, padded with -1: all of them below a row's minimum length.

    Args:
        stop_ids: [B, E] int32, padded with -1. too_short: [B, 1] bool.
    """
    return torch.where(too_short, stop_ids, -1).to(torch.int64)


def penalize(
    logits: Tensor, ids: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """The logits at `ids` after the repetition, presence and frequency penalties, [B, h] float32.

    Gathered at the ids and not over the vocabulary; duplicates read one value and get one value. Sampled tokens are in
    the history too, so that covers every non-zero count.

    Repetition: Keskar et al. 2019 (CTRL), arXiv:1909.05858, section 4.1, in its sign-aware form: l * r where l < 0,
    else l / r.

    Args:
        logits: [B, V] float32.
        ids: [B, h] int64, in [0, V), duplicates welcome: the row's history.
        output_counts: [B, V] float32, how often each token was sampled.
        repetition: [B, 1] float32, > 0; 1 = off.
        presence, frequency: [B, 1] float32; 0 = off.
    """
    seen = logits.gather(1, ids)
    counts = output_counts.gather(1, ids)
    seen = torch.where(seen < 0, seen * repetition, seen / repetition)
    return seen - (frequency * counts + presence * counts.clamp(max=1.0))


def block(values: Tensor, ids: Tensor, blocked: Tensor) -> Tensor:
    """`values` [B, h] float32 of the tokens `ids` [B, h] int64; -inf where an id is among `blocked` [B, E] int64."""
    is_blocked = (ids[:, :, None] == blocked[:, None, :]).any(-1)
    return values + torch.where(is_blocked, -torch.inf, 0.0)
