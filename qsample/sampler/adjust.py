"""Step 2 of the contract: masks, biases, bans and penalties on the logits.

Every mask is added, never written over: -inf + NaN and -inf + inf are NaN, so an invalid logit stays visible to the
validity check that follows.
"""

from __future__ import annotations

import numpy as np

from qsample.sampler import repetition
from qsample.sampler.call import Call, Columns
from qsample.sampler.tensor import FLOAT, INT64, Tensor, Tensors, branch, concat, constant, minimum, op, where

_BYTE_VALUES, _BYTE_BITS, _WORD_BYTES = 256, 8, 4


def adjusted_logits(call: Call) -> Tensor:
    """The logits that filters and the argmax see, [B, V] float32."""
    logits, chosen = call["logits"], call.features
    if chosen.allowed_tokens:
        logits = mask_disallowed(logits, call["allowed_tokens"], call.vocab, narrow=call.for_webgpu)
    if chosen.logit_bias:
        logits = add_bias(logits, call["logit_bias_ids"], call["logit_bias"], call.vocab)
    past = _past(call) if call.uses("bad_words_ids", "no_repeat_ngram_size", "dry") else None
    if past is not None:
        logits = _forbid(call, logits, past)
    # A single scatter for stops and penalties: if the logits are in a buffer of the graph's own, it is in place.
    logits = logits.scatter(*_block_and_penalize(call, logits))
    return logits if past is None else _dry(call, logits, past)


def mask_disallowed(logits: Tensor, allowed_tokens: Tensor, vocab: int, *, narrow: bool = False) -> Tensor:
    """Set the logits of tokens that the bitmask forbids to -inf.

    Args:
        logits: [B, V] float32.
        allowed_tokens: [B, ceil(V / 32)] int32; bit i of word w allows token 32 w + i; -1 allows all 32.
        vocab: V.
        narrow: with integers of 32 bits, which takes the CPU twice as long.
    """
    # A table with a row for each byte, because bit shifts have no kernel on some execution providers.
    bits = np.unpackbits(np.arange(_BYTE_VALUES, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    masks = constant(np.where(bits == 1, 0, -np.inf).astype(np.float32))
    mask = op("Gather", masks, (_bytes_narrow if narrow else _bytes)(allowed_tokens)).reshape(0, -1)
    return logits + (mask.columns(0, vocab) if vocab % (_BYTE_BITS * _WORD_BYTES) else mask)


def _bytes(words: Tensor) -> Tensor:
    """[B, W] int32 -> [B, W, 4] int64, from the lowest on."""
    scales = constant(np.array([_BYTE_VALUES**i for i in range(_WORD_BYTES)]))
    # ONNX's modulo has the divisor's sign, which gives a negative word's two's complement.
    unsigned = op("Mod", words.to(INT64), _BYTE_VALUES**_WORD_BYTES)
    return op("Mod", unsigned.unsqueeze() / scales, _BYTE_VALUES)


def _bytes_narrow(words: Tensor) -> Tensor:
    """[B, W] int32 -> [B, W, 4] int32. A negative word is 2**31 more without its sign bit."""
    scales = constant(np.array([_BYTE_VALUES**i for i in range(_WORD_BYTES)], np.int32))
    sign_bit = constant(np.array([0, 0, 0, _BYTE_VALUES // 2], np.int32))
    negative = words.unsqueeze() < 0
    shifted = where(negative, words.unsqueeze() + (2**31 - 1) + 1, words.unsqueeze()) / scales
    return shifted - shifted / _BYTE_VALUES * _BYTE_VALUES + where(negative, sign_bit, 0)


def add_bias(logits: Tensor, ids: Tensor, bias: Tensor, vocab: int) -> Tensor:
    """Add `bias` at `ids`; the biases of an id that occurs twice add up.

    Args:
        logits: [B, V] float32.
        ids: [B, N] int32; entries outside of [0, V) are padding.
        bias: [B, N] float32; -inf forbids a token.
        vocab: V.
    """
    valid = (ids >= 0) & (ids < vocab)
    return logits.scatter(where(valid, ids, 0).to(INT64), where(valid, bias, 0.0), reduction="add")


def penalize(
    logits: Tensor, ids: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """The logits at `ids` after the repetition, presence and frequency penalties, [B, h] float32.

    Gathered at the ids and not over the vocabulary; duplicates read and get the same value. Sampled tokens are in
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


def block(values: Tensor, ids: Tensor, blocked: Tensor) -> Tensor:
    """`values` [B, h] float32 of the tokens `ids` [B, h] int64; -inf if an id is among `blocked` [B, E] int64."""
    # Counted in float32: CUDA has no maximum of bools.
    matches = ids.unsqueeze().equals(blocked.unsqueeze(1)).to(FLOAT).max(keep=False)
    return values + where(matches > 0, -np.inf, 0.0)


def _block_and_penalize(call: Call, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The stop ids below the minimum length, and the history with its penalties: ids [B, h] and their logits."""
    strengths = [f"{kind}_penalty" for kind in ("repetition", "presence", "frequency")]
    off = [call[name].equals(float(name == "repetition_penalty")) for name in strengths]
    unpenalized = off[0] & off[1] & off[2]
    too_short = call.total < call["min_length"]

    def seen() -> Tensor:
        # The history is read as far as some row is penalized for it: not at all if no row is.
        length = call.capacity
        if not call.captured:
            length = minimum(where(unpenalized, 0, call.start).max(keep=False).to(INT64), length)
        return call.history(length)

    def without_stops() -> Tensors:
        ids = seen()
        return ids, penalize(logits, ids, call["output_counts"], *call.columns(*strengths))

    def with_stops() -> Tensors:
        ids = seen()
        stops = where(too_short.unsqueeze(), call["stop_ids"], -1).to(INT64)
        ids = concat(ids, where(stops >= 0, stops, ids.last()))
        return ids, block(penalize(logits, ids, call["output_counts"], *call.columns(*strengths)), ids, stops)

    def nothing() -> Tensors:
        return call["input_ids"].columns(0, 0), logits.columns(0, 0)

    if call.captured:
        ids, values = with_stops()
    else:
        some_too_short = too_short.any()
        found = branch(some_too_short, with_stops, nothing)
        ids, values = branch(op("Or", some_too_short, unpenalized.all()), lambda: found, without_stops)
    return ids, values


def _past(call: Call) -> repetition.Past:
    tokens = call.row_tokens()
    return repetition.Past(tokens, minimum(call.total.unsqueeze().to(INT64), call.capacity))


def _forbid(call: Call, logits: Tensor, past: repetition.Past) -> Tensor:
    if call.uses("bad_words_ids"):
        logits = repetition.forbid_bad_words(logits, past, call["bad_words_ids"])
    if call.uses("no_repeat_ngram_size"):
        size = call["no_repeat_ngram_size"]
        given = (logits,)
        (logits,) = call.branch(
            size > 0, lambda: (repetition.forbid_repeated_ngrams(*given, past, size.unsqueeze()),), lambda: given
        )
    return logits


def _dry(call: Call, logits: Tensor, past: repetition.Past) -> Tensor:
    if not call.uses("dry"):
        return logits

    def penalized() -> Tensors:
        return (repetition.dry(logits, past, Columns(call.inputs)),)

    return call.branch(call["dry_multiplier"] > 0, penalized, lambda: (logits,))[0]
