"""Ends rows where a caller's criteria say so, or where time is up: token by token, the whole batch at once.

transformers asks its criteria after every token of the batch, and shows them prompts and tokens as one array. The same
is done here, whatever was sampled meanwhile: what comes after a criterion was met is left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qsample.runtime.output import sequences_array
from qsample.runtime.sequence import Sequence
from qsample.tensors import Array

Criterion = Callable[[Array], Array]  # [B, n] int64 token ids → which rows end, [B] bool
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

    def __init__(self, criteria: Any, max_time: float | None, sequences: Rows[Sequence], pad: int) -> None:
        self._criteria = _as_criteria(criteria)
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
            rows |= criterion(ids)
        return {id(sequence): bool(row) for sequence, row in zip(self._sequences, rows, strict=True)}


def _as_criteria(given: Any) -> list[Criterion]:
    if given is None:
        return []
    several = list(given) if isinstance(given, Iterable) else [given]
    if not all(callable(one) for one in several):
        wrong = next(one for one in several if not callable(one))
        raise ValueError(
            f"stopping_criteria has a {type(wrong).__name__}; give a function of (input_ids, scores) that returns "
            "whether rows end, or a list of them"
        )
    return [_Asked(one, in_torch=_of_transformers(given) or _of_transformers(one)) for one in several]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One criterion of a caller, between arrays."""

    function: Any
    in_torch: bool

    def __call__(self, ids: Array) -> Array:
        # Who made an object of transformers' has imported torch; nobody else needs it.
        shown = sys.modules["torch"].from_numpy(ids.copy()) if self.in_torch else ids.copy()
        result = self.function(shown, None)
        answer = np.asarray(result.cpu() if hasattr(result, "cpu") else result)
        if answer.dtype != bool or answer.size not in (1, len(ids)):
            raise ValueError(
                f"a stopping criterion returned {result!r:.60}; it must return a bool, or one for each of the "
                f"{len(ids)} rows"
            )
        return np.array(np.broadcast_to(answer.reshape(-1), len(ids)))


def _of_transformers(value: Any) -> bool:
    return any(kind.__module__.split(".")[0] == "transformers" for kind in type(value).__mro__)
