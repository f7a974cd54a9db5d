"""GBNF: expressions beside llguidance's own translation, and errors that name the line."""

from __future__ import annotations

import itertools
import re

import pytest
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from qsample.errors import ArgumentError
from qsample.request.structured.automaton import automaton_of
from qsample.request.structured.gbnf import expression_of_gbnf
from qsample.request.structured.not_regular import MAX_NESTING, NotRegularError
from tests.request.structured.conftest import Kind

GRAMMARS = {
    'root ::= "a" | "b" "c"?': "a|bc?",
    'root ::= item ("," item)*\nitem ::= [ab]{1,2}': "[ab]{1,2}(,[ab]{1,2})*",
    'root ::= "a" ws "b"\nws ::= ([ \\t] ws)?': "a[ \\t]*b",
    'root ::= list\nlist ::= item "," list | item # a list\nitem ::= [a-c]': "([a-c],)*[a-c]",
    'root ::= "x" root | "y" root | "z" | ""': "[xy]*z?",
    'root ::= ("a" root | "b")?': "a*b?",
    'root ::= ((("a" | "b") (root))? | "c")': "[ab]*c?",
    "root ::= [^a\\n]+": "[^a\\n]+",
    'root ::= ( # in a group\n  "a"\n  | "b"\n)+\n\n# the end\n': "[ab]+",
    'root ::= "\\"\\\\\\n\\x41\\u00e9\\U0001f60a"': '"\\\\\\\\\\nAé😊'.replace("\\\\\\\\", "\\\\"),
    "root ::= [\\]\\-a-]{2,}": "[\\]\\\\a-]{2,}".replace("\\\\", ""),
    'root ::=\n "a"{2} "b"{0,1} | \n"c"': "aab?|c",
    'root ::= a-b\na-b ::= "1"\n': "1",
    "root ::= . [.]": "(?s:.)\\.",
    "root ::= [a-] [a-c-]": "[a-][a-c-]",
    'root ::= "a"*?': "a*",
    '\n# how it begins\n\nroot ::= "a"': "a",
    'root ::= "(*" "[x]"': r"\(\*\[x\]",
}


@pytest.mark.parametrize(("grammar", "expression"), GRAMMARS.items())
def test_a_grammar_is_its_expression(grammar: str, expression: str) -> None:
    if "\\-" in grammar:
        # llama.cpp knows no escape of a hyphen.
        with pytest.raises(ArgumentError, match="escape"):
            expression_of_gbnf(grammar)
        return
    automaton = automaton_of(expression_of_gbnf(grammar))
    pattern = re.compile(expression)
    letters = sorted({*"ab,", *re.sub(r"[^a-z0-9 \n]", "", expression)[:5]})
    texts = [
        "".join(parts) for size in range(5) for parts in itertools.product(letters, repeat=size)
    ]
    texts += ['"\\\nAé😊', "(*[x]", "é.", "\n."]
    for text in texts:
        state = 0
        for byte in text.encode():
            state = int(automaton.transitions[state, byte]) if state >= 0 else -1
        is_matched = state >= 0 and bool(automaton.final[state])
        assert is_matched == bool(pattern.fullmatch(text)), text


