"""Ends rows where a caller's criteria say so, or where time is up: token by token, the whole batch at once.

transformers asks its criteria after every token of the batch, and shows them prompts and tokens as one array. The same
is done here, whatever was sampled meanwhile: what comes after a criterion was met is left out.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from qsample.runtime.callbacks.frameworks import as_callbacks, on_host
from qsample.runtime.output import sequences_array
from qsample.runtime.sequence import Sequence

_STOP: Final = "stop"
_TIME: Final = "time"


class BatchEnd:
    """Follows the sequences of one batch.

    Args:
        criteria: a callable of ([B, n] token ids, scores), prompts and padding included, that returns a bool, or one a
            row; or a list of them. transformers' own get torch tensors, others int64 arrays; scores are None.
        max_time: seconds from now on; None = any time.
        pad: token id behind a row that has ended.

    Raises ValueError where criteria is none of that.
    """

    def __init__(self, criteria: Any, max_time: float | None, sequences: abc.Sequence[Sequence], pad: int) -> None:
        self._criteria = as_callbacks(
            "stopping_criteria", criteria, "a function of (input_ids, scores) that returns whether rows end"
        )
        self._deadline = None if max_time is None else time.perf_counter() + max_time
        self._sequences = sequences
        self._live = list(sequences)
        self._pad = pad

    def update(self, leave: Callable[[Sequence], None], deliver: Callable[[Sequence], None]) -> None:
        """Look at what was sampled since the last call, one token of every row at a time.

        leave: takes a sequence out of the loop. deliver: takes the next token of a sequence.
        """
        while True:
            self._live = [sequence for sequence in self._live if not sequence.ended]
            if not self._live or not all(sequence.untaken for sequence in self._live):
                return  # a row has yet to sample the token that the others have
            for sequence in self._live:
                deliver(sequence)
            met = self._met()
            late = self._deadline is not None and time.perf_counter() > self._deadline
            for sequence in self._live:
                if met[id(sequence)]:
                    sequence.reason = _STOP
                elif late and not sequence.ended:
                    sequence.reason = _TIME
                if sequence.ended:
                    leave(sequence)

    def _met(self) -> dict[int, bool]:
        """Whether a criterion is met, by the id of each sequence."""
        ids = sequences_array(self._sequences, self._pad) if self._criteria else None
        rows = np.zeros(len(self._sequences), dtype=bool)
        for criterion in self._criteria:
            assert ids is not None
            result = criterion(ids, None)
            answer = on_host(result)
            if answer.dtype != bool or answer.size not in (1, len(rows)):
                raise ValueError(
                    f"a stopping criterion returned {result!r:.60}; it must return a bool, or one for each of the "
                    f"{len(rows)} rows"
                )
            rows |= answer.reshape(-1)
        return {id(sequence): bool(row) for sequence, row in zip(self._sequences, rows, strict=True)}
