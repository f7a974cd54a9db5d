"""Beginnings of prompts that need not be read again. No tensors here.

A prompt is cut at places that depend only on the prompt. Its beginning can be reused up to such a
place. Recurrent states belong to a row's newest token, so a model that has them can only continue
from a saved copy of them.

Prompts are arrays of identities, [n] int64: token ids, and negative numbers for image tokens (`ImagePrompt`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.ort.session import Sessions

LATE_START: Final = 1024  # tokens


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces in which a prompt is read, counted from its start, each in a separate call.

    A call over more tokens reads the tokens before it less often: after 4,000 tokens the CPU's
    attention takes 1.6 times as long for each token of a piece of 64 as of 256. A shorter piece
    holds up other rows for less time.

    Attributes:
        size: the number of tokens of a piece.
        late: the number of tokens of a piece after the first LATE_START tokens; None for `size`.
            LATE_START and `late` are multiples of `size`, or no prompt is that long.
        whole_images: whether the tokens of an image see each other (`ImageShape.blockwise`). A piece
            that would end between two image tokens then extends to the end of their run.
    """

    size: int
    late: int | None = None
    whole_images: bool = False

    @classmethod
    def of(cls, sessions: Sessions) -> Pieces:
        """The pieces that suit a package's graphs and their kernels."""
        image = sessions.interface.image
        whole_images = image is not None and image.blockwise
        prompts = sessions.prompts
        return cls(prompts.piece_size, prompts.late_piece_size, whole_images)

    def around(self, token: int) -> range:
        """The piece of a text that contains token number `token`."""
        size = self.size if self.late is None or token < LATE_START else self.late
        start = token // size * size
        return range(start, start + size)

    def run(self, prompt: Array, place: int) -> range:
        """The run of image tokens that may not be cut at `place`. It is empty, range(place, place),
        unless both tokens beside `place` are image tokens."""
        if not self.whole_images or not 0 < place < len(prompt):
            return range(place, place)
        if max(prompt[place - 1], prompt[place]) >= 0:
            return range(place, place)
        text = np.flatnonzero(prompt >= 0)
        after = int(np.searchsorted(text, place))
        start = int(text[after - 1]) + 1 if after > 0 else 0
        stop = int(text[after]) if after < len(text) else len(prompt)
        return range(start, stop)

    def begin(self, prompt: Array, token: int) -> int:
        """The last end of a whole piece of `prompt` that does not come after `token`."""
        run = self.run(prompt, self.around(token).start)
        return run.stop if run.stop <= token else self.begin(prompt, run.start)

    def cut(
        self, prompt: Array, start: int, end: int, most: int | None = None
    ) -> tuple[range, ...]:
        """Cut the tokens [start, end) of a prompt at the ends of pieces.

        Args:
            prompt: the identities of the prompt.
            start: the first token; inside a piece, it counts as the beginning of that piece.
            end: the end of the tokens.
            most: the most tokens of all pieces together, but at least one piece is returned; None
                for all pieces up to `end`.
        """
        beginning = self.begin(prompt, start)
        pieces: list[range] = []
        while start < end:
            stop = self.run(prompt, self.around(start).stop).stop
            if pieces and most is not None and stop - beginning > most:
                break
            pieces.append(range(start, min(stop, end)))
            start = stop
        return tuple(pieces)


def reusable_prefix(held: Array, prompt: Array, pieces: Pieces, tail_size: int | None) -> int:
    """The number of tokens of `prompt` that need not be read after `held`.

    These are the tokens of the whole pieces that both have in common: the numbers of a piece may
    depend on where it ends. If both end in the same piece, more of it can be reused.

    Args:
        held: the identities of tokens that were read in pieces from their start.
        prompt: the identities of the prompt.
        pieces: the pieces in which both are read.
        tail_size: the number of last tokens of a piece that have to be read again if both end in
            the same piece; None for the whole piece.
    """
    shared = _shared_images(held, prompt, pieces)
    length = len(prompt)
    ends_alike = shared == length and (
        length == len(held) or length == pieces.begin(prompt, length)
    )
    if not ends_alike:
        return pieces.begin(prompt, min(shared, length - 1))
    start = pieces.begin(prompt, length - 1)
    if tail_size is None:
        return start
    return max(start, pieces.run(prompt, length - tail_size).start)


def shared_pieces(held: Array, prompt: Array, pieces: Pieces) -> int:
    """The number of tokens of the whole pieces that two rows have in common from their start."""
    return pieces.begin(prompt, _shared_images(held, prompt, pieces))


def shared_tokens(held: Array, prompt: Array, pieces: Pieces) -> int:
    """The number of tokens that two rows have in common from their start. The last token of `prompt`
    and part of an image that may not be cut do not count."""
    shared = min(_shared_images(held, prompt, pieces), len(prompt) - 1)
    return pieces.run(prompt, shared).start


def _shared_images(held: Array, prompt: Array, pieces: Pieces) -> int:
    """`shared_prefix`, or a token less if a run of images continues in `held`: its tokens have seen
    the images that follow."""
    shared = shared_prefix(held, prompt)
    return shared - 1 if pieces.run(held, shared) else shared


def shared_prefix(one: Array, other: Array) -> int:
    """The number of tokens that two rows have in common from their start."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) > 0 else length


class SavedStates:
    """A fixed number of places for recurrent states after beginnings of prompts.

    If all places are taken, the next beginning gets a place of tokens whose keys and values no slot
    has; if there is none, the place that was used longest ago.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        # The beginning in each place; the place used longest ago comes first.
        self._tokens: dict[int, Array] = {}

    @property
    def beginnings(self) -> list[Array]:
        """The tokens after which states are saved."""
        return list(self._tokens.values())

    def longest(self, prompt: Array, most: int) -> int:
        """The number of tokens of the longest saved beginning of `prompt` that has at most `most`
        tokens; 0 without any."""
        lengths = [
            len(tokens)
            for tokens in self._tokens.values()
            if len(tokens) <= most and _begins(tokens, prompt)
        ]
        return max(lengths, default=0)

    def use(self, tokens: Array) -> int | None:
        """The place that has the states after exactly these tokens, or None. It becomes the place
        that was used last."""
        for place, saved in self._tokens.items():
            if np.array_equal(saved, tokens):
                self._tokens[place] = self._tokens.pop(place)
                return place
        return None

    def add(self, tokens: Array, is_useful: Callable[[Array], bool]) -> int | None:
        """Take a place for the states after `tokens`.

        Args:
            tokens: the beginning of a prompt.
            is_useful: whether any sequence can use the states after the given tokens.

        Returns:
            The place; None without places, or if these states are saved already.
        """
        if self.places == 0 or self.use(tokens) is not None:
            return None
        place = len(self._tokens)
        if place == self.places:
            place = self._place_to_give_away(is_useful)
            del self._tokens[place]
        self._tokens[place] = tokens.copy()
        return place

    def _place_to_give_away(self, is_useful: Callable[[Array], bool]) -> int:
        """The first place whose states are not useful, or the place that was used longest ago."""
        for place, saved in self._tokens.items():
            if not is_useful(saved):
                return place
        return next(iter(self._tokens))


def _begins(tokens: Array, prompt: Array) -> bool:
    """Whether `prompt` begins with `tokens`."""
    return len(tokens) <= len(prompt) and np.array_equal(tokens, prompt[: len(tokens)])
