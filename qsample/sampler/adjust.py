"""Masks, biases and penalties on the logits.

Every mask is added, never written over: -inf + NaN and -inf + inf are NaN, so an invalid logit stays visible to the
validity check that follows.
"""

from __future__ import annotations

import numpy as np

from qsample.sampler.tensor import FLOAT, INT64, Tensor, constant, minimum, op, where

_BYTE_VALUES, _BYTE_BITS, _WORD_BYTES = 256, 8, 4


def mask_disallowed(logits: Tensor, allowed_tokens: Tensor, vocab: int) -> Tensor:
    """Set the logits of tokens that the bitmask forbids to -inf.

    Args:
        logits: [B, V] float32.
        allowed_tokens: [B, ceil(V / 32)] int32; bit i of word w allows token 32 w + i; -1 allows all 32.
        vocab: V.
    """
    # A table with a row for each byte, because bit shifts have no kernel on some execution providers.
    bits = np.unpackbits(np.arange(_BYTE_VALUES, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    masks = constant(np.where(bits == 1, 0, -np.inf).astype(np.float32))
    scales = constant(np.array([_BYTE_VALUES**i for i in range(_WORD_BYTES)]))
    # ONNX's modulo has the divisor's sign, which gives a negative word's two's complement.
    words = op("Mod", allowed_tokens.to(INT64), _BYTE_VALUES**_WORD_BYTES)
    bytes_ = op("Mod", words.unsqueeze() / scales, _BYTE_VALUES)
    mask = op("Gather", masks, bytes_).reshape(0, -1)
    return logits + (mask.columns(0, vocab) if vocab % (_BYTE_BITS * _WORD_BYTES) else mask)


def add_bias(logits: Tensor, ids: Tensor, bias: Tensor, vocab: int) -> Tensor:
    """Add `bias` at `ids`; the biases of an id that occurs twice add up.

    Args:
        logits: [B, V] float32.
        ids: [B, N] int32 or int64; entries outside [0, V) are padding.
        bias: [B, N] float32; -inf forbids a token.
        vocab: V.
    """
    valid = (ids >= 0) & (ids < vocab)
    return logits.scatter(where(valid, ids, 0).to(INT64), where(valid, bias, 0.0), reduction="add")


def penalize(
    logits: Tensor, ids: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """The logits at `ids` after the repetition, presence and frequency penalties, [B, h] float32.

    Gathered at the ids and not over the vocabulary; duplicates read one value and get one value. Sampled tokens are in
    the history too, so that covers every non-zero count.

    Repetition: Keskar et al. 2019 (CTRL), arXiv:1909.05858, section 4.1, in its sign-aware form: l * r if l < 0, else
    l / r.

    Args:
        logits: [B, V] float32.
        ids: [B, h] int64, in [0, V), duplicates welcome: the row's history.
        output_counts: [B, V] float32, how often each token was sampled.
        repetition: [B, 1] float32, > 0; 1 = off.
        presence, frequency: [B, 1] float32; 0 = off.
    """
    seen, counts = logits.gather(ids), output_counts.gather(ids)
    seen = where(seen < 0, seen * repetition, seen / repetition)
    return seen - (frequency * counts + presence * minimum(counts, 1.0))


def forbid(logits: Tensor, ids: Tensor, forbidden: Tensor) -> Tensor:
    """Add -inf at `ids` ([B, N] int64, in [0, V)) that are `forbidden` ([B, N] bool)."""
    return logits.scatter(ids, where(forbidden, constant(np.float32(-np.inf)), 0.0), reduction="add")


def block(values: Tensor, ids: Tensor, blocked: Tensor) -> Tensor:
    """`values` [B, h] float32 of the tokens `ids` [B, h] int64; -inf if an id is among `blocked` [B, E] int64."""
    # Counted in float32: CUDA has no maximum of bools.
    matches = ids.unsqueeze().equals(blocked.unsqueeze(1)).to(FLOAT).max(keep=False)
    return values + where(matches > 0, -np.inf, 0.0)
