"""Stop strings: the same one however the text is cut."""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import pytest

from qsample.request.text import generated_text
from qsample.request.text.generated_text import StopStrings, check_stop_strings


def through(stops: StopStrings, parts: list[str]) -> tuple[str, str | None]:
    return "".join([*(stops.put(part) for part in parts), stops.end()]), stops.match


def test_the_same_stop_string_however_the_text_is_cut() -> None:
    generator = random.Random(2)
    for _ in range(500):
        text = "".join(generator.choice("ab\n漢") for _ in range(generator.randrange(0, 14)))
        strings = [
            "".join(generator.choice("ab\n漢") for _ in range(generator.randrange(1, 5)))
            for _ in range(3)
        ]
        # The oracle: the shortest text that ends in a stop string, and of several of them the longest.
        ends = [
            (text[:end], stop)
            for end in range(len(text) + 1)
            for stop in strings
            if text[:end].endswith(stop)
        ]
        wanted: tuple[str, str | None] = (text, None)
        if ends:
            stop = max((stop for whole, stop in ends if len(whole) == len(ends[0][0])), key=len)
            wanted = (ends[0][0].removesuffix(stop), stop)
        for _ in range(5):
            cuts = sorted(generator.choices(range(len(text) + 1), k=3))
            parts = [
                text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
            ]
            assert through(StopStrings(strings), parts) == wanted
        assert through(StopStrings(strings), list(text)) == wanted


def test_text_is_held_back_only_while_it_may_begin_a_stop_string() -> None:
    stops = StopStrings(["\n\nQ:", "END"])
    parts = ["a", "\n", "b", "\n\n", "Q", "E", "N", "\n", "\nQ", ":c"]
    assert [stops.put(part) for part in parts] == [
        "a",
        "",
        "\nb",
        "",
        "",
        "\n\nQ",
        "",
        "EN",
        "",
        "",
    ]
    assert (stops.match, stops.end()) == ("\n\nQ:", "")
    ended = StopStrings(["END"])
    assert (ended.put("xEN"), ended.end()) == ("x", "EN")


@pytest.mark.parametrize("wrong", ["", ["a", ""], 5, [b"a"], {"a": 1}])
def test_wrong_stop_strings(wrong: Any) -> None:
    with pytest.raises(ValueError, match="stop_strings is"):
        check_stop_strings(wrong)


def test_stop_strings_as_they_are_given() -> None:
    assert check_stop_strings(None) == ()
    assert check_stop_strings("ab") == ("ab",)
    assert check_stop_strings(["a", "b", "a"]) == ("a", "b")


def test_far_too_many_stop_strings() -> None:
    with pytest.raises(
        ValueError, match="has 70000 characters in 7000 strings; give at most 65536 in all"
    ):
        check_stop_strings(["0123456789"] * 7000)


def test_half_a_character_is_refused_as_a_stop_string() -> None:
    with pytest.raises(
        ValueError, match=r"a stop string has a lone surrogate at character 1 \('\\ud83d'\)"
    ):
        check_stop_strings(["fine", "a\ud83d"])


def test_deeply_nested_stop_strings_are_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ValueError, match="stop_strings is"):
        check_stop_strings(nested)


LONG = "a" * 3000 + "b"


@pytest.mark.parametrize(
    "strings",
    [
        [LONG],
        [LONG, "b" * 2000],
        [f"{n}a" for n in range(400)],
        [f"{'a' * 100}{n}" for n in range(90)],
    ],
    ids=["one", "two", "many that end alike", "many that begin alike"],
)
def test_the_work_for_a_character_does_not_grow(strings: list[str]) -> None:
    """Characters in the variables of its functions when they return, in all: how much text was looked at."""
    looked_at = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal looked_at
        if frame.f_code.co_filename != generated_text.__file__:
            return None
        if event == "return":
            looked_at += sum(
                len(value) for value in frame.f_locals.values() if isinstance(value, str)
            )
        return trace

    stops = StopStrings(strings)
    sys.settrace(trace)
    try:
        text = "".join(stops.put("a") for _ in range(4000))
    finally:
        sys.settrace(None)
    assert text + stops.end() == "a" * 4000
    assert looked_at < 10 * 4000


def test_rows_with_the_same_stop_strings_share_an_automaton() -> None:
    """It is hundreds of times as large as the strings; where each answer of a request had its own, memory ran out."""
    first, second, other = StopStrings(["END"]), StopStrings(["END"]), StopStrings(["EN"])
    assert first._automaton is second._automaton
    assert first._automaton is not other._automaton
    assert (first.put("xEN"), second.put("yD"), first.put("D"), second.match) == (
        "x",
        "yD",
        "",
        None,
    )
    assert first.match == "END"
    assert ("END",) in generated_text._AUTOMATA
    del first, second
    gc.collect()
    assert ("END",) not in generated_text._AUTOMATA


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_texts_that_include_their_stop_string(size: int) -> None:
    """The text ends with the stop string that is complete first, and nothing is held back."""
    generator = random.Random(size)
    for _ in range(200):
        strings = ["".join(generator.choices("ab", k=generator.randrange(1, 4))) for _ in range(2)]
        text = "".join(generator.choices("abc", k=20))
        stops = StopStrings(strings, include_match=True)
        given = ""
        found = ""
        for start in range(0, len(text), size):
            given += text[start : start + size]
            found += stops.put(text[start : start + size])
            assert stops.match is not None or found == given
        ends = [end for end in range(21) if text[:end].endswith(tuple(strings))]
        assert found + stops.end() == (text[: ends[0]] if ends else text)
        if ends:
            assert stops.match == max(filter(found.endswith, strings), key=len)
