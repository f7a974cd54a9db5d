"""Masks of answers; llguidance is the oracle."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
import pytest

from qsample.errors import ArgumentError
from qsample.request.grammar import (
    CompiledGrammar,
    Form,
    Grammar,
    GrammarGuide,
    InvalidGrammarError,
    check_form,
    compile_grammar,
    grammar_of,
)
from qsample.request.schemas.normal_form import InvalidSchemaError
from qsample.runtime import CausalLM, Step, load
from tests.helpers.random_schemas import (
    REFUSED,
    byte_tokenizer,
    is_valid,
    random_client_schema,
    random_masked_text,
)

FORMS = [
    Form("choice", ["yes", "no"]),
    Form("json_schema", {"type": "integer"}),
    Form("regex", "[a-z]{3,9}"),
]


@pytest.fixture(scope="module")
def bundled_model(bundled_package: Path) -> CausalLM:
    return load(bundled_package, intra_op_num_threads=1)


def compiled(model: CausalLM, form: Form) -> CompiledGrammar:
    return compile_grammar(grammar_of(form), model.grammars.tokenizer)


def matcher_of(model: CausalLM, form: Form) -> llguidance.LLMatcher:
    """llguidance's own matcher, with the model's stop tokens."""
    assert model.tokenizer is not None
    ends = list(model.package.manifest.token_ids.eos)
    size = model.interface.vocab_size
    tokenizer = llguidance.LLTokenizer(model.tokenizer.to_json(), n_vocab=size, eos_token=ends)
    return llguidance.LLMatcher(tokenizer, grammar_of(form).text)


def step(tokens: list[int]) -> Step:
    count = len(tokens)
    return Step(np.array(tokens), np.ones(count, bool), np.zeros(count, np.int32), {})


def first_allowed(mask: np.ndarray) -> int:
    return int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_masks_are_those_of_llguidance(bundled_model: CausalLM, count: int) -> None:
    forms = [FORMS[row % 3] for row in range(count)]
    ends = bundled_model.package.manifest.token_ids.eos
    guide = GrammarGuide([compiled(bundled_model, form) for form in forms], [ends] * count)
    alone = [matcher_of(bundled_model, form) for form in forms]
    masks = np.zeros((count, (bundled_model.interface.vocab_size + 31) // 32), np.int32)
    wanted = np.zeros_like(masks[:1])
    guide(None, masks)
    for number in range(4):
        for mask, matcher in zip(masks, alone, strict=True):
            llguidance.numpy.fill_next_token_bitmask(matcher, wanted, 0)
            np.testing.assert_array_equal(mask, wanted[0], err_msg=str(number))
        tokens = [first_allowed(mask) for mask in masks]
        if any(token in ends for token in tokens):
            break
        guide(step(tokens), masks)
        for matcher, token in zip(alone, tokens, strict=True):
            assert matcher.consume_token(token)


@pytest.mark.parametrize("stop_ids", [[], [0], [2], [5, 9], [31, 32, 63]])
def test_stop_tokens_are_those_of_the_row(bundled_model: CausalLM, stop_ids: list[int]) -> None:
    """They are allowed where an answer may end, and nowhere else, whatever their texts."""
    guide = GrammarGuide([None, compiled(bundled_model, FORMS[2])], [[], stop_ids])
    masks = np.full((2, (bundled_model.interface.vocab_size + 31) // 32), -1, np.int32)
    guide(None, masks)
    for number in range(6):
        assert (masks[0] == -1).all()
        allowed = np.unpackbits(masks[1].view(np.uint8), bitorder="little")
        assert all(allowed[token] == (number >= 3) for token in stop_ids)
        letters = [int(token) for token in np.flatnonzero(allowed) if token not in stop_ids]
        texts = [bundled_model.tokenizer.decode([token]) for token in letters]  # type: ignore[union-attr]
        assert all(text.isalpha() and text.islower() for text in texts)
        token = next(token for token, text in zip(letters, texts, strict=True) if len(text) == 1)
        guide(step([0, token]), masks)


def test_an_answer_is_over_where_nothing_may_follow(bundled_model: CausalLM) -> None:
    tokenizer = bundled_model.tokenizer
    assert tokenizer is not None
    cases = {
        "ab": {"": False, "a": False, "ab": True, "b": False},
        "a+": {"a": False, "aa": False},
        "(ab)?": {"": False, "ab": True},
    }
    for expression, texts in cases.items():
        grammar = compiled(bundled_model, Form("regex", expression))
        for text, is_over in texts.items():
            tokens = tokenizer.encode(text, add_special_tokens=False)
            assert grammar.is_over(tokens) == is_over, (expression, text)


def test_a_token_that_does_not_fit_is_an_error(bundled_model: CausalLM) -> None:
    grammar = compiled(bundled_model, FORMS[2])
    guide = GrammarGuide([grammar], [[]])
    mask = np.zeros_like(grammar.mask)
    guide(None, mask)
    with pytest.raises(InvalidGrammarError, match="no answer can follow that form"):
        guide(step([first_allowed(~mask)]), mask)


@pytest.mark.parametrize("form", [*FORMS, Form("grammar", 'root ::= "a"')])
def test_valid_forms(form: Form) -> None:
    check_form(form)


@pytest.mark.parametrize(
    "form",
    [
        Form("regex", "("),
        Form("json_schema", "{"),
        Form("json_schema", "[]"),
        Form("choice", [""]),
        Form("grammar", "start: missing"),
        Form("grammar", 'root ::= "'),
    ],
)
def test_invalid_forms(form: Form) -> None:
    with pytest.raises(ArgumentError):
        check_form(form)


# JSON schemas.

# Words that only llguidance knows, and advice that does not exist here.
FOREIGN = re.compile(
    "lenient|guidance|coerce|Unimplemented|Unsatisfiable|Regex|anyOf is|serde", re.I
)


def check_client_schemas(start: int, count: int) -> int:
    """Check texts of random schemas of all keywords; returns the number of schemas that are kept."""
    num_kept = 0
    for seed in range(start, start + count):
        rng = np.random.default_rng(seed)
        schema = random_client_schema(rng)
        try:
            texts = [random_masked_text(grammar_of(Form("json_schema", schema)), rng) for _ in "ab"]
        except ArgumentError:
            continue
        for text in texts:
            assert text is None or is_valid(json.loads(text), schema), (schema, text)
        num_kept += any(texts)
    return num_kept


@pytest.mark.parametrize("start", range(0, 100, 25))
def test_masks_let_valid_documents_through(start: int) -> None:
    assert check_client_schemas(start, 25) > 3


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 4000, 500))
def test_masks_let_more_valid_documents_through(start: int) -> None:
    assert check_client_schemas(start, 500) > 100


def follows(form: Form, text: str) -> bool:
    """Whether masks let a text through."""
    bytes_alone = byte_tokenizer()
    matcher = compile_grammar(grammar_of(form), bytes_alone).matcher
    tokens = bytes_alone.tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


AN_INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}}
OTHERS = AN_INTEGER | {"additionalProperties": {"type": "string"}}
TREE = {"type": "object", "properties": {"left": {"oneOf": [{"$ref": "#"}, {"type": "null"}]}}}


@pytest.mark.parametrize(
    ("schema", "text", "is_kept"),
    [
        (True, '[{"a": null}]', True),
        ({"format": "path"}, '"a/b"', True),
        ({"format": "int64", "type": "integer"}, "5", True),
        ({"format": 5}, "5", True),
        ({"format": "date"}, '"2024-02-29"', True),
        ({"format": "date"}, '"2023-02-29"', False),
        ({"format": "date", "pattern": "^2024"}, '"2024-02-29"', True),
        ({"format": "date", "pattern": "^2024"}, '"2023-02-28"', False),
        ({"items": {"$ref": "#/$defs/d"}, "$defs": {"d": {"format": "date"}}}, '["x"]', False),
        ({"format": "ipv6"}, '"::1"', True),
        ({"format": "ipv6"}, '"a"', False),
        (OTHERS, '{"a": 1, "b": "x"}', True),
        # Escaped, the name is still a.
        (OTHERS, '{"\\u0061": "x"}', False),
        ({"x-guidance": {"lenient": True}, **AN_INTEGER}, '{"a": "x"}', False),
        ({"x-guidance": {"whitespace_flexible": True}, **AN_INTEGER}, '{"a":1}', False),
        ({"properties": {"x-guidance": {"type": "null"}}, "type": "object"}, '{"x-guidance": null}', True),
        ({"properties": {"x-guidance": {"type": "null"}}, "type": "object"}, '{"x-guidance": 1}', False),
        (TREE, '{"left": {"left": null}}', True),
        (TREE, '{"left": 5}', False),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_masks_of_schemas(schema: Any, text: str, is_kept: bool) -> None:
    assert follows(Form("json_schema", schema), text) == is_kept
    call = Form("calls", {"g": {"type": "null"}, "f": {} if schema is True else schema})
    assert follows(call, f'[{{"name": "f", "parameters": {text}}}]') == is_kept


MASKS_REFUSE: list[tuple[Any, str]] = [
    ({"items": {"type": "string", "pattern": "(?=a)a"}}, "#/items/pattern"),
    ({"anyOf": [{"type": "null"}, {"pattern": r"(a)\1"}]}, "#/anyOf/1/pattern"),
    ({"patternProperties": {"/(": {}}}, "#/patternProperties/~1("),
    ({"patternProperties": {"^a": {}, "b": {}}}, "#/patternProperties"),
    ({"properties": {"a": {"const": 2**53 + 1}}}, "#/properties/a/const"),
    ({"$defs": {"d": {"enum": [[{"a": 10**400}]]}}, "items": {"$ref": "#/$defs/d"}}, "#/$defs/d/enum"),
    ({"minimum": 2**60}, "#/minimum"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "pointer"), [*REFUSED, *MASKS_REFUSE], ids=lambda value: repr(value)[:60]
)
def test_schemas_that_masks_refuse(schema: Any, pointer: str) -> None:
    for form in (Form("json_schema", schema), Form("calls", {"g": {}, "f": schema})):
        if schema is None and form.kind == "json_schema":
            continue
        with pytest.raises(InvalidSchemaError) as caught:
            check_form(form)
        assert caught.value.pointer == pointer
        assert not FOREIGN.search(str(caught.value))
        assert ("of the arguments of f: " in str(caught.value)) == (form.kind == "calls")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "no document is valid under the schema"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no document is valid"),
        ({"type": "string", "format": "date", "maxLength": 2}, "no document is valid"),
        ({"$ref": "#", "type": "null"}, "leads back to itself"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_other_problems_of_schemas(schema: Any, words: str) -> None:
    with pytest.raises(InvalidGrammarError) as caught:
        check_form(Form("json_schema", schema))
    assert words in str(caught.value)
    assert not FOREIGN.search(str(caught.value))


@pytest.mark.parametrize("problem", ["grammar too big (limit: 500000)", "lenient", ""])
def test_any_other_problem_of_a_schema_is_its_size(problem: str) -> None:
    error = Grammar("", schemas={"": {"type": "null"}}).refusal(problem)
    assert str(error).endswith("the schema is too large to compile; give a smaller one")
    assert problem in str(Grammar("").refusal(problem))


def test_an_answer_gets_no_word_of_llguidance(bundled_model: CausalLM) -> None:
    """Not even if it cannot go on."""
    grammar = compiled(bundled_model, Form("json_schema", {"type": "object"}))
    guide = GrammarGuide([grammar], [()])
    mask = np.zeros_like(grammar.mask)
    guide(None, mask)
    with pytest.raises(InvalidGrammarError) as caught:
        guide(step([first_allowed(~mask)]), mask)
    assert "the schema is too large" in str(caught.value)
