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
    assert model.tokenizer is not None
    size = model.interface.vocab_size
    ends = list(model.package.manifest.token_ids.eos)
    tokenizer = llguidance.LLTokenizer(model.tokenizer.to_json(), n_vocab=size, eos_token=ends)
    return compile_grammar(grammar_of(form), tokenizer, size)


def step(token: int) -> Step:
    return Step(np.array([token]), np.array([True]), np.array([0], dtype=np.int32), {})


def first_allowed(mask: np.ndarray) -> int:
    return int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_masks_are_those_of_llguidance(bundled_model: CausalLM, count: int) -> None:
    grammars = [compiled(bundled_model, form) for form in FORMS]
    guides = [GrammarGuide(grammars[row % 3]) for row in range(count)]
    masks = [np.zeros_like(guide._compiled.mask) for guide in guides]
    alone = [guide._compiled.matcher.deep_copy() for guide in guides]
    wanted = np.zeros_like(masks[0])
    for guide, mask in zip(guides, masks, strict=True):
        guide(None, mask)
    for number in range(4):
        for mask, matcher in zip(masks, alone, strict=True):
            llguidance.numpy.fill_next_token_bitmask(matcher, wanted, 0)
            np.testing.assert_array_equal(mask, wanted, err_msg=str(number))
        tokens = [first_allowed(mask) for mask in masks]
        if any(token in bundled_model.package.manifest.token_ids.eos for token in tokens):
            break
        for guide, token, mask in zip(guides, tokens, masks, strict=True):
            guide(step(token), mask)
        for matcher, token in zip(alone, tokens, strict=True):
            assert matcher.consume_token(token)


def test_a_token_that_does_not_fit_is_an_error(bundled_model: CausalLM) -> None:
    guide = GrammarGuide(compiled(bundled_model, FORMS[2]))
    mask = np.zeros_like(guide._compiled.mask)
    guide(None, mask)
    with pytest.raises(InvalidGrammarError, match="no answer can follow that form"):
        guide(step(first_allowed(~mask)), mask)


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
