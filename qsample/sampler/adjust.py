"""Step 2 of the contract: masks, biases, bans and penalties on the logits.

Masks are added and never overwrite a logit: -inf + NaN and -inf + inf are NaN, so the later check
still sees invalid logits.

DRY, no_repeat_ngram_size and bad_words_ids compare the tokens of a row with the end of the row. For
each position i before the last, m(i) is the length of the longest sequence that ends both at i and
at the end of the row. The token at i + 1 would continue a repetition of that length.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qsample.contract.tensors import LONGEST_MATCH
from qsample.sampler import grammar
from qsample.sampler.call import Columns, StepCall
from qsample.sampler.tensor import (
    FLOAT,
    INT64,
    Tensor,
    branch,
    concat,
    constant,
    indices,
    maximum,
    minimum,
    op,
    size,
    where,
)

_BYTE_VALUES = 256
_BITS_PER_BYTE = 8
_BYTES_PER_WORD = 4
# A word of `allowed_tokens` whose tokens may all be sampled.
_ALL_ALLOWED = -1
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# DRY's penalty is finite: infinity would make a logit invalid.
_LARGEST_PENALTY = 1e30
# An `allowed_length` below 0 counts at most this much.
_LARGEST_EXPONENT = 1e4


def adjusted_logits(call: StepCall) -> Tensor:
    """The logits that filters and the argmax see: [B, V] float32."""
    logits = call["logits"]
    if call.features.allowed_tokens:
        logits = _masked(call, logits)
    if call.features.logit_bias:
        logits = _add_bias(logits, call["logit_bias_ids"], call["logit_bias"], call.vocab)
    if call.features.grammars:
        # After the biases, which change no mask: a stop token gets back the logit that it has here.
        logits = grammar.masked(call, logits)
    past = None
    if call.uses("bad_words_ids", "no_repeat_ngram_size", "dry"):
        tokens = call.row_tokens()
        past = Past(tokens, minimum(call.total.unsqueeze().to(INT64), call.capacity))
        logits = _forbid(call, logits, past)
    if call.captured:
        logits = _blocked_and_penalized(call, logits)
    else:
        # Stops and penalties are a single scatter. ONNX Runtime does it in place if it owns the
        # buffer.
        logits = logits.scatter(*_block_and_penalize(call, logits))
    return logits if past is None else _dry(call, logits, past)


def _masked(call: StepCall, logits: Tensor) -> Tensor:
    """The logits, -inf for the tokens that `allowed_tokens` forbids: [B, V] float32."""
    words = call["allowed_tokens"]
    mask = call.branch(
        _has_mask(call),
        lambda: _mask_of_bits(words, call.vocab, narrow=call.for_webgpu),
        lambda: constant(np.zeros((1, 1), np.float32)),
    )
    return logits.masked_by(mask)


def _has_mask(call: StepCall) -> Tensor:
    """Whether `allowed_tokens` forbids a token of a row: [B] bool."""
    # The maximum is of float32, because CUDA has no maximum of bools.
    forbids = (~call["allowed_tokens"].equals(_ALL_ALLOWED)).to(FLOAT)
    return forbids.max(keep=False) > 0


def _mask_of_bits(allowed_tokens: Tensor, vocab: int, *, narrow: bool) -> Tensor:
    """0 for allowed tokens and -inf for others: [n, V] float32.

    Args:
        allowed_tokens: the bitmask, [n, ceil(V / 32)] int32.
        vocab: V.
        narrow: compute with integers of 32 bits, which takes twice as long on the CPU.
    """
    # A table with a row for each byte, because some execution providers have no bit shifts.
    byte_values = np.arange(_BYTE_VALUES, dtype=np.uint8)[:, None]
    bits = np.unpackbits(byte_values, axis=1, bitorder="little")
    masks = constant(np.where(bits == 1, 0, -np.inf).astype(np.float32))
    mask_bytes = _bytes_narrow(allowed_tokens) if narrow else _bytes(allowed_tokens)
    words = -(-vocab // (_BITS_PER_BYTE * _BYTES_PER_WORD))
    mask = op("Gather", masks, mask_bytes)
    mask = mask.reshape(0, words * _BYTES_PER_WORD * _BITS_PER_BYTE)
    if vocab % (_BITS_PER_BYTE * _BYTES_PER_WORD) != 0:
        mask = mask.columns(0, vocab)
    return mask


def _bytes(words: Tensor) -> Tensor:
    """The bytes of words, the lowest first: [B, W] int32 gives [B, W, 4] int64."""
    scales = constant(np.array([_BYTE_VALUES**i for i in range(_BYTES_PER_WORD)]))
    # ONNX's Mod has the sign of the divisor, so a negative word gives its two's complement.
    unsigned = op("Mod", words.to(INT64), _BYTE_VALUES**_BYTES_PER_WORD)
    return op("Mod", unsigned.unsqueeze() / scales, _BYTE_VALUES)


def _bytes_narrow(words: Tensor) -> Tensor:
    """The bytes of words, the lowest first: [B, W] int32 gives [B, W, 4] int32.

    The sign bit is taken from a negative word before the division, and added to its highest byte.
    """
    scales = constant(np.array([_BYTE_VALUES**i for i in range(_BYTES_PER_WORD)], np.int32))
    sign_bit = constant(np.array([0, 0, 0, _BYTE_VALUES // 2], np.int32))
    negative = words.unsqueeze() < 0
    without_sign = words.unsqueeze() + (2**31 - 1) + 1
    shifted = where(negative, without_sign, words.unsqueeze()) / scales
    return shifted - shifted / _BYTE_VALUES * _BYTE_VALUES + where(negative, sign_bit, 0)


def _add_bias(logits: Tensor, ids: Tensor, bias: Tensor, vocab: int) -> Tensor:
    """Add `bias`, [B, N] float32, at `ids`, [B, N] int32.

    Ids outside [0, V) are padding; the biases of equal ids add up.
    """
    valid = (ids >= 0) & (ids < vocab)
    return logits.scatter(where(valid, ids, 0).to(INT64), where(valid, bias, 0.0), reduction="add")


def _newest_counts(call: StepCall, needed: Tensor) -> Tensor:
    """How often each token is among the newest `penalty_last_n` tokens of a row: [B, V] float32.

    If no row needs the counts, the result is a column of arbitrary numbers.

    Args:
        call: the inputs of the call.
        needed: [B] bool, the rows that need the counts.
    """

    def counts() -> Tensor:
        length = call.longest(needed)
        newest = call.newest(length, call["penalty_last_n"].unsqueeze())
        none = op("Expand", 0.0, op("Shape", call["logits"]))
        return none.scatter(call.history(length), newest, reduction="add")

    return call.branch(needed, counts, lambda: call["temperature"].unsqueeze())


def _penalized(call: StepCall, values: Tensor, ids: Tensor, newest: Tensor | None) -> Tensor:
    """Logits after the repetition, presence and frequency penalties: [B, h] float32.

    The repetition penalty r is that of CTRL (Keskar et al. 2019, arXiv:1909.05858, section 4.1), by
    the sign of the logit: l * r if l < 0, else l / r. The presence penalty and the frequency
    penalty are OpenAI's: l - (frequency * count + presence * [count > 0]).

    Args:
        call: the inputs of the call.
        values: [B, h] float32, the logits.
        ids: [B, h] integers, their tokens. They cover each count above 0, because sampled tokens
            are in the history, too. Duplicates get the same value.
        newest: the result of `_newest_counts`; None if the graph has no `penalty_last_n`.
    """
    repetition, presence, frequency = call.columns(*_PENALTIES)
    counts = call.counts(ids)
    if newest is not None:
        # A graph with control flow has a single column of them if no row needs the counts.
        newest_ids = ids if call.captured else minimum(ids, size(newest, 1) - 1)
        newest_counts = newest.gather(newest_ids)
        is_on = call["penalty_last_n"].unsqueeze() >= 0
        repetition = where(is_on & newest_counts.equals(0.0), 1.0, repetition)
        counts = where(is_on, newest_counts, counts)
    values = where(values < 0, values * repetition, values / repetition)
    return values - (frequency * counts + presence * minimum(counts, 1.0))


def _blocked(values: Tensor, ids: Tensor, blocked: Tensor) -> Tensor:
    """`values`, [B, h] float32, with -inf where the id is blocked.

    Args:
        values: [B, h] float32, logits.
        ids: [B, h] int64, their tokens.
        blocked: [B, E] int64, the blocked tokens, padded with -1.
    """
    # The maximum is of float32, because CUDA has no maximum of bools.
    matches = ids.unsqueeze().equals(blocked.unsqueeze(1)).to(FLOAT).max(keep=False)
    return values + where(matches > 0, -np.inf, 0.0)


def _blocked_and_penalized(call: StepCall, logits: Tensor) -> Tensor:
    """The logits after `min_length` and the penalties, [B, V] float32, without control flow."""
    too_short = (call.total < call["min_length"]).unsqueeze()
    stops = where(too_short, call["stop_ids"], -1)
    logits = forbid(logits, maximum(stops, 0), stops >= 0)
    newest = None
    if call.uses("penalty_last_n"):
        newest = _newest_counts(call, call["penalty_last_n"] >= 0)
    ids = call.history(call.capacity)
    return logits.scatter(ids, _penalized(call, logits.gather(ids), ids, newest))


def _block_and_penalize(call: StepCall, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Stop ids of rows below their minimum length, and the tokens of the history with penalties.

    Returns:
        Ids, [B, h] int64, and their new logits, [B, h] float32; without columns if no row needs
        any.
    """
    # Few nodes: after a model has run, each node takes microseconds, because its code and its data
    # are no longer in the processor's caches.
    penalties = op("Concat", *(call[name] for name in _PENALTIES), axis=0)
    off = penalties.reshape(len(_PENALTIES), -1).equals(
        constant(np.array([[1], [0], [0]], np.float32))
    )
    long_enough = call.total >= call["min_length"]

    def has_penalty() -> Tensor:
        return ~off.min(0, keep=False)

    newest = None
    if call.uses("penalty_last_n"):
        newest = _newest_counts(call, (call["penalty_last_n"] >= 0) & has_penalty())

    def history() -> Tensor:
        # Read as far as the longest row with a penalty reaches; not at all if no row has a penalty.
        return call.history(call.longest(has_penalty()))

    def without_stops() -> tuple[Tensor, Tensor]:
        ids = history()
        return ids, _penalized(call, logits.gather(ids), ids, newest)

    def with_stops() -> tuple[Tensor, Tensor]:
        ids = history()
        stops = where(long_enough.unsqueeze(), -1, call["stop_ids"]).to(INT64)
        ids = concat(ids, where(stops >= 0, stops, ids.last()))
        return ids, _penalized(call, _blocked(logits.gather(ids), ids, stops), ids, newest)

    def nothing() -> tuple[Tensor, Tensor]:
        return constant(np.zeros((1, 0), np.int64)), constant(np.zeros((1, 0), np.float32))

    return branch(
        (off & long_enough).all(),
        nothing,
        lambda: branch(long_enough.all(), without_stops, with_stops),
    )


