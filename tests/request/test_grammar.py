"""Masks of answers; llguidance is the oracle."""

from __future__ import annotations

from pathlib import Path

import llguidance
import llguidance.numpy
import numpy as np
import pytest

from qsample.errors import ArgumentError
from qsample.request.grammar import (
    CompiledGrammar,
    Form,
    GrammarGuide,
    InvalidGrammarError,
    check_form,
    compile_grammar,
    grammar_of,
)
from qsample.runtime import CausalLM, Step, load

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
