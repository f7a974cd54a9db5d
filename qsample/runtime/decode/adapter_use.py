"""Which adapter is in which of the graph's places for adapters, and which tokens were read with which. No tensors here.

Keys, values and states depend on the adapter. So tokens are compared with the mark of their adapter in their upper
bits: beginnings that were read with different adapters have no token in common.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.runtime.adapters import Adapter

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


class AdapterPlaces:
    """The graph's places for adapters, numbered from 1; 0 is none.

    An adapter keeps its place until another one needs it. Of the places without rows, the one used longest ago is given
    away. If all have rows, the one used longest ago takes no further row, so that the waiting request gets it.
    """

    def __init__(self, count: int) -> None:
        self._held: dict[int, str] = dict.fromkeys(range(1, count + 1), "")  # place → sha256; used longest ago first
        self._rows: Counter[int] = Counter()

    def take(self, adapter: Adapter | None, claimed: dict[int, str]) -> tuple[int, bool] | None:
        """A place for a row, and whether the adapter has to be written to it; None = the row has to wait.

        Args:
            adapter: of the row.
            claimed: place → the sha256 of the adapter of a row that waits for it and comes before this row; may get
                another.
        """
        if adapter is None:
            return 0, False
        place = next((place for place, sha256 in self._held.items() if sha256 == adapter.sha256), None)
        is_new = place is None
        if place in claimed or (place is None and adapter.sha256 in claimed.values()):
            return None
        if place is None:
            free = [one for one in self._held if one not in claimed]
            place = next((one for one in free if not self._rows[one]), None)
            if place is None:
                claimed |= dict.fromkeys(free[:1], adapter.sha256)
                return None
        del self._held[place]
        self._held[place] = adapter.sha256
        self._rows[place] += 1
        return place, is_new

    def leave(self, place: int) -> None:
        """A row has ended."""
        self._rows[place] -= 1
