"""Requests that may take so long and no longer."""

from __future__ import annotations

import heapq
import time
from itertools import count

from qsample.runtime.sequence import Sequence


class Deadlines:
    """When each sequence has to end, the earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._order = count()  # of equals, so that sequences are never compared

    def add(self, sequence: Sequence, since: float) -> None:
        """Count its `max_time`, where it has one, from `since`, on `time.perf_counter`."""
        if sequence.max_time is not None:
            heapq.heappush(self._heap, (since + sequence.max_time, next(self._order), sequence))

    def due(self) -> list[Sequence]:
        """Those whose time is up, each once; some of them may have ended before."""
        late = []
        while self._heap and self._heap[0][0] <= time.perf_counter():
            late.append(heapq.heappop(self._heap)[2])
        return late
