"""Step 2 of the contract: masks, biases, bans and penalties on the logits.

Every mask is added, never written over: -inf + NaN and -inf + inf are NaN, so the later check sees invalid logits.

DRY, no_repeat_ngram_size and bad_words_ids compare a row's tokens so far with the end of the row: m(i), for each
position i before the last, is how many tokens up to i are those up to the end. A repetition of length m(i) would go on
with the token at i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qsample.contract.tensors import LONGEST_MATCH
from qsample.sampler.call import Call, Columns
from qsample.sampler.tensor import (
    FLOAT,
    INT64,
    Tensor,
    Tensors,
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

_BYTE_VALUES, _BYTE_BITS, _WORD_BYTES = 256, 8, 4


def adjusted_logits(call: Call) -> Tensor:
    """The logits that filters and the argmax see, [B, V] float32."""
    logits, chosen = call["logits"], call.features
    if chosen.allowed_tokens:
        logits = _mask_disallowed(
            logits, call["allowed_tokens"], call.vocab, narrow=call.for_webgpu
        )
    if chosen.logit_bias:
        logits = _add_bias(logits, call["logit_bias_ids"], call["logit_bias"], call.vocab)
    past = None
    if call.uses("bad_words_ids", "no_repeat_ngram_size", "dry"):
        tokens = call.row_tokens()
        past = Past(tokens, minimum(call.total.unsqueeze().to(INT64), call.capacity))
        logits = _forbid(call, logits, past)
    # A single scatter for stops and penalties: if the logits are in a buffer of the graph, it is in place.
    logits = logits.scatter(*_block_and_penalize(call, logits))
    return logits if past is None else _dry(call, logits, past)


def _mask_disallowed(logits: Tensor, allowed_tokens: Tensor, vocab: int, *, narrow: bool) -> Tensor:
    """Set the logits of tokens that the bitmask, [B, ceil(V / 32)] int32, forbids to -inf. narrow: with integers of 32
    bits; that takes the CPU twice as long."""
    # A table with a row for each byte, because bit shifts have no kernel on some execution providers.
    bits = np.unpackbits(
        np.arange(_BYTE_VALUES, dtype=np.uint8)[:, None], axis=1, bitorder="little"
    )
    masks = constant(np.where(bits == 1, 0, -np.inf).astype(np.float32))
    mask = op("Gather", masks, (_bytes_narrow if narrow else _bytes)(allowed_tokens)).reshape(0, -1)
    return logits + (mask.columns(0, vocab) if vocab % (_BYTE_BITS * _WORD_BYTES) else mask)


def _bytes(words: Tensor) -> Tensor:
    """[B, W] int32 -> [B, W, 4] int64, from the lowest on."""
    scales = constant(np.array([_BYTE_VALUES**i for i in range(_WORD_BYTES)]))
    # ONNX's modulo has the divisor's sign: a negative word gives its two's complement.
    unsigned = op("Mod", words.to(INT64), _BYTE_VALUES**_WORD_BYTES)
    return op("Mod", unsigned.unsqueeze() / scales, _BYTE_VALUES)


def _bytes_narrow(words: Tensor) -> Tensor:
    """[B, W] int32 -> [B, W, 4] int32. A negative word is 2**31 more without its sign bit."""
    scales = constant(np.array([_BYTE_VALUES**i for i in range(_WORD_BYTES)], np.int32))
    sign_bit = constant(np.array([0, 0, 0, _BYTE_VALUES // 2], np.int32))
    negative = words.unsqueeze() < 0
    shifted = where(negative, words.unsqueeze() + (2**31 - 1) + 1, words.unsqueeze()) / scales
    return shifted - shifted / _BYTE_VALUES * _BYTE_VALUES + where(negative, sign_bit, 0)


def _add_bias(logits: Tensor, ids: Tensor, bias: Tensor, vocab: int) -> Tensor:
    """Add `bias` [B, N] float32 at `ids` [B, N] int32: ids outside [0, V) are padding; equal ids add up."""
    valid = (ids >= 0) & (ids < vocab)
    return logits.scatter(where(valid, ids, 0).to(INT64), where(valid, bias, 0.0), reduction="add")


def _newest_counts(call: Call, needed: Tensor) -> Tensor:
    """How often each token is among the newest `penalty_last_n` of a row, [B, V] float32; a column of any numbers if no
    row needs that. needed: [B] bool."""

    def counts() -> Tensor:
        length = _longest(call, needed)
        newest = call.newest(length, call["penalty_last_n"].unsqueeze())
        none = op("Expand", 0.0, op("Shape", call["logits"]))
        return none.scatter(call.history(length), newest, reduction="add")

    return call.branch(needed, counts, lambda: call["temperature"].unsqueeze())


def _longest(call: Call, needed: Tensor) -> Tensor:
    """How many columns of `tokens` to read for the rows that are `needed`, [B] bool: [1] int64."""
    if call.captured:
        return call.capacity
    return minimum(where(needed, call.start, 0).max(keep=False).to(INT64), call.capacity)


def _penalized(call: Call, seen: Tensor, ids: Tensor, newest: Tensor | None) -> Tensor:
    """The logits `seen` [B, h] float32 of `ids` [B, h] int64 after the repetition, presence and frequency penalties.
    newest: of `_newest_counts`; None: no row has `penalty_last_n`.
    The ids cover every non-zero count, because sampled tokens are in the history, too; duplicates get the same value.
    Repetition is Keskar et al. 2019 (CTRL), arXiv:1909.05858, section 4.1, by sign: l * r if l < 0, else l / r."""
    output_counts, (repetition, presence, frequency) = (
        call["output_counts"],
        call.columns(*_PENALTIES),
    )
    counts = output_counts.gather(ids)
    if newest is not None:
        found = newest.gather(ids if call.captured else minimum(ids, size(newest, 1) - 1))
        on = call["penalty_last_n"].unsqueeze() >= 0
        repetition, counts = (
            where(on & found.equals(0.0), 1.0, repetition),
            where(on, found, counts),
        )
    seen = where(seen < 0, seen * repetition, seen / repetition)
    return seen - (frequency * counts + presence * minimum(counts, 1.0))


def _blocked(values: Tensor, ids: Tensor, blocked: Tensor) -> Tensor:
    """`values` [B, h] float32 of the tokens `ids` [B, h] int64; -inf if an id is among `blocked` [B, E] int64."""
    # Counted in float32: CUDA has no maximum of bools.
    matches = ids.unsqueeze().equals(blocked.unsqueeze(1)).to(FLOAT).max(keep=False)
    return values + where(matches > 0, -np.inf, 0.0)


def _block_and_penalize(call: Call, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The stop ids below the minimum length, and the history with its penalties: ids [B, h] and their logits."""
    # Few nodes: behind a model, each takes microseconds, because its code and its data are no longer in the caches.
    values = op("Concat", *(call[name] for name in _PENALTIES), axis=0).reshape(len(_PENALTIES), -1)
    off = values.equals(constant(np.array([[1], [0], [0]], np.float32)))
    long_enough = call.total >= call["min_length"]

    def penalized() -> Tensor:
        return ~off.min(0, keep=False)

    newest = None
    if call.uses("penalty_last_n"):
        newest = _newest_counts(call, (call["penalty_last_n"] >= 0) & penalized())

    def seen() -> Tensor:
        # The history is read as far as some row is penalized for it: not at all if no row is.
        return call.history(_longest(call, penalized()))

    def without_stops() -> Tensors:
        ids = seen()
        return ids, _penalized(call, logits.gather(ids), ids, newest)

    def with_stops() -> Tensors:
        ids = seen()
        stops = where(long_enough.unsqueeze(), -1, call["stop_ids"]).to(INT64)
        ids = concat(ids, where(stops >= 0, stops, ids.last()))
        return ids, _penalized(call, _blocked(logits.gather(ids), ids, stops), ids, newest)

    def nothing() -> Tensors:
        return constant(np.zeros((1, 0), np.int64)), constant(np.zeros((1, 0), np.float32))

    if call.captured:
        ids, values = with_stops()
        return ids, values
    ids, values = branch(
        (off & long_enough).all(),
        nothing,
        lambda: branch(long_enough.all(), without_stops, with_stops),
    )
    return ids, values


