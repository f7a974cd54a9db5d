"""Single values that a caller gave: numbers that are no bools, counts, timeouts."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from qsample.request.checks import check_count, checked_timeout, is_integer, is_number


@pytest.mark.parametrize("value", [0, 5, 10**400, np.int32(7)])
def test_integers_are_numbers(value: Any) -> None:
    assert is_integer(value)
    assert is_number(value)
    assert is_integer(value, value, value)
    assert not is_integer(value, least=value + 1)
    assert not is_number(value, most=value - 1)


@pytest.mark.parametrize("value", [True, np.True_, "1", None, [1], 1j])
def test_neither(value: Any) -> None:
    assert not is_integer(value)
    assert not is_number(value)


def test_numbers() -> None:
    assert all(map(is_number, [0.5, -1e30, float("inf"), np.float32(2)]))
    assert not any(map(is_integer, [0.5, 1.0, np.float32(2)]))
    assert not is_number(float("nan"))


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_wrong_counts(value: Any) -> None:
    with pytest.raises(ValueError, match=f"n is {value!r}; give an integer >= 1, or None"):
        check_count("n", value)


def test_counts() -> None:
    check_count("n", None)
    check_count("n", 1)
    check_count("n", 0, least=0)


def test_timeouts() -> None:
    assert checked_timeout(None) is None
    assert [checked_timeout(value) for value in (2, -1, 0.5)] == [2.0, 0.0, 0.5]
    assert checked_timeout(float("inf")) == threading.TIMEOUT_MAX
    for value in (True, "1", float("nan")):
        with pytest.raises(ValueError, match=r"timeout is .*; give seconds, or None to wait as long as it takes"):
            checked_timeout(value)
