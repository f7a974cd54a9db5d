"""Byte automata: beside Python's `re` on all short texts; the smallest; thoughts beside a plain description of them."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from qsample.errors import ArgumentError
from qsample.request.grammar import InvalidGrammarError
from qsample.request.structured.automaton import (
    ANY_SPECIAL,
    NUM_BYTES,
    ByteAutomaton,
    Thoughts,
    automaton_of,
    with_thoughts,
)
from qsample.request.structured.not_regular import NotRegularError
from qsample.request.structured.state_graph import equal_rows


def state_after(automaton: ByteAutomaton, text: bytes, state: int = 0) -> int:
    for byte in text:
        if state < 0:
            return -1
        state = int(automaton.transitions[state, byte])
    return state


def accepts(automaton: ByteAutomaton, text: str) -> bool:
    state = state_after(automaton, text.encode())
    return state >= 0 and bool(automaton.final[state])


EXPRESSIONS = [
    "",
    "a",
    "a|ab",
    "ab|a",
    "a|abc",
    "a*",
    "(?:ab)*",
    "(?:a|)b??",
    "a*?b*?",
    "(?:a|b)*a(?:a|b){2}",
    "(?:a|aé){2,3}",
    "[^a]{1,3}",
    "(?:ab?|b)+s?",
    "s|sa",
    "(?:é|ü|a)*b",
    "(?s:.)a",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_automaton_accepts_what_its_expression_matches(expression: str) -> None:
    automaton = automaton_of(expression)
    pattern = re.compile(expression)
    for length in range(6):
        for letters in itertools.product("abés", repeat=length):
            text = "".join(letters)
            assert accepts(automaton, text) == bool(pattern.fullmatch(text)), text


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_automaton_is_the_smallest(expression: str) -> None:
    """Any two states are told apart by a text, and each state is between the start and an end."""
    automaton = automaton_of(expression)
    states = len(automaton.transitions)
    apart = automaton.final[:, None] != automaton.final[None]
    after = np.where(automaton.transitions < 0, states, automaton.transitions)
    for _ in range(states):
        padded = np.pad(apart, (0, 1), constant_values=True)
        padded[states, states] = False
        apart = apart | padded[after[:, None], after[None]].any(axis=2)
    assert (apart | np.eye(states, dtype=bool)).all()
    seen = {0}
    for _ in range(states):
        seen |= {int(end) for state in seen for end in automaton.transitions[state] if end >= 0}
    assert seen == set(range(states))
    assert (automaton.late == np.arange(states)).all()


@pytest.mark.parametrize(
    ("expression", "states"),
    [("[ab]{0,500}", 501), ("(?:[^a]|bb){40}", None), ("(?:a|b){300}", 301)],
)
def test_counted_repetitions_take_no_exponential_time(expression: str, states: int | None) -> None:
    automaton = automaton_of(expression)
    assert states is None or len(automaton.transitions) == states


@pytest.mark.parametrize("expression", ["[a&&b]", "a{2,1}", "(", "(?-u:\\xff)"])
def test_an_expression_without_texts_is_invalid(expression: str) -> None:
    with pytest.raises(InvalidGrammarError, match="no answer can follow that form"):
        automaton_of(expression)


@pytest.mark.parametrize("expression", [r"\bfoo", "a" * (1 << 20) + "b"])
def test_an_expression_that_is_no_automaton_is_refused(expression: str) -> None:
    with pytest.raises(NotRegularError):
        automaton_of(expression)


def test_too_many_states_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qsample.request.structured.automaton.MAX_BYTE_STATES", 10)
    with pytest.raises(NotRegularError, match="states"):
        automaton_of("a{20}")


def test_rows_with_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.array([[1, 2], [3, 4], [1, 2], [5, 6]])
    expected = equal_rows(rows)
    assert [part.tolist() for part in expected] == [[0, 1, 3], [0, 1, 0, 2]]

    class NoWeights:
        def integers(self, low: int, high: int, size: int) -> np.ndarray:
            return np.zeros(size, np.int64)

    monkeypatch.setattr(np.random, "default_rng", lambda seed: NoWeights())
    assert [part.tolist() for part in equal_rows(rows)] == [part.tolist() for part in expected]


START = "<t>"
END = "<e<e>"  # Its beginning repeats itself.


def description(form: str, is_open: bool) -> re.Pattern[str]:
    """Thoughts and a form, as an expression for Python."""
    thoughts = f"(?:(?!{END}).)*?{END}\n{{0,2}}(?:{form})"
    start = "" if is_open else START
    whole = f"{start}{thoughts}" if is_open else f"{start}{thoughts}|(?!{START})(?:{form})"
    return re.compile(whole, re.DOTALL)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("form", ["a|ee", "<e|<|<ta"])
def test_thoughts_end_with_the_first_end(form: str, is_open: bool) -> None:
    automaton = with_thoughts(automaton_of(form), Thoughts(START, END, is_open))
    pattern = description(form, is_open)
    pieces = ["<", "e", "t", ">", "a", "\n", "<e", "<e<e>", "<t>"]
    checked = 0
    for length in range(6):
        for parts in itertools.product(pieces, repeat=length):
            text = "".join(parts)
            is_matched = pattern.fullmatch(text) is not None
            checked += is_matched
            assert accepts(automaton, text) == is_matched, text
    assert checked > 50


@pytest.mark.parametrize("has_form", [True, False])
@pytest.mark.parametrize("is_open", [True, False])
def test_late_states_allow_the_rest_of_the_end(has_form: bool, is_open: bool) -> None:
    form = automaton_of("a|ee") if has_form else None
    automaton = with_thoughts(form, Thoughts(START, END, is_open))
    before = "" if is_open else START
    for text, rest in [("", END), ("x", END), ("<", END[1:]), ("<e<", END[3:]), ("<e<e<", END[3:])]:
        state = state_after(automaton, (before + text).encode())
        late = int(automaton.late[state])
        assert late != state
        for byte in rest.encode():
            assert automaton.late[late] == late
            assert np.flatnonzero(automaton.transitions[late, :256] >= 0).tolist() == [byte]
            assert automaton.final[late] == 0
            late = int(automaton.transitions[late, byte])
        assert late == state_after(automaton, (before + text + rest).encode())


@pytest.mark.parametrize("has_form", [True, False])
@pytest.mark.parametrize("is_open", [True, False])
def test_late_thoughts_complete_a_character(has_form: bool, is_open: bool) -> None:
    form = automaton_of("a|ee") if has_form else None
    automaton = with_thoughts(form, Thoughts(START, END, is_open))
    before = b"" if is_open else START.encode()
    after_thought = state_after(automaton, before + b"x")
    for character in "é日😊":
        content = character.encode()
        for cut in range(1, len(content)):
            state = state_after(automaton, before + b"x" + content[:cut])
            late = int(automaton.late[state])
            for byte in content[cut:]:
                allowed = np.flatnonzero(automaton.transitions[late, :256] >= 0)
                assert allowed.tolist() == [*range(0x80, 0xC0)]
                assert automaton.late[late] == late
                assert not automaton.final[late]
                late = int(automaton.transitions[late, byte])
            assert late == automaton.late[after_thought]
        assert state_after(automaton, before + b"x" + content) == after_thought
    # Bytes that are no text are thoughts, too.
    broken = state_after(automaton, before + b"\xe6\xc3x")
    assert broken == after_thought
    ended = state_after(automaton, before + b"\xf0" + END.encode())
    assert ended == state_after(automaton, before + END.encode())


@pytest.mark.parametrize("is_open", [True, False])
def test_special_tokens_spell_the_start_and_the_end(is_open: bool) -> None:
    automaton = with_thoughts(automaton_of("a|ee"), Thoughts(START, END, is_open))
    assert automaton.special_texts == (START, END)
    thinking = int(automaton.transitions[0, 256])
    assert thinking == state_after(automaton, START.encode() if not is_open else b"x")
    after_end = state_after(automaton, END.encode(), thinking)
    for text in (b"", b"x", b"<e<"):
        assert automaton.transitions[state_after(automaton, text, thinking), 257] == after_end
    assert automaton.transitions[automaton.late[thinking], 257] == after_end
    assert (automaton.transitions[1:, 256] == -1).all()
    assert automaton.transitions[after_end, 257] == -1


@pytest.mark.parametrize("is_open", [True, False])
def test_a_budget_allows_everything(is_open: bool) -> None:
    automaton = with_thoughts(None, Thoughts(START, END, is_open))
    is_late = np.zeros(len(automaton.late), bool)
    is_late[automaton.late[automaton.late != np.arange(len(automaton.late))]] = True
    assert is_late.sum() == len(END) + 3  # inside a character of up to four bytes
    assert automaton.special_texts == (START, END, "")
    assert (automaton.transitions[~is_late] >= 0).all()
    assert (automaton.final == ~is_late).all()
    assert (automaton.transitions[automaton.free] == automaton.free).all()
    before = "" if is_open else START
    assert state_after(automaton, (before + "x" + END).encode()) == automaton.free
    assert state_after(automaton, b"<x") != automaton.free or not is_open


@pytest.mark.parametrize("form", ["a|ee", None])
def test_thoughts_that_the_prompt_begins_need_no_start(form: str | None) -> None:
    """Special tokens without a text of their own stay apart from the absent start."""
    automaton = None if form is None else automaton_of(form)
    without_start = with_thoughts(automaton, Thoughts.between("", END))
    with_start = with_thoughts(automaton, Thoughts(START, END, is_open=True))
    assert without_start.special_texts == ((END,) if form else (END, ANY_SPECIAL))
    assert with_start.special_texts == (START, *without_start.special_texts)
    transitions = np.delete(with_start.transitions, NUM_BYTES, axis=1)
    assert (without_start.transitions == transitions).all()
    assert (without_start.final == with_start.final).all()
    assert (without_start.late == with_start.late).all()
    assert without_start.free == with_start.free


@pytest.mark.parametrize(
    ("thoughts", "missing"),
    [
        (Thoughts("", "b", False), "start"),
        (Thoughts("a", "", False), "end"),
        (Thoughts("a", "", True), "end"),
        (Thoughts.between("", ""), "end"),
    ],
)
def test_thoughts_have_a_start_and_an_end(thoughts: Thoughts, missing: str) -> None:
    with pytest.raises(ArgumentError, match=f"the {missing} of thoughts is empty"):
        with_thoughts(None, thoughts)