def _forbid(call: Call, logits: Tensor, past: Past) -> Tensor:
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


def _dry(call: Call, logits: Tensor, past: Past) -> Tensor:
    if not call.uses("dry"):
        return logits
    return call.branch(
        call["dry_multiplier"] > 0,
        lambda: dry(logits, past, Columns(call.inputs)),
        lambda: logits,
    )


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_LARGEST_PENALTY = 1e30  # in place of infinity: that would make an invalid logit


class Past:
    """Each row's tokens so far, and its end. tokens: [B, h] int64, in [0, V), anything from `lengths` on. lengths: [B,
    1] int64, 1..h, how many of them count."""

    def __init__(self, tokens: Tensor, lengths: Tensor) -> None:
        self.tokens, self.lengths = tokens, lengths
        self.positions = op("Range", 0, op("Squeeze", size(tokens, 1)), 1).unsqueeze(0)  # [1, h]

    def end(self, count: int | Tensor, *, ahead: int = 0) -> tuple[Tensor, Tensor]:
        """The newest `count` tokens, the newest first: [B, count], and whether the row has all of them: bool. ahead:
        how many columns come before the newest token; their content means nothing."""
        back = indices(count) if isinstance(count, int) else op("Range", 0, count, 1)
        places = self.lengths - 1 + ahead - back.unsqueeze(0)
        return self.tokens.gather(
            op("Clip", places, 0, op("Squeeze", size(self.tokens, 1)) - 1)
        ), places >= 0

    def matches(self, longest: Tensor) -> Tensor:
        """m(i), [B, h] float32: 0 from the newest token on, at most `longest` [B, 1] int64, up to LONGEST_MATCH."""
        end, there = self.end(LONGEST_MATCH)
        wanted = there & (indices(LONGEST_MATCH) < longest)
        # [B, h, LONGEST_MATCH]: the tokens up to each position, the newest first; before the first position, none.
        places = self.positions.unsqueeze() - indices(LONGEST_MATCH)
        shape = op("Concat", op("Shape", self.tokens), [LONGEST_MATCH], axis=0)
        flat = op("Expand", maximum(places, 0), shape).reshape(0, -1)
        earlier = self.tokens.gather(flat).reshape(0, -1, LONGEST_MATCH)
        same = earlier.equals(end.unsqueeze(1)) & wanted.unsqueeze(1) & (places >= 0)
        misses = (~same).to(FLOAT).cumsum()
        found = misses.equals(0.0).to(FLOAT).sum(keep=False)
        return where(self.positions < self.lengths - 1, found, 0.0)

    def followers(self) -> Tensor:
        """The token after each position, [B, h] int64; of the last column, itself."""
        following = minimum(self.positions + 1, size(self.tokens, 1) - 1)
        return self.tokens.gather(op("Expand", following, op("Shape", self.tokens)))


