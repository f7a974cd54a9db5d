"""Requests that may take so long and no longer."""

from __future__ import annotations

import math
import time

from qsample.runtime.sequence import Sequence


class Deadlines:
    """When each sequence has to end."""

    def __init__(self) -> None:
        self._ends: dict[Sequence, float] = {}
        self._next = math.inf  # none is due before; nothing is looked through until then

    def add(self, sequence: Sequence, since: float) -> None:
        """Count its `max_time`, where it has one, from `since`, on `time.perf_counter`."""
        if sequence.max_time is not None:
            self._ends[sequence] = since + sequence.max_time
            self._next = min(self._next, self._ends[sequence])

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._ends.pop(sequence, None)

    def due(self) -> list[Sequence]:
        """Those whose time is up, the earliest first and each once."""
        now = time.perf_counter()
        if now < self._next:
            return []
        late = sorted((one for one, end in self._ends.items() if end <= now), key=self._ends.__getitem__)
        for sequence in late:
            del self._ends[sequence]
        self._next = min(self._ends.values(), default=math.inf)
        return late