@pytest.mark.parametrize("grammar", list(GRAMMARS)[:6])
def test_texts_are_those_of_llguidance(grammar: str, byte_level: Kind) -> None:
    theirs = LLMatcher.grammar_from_lark(gbnf_to_lark(grammar))
    ours = LLMatcher.grammar_from_regex(expression_of_gbnf(grammar))
    for text in ["a", "b", "bc", "a,b", "a \tb", "xyz", "aab", "c", "", "a,b,c"]:
        tokens = byte_level.tokenizer.tokenize_str(text)
        results = []
        for source in (theirs, ours):
            matcher = LLMatcher(byte_level.tokenizer, source, log_level=0)
            count = matcher.validate_tokens(tokens)
            is_whole = count == len(tokens) and (not tokens or matcher.consume_tokens(tokens))
            results.append(is_whole and matcher.is_accepting())
        assert results[0] == results[1], text


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "(" root ")" | ""', "calls itself"),
        ('root ::= root "a" | "b"', "calls itself"),
        ('root ::= a\na ::= b "x"\nb ::= a | "y"', "line 3: the rule a calls itself"),
        ('root ::= ("a" root)*', "inside a repetition"),
        ("root ::= <think>", "line 1: a token of the model"),
        ('root ::= "a"{5000}', "repeated"),
        ("root ::= " + "(" * 60 + '"a"' + ")" * 60, "nested"),
        (
            "\n".join(f'r{n} ::= r{n + 1} "a"' for n in range(300)) + '\nr300 ::= "b"\nroot ::= r0',
            "nested too deep",
        ),
        (
            "\n".join(f'r{n} ::= (r{n + 1} | "c") "a"' for n in range(300))
            + '\nr300 ::= "b"\nroot ::= r0',
            "nested too deep",
        ),
        ('root ::= "a"' + "?" * (MAX_NESTING + 1), "line 1: too many repetitions"),
        (
            "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(30))
            + '\nr30 ::= "ab"\nroot ::= r0',
            "characters",
        ),
    ],
    ids=range(11),
)
def test_other_grammars_are_not_regular(grammar: str, reason: str) -> None:
    with pytest.raises(NotRegularError, match=reason):
        expression_of_gbnf(grammar)


def test_as_many_repetitions_as_may_be() -> None:
    automaton = automaton_of(expression_of_gbnf('root ::= "a"' + "?" * MAX_NESTING))
    assert automaton.final.tolist() == [True, True]


@pytest.mark.parametrize(
    ("grammar", "line"),
    [
        ('root ::= "a\n', 1),
        ('root ::= "a"\nb ::= [a', 2),
        ('root ::= "a"\n\n"b"', 3),
        ("root := x", 1),
        ('root ::= ("a"', 1),
        ('root ::= "a")', 1),
        ("root ::= []", 1),
        ("root ::= [b-a]", 1),
        ('root ::= "\\q"', 1),
        ('root ::= "\\ud800"', 1),
        ('root ::= "a"{2,1}', 1),
        ("root ::= a\n# comment\na ::= b", 3),
        ('a ::= "x"', None),
        ("", None),
    ],
)
def test_errors_name_the_line(grammar: str, line: int | None) -> None:
    message = "it has no rule `root`" if line is None else f"line {line}: "
    with pytest.raises(ArgumentError, match=message) as caught:
        expression_of_gbnf(grammar)
    assert not isinstance(caught.value, NotRegularError)


@pytest.mark.parametrize("called", ["r{}", '"b" | r{} | "c"', "groups"])
def test_the_root_and_47_more_levels_are_the_most(called: str) -> None:
    def nested(levels: int) -> str:
        if called == "groups":
            return "root ::= " + "(" * levels + '"a"' + ")" * levels
        rules = [f"r{number} ::= {called.format(number + 1)}" for number in range(levels)]
        return "\n".join([*rules, f'r{levels} ::= "a"', "root ::= r1"])

    expression_of_gbnf(nested(47))
    with pytest.raises(NotRegularError, match="nested too deep"):
        expression_of_gbnf(nested(48))


def test_characters_and_lengths_at_their_limits() -> None:
    for digits in ("\\ud7ff", "\\ue000", "\\U0010ffff"):
        character = chr(int(digits[2:], 16))
        assert expression_of_gbnf(f'root ::= "{digits}"') == f"(?:{character})"
    for digits in ("\\ud800", "\\udfff", "\\U00110000"):
        with pytest.raises(ArgumentError, match="line 1: an escape is not a character"):
            expression_of_gbnf(f"root ::= [{digits}]")
    longest = 'root ::= "a" #'.ljust(1 << 20, "x")
    assert expression_of_gbnf(longest) == "(?:a)"
    with pytest.raises(NotRegularError, match="a grammar of more than 1048576 characters"):
        expression_of_gbnf(longest + "x")
    with pytest.raises(ArgumentError, match="line 2: there is no rule other"):
        expression_of_gbnf('root ::= "a" |\nother')
    assert expression_of_gbnf('root ::= "a"\nroot ::= "b"') == "(?:b)", "the last counts"
