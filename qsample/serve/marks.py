"""Marks in a text that comes in pieces."""

from __future__ import annotations


def open_end(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    for count in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:count]):
            return count
    return 0
