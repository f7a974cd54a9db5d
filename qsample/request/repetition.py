"""Tokens as they come → whether they end with a repeated pattern: vLLM's `repetition_detection`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qsample.checks import check_fields, from_keywords, integer, refuse
from qsample.contract.arrays import Array
from qsample.errors import ArgumentError

# Each token is compared with up to this number of tokens before it.
MAX_PATTERN_SIZE: Final = 4096
_MAX_COUNT: Final = 2**31 - 1
# A number that no token id equals, for places before the first token.
_NO_TOKEN: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """The repetitions that end a row, in vLLM's words: a pattern of `min_pattern_size` to
    `max_pattern_size` tokens that comes `min_count` times in a row, at the end of the sampled tokens.

    Args:
        max_pattern_size: the most tokens of a pattern, 0 to 4096; 0 = off.
        min_pattern_size: the fewest tokens of a pattern, up to `max_pattern_size`; 0 counts as 1.
        min_count: how often the pattern comes, at least 2.

    Raises ArgumentError for a value out of its range.
    """

    max_pattern_size: int = integer(
        0, 0, MAX_PATTERN_SIZE, f"an integer from 0 to {MAX_PATTERN_SIZE} (0 = off)"
    )
    min_pattern_size: int = integer(
        0, 0, MAX_PATTERN_SIZE, f"an integer from 0 to {MAX_PATTERN_SIZE}"
    )
    min_count: int = integer(0, 0, _MAX_COUNT, "an integer >= 2")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.min_pattern_size > self.max_pattern_size:
            raise ArgumentError(
                f"min_pattern_size is {self.min_pattern_size}, more than max_pattern_size "
                f"({self.max_pattern_size}); give at most that",
                "repetition_detection",
            )
        if self.max_pattern_size != 0 and self.min_count < 2:
            raise ArgumentError(
                f"min_count is {self.min_count}; give an integer >= 2, or max_pattern_size=0 to "
                "detect nothing",
                "repetition_detection",
            )


def read_repetition_detection(name: str, value: Any) -> RepetitionDetection | None:
    """The value of an argument.

    Args:
        name: the name of the argument.
        value: a RepetitionDetection, a mapping with its fields, or None.

    Returns:
        The repetitions; None if they are off.

    Raises:
        ValueError: the value is something else.
        TypeError: a mapping has an unknown field.
    """
    if isinstance(value, Mapping):
        value = from_keywords(RepetitionDetection, name, value)
    if value is None or (isinstance(value, RepetitionDetection) and value.max_pattern_size == 0):
        return None
    if not isinstance(value, RepetitionDetection):
        refuse(name, value, 'a mapping such as {"max_pattern_size": 20, "min_count": 4}, or None')
    return value


class RepetitionDetector:
    """Finds the repetitions at the end of a row's tokens.

    A pattern of n tokens comes k times in a row exactly if each of the newest n (k - 1) tokens equals
    the token n places before it. So the number of newest tokens is kept for which that holds, for
    each n, and the work for a token does not depend on k.

    >>> detector = RepetitionDetector(RepetitionDetection(max_pattern_size=2, min_count=3))
    >>> [detector.put(token) for token in (5, 7, 5, 7, 5, 7)]
    [False, False, False, False, False, True]
    """

    def __init__(self, detection: RepetitionDetection) -> None:
        sizes = np.arange(1, detection.max_pattern_size + 1)
        self._first_size = max(detection.min_pattern_size, 1)
        self._needed: Array = sizes * (detection.min_count - 1)
        self._equal: Array = np.zeros(len(sizes), np.int64)
        # The newest tokens, the newest first.
        self._newest: Array = np.full(len(sizes), _NO_TOKEN, np.int64)

    def put(self, token: int) -> bool:
        """Whether the tokens end with a repetition after `token`."""
        self._equal = np.where(self._newest == token, self._equal + 1, 0)
        self._newest[1:] = self._newest[:-1].copy()
        self._newest[0] = token
        repeats = self._equal >= self._needed
        return bool(repeats[self._first_size - 1 :].any())
