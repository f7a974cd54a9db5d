"""Penalties and bans of repeated sequences: DRY, no_repeat_ngram_size and bad_words_ids.

A row's tokens so far are compared with its own end: m(i), for each position i before the last, is how many tokens up to
i are those up to the end. A repetition of length m(i) would go on with the token at i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qsample.contract.tensors import LONGEST_MATCH
from qsample.sampler.tensor import (
    FLOAT,
    INT64,
    Tensor,
    constant,
    indices,
    maximum,
    minimum,
    op,
    size,
    where,
)

_LARGEST_PENALTY = 1e30  # in place of infinity, which would make an invalid logit


class Past:
    """Each row's tokens so far, and its end.

    Args:
        tokens: [B, h] int64, in [0, V), anything from `lengths` on.
        lengths: [B, 1] int64, 1..h, how many of them count.
    """

    def __init__(self, tokens: Tensor, lengths: Tensor) -> None:
        self.tokens, self.lengths = tokens, lengths
        self.positions = op("Range", 0, op("Squeeze", size(tokens, 1)), 1).unsqueeze(0)  # [1, h]

    def end(self, count: int | Tensor, *, ahead: int = 0) -> tuple[Tensor, Tensor]:
        """The newest `count` tokens, the newest first: [B, count], and whether there are so many: bool.

        Args:
            count: how many.
            ahead: how many columns come before the newest token; their content means nothing.
        """
        back = indices(count) if isinstance(count, int) else op("Range", 0, count, 1)
        places = self.lengths - 1 + ahead - back.unsqueeze(0)
        return self.tokens.gather(op("Clip", places, 0, op("Squeeze", size(self.tokens, 1)) - 1)), places >= 0

    def matches(self, longest: Tensor) -> Tensor:
        """m(i), [B, h] float32: 0 from the newest token on.

        Args:
            longest: [B, 1] int64, the most tokens of the end that may be compared, at most LONGEST_MATCH.
        """
        end, there = self.end(LONGEST_MATCH)
        wanted = there & (indices(LONGEST_MATCH) < longest)
        # [B, h, LONGEST_MATCH]: the token that many before each position; before the first position, none.
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
    penalized.

    Args:
        logits: [B, V] float32.
        past: the row's tokens.
        row: DRY's inputs by name, [B, 1] each and `dry_sequence_breakers` [B, D]. `dry_multiplier` 0, `dry_base` below
            1 and `dry_penalty_last_n` 0 switch it off; `dry_penalty_last_n` -1 looks back at all tokens.
    """
    multiplier, base, breakers = row["dry_multiplier"], row["dry_base"], row["dry_sequence_breakers"]
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
    """Whether each id, [B, h] int64, is among `listed` [B, D] int32, which -1 pads: bool."""
    return ids.unsqueeze().equals(listed.to(INT64).unsqueeze(1)).to(FLOAT).max(keep=False) > 0


def forbid_repeated_ngrams(logits: Tensor, past: Past, ngram: Tensor) -> Tensor:
    """Forbid each token that would complete an n-gram that the row holds already.

    Args:
        logits: [B, V] float32.
        past: the row's tokens.
        ngram: [B, 1] int32, n from 1 to LONGEST_MATCH + 1; 0 = off.
    """
    before = maximum(ngram - 1, 0)
    lengths = past.matches(constant(np.array([[LONGEST_MATCH]])))
    # Of a single token, each that occurred: the newest one as well.
    single = ngram.equals(1) & (past.positions < past.lengths)
    repeats = (lengths >= before.to(FLOAT)) & (ngram > 1) & (past.positions < past.lengths - 1)
    logits = forbid(logits, past.followers(), repeats)
    return forbid(logits, past.tokens, single)


def forbid_bad_words(logits: Tensor, past: Past, bad_words: Tensor) -> Tensor:
    """Forbid the last token of each sequence whose other tokens the row ends with.

    Args:
        logits: [B, V] float32.
        past: the row's tokens.
        bad_words: [B, Q, L] int32, sequences of ids, each padded with -1 at its beginning.
    """
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
    """Add -inf at `ids` ([B, h] int64, in [0, V)) that are `forbidden` ([B, h] bool)."""
    return logits.scatter(ids, where(forbidden, constant(np.array(-np.inf, np.float32)), 0.0), reduction="add")