def dry(logits: Tensor, past: Past, row: Mapping[str, Tensor]) -> Tensor:
    """DRY ("don't repeat yourself"): l - multiplier * base ** (m - allowed_length) for the longest m of each token.

    https://github.com/oobabooga/text-generation-webui/pull/5677, in llama.cpp's form: a match of at least
    `allowed_length` tokens counts, the end of the row is compared back to the newest breaker, and no breaker is
    penalized. `dry_multiplier` 0, `dry_base` below 1 and `dry_penalty_last_n` 0 switch it off. `row` has DRY's inputs
    by name, [B, 1] each and `dry_sequence_breakers` [B, D].
    """
    multiplier, base, breakers = (
        row["dry_multiplier"],
        row["dry_base"],
        row["dry_sequence_breakers"],
    )
    last_n, allowed = row["dry_penalty_last_n"], row["dry_allowed_length"].to(FLOAT)
    end, there = past.end(LONGEST_MATCH)
    unbroken = (~_is_among(end, breakers) & there).to(FLOAT)
    before_breaker = ((1.0 - unbroken).cumsum().equals(0.0)).to(FLOAT).sum().to(INT64)
    window = where(last_n < 0, 2**31 - 1, last_n).to(INT64)
    lengths = past.matches(minimum(before_breaker, window))
    # A match lies within the window as a whole.
    room = (past.positions - (past.lengths - minimum(window, past.lengths)) + 1).to(FLOAT)
    lengths = minimum(lengths, maximum(room, 0.0))

    counts = (lengths >= maximum(allowed, 1.0)) & (multiplier > 0) & (base >= 1)
    strength = where(counts, op("Pow", base, minimum(lengths - allowed, 1e4)) * multiplier, 0.0)
    followers = past.followers()
    strength = where(_is_among(followers, breakers), 0.0, minimum(strength, _LARGEST_PENALTY))
    none = op("Expand", 0.0, op("Shape", logits))
    return logits - none.scatter(followers, strength, reduction="max")


