"""The parts of expressions that all forms share, and their limits; Python's `re` is the judge."""

from __future__ import annotations

import re

import pytest

from qsample.errors import ArgumentError
from qsample.request.structured.not_regular import (
    MAX_EXPRESSION_CHARACTERS,
    MAX_NESTING,
    MAX_REPETITIONS,
    NEVER,
    NotRegularError,
    alternatives,
    checked_length,
    checked_nesting,
    escaped,
    repeated,
)


def test_the_error_keeps_the_reason() -> None:
    error = NotRegularError("#/a: uniqueItems")
    assert error.reason == "#/a: uniqueItems"
    assert str(error) == "that form has no tables: #/a: uniqueItems"
    assert isinstance(error, ArgumentError)
    long = NotRegularError("x" * 1000)
    assert (len(long.reason), str(long).count("x")) == (1000, 300)


def test_the_limits() -> None:
    """Those that the documentation states."""
    assert (MAX_EXPRESSION_CHARACTERS, MAX_NESTING, MAX_REPETITIONS) == (1_048_576, 48, 4096)


def test_the_length_of_an_expression() -> None:
    longest = "a" * MAX_EXPRESSION_CHARACTERS
    assert checked_length(longest) is longest
    with pytest.raises(NotRegularError, match="more than 1048576 characters"):
        checked_length(longest + "a")
    # The parts around others count.
    assert len(alternatives([longest[4:]])) == MAX_EXPRESSION_CHARACTERS
    with pytest.raises(NotRegularError, match="characters"):
        alternatives([longest[3:]])
    with pytest.raises(NotRegularError, match="characters"):
        repeated(longest, 0, None)


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        ("(" * 200 + ")" * 200, True),
        ("(" * 201 + ")" * 201, False),
        ("()" * 1000, True),
        ("()" * 1000 + "(" * 201 + ")" * 201, False),
        ("(" * 200 + ")(" * 50 + ")" * 200, True),
        ("(" * 200 + r"\(" + ")" * 200, True),
        ("(" * 200 + r"\\(" + ")" * 201, False),
        (r"\)" + "(" * 201 + ")" * 201, False),
        ("(" * 200 + "\\\n" + ")" * 200, True),
    ],
)
def test_the_nesting_of_groups(expression: str, fits: bool) -> None:
    if fits:
        assert checked_nesting(expression) == expression
    else:
        with pytest.raises(NotRegularError, match="nested more than 200 deep"):
            checked_nesting(expression)


def test_a_text_matches_itself_alone() -> None:
    text = "".join(map(chr, range(0x20, 0x7F))) + "\n\té日😀"
    assert re.fullmatch(escaped(text), text)
    for character in text:
        matched = [other for other in text if re.fullmatch(escaped(character), other)]
        assert matched == [character]
    assert escaped("az09_ é") == "az09_ é"
    for character in r"\.+*?()|[]{}^$#&-~":  # those that are special to Rust's regex crate
        assert escaped(character) == f"\\{character}"
    with pytest.raises(NotRegularError, match="half of a surrogate pair"):
        escaped("a\ud800")


def test_alternatives() -> None:
    assert alternatives([]) == alternatives([NEVER, NEVER]) == NEVER
    assert alternatives(["b", NEVER, "a", "b"]) == "(?:b|a)"
    assert alternatives(["a"]) == "(?:a)"


@pytest.mark.parametrize("least", range(4))
@pytest.mark.parametrize("most", [0, 1, 2, 3, None])
def test_repetitions(least: int, most: int | None) -> None:
    if most is not None and most < least:
        return
    expression = repeated("ab|c", least, most)
    for times in range(6):
        fits = least <= times and (most is None or times <= most)
        assert bool(re.fullmatch(expression, "abcccc"[: times + 1] if times else "")) == fits
        assert bool(re.fullmatch(expression, "ab" * times)) == fits


def test_so_many_repetitions_and_no_more() -> None:
    assert repeated("a", 4096, 4096) == "(?:a){4096,4096}"
    assert repeated("a", 4096, None) == "(?:a){4096,}"
    for least, most in ((4097, None), (0, 4097), (4097, 4097)):
        with pytest.raises(NotRegularError, match="more than 4096 times"):
            repeated("a", least, most)
