"""The patterns of schemas: found where Python's `re` finds them, in texts as JSON writes them."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from qsample.request.structured.automaton import automaton_of
from qsample.request.structured.not_regular import NEVER, NotRegularError
from qsample.request.structured.pattern import expression_of_pattern
from tests.helpers.random_schemas import PATTERNS


def compiled(pattern: str) -> re.Pattern[str]:
    """The expression in Python's syntax, which writes a code point otherwise than Rust's."""
    expression = expression_of_pattern(pattern)
    assert NEVER not in expression
    return re.compile(re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{found[1]:0>8}", expression))


def content(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_they_mean_in_python(pattern: str) -> None:
    """Raw characters that both have are found in both; other texts may be missing."""
    rng = np.random.default_rng(3)
    expression = f'"{expression_of_pattern(pattern)}"'
    automaton = automaton_of(expression) if NEVER not in expression else None
    for _ in range(300):
        letters = rng.choice(list('aby-Zz019é日ü@. _x"\\'), rng.integers(0, 8))
        text = "".join(str(letter) for letter in letters)
        is_found = re.search(pattern, text) is not None
        state = 0
        if automaton is not None:
            for byte in json.dumps(text, ensure_ascii=False).encode():
                state = int(automaton.transitions[state, byte]) if state >= 0 else -1
        is_matched = automaton is not None and state >= 0 and bool(automaton.final[state])
        assert is_found >= is_matched, (pattern, text)
        if text.isascii() and '"' not in text and "\\" not in text:
            assert is_found == is_matched, (pattern, text)


ANCHORS = [
    "a", "^a", "a$", "^a$", "^", "$", "^$", "",
    "^a|b", "a|b$", "^(a|b)$", "(^a|b$)", "(^a)b", "a(b$)", "(^a|^b)(a$|b)", "((^a))", "^(a|(b|ab))",
    "^a{2}$", "^a{2,}$", "^a{0,2}$", "^a*?b$", "^(ab)+$", "^(ab)?$", "^a{0}b$", "(a|b)c", "a(b|c)",
]  # fmt: skip


@pytest.mark.parametrize("pattern", ANCHORS)
def test_every_short_text(pattern: str) -> None:
    texts = [""]
    for _ in range(5):
        texts += [text + letter for text in texts for letter in "abc"]
    expression = compiled(pattern)
    for text in set(texts):
        assert bool(expression.fullmatch(text)) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize(
    "pattern",
    [r"^[a-cx]$", r"^[^a-cx]$", r"^[^\n]$", r"^\d$", r"^\D$", r"^\w$", r"^\W$", r"^[\d_]$", r"^[\D]$", r"^[^\W]$",
     "^a$", r"^\n$", '^"$', r"^\\$", r"^[^x]$", "^[^a-b]$", "^[!-~]$", r"^.$", r"^[\w\-]$", "^[a-cb-e]$", "^[ace]$",
     r"^[\"]$", "^x?[ab]$"],
)  # fmt: skip
def test_which_character_of_ascii_a_class_has(pattern: str) -> None:
    """A dot has no ends of lines of JavaScript, nor has it those that JSON escapes; a class has what JSON escapes
    only if it is written as such."""
    expression = compiled(pattern)
    for character in map(chr, range(128)):
        is_found = re.search(pattern, character) is not None
        is_matched = expression.fullmatch(content(character)) is not None
        is_raw = content(character) == character
        if is_raw:
            assert is_matched == is_found, character
        else:
            assert is_matched <= is_found, character


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        # What Python and JavaScript, or versions of Unicode, see otherwise is in neither a class nor its negation.
        (r"^\d$", "09", "\u0660a/:"),
        (r"^\D$", "a/:", "\u06600é"),
        (r"^\w$", "az_09AZ", "é日-`{@["),
        (r"^\W$", "-@[`{ ", "é日a_"),
        (r"^\s$", " ", "a\xa0\u2000\u200a\u3000\ufeff\x85"),
        (r"^\S$", "aé\u1fff\u200b日", " \xa0\u1680\u180e\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff\x85"),
        (r"^[^\s]$", "a", " \xa0"),
        (r"^[^\S]$", " ", "a\xa0"),
        (r"^.$", "aé\xa0\x7f\U0010ffff", "\u2028\u2029\n\r"),
        (r"^[^a]$", "bé\x7f\x80\ud7ff\ue000\uffff\U0010ffff", "a"),
        ("^[à-ü]$", "àéü", "ßýa"),
        ("^\U0001f600$", "\U0001f600", "\U0001f601a"),
        ("^[\U0001f600-\U0010ffff]$", "\U0001f600\U0010ffff", "a\U0001f5ff"),
        ("^[a-c]$", "abc", "`d"),
    ],
)  # fmt: skip
def test_characters_that_are_in_a_class_for_sure(pattern: str, inside: str, outside: str) -> None:
    expression = compiled(pattern)
    for character in inside:
        assert expression.fullmatch(content(character)), character
    for character in outside:
        assert not expression.fullmatch(content(character)), character


@pytest.mark.parametrize("character", list('"\\\b\f\n\r\t'))
def test_what_json_escapes(character: str) -> None:
    assert compiled(f"^a{re.escape(character)}b$").fullmatch(content(f"a{character}b"))
    assert compiled("a").fullmatch(content(f"{character}a{character}"))


@pytest.mark.parametrize("pattern", ["^[\x01]$", "^\x01$", "^[\ud800]$", "a\x1fb", "(^\x01)", "^\x01+$"])  # fmt: skip
def test_a_pattern_without_any_text(pattern: str) -> None:
    assert expression_of_pattern(pattern) == NEVER


def test_repetitions_of_what_has_no_text() -> None:
    """None of them is a text; an alternative without a text is none."""
    for pattern in ("^a\x01*b$", "^a\x01?b$", "^ab|\x01$"):
        assert compiled(pattern).fullmatch("ab"), pattern
    assert not compiled("^a\x01*b$").fullmatch("axb")


@pytest.mark.parametrize(
    "pattern", ["(?i:a)b", "(?i)ab", "a(?s:.)", "(?-i:a)b", "(?x:a b)", "(?a)a", "(?m)a", "(?s)a"]
)
def test_flags_in_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(NotRegularError, match="flags"):
        expression_of_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a" * (1 << 14 | 1), "pattern of more than 16384 characters"),
        ("(", r"pattern \(missing \), unterminated subpattern"),
        ("[[a]b]", r"pattern \(Possible nested set"),
        ("a{99999999999999999999}", r"pattern \("),
        ("a^b", "pattern with at"),
        ("a$b", "pattern with at"),
        ("(a$)b", "pattern with at"),
        ("a(^b)", "pattern with at"),
        (r"\bab", "pattern with at"),
        (r"(a)\1", "pattern with groupref"),
        ("(?=a)b", "pattern with assert"),
        ("a++", "pattern with possessive_repeat"),
        ("a{4097}", "more than 4096 times"),
        ("(" * 49 + "a" + ")" * 49, "pattern nested too deep"),
        ("(a|" * 25 + "a" + ")" * 25, "pattern nested too deep"),
    ],
)  # fmt: skip
def test_patterns_that_are_not_kept(pattern: str, reason: str) -> None:
    with pytest.raises(NotRegularError, match=reason):
        expression_of_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", ["a" * (1 << 14), "(" * 48 + "a" + ")" * 48, "(?:" * 48 + "a" + ")" * 48, "a{4096}"]
)
def test_patterns_at_the_limits(pattern: str) -> None:
    assert expression_of_pattern(pattern)


def test_a_long_message_of_python_is_cut() -> None:
    with pytest.raises(NotRegularError) as caught:
        expression_of_pattern("(?P<" + "-" * 200 + ">a)")
    reason: Any = caught.value.reason
    assert len(reason) == len("pattern ()") + 60


@pytest.mark.parametrize(
    ("begin", "end", "most"),
    [("(", ")", 48), ("(a|", ")", 24), ("(?:a", "b)+", 48), ("(a", ")+", 24)],
)
def test_groups_alternatives_and_repetitions_are_levels(begin: str, end: str, most: int) -> None:
    """Of 48 at most."""
    expression_of_pattern(begin * most + "a" + end * most)
    with pytest.raises(NotRegularError, match="pattern nested too deep"):
        expression_of_pattern(begin * (most + 1) + "a" + end * (most + 1))
