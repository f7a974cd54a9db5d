"""Repetitions at the end of tokens; the oracle compares lists."""

from __future__ import annotations

import random
from typing import Any

import pytest

from qsample.request.repetition import (
    MAX_PATTERN_SIZE,
    RepetitionDetection,
    RepetitionDetector,
    read_repetition_detection,
)


def ends_repeated(tokens: list[int], sizes: range, count: int) -> bool:
    """Whether `tokens` end with `count` copies of a pattern of one of `sizes`."""
    return any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
        for size in sizes
    )


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(("least", "most"), [(0, 1), (1, 4), (2, 2), (3, 7), (5, 5)])
def test_repetitions_of_random_tokens(least: int, most: int, count: int) -> None:
    generator = random.Random(7 * most + count)
    detection = RepetitionDetection(max_pattern_size=most, min_pattern_size=least, min_count=count)
    found = 0
    for _ in range(60):
        detector = RepetitionDetector(detection)
        pattern = [generator.randrange(3) for _ in range(generator.randrange(1, 9))]
        tokens: list[int] = []
        for place in range(60):
            is_noise = generator.random() < 0.1
            tokens.append(generator.randrange(3) if is_noise else pattern[place % len(pattern)])
            expected = ends_repeated(tokens, range(max(least, 1), most + 1), count)
            assert detector.put(tokens[-1]) == expected, tokens
            found += expected
    assert found > 20


def test_the_largest_pattern() -> None:
    detector = RepetitionDetector(
        RepetitionDetection(
            max_pattern_size=MAX_PATTERN_SIZE, min_pattern_size=MAX_PATTERN_SIZE, min_count=2
        )
    )
    tokens = [*range(MAX_PATTERN_SIZE)] * 2
    assert [detector.put(token) for token in tokens] == [False] * (len(tokens) - 1) + [True]


def test_values() -> None:
    detection = RepetitionDetection(max_pattern_size=3, min_count=2)
    assert read_repetition_detection("x", {"max_pattern_size": 3, "min_count": 2}) == detection
    assert read_repetition_detection("x", detection) is detection
    for off in (None, {}, {"max_pattern_size": 0, "min_count": 9}, RepetitionDetection()):
        assert read_repetition_detection("x", off) is None


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"max_pattern_size": 3}, ValueError, "min_count is 0; give an integer >= 2"),
        ({"max_pattern_size": 3, "min_count": 1}, ValueError, "min_count is 1"),
        ({"max_pattern_size": -1}, ValueError, "max_pattern_size is -1; give an integer from 0"),
        ({"max_pattern_size": 4097, "min_count": 2}, ValueError, "max_pattern_size is 4097"),
        ({"max_pattern_size": True, "min_count": 2}, ValueError, "max_pattern_size is True"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, ValueError, "more than"),
        ({"pattern_size": 3}, TypeError, "x has no argument 'pattern_size'; did you mean"),
        (5, ValueError, "x is 5; give a mapping"),
    ],
)
def test_wrong_values(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_repetition_detection("x", value)


def test_the_limits_of_values() -> None:
    widest = {"max_pattern_size": 4096, "min_pattern_size": 4096, "min_count": 2**31 - 1}
    assert read_repetition_detection("x", widest) == RepetitionDetection(**widest)
    for name, value in (("min_count", 2**31), ("min_count", -1), ("min_pattern_size", -1)):
        with pytest.raises(ValueError, match=f"{name} is {value}; give an integer"):
            read_repetition_detection("x", widest | {name: value})
