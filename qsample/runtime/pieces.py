"""`Pieces`: where prompts are cut, so that nothing but the prompt decides how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