def _is_among(ids: Tensor, listed: Tensor) -> Tensor:
    """Whether each id, [B, h] int64, is among `listed` [B, D] int32, padded with -1: bool."""
    return ids.unsqueeze().equals(listed.to(INT64).unsqueeze(1)).to(FLOAT).max(keep=False) > 0


def forbid_repeated_ngrams(logits: Tensor, past: Past, ngram: Tensor) -> Tensor:
    """Forbid each token that would complete an n-gram that the row holds already. ngram: [B, 1] int32, n from 1 to
    LONGEST_MATCH + 1; 0: off."""
    before = maximum(ngram - 1, 0)
    lengths = past.matches(constant(np.array([[LONGEST_MATCH]])))
    # Of a single token, each that occurred: the newest one as well.
    single = ngram.equals(1) & (past.positions < past.lengths)
    repeats = (lengths >= before.to(FLOAT)) & (ngram > 1) & (past.positions < past.lengths - 1)
    logits = forbid(logits, past.followers(), repeats)
    return forbid(logits, past.tokens, single)


def forbid_bad_words(logits: Tensor, past: Past, bad_words: Tensor) -> Tensor:
    """Forbid the last token of each sequence if the row ends with its other tokens. bad_words: [B, Q, L] int32, each
    padded with -1 at its beginning."""
    newest_first = op("Slice", bad_words.to(INT64), [-1], [-(2**31)], [2], [-1])  # [B, Q, L]
    completing = op("Slice", newest_first, [0], [1], [2])
    # In place of the token that would complete the sequence, any token fits.
    end, there = past.end(op("Squeeze", size(bad_words, 2)), ahead=1)
    fits = (newest_first.equals(end.unsqueeze(1)) & there.unsqueeze(1)) | (newest_first < 0)
    ahead = op("Range", 0, op("Squeeze", size(bad_words, 2)), 1) < 1
    misses = (~(fits | ahead)).to(FLOAT).sum(keep=False)
    last = completing.squeeze(2)
    return forbid(logits, maximum(last, 0), misses.equals(0.0) & (last >= 0))


def forbid(logits: Tensor, ids: Tensor, forbidden: Tensor) -> Tensor:
    """Add -inf at `ids` [B, h] int64, in [0, V), that are `forbidden` [B, h] bool."""
    return logits.scatter(
        ids, where(forbidden, constant(np.array(-np.inf, np.float32)), 0.0), reduction="add"
    )