def _forbid(call: StepCall, logits: Tensor, past: Past) -> Tensor:
    """The logits after bad_words_ids and no_repeat_ngram_size."""
    if call.uses("bad_words_ids"):
        logits = forbid_bad_words(logits, past, call["bad_words_ids"])
    if call.uses("no_repeat_ngram_size"):
        size = call["no_repeat_ngram_size"]
        before = logits
        logits = call.branch(
            size > 0,
            lambda: forbid_repeated_ngrams(before, past, size.unsqueeze()),
            lambda: before,
        )
    return logits


def _dry(call: StepCall, logits: Tensor, past: Past) -> Tensor:
    """The logits after DRY, if the graph has it."""
    if not call.uses("dry"):
        return logits
    return call.branch(
        call["dry_multiplier"] > 0,
        lambda: dry(logits, past, Columns(call.inputs)),
        lambda: logits,
    )


class Past:
    """The tokens of each row so far.

    Attributes:
        tokens: [B, h] int64, ids of the vocabulary; those from `lengths` on mean nothing.
        lengths: [B, 1] int64, 1 to h, the number of tokens of each row.
        positions: [1, h] int64, 0 to h - 1.
    """

    def __init__(self, tokens: Tensor, lengths: Tensor) -> None:
        self.tokens = tokens
        self.lengths = lengths
        self.positions = op("Range", 0, op("Squeeze", size(tokens, 1)), 1).unsqueeze(0)

    def end(self, count: int | Tensor, *, ahead: int = 0) -> tuple[Tensor, Tensor]:
        """The newest tokens of each row, the newest first.

        Args:
            count: how many columns the result has; a number or a scalar int64.
            ahead: how many of them come before the newest token; their content means nothing.

        Returns:
            The tokens, [B, count] int64, and whether the row has them, [B, count] bool.
        """
        back = indices(count) if isinstance(count, int) else op("Range", 0, count, 1)
        places = self.lengths - 1 + ahead - back.unsqueeze(0)
        last = op("Squeeze", size(self.tokens, 1)) - 1
        return self.tokens.gather(op("Clip", places, 0, last)), places >= 0

    def matches(self, longest: Tensor) -> Tensor:
        """The length m(i) of the match that ends at each position: [B, h] float32.

        It is 0 from the newest token on.

        Args:
            longest: [B, 1] int64, the largest length that counts, up to LONGEST_MATCH.
        """
        end, is_there = self.end(LONGEST_MATCH)
        wanted = is_there & (indices(LONGEST_MATCH) < longest)
        # The tokens up to each position, the newest first: [B, h, LONGEST_MATCH]. There are none
        # before the first position.
        places = self.positions.unsqueeze() - indices(LONGEST_MATCH)
        shape = op("Concat", op("Shape", self.tokens), [LONGEST_MATCH], axis=0)
        # No size is inferred: of no rows, it cannot be.
        flat_shape = op(
            "Concat", size(self.tokens, 0), size(self.tokens, 1) * LONGEST_MATCH, axis=0
        )
        flat = op("Reshape", op("Expand", maximum(places, 0), shape), flat_shape)
        earlier = op("Reshape", self.tokens.gather(flat), shape)
        same = earlier.equals(end.unsqueeze(1)) & wanted.unsqueeze(1) & (places >= 0)
        misses = (~same).to(FLOAT).cumsum()
        matched = misses.equals(0.0).to(FLOAT).sum(keep=False)
        return where(self.positions < self.lengths - 1, matched, 0.0)

    def followers(self) -> Tensor:
        """The token after each position: [B, h] int64; the last column has its own token."""
        following = minimum(self.positions + 1, size(self.tokens, 1) - 1)
        return self.tokens.gather(op("Expand", following, op("Shape", self.tokens)))


