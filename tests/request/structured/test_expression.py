"""Expressions of all kinds of forms, beside llguidance on whole texts."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from qsample.errors import ArgumentError
from qsample.request.grammar import Form, InvalidGrammarError, grammar_of
from qsample.request.structured.automaton import automaton_of
from qsample.request.structured.expression import expression_of
from qsample.request.structured.not_regular import NotRegularError
from tests.request.structured.conftest import Kind

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = {"get_weather": WEATHER, "now": EMPTY}
CALL = '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}'
OTHER = '{"name": "now", "parameters": {}}'
TEXTS = [
    *("yes", "no", "yes no", "a.b", "axb", "(", "", "ab", "abc", "a", "1", "-0", "x1"),
    *(CALL, f"[{CALL}]", f"[{OTHER}]", f"[{CALL}, {OTHER}]", f"[{CALL},{OTHER}]", "[]"),
    *('{"city": "Paris"}', '{"city": "Oslo"}', '{"days": 3, "city": "Rome"}'),
]
FORMS = [
    Form("json_schema", WEATHER),
    Form("json_schema", '{"type": "integer"}'),
    Form("regex", "a|ab"),
    Form("regex", r"a\.b|[a-z]\d?"),
    Form("choice", ["yes", "a.b", "(", "yes"]),
    Form("grammar", 'root ::= "yes" | [a-b]{2}'),
    Form("call", FUNCTIONS),
    Form("calls", FUNCTIONS),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_expression_matches_what_llguidance_accepts(form: Form, byte_level: Kind) -> None:
    automaton = automaton_of(expression_of(form))
    num_accepted = 0
    for text in TEXTS:
        matcher = LLMatcher(byte_level.tokenizer, source_of(form), log_level=0)
        tokens = byte_level.tokenizer.tokenize_str(text)
        count = matcher.validate_tokens(tokens)
        is_whole = count == len(tokens) and (not tokens or matcher.consume_tokens(tokens))
        theirs = is_whole and matcher.is_accepting()
        state = 0
        for byte in text.encode():
            state = int(automaton.transitions[state, byte]) if state >= 0 else -1
        ours = state >= 0 and bool(automaton.final[state])
        assert ours == theirs, text
        num_accepted += ours
    assert num_accepted


def source_of(form: Form) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    grammar = grammar_of(form)
    if grammar.is_gbnf:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text))
    return grammar.text


@pytest.mark.parametrize(
    ("expression", "inner"),
    [
        ("^a|b$", "a|b"),
        (r"a\$", r"a\$"),
        (r"a\\$", r"a\\"),
        ("[$^]", "[$^]"),
        ("$", ""),
        ("a", "a"),
    ],
)
def test_anchors_at_the_ends_of_a_regex_change_nothing(expression: str, inner: str) -> None:
    assert expression_of(Form("regex", expression)) == inner


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (Form("grammar", 'start: "a"'), "Lark"),
        (Form("json_schema", True), "any JSON"),
        (Form("json_schema", {"type": "object"}), "any object"),
        (Form("json_schema", {"$ref": "#"}), "#: $ref # is recursive"),
        (Form("regex", "a|^b|c"), "anchors"),
        (Form("regex", "a$|b"), "anchors"),
        (Form("regex", r"a\zb"), "anchors"),
        (Form("calls", {"f": {"type": "array"}}), "f: #: an array"),
        (Form("choice", ["\ud800"]), "surrogate"),
    ],
    ids=str,
)
def test_other_forms_have_no_tables(form: Form, reason: str) -> None:
    with pytest.raises((NotRegularError, InvalidGrammarError)) as caught:
        expression_of(form)
    if isinstance(caught.value, NotRegularError):
        assert reason in str(caught.value)
    else:
        assert "look" in str(caught.value)


@pytest.mark.parametrize(
    "form",
    [
        Form("choice", []),
        Form("choice", ["a", ""]),
        Form("json_schema", "{"),
        Form("json_schema", {"$ref": 5}),
        Form("json_schema", '{"$ref": "a.json#/b"}'),
        Form("calls", {"f": {"type": "null"}, "g": {"type": "thing"}}),
        Form("grammar", 'root ::= "'),
        Form("regex", "a)|(b"),
        Form("regex", "["),
    ],
    ids=str,
)
def test_invalid_forms_are_refused(form: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        expression_of(form)
    assert not isinstance(caught.value, NotRegularError)
