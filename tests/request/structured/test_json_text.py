"""Expressions of JSON's scalars, beside Python's json and plain counting."""

from __future__ import annotations

import json
import random
import re

import pytest

from qsample.request.structured import json_text
from qsample.request.structured.json_text import LARGEST_INTEGER, integers
from qsample.request.structured.not_regular import NEVER


def matches(expression: str, text: str) -> bool:
    return re.fullmatch(expression, text) is not None


@pytest.mark.parametrize(
    "least", [-120, -101, -100, -99, -11, -10, -9, -1, 0, 1, 9, 10, 11, 99, 100]
)
@pytest.mark.parametrize("most", [-100, -10, -9, -1, 0, 1, 8, 9, 10, 19, 99, 100, 101, 119])
def test_small_ranges_have_exactly_their_integers(least: int, most: int) -> None:
    expression = integers(least, most)
    if least > most:
        assert expression == NEVER
        return
    found = {number for number in range(-1300, 1301) if matches(expression, str(number))}
    assert found == set(range(least, most + 1))
    assert not any(matches(expression, text) for text in ("-0", "00", "+1", "1.0", "", "-", "01"))


def test_ranges_of_any_size() -> None:
    lot = random.Random(0)
    for _ in range(300):
        digits = lot.randint(1, 18), lot.randint(1, 18)
        ends = sorted(lot.choice((-1, 1)) * lot.randint(0, 10**size - 1) for size in digits)
        expression = integers(*ends)
        near = [end + step for end in ends for step in (-2, -1, 0, 1, 2)]
        near += [lot.randint(-LARGEST_INTEGER, LARGEST_INTEGER) for _ in range(20)]
        near += [lot.randint(*ends) for _ in range(20)]
        for number in near:
            assert matches(expression, str(number)) == (ends[0] <= number <= ends[1]), (
                ends,
                number,
            )


def test_open_ranges_have_the_integers_of_18_digits() -> None:
    everything = integers(-(10**30), 10**30)
    for expression in (everything, json_text.INTEGER):
        for number in (0, 1, -1, 10, LARGEST_INTEGER, -LARGEST_INTEGER):
            assert matches(expression, str(number))
        for number in (LARGEST_INTEGER + 1, -LARGEST_INTEGER - 1):
            assert not matches(expression, str(number))
    half = integers(5, 10**30)
    assert matches(half, str(LARGEST_INTEGER))
    assert not matches(half, str(LARGEST_INTEGER + 1))
    assert not matches(half, "4")
    assert matches(integers(-(10**30), -5), str(-LARGEST_INTEGER))
    assert integers(LARGEST_INTEGER + 1, 10**30) == NEVER
    assert integers(3, 2) == NEVER


def test_numbers_and_strings_are_those_of_json() -> None:
    for text in ("0", "-1.5", "12e3", "1E-09", "1.25e+10", "-0", "0.10"):
        assert matches(json_text.NUMBER, text)
        json.loads(text)
    for text in ("01", ".5", "1.", "1e", "1e400", "+1", "NaN", "1e+", "-", "0x1", "1" * 19):
        assert not matches(json_text.NUMBER, text)
    for value in ("", "a", 'q"\\/\b\f\n\r\t', "é😊", "\x7f", "\u2028"):
        assert matches(json_text.STRING, json.dumps(value, ensure_ascii=False))
    for text in (r'"\u00e9"', r'"\uD7ff"', r'"\/"', r'"\uABCD"'):
        assert matches(json_text.STRING, text)
        json.loads(text)
    # Half a character has no bytes.
    for text in (
        r'"\ud800"',
        r'"\uDfff"',
        r'"\x"',
        '"\n"',
        '"',
        '"a',
        r'"\u12"',
        '"a"b"',
        r'"\u12g4"',
    ):
        assert not matches(json_text.STRING, text)
    for text in ("true", "false"):
        assert matches(json_text.BOOLEAN, text)
    assert not matches(json_text.BOOLEAN, "True")
    assert json.loads(json_text.NULL) is None