def dry(logits: Tensor, past: Past, row: Mapping[str, Tensor]) -> Tensor:
    """DRY ("don't repeat yourself"): l - multiplier * base ** (m - allowed_length).

    m is the longest match that the token would continue. Source:
    https://github.com/oobabooga/text-generation-webui/pull/5677, in llama.cpp's form: a match
    counts if it has at least `allowed_length` tokens, none of which is a breaker, and no breaker is
    penalized. `dry_multiplier` 0, `dry_base` below 1 and `dry_penalty_last_n` 0 switch DRY off.

    Args:
        logits: [B, V] float32.
        past: the tokens of the rows.
        row: DRY's inputs by name, [B, 1] each, except `dry_sequence_breakers`, [B, D].
    """
    multiplier = row["dry_multiplier"]
    base = row["dry_base"]
    breakers = row["dry_sequence_breakers"]
    last_n = row["dry_penalty_last_n"]
    allowed = row["dry_allowed_length"].to(FLOAT)
    end, is_there = past.end(LONGEST_MATCH)
    unbroken = (~_is_among(end, breakers) & is_there).to(FLOAT)
    before_breaker = ((1.0 - unbroken).cumsum().equals(0.0)).to(FLOAT).sum().to(INT64)
    window = where(last_n < 0, 2**31 - 1, last_n).to(INT64)
    lengths = past.matches(minimum(before_breaker, window))
    # A match lies completely within the window.
    room = (past.positions - (past.lengths - minimum(window, past.lengths)) + 1).to(FLOAT)
    lengths = minimum(lengths, maximum(room, 0.0))

    counts = (lengths >= maximum(allowed, 1.0)) & (multiplier > 0) & (base >= 1)
    power = op("Pow", base, minimum(lengths - allowed, _LARGEST_EXPONENT))
    strength = where(counts, power * multiplier, 0.0)
    followers = past.followers()
    strength = where(_is_among(followers, breakers), 0.0, minimum(strength, _LARGEST_PENALTY))
    none = op("Expand", 0.0, op("Shape", logits))
    return logits - none.scatter(followers, strength, reduction="max")


