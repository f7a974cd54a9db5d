"""Where prompts are cut, so that nothing but the prompt decides how it is read; and what two have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from qsample.tensors import Array

LATE: Final = 1024  # tokens


@dataclass(frozen=True, slots=True)
class Pieces:
    """A prompt is read in pieces that are counted from its start, each in a call of its own.

    A call over more tokens reads what came before it less often: behind 4,000 tokens the CPU's attention takes 1.6
    times as long for each token of a piece of 64 as for one of 256. A shorter one holds up other rows for less time.

    size: tokens of a piece, at least 1. late: of those that begin behind LATE tokens; None = as the others. LATE and
    `late` are multiples of `size`, or no prompt is that long.
    """

    size: int
    late: int | None = None

    def around(self, token: int) -> range:
        """The whole piece that token number `token` is in."""
        size = self.size if self.late is None or token < LATE else self.late
        start = token // size * size
        return range(start, start + size)

    def begin(self, token: int) -> int:
        """The last end of a whole piece that is not behind `token`."""
        return self.around(token).start

    def end(self, start: int, tokens: int) -> int:
        """Where a chunk ends that begins at `start` and has at most `tokens` tokens, or is one piece.

        A `start` inside a piece counts as that piece's beginning.
        """
        begun, end = self.around(start).start, self.around(start).stop
        while self.around(end).stop - begun <= tokens:
            end = self.around(end).stop
        return end

    def cut(self, start: int, end: int) -> tuple[range, ...]:
        """The tokens [start, end) of a prompt, cut where pieces end."""
        result = []
        while start < end:
            stop = min(self.around(start).stop, end)
            result.append(range(start, stop))
            start = stop
        return tuple(result)


def reusable_prefix(held: Array, prompt: Array, pieces: Pieces, tail_size: int | None) -> int:
    """How many tokens of `prompt` need not be read after `held`, which was read in pieces from its start.

    Those of whole pieces that both have: what is in a piece may depend on where the piece ends. Where both end in the
    same piece, all but its last `tail_size` tokens (None = all of it).
    """
    shared, length = shared_prefix(held, prompt), len(prompt)
    if shared == length and (length == len(held) or length == pieces.begin(length)):
        start = pieces.begin(length - 1)
        return start if tail_size is None else max(start, length - tail_size)
    return pieces.begin(min(shared, length - 1))


def shared_prefix(kept: Array, prompt: Array) -> int:
    """How many tokens two rows have in common from their start."""
    length = min(len(kept), len(prompt))
    different = np.flatnonzero(kept[:length] != prompt[:length])
    return int(different[0]) if len(different) else length
