"""Cuts text off before its first stop string, while the text comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_stop_strings(value: Any) -> tuple[str, ...]:
    """`value` as a tuple: a string, or several, none of them empty; None = none. Raises ValueError."""
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(isinstance(item, str) and item for item in strings):
        raise ValueError(f"stop_strings is {value!r:.80}; give a string that is not empty, or a list of them")
    return tuple(dict.fromkeys(strings))


class StopStrings:
    r"""Finds the stop string that is complete first, however the text is cut into pieces.

    Of several that are complete with the same character, the longest counts. Text that may begin a stop string is held
    back until it is known not to.

    match: the stop string, once it is complete.

    >>> stops = StopStrings(["\n\n"])
    >>> stops.put("one\n"), stops.put("\ntwo"), stops.match
    ('one', '', '\n\n')
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(strings, key=len, reverse=True)
        self._held = ""
        self.match: str | None = None

    def put(self, piece: str) -> str:
        """The text that `piece` makes certain; "" after a stop string."""
        if self.match is not None:
            return ""
        text = self._held + piece
        ends = {stop: text.find(stop) + len(stop) for stop in self._strings if stop in text}
        if ends:
            self.match = min(ends, key=ends.__getitem__)  # of equals, the first: the longest
            self._held = ""
            return text[: ends[self.match] - len(self.match)]
        held = max((_overlap(text, stop) for stop in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """What was held back, as no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop`, in characters."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