def _is_among(ids: Tensor, listed: Tensor) -> Tensor:
    """Whether each id, [B, h] int64, is among `listed`, [B, D] int32, padded with -1: [B, h]
    bool."""
    matches = ids.unsqueeze().equals(listed.to(INT64).unsqueeze(1))
    return matches.to(FLOAT).max(keep=False) > 0


def forbid_repeated_ngrams(logits: Tensor, past: Past, ngram: Tensor) -> Tensor:
    """Forbid each token that would complete an n-gram that the row already has.

    Source: Paulus et al. 2017, arXiv:1705.04304.

    Args:
        logits: [B, V] float32.
        past: the tokens of the rows.
        ngram: [B, 1] int32, n, from 1 to LONGEST_MATCH + 1; 0 for off.
    """
    before = maximum(ngram - 1, 0)
    lengths = past.matches(constant(np.array([[LONGEST_MATCH]])))
    # An n-gram of a single token is each token of the row, including the newest.
    single = ngram.equals(1) & (past.positions < past.lengths)
    repeats = (lengths >= before.to(FLOAT)) & (ngram > 1) & (past.positions < past.lengths - 1)
    logits = forbid(logits, past.followers(), repeats)
    return forbid(logits, past.tokens, single)


def forbid_bad_words(logits: Tensor, past: Past, bad_words: Tensor) -> Tensor:
    """Forbid the last token of each sequence in rows that end with its other tokens.

    Args:
        logits: [B, V] float32.
        past: the tokens of the rows.
        bad_words: [B, Q, L] int32, the sequences, each padded with -1 at its beginning.
    """
    newest_first = op("Slice", bad_words.to(INT64), [-1], [-(2**31)], [2], [-1])
    completing = op("Slice", newest_first, [0], [1], [2])
    # The first column stands for the token that would complete the sequence: any token fits there.
    end, is_there = past.end(op("Squeeze", size(bad_words, 2)), ahead=1)
    is_equal = newest_first.equals(end.unsqueeze(1)) & is_there.unsqueeze(1)
    fits = is_equal | (newest_first < 0)
    is_completing = op("Range", 0, op("Squeeze", size(bad_words, 2)), 1) < 1
    misses = (~(fits | is_completing)).to(FLOAT).sum(keep=False)
    last = completing.squeeze(2)
    return forbid(logits, maximum(last, 0), misses.equals(0.0) & (last >= 0))


def forbid(logits: Tensor, ids: Tensor, forbidden: Tensor) -> Tensor:
    """Add -inf to the logits of `ids`, [B, h] integers, that are `forbidden`, [B, h] bool."""
    mask = where(forbidden, constant(np.array(-np.inf, np.float32)), 0.0)
    return logits.scatter(ids, mask, reduction="add")
