"""Which beginnings of prompts the states of a row were saved after, and in which place. No tensors here.

A recurrent state is that of a row's newest token: who goes on from an earlier one needs a copy that was made there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qsample.tensors import Array


@dataclass(frozen=True, slots=True)
class Save:
    """The states of `slot`, once `tokens` tokens of its row are read, for a place."""

    slot: int
    tokens: int
    place: int


class SavedStates:
    """A fixed number of places. One that no slot has the keys and values for is given away first, then the one that was
    used longest ago."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._tokens: dict[int, Array] = {}  # place → the beginning; the one that was used longest ago first

    @property
    def beginnings(self) -> list[Array]:
        return list(self._tokens.values())

    def longest(self, prompt: Array, most: int) -> int:
        """Tokens of the longest saved beginning of `prompt` that has at most so many; 0 where there is none."""
        lengths = {len(tokens) for tokens in self._tokens.values() if _begins(tokens, prompt)}
        return max((length for length in lengths if length <= most), default=0)

    def use(self, tokens: Array) -> int | None:
        """The place that has the states after exactly these tokens, which is then the last to be given away."""
        for place, saved in self._tokens.items():
            if np.array_equal(saved, tokens):
                self._tokens[place] = self._tokens.pop(place)
                return place
        return None

    def add(self, tokens: Array, is_useful: Callable[[Array], bool]) -> int | None:
        """A place for the states after `tokens`; None where there is no room, or where they are saved already.

        is_useful: whether the states after some tokens are of use to anybody.
        """
        if not self.places or self.use(tokens) is not None:
            return None
        place = len(self._tokens)
        if place == self.places:
            useless = (place for place, saved in self._tokens.items() if not is_useful(saved))
            place = next(useless, next(iter(self._tokens)))
            del self._tokens[place]
        self._tokens[place] = tokens.copy()
        return place


def _begins(tokens: Array, prompt: Array) -> bool:
    return len(tokens) <= len(prompt) and np.array_equal(tokens, prompt[: len(tokens)])
