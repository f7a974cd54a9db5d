"""Which adapters the rows of a batch use, and which tokens were read with which adapter. No tensors here.

Keys, values and states depend on the adapter. So tokens are compared with the mark of their adapter in their upper
bits: beginnings that were read with different adapters have no token in common.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from qsample.runtime.adapters import Adapter
from qsample.tensors import Array

_BITS: Final = 32  # of a token
_MOST_MARKS: Final = 1024  # adapters whose tokens are recognised; one that is forgotten gets a new mark


class Marks:
    """A number for the content of each adapter, 0 for none; never the same for two."""

    def __init__(self) -> None:
        self._marks: dict[str, int] = {}  # sha256 → mark; the one used longest ago first
        self._last = 0

    def mark(self, tokens: Array, adapter: Adapter | None) -> Array:
        """Tokens that are read with an adapter, [n] int64, marked."""
        if adapter is None:
            return tokens
        mark = self._marks.pop(adapter.sha256, None)
        if mark is None:
            mark = self._last = self._last + 1
        self._marks[adapter.sha256] = mark
        if len(self._marks) > _MOST_MARKS:
            del self._marks[next(iter(self._marks))]
        return tokens + (mark << _BITS)

    def adapter_of(self, marked: Array) -> str | None:
        """The sha256 of the adapter of marked tokens, "" for none; None if it is forgotten."""
        mark = int(marked[0]) >> _BITS if len(marked) else 0
        return "" if not mark else next((sha256 for sha256, one in self._marks.items() if one == mark), None)


def extended(marked: Array, tokens: list[int]) -> Array:
    """Marked tokens, at least one, and the tokens after them with the same mark."""
    return np.concatenate([marked, np.array(tokens, dtype=np.int64) + (int(marked[0]) >> _BITS << _BITS)])


def unmarked(marked: Array) -> Array:
    """The tokens, [n] int64."""
    return marked & ((1 << _BITS) - 1)


class AdaptersInUse:
    """How many rows use each adapter; those of at most `most` adapters run at once.

    If a row needs one more, the adapter that was given to a row longest ago gets no further row, so that whoever waits
    gets its turn when these rows have ended.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: dict[str, int] = {}  # sha256 → rows; the adapter that was given to a row longest ago first

    def take(self, adapter: Adapter | None, claimed: dict[str, str]) -> bool:
        """Whether a row may use an adapter now; it is counted then.

        Args:
            adapter: of the row.
            claimed: sha256 of an adapter in use → that of the adapter for which a row before this one waits; may get
                another.
        """
        if adapter is None:
            return True
        own = adapter.sha256
        if own not in self._rows and len(self._rows) == self._most:
            rest = [one for one in self._rows if one not in claimed]
            if own not in claimed.values() and rest:
                claimed[rest[0]] = own
            return False
        if own in claimed:
            return False
        self._rows[own] = self._rows.pop(own, 0) + 1
        return True

    def leave(self, adapter: Adapter | None) -> None:
        """A row has ended."""
        if adapter is not None:
            self._rows[adapter.sha256] -= 1
            if not self._rows[adapter.sha256]:
                del self._rows[adapter.sha256]
