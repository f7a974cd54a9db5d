"""The text that an answer is expected to have, as guesses of the tokens that come next."""

from __future__ import annotations

from typing import Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.tensors import DRAFT_IDS

_NGRAMS: Final = range(8, 1, -1)  # tokens that have to be the same before guesses go on elsewhere; the most first


class Prediction:
    """Follows the tokens of a row through its expected tokens.

    While both are the same, the expected tokens that come next are guessed. Where they part, nothing is guessed, until
    the newest tokens of the row stand among those that are expected: from there on, or anywhere if they do not.
    """

    def __init__(self, tokens: Array) -> None:
        """tokens: [n] int64."""
        self._tokens = tokens
        self._place: int | None = 0  # of the next token among those expected; None = unknown
        self._last = 0  # the last place that was known
        self._seen = 0  # tokens of the row

    def draft(self, sampled: list[int], most: int) -> Array:
        """Guesses of the tokens after `sampled`: [0 to most] int32, at least [1]; -1 = none.

        Args:
            sampled: the row's new tokens so far; each call gets those of the call before, and more.
            most: guesses.
        """
        for count in range(self._seen + 1, len(sampled) + 1):
            place = self._place
            if place is not None and place < len(self._tokens) and self._tokens[place] == sampled[count - 1]:
                self._place = self._last = place + 1
            else:
                self._place = self._find(sampled[:count])
        self._seen = len(sampled)
        guesses = self._tokens[:0] if self._place is None else self._tokens[self._place :][:most]
        return guesses.astype(DRAFT_IDS.dtype) if len(guesses) else np.array([DRAFT_IDS.off], DRAFT_IDS.dtype)

    def _find(self, sampled: list[int]) -> int | None:
        """The place after the longest end of `sampled` that is among the expected tokens; None if that is shorter than
        any of _NGRAMS. Of several places, the first after the last that was known."""
        for length in _NGRAMS:
            if length > min(len(sampled), len(self._tokens)):
                continue
            windows = np.lib.stride_tricks.sliding_window_view(self._tokens, length)
            places = np.flatnonzero((windows == sampled[-length:]).all(axis=1)) + length
            if len(places):
                later = places[places >= self._last]
                self._last = int(later[0] if len(later) else places[0])
                return self._last
        return None
