"""Beginnings of prompts that need not be read again. No tensors here.

A prompt is cut at places that depend on nothing but the prompt. Its beginning can be reused up to such a place; and if
the model has recurrent states, which belong to a row's newest token, only up to a saved copy of them.

Prompts are arrays of identities, [n] int64: token ids, and negative numbers for image tokens (`ImagePrompt`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.ort.session import Sessions

LATE: Final = 1024  # tokens


@dataclass(frozen=True, slots=True)
class Pieces:
    """A prompt is read in pieces that are counted from its start, each in a separate call: of `size` tokens, and after
    the first LATE of `late` tokens, if given. LATE and `late` are multiples of `size`, or no prompt is that long.

    A call over more tokens reads the tokens before it less often: after 4,000 tokens the CPU's attention takes 1.6
    times as long for each token of a piece of 64 as of 256. A shorter piece holds up other rows for less time.

    whole_images: the tokens of an image see each other (`ImageShape.blockwise`): a piece that would end between two
    image tokens goes on to the end of their run.
    """

    size: int
    late: int | None = None
    whole_images: bool = False

    @classmethod
    def of(cls, sessions: Sessions) -> Pieces:
        """As suits a package's graphs and their kernels."""
        image = sessions.interface.image
        return cls(
            sessions.prompts.piece_size,
            sessions.prompts.late_piece_size,
            image is not None and image.blockwise,
        )

    def around(self, token: int) -> range:
        """The whole piece of a text that token number `token` is in."""
        size = self.size if self.late is None or token < LATE else self.late
        start = token // size * size
        return range(start, start + size)

    def run(self, prompt: Array, place: int) -> range:
        """The run of image tokens that may not be cut at `place`: both tokens next to it are image tokens. Otherwise
        nothing, range(place, place)."""
        if (
            not self.whole_images
            or not 0 < place < len(prompt)
            or max(prompt[place - 1], prompt[place]) >= 0
        ):
            return range(place, place)
        text = np.flatnonzero(prompt >= 0)
        after = int(np.searchsorted(text, place))
        return range(
            int(text[after - 1]) + 1 if after else 0,
            int(text[after]) if after < len(text) else len(prompt),
        )

    def begin(self, prompt: Array, token: int) -> int:
        """The last end of a whole piece of `prompt` that is not after `token`."""
        run = self.run(prompt, self.around(token).start)
        return run.stop if run.stop <= token else self.begin(prompt, run.start)

    def cut(
        self, prompt: Array, start: int, end: int, most: int | None = None
    ) -> tuple[range, ...]:
        """The tokens [start, end) of a prompt, cut at the ends of pieces; with `most`, whole pieces of at most so many
        tokens, or a single piece. A `start` inside a piece counts as that piece's beginning."""
        begun, result = self.begin(prompt, start), list[range]()
        while start < end:
            stop = self.run(prompt, self.around(start).stop).stop
            if result and most is not None and stop - begun > most:
                break
            result.append(range(start, min(stop, end)))
            start = stop
        return tuple(result)


def reusable_prefix(held: Array, prompt: Array, pieces: Pieces, tail_size: int | None) -> int:
    """The number of tokens of `prompt` that need not be read after `held`, itself read in pieces from its start: the
    tokens of whole pieces that both have, as the numbers of a piece may depend on its end. If both end in the same
    piece, all but its last `tail_size` tokens (None: all of it)."""
    shared, length = _shared_images(held, prompt, pieces), len(prompt)
    if shared == length and (length == len(held) or length == pieces.begin(prompt, length)):
        start = pieces.begin(prompt, length - 1)
        return (
            start if tail_size is None else max(start, pieces.run(prompt, length - tail_size).start)
        )
    return pieces.begin(prompt, min(shared, length - 1))


def shared_pieces(held: Array, prompt: Array, pieces: Pieces) -> int:
    """The number of tokens of whole pieces that two rows have in common from their start."""
    return pieces.begin(prompt, _shared_images(held, prompt, pieces))


def shared_tokens(held: Array, prompt: Array, pieces: Pieces) -> int:
    """The number of tokens that two rows have in common from their start, without a beginning of an image that may not
    be cut, and without the last token of `prompt`."""
    shared = min(_shared_images(held, prompt, pieces), len(prompt) - 1)
    return pieces.run(prompt, shared).start


def _shared_images(held: Array, prompt: Array, pieces: Pieces) -> int:
    """`shared_prefix`, or a token less if a run of images goes on in `held`: its tokens have seen those images."""
    shared = shared_prefix(held, prompt)
    return shared - (1 if pieces.run(held, shared) else 0)


def shared_prefix(kept: Array, prompt: Array) -> int:
    """The number of tokens that two rows have in common from their start."""
    length = min(len(kept), len(prompt))
    different = np.flatnonzero(kept[:length] != prompt[:length])
    return int(different[0]) if len(different) else length


class SavedStates:
    """A fixed number of places for recurrent states after beginnings of prompts. A place is given away first if no slot
    has the keys and values of its tokens, then if it was used longest ago."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._tokens: dict[
            int, Array
        ] = {}  # place → the beginning; the place used longest ago first

    @property
    def beginnings(self) -> list[Array]:
        return list(self._tokens.values())

    def longest(self, prompt: Array, most: int) -> int:
        """Tokens of the longest saved beginning of `prompt` that has at most `most`; 0 without any."""
        lengths = {len(tokens) for tokens in self._tokens.values() if _begins(tokens, prompt)}
        return max((length for length in lengths if length <= most), default=0)

    def use(self, tokens: Array) -> int | None:
        """The place that has the states after exactly these tokens; it is then the last to be given away."""
        for place, saved in self._tokens.items():
            if np.array_equal(saved, tokens):
                self._tokens[place] = self._tokens.pop(place)
                return place
        return None

    def add(self, tokens: Array, is_useful: Callable[[Array], bool]) -> int | None:
        """A place for the states after `tokens`; None without places, or if they are saved already. is_useful: whether
        any request can use the states after some tokens."""
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
