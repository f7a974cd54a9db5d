"""Masks of answers, and grammars: compiled once, and in another process first; llguidance is the oracle."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import llguidance.gbnf_to_lark
import llguidance.numpy
import numpy as np
import pytest

from qsample.errors import ArgumentError
from qsample.request.grammar import (
    Form,
    Grammar,
    GrammarGuide,
    Grammars,
    InvalidGrammarError,
    TokenizerArguments,
    Trial,
    grammar_of,
)
from qsample.runtime import CausalLM, Step, load
from tests.helpers.grammars import SLOW, chained


@pytest.fixture(scope="module")
def bundled_model(bundled_package: Path) -> CausalLM:
    return load(bundled_package, intra_op_num_threads=1)


@pytest.fixture(scope="module")
def trial(bundled_model: CausalLM) -> Iterator[Trial]:
    tokenizer = bundled_model.tokenizer
    assert tokenizer is not None
    arguments = TokenizerArguments(
        tokenizer=tokenizer.to_json(), n_vocab=bundled_model.interface.vocab_size, eos_token=[2]
    )
    made = Trial(lambda: arguments, max_seconds=600)
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("form", "seconds", "reason"),
    [
        (Form("json_schema", chained(5000)), 600, "too large or nested too deep"),
        (Form("regex", SLOW), 0.5, "takes more than 0.5 seconds"),
    ],
)
def test_a_grammar_beyond_the_limits_ends_alone(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, form: Form, seconds: float, reason: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(trial, "_max_seconds", seconds)
        assert reason in str(trial.refusal(grammar_of(form)))
    assert trial.refusal(grammar_of(Form("regex", "[a-z]+"))) is None


def test_an_invalid_grammar_is_left_to_the_server(trial: Trial) -> None:
    assert trial.refusal(Grammar("start: missing")) is None


@pytest.fixture(scope="module")
def grammars(bundled_model: CausalLM) -> Any:
    """A grammar may take as long as a busy machine needs: none ends by itself."""
    made = Grammars(bundled_model)
    for trial in [made._idle_trials.get() for _ in range(made._idle_trials.qsize())]:
        trial._max_seconds = 600
        made._idle_trials.put(trial)
    yield made
    made.close()


def step(token: int) -> Step:
    return Step(np.array([token]), np.array([True]), np.array([0], dtype=np.int32), {})


def first_allowed(mask: np.ndarray) -> int:
    return int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_masks_are_those_of_llguidance(grammars: Grammars, count: int) -> None:
    made = [
        grammar_of(Form("choice", ["yes", "no"])),
        grammar_of(Form("json_schema", {"type": "integer"})),
        grammar_of(Form("regex", "[a-z]{3,9}")),
    ]

    async def run() -> list[GrammarGuide]:
        return [await grammars.guide(made[row % 3]) for row in range(count)]

    guides = asyncio.run(run())
    words = guides[0]._compiled.mask.shape[1]
    masks = [np.zeros((1, words), dtype=np.int32) for _ in guides]
    alone = [guide._compiled.matcher.deep_copy() for guide in guides]
    wanted = np.zeros((1, words), dtype=np.int32)
    for guide, mask in zip(guides, masks, strict=True):
        guide(None, mask)
    for number in range(4):
        for mask, matcher in zip(masks, alone, strict=True):
            llguidance.numpy.fill_next_token_bitmask(matcher, wanted, 0)
            np.testing.assert_array_equal(mask, wanted, err_msg=str(number))
        tokens = [first_allowed(mask) for mask in masks]
        if any(token in grammars._model.package.manifest.token_ids.eos for token in tokens):
            break
        for guide, token, mask in zip(guides, tokens, masks, strict=True):
            guide(step(token), mask)
        for matcher, token in zip(alone, tokens, strict=True):
            assert matcher.consume_token(token)


def test_a_token_that_does_not_fit_is_an_error(grammars: Grammars) -> None:
    guide = asyncio.run(grammars.guide(grammar_of(Form("regex", "[a-z]{3,9}"))))
    mask = np.zeros_like(guide._compiled.mask)
    guide(None, mask)
    with pytest.raises(InvalidGrammarError, match="no answer can follow that form"):
        guide(step(first_allowed(~mask)), mask)


def test_gbnf_is_translated_elsewhere(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done in Python, and takes seconds where a client sends much."""
    threads, plain = [], llguidance.gbnf_to_lark.gbnf_to_lark

    def translate(text: str) -> str:
        threads.append(threading.get_ident())
        return plain(text)

    monkeypatch.setattr(llguidance.gbnf_to_lark, "gbnf_to_lark", translate)

    async def run() -> None:
        guide = await grammars.guide(grammar_of(Form("grammar", 'root ::= "yes" | "no"')))
        other = await grammars.guide(grammar_of(Form("choice", ["yes", "no"])))
        np.testing.assert_array_equal(guide._compiled.mask, other._compiled.mask)
        with pytest.raises(ArgumentError, match="the grammar is not valid GBNF"):
            await grammars.guide(grammar_of(Form("grammar", 'root ::= "')))

    asyncio.run(run())
    assert len(threads) == 2
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("error", "regex"),
    [(MemoryError, "[0-9]{2}"), (type("PanicException", (BaseException,), {}), "[0-9]{3}")],
)
def test_a_grammar_that_failed_is_tried_again(
    error: type[BaseException], regex: str, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_(self: Grammars, grammar: Grammar) -> Any:
        raise error("for now")

    async def run() -> GrammarGuide:
        with monkeypatch.context() as patched:
            patched.setattr(Grammars, "_compile", compile_)
            asked = [grammars.guide(grammar_of(Form("regex", regex))) for _ in range(2)]
            assert [
                type(told) for told in await asyncio.gather(*asked, return_exceptions=True)
            ] == [error, error]
        return await grammars.guide(grammar_of(Form("regex", regex)))

    assert asyncio.run(run())._compiled.mask.any()


@pytest.mark.parametrize(
    ("kind", "text", "whole"),
    [
        ("calls", '[{"name": "f", "parameters": {"x": 2}}]', True),
        (
            "calls",
            '[{"name": "f", "parameters": {"x": 2}}, {"name": "g.h", "parameters": {}}]',
            True,
        ),
        ("call", '[{"name": "f", "parameters": {"x": 2}}]', True),
        (
            "call",
            '[{"name": "f", "parameters": {"x": 2}}, {"name": "g.h", "parameters": {}}]',
            False,
        ),
        (
            "calls",
            '[{"name": "f", "parameters": {"x": 4}}]',
            False,
        ),  # by the definition that its schema refers to
        (
            "calls",
            '[{"name": "f", "parameters": {"x":2}}]',
            False,
        ),  # blanks as json.dumps writes them
        ("calls", '[{"name": "e", "parameters": {}}]', False),
        ("calls", "[]", False),
    ],
)
def test_calls_follow_the_functions(
    bundled_model: CausalLM, kind: Any, text: str, whole: bool
) -> None:
    one_to_three = {"description": 'a "::=" // \n', "type": "integer", "minimum": 1, "maximum": 3}
    f = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "required": ["x"],
        "$defs": {"a": one_to_three},
    }
    grammar = grammar_of(Form(kind, {"f": f | {"x-guidance": {}}, "g.h": {"type": "object"}}))
    assert bundled_model.tokenizer is not None
    tokenizer = llguidance.LLTokenizer(bundled_model.tokenizer.to_json(), eos_token=[1])
    matcher = llguidance.LLMatcher(tokenizer, grammar.text, log_level=0)
    tokens = tokenizer.tokenize_str(text)
    assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == whole


def test_a_choice_may_look_like_a_grammar(grammars: Grammars) -> None:
    guide = asyncio.run(grammars.guide(grammar_of(Form("choice", ["a ::= b", 'say "x"\n']))))
    assert guide._compiled.mask.any()


def test_a_grammar_is_compiled_once_and_elsewhere(
    bundled_model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars, threads = Grammars(bundled_model), []
    plain = Grammars._compile

    def compile_(self: Grammars, grammar: Grammar) -> Any:
        threads.append(threading.get_ident())
        return plain(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", compile_)

    async def run() -> None:
        asked = [
            asyncio.ensure_future(grammars.guide(grammar_of(Form("regex", "[a-z]+"))))
            for _ in range(20)
        ]
        cancelled = asyncio.ensure_future(grammars.guide(grammar_of(Form("regex", "[a-z]+"))))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert len({id(guide) for guide in await asyncio.gather(*asked)}) == 20
        for _ in range(2):
            with pytest.raises(InvalidGrammarError, match="no answer can follow that form"):
                await grammars.guide(grammar_of(Form("grammar", "start: start start")))
        for number in range(70):
            await grammars.guide(grammar_of(Form("regex", f"a{number}")))

    asyncio.run(run())
    grammars.close()
    assert len(threads) == 1 + 2 + 70
    assert threading.get_ident() not in threads
    assert len(grammars._cache) == 64


def test_a_grammar_ends_with_its_last_client(grammars: Grammars) -> None:
    async def run() -> None:
        await grammars.guide(grammar_of(Form("regex", "[a-y]+")))  # the process has begun
        asked = [
            asyncio.ensure_future(grammars.guide(grammar_of(Form("regex", SLOW)))) for _ in range(2)
        ]
        while not (tried := list(grammars._running_trials.values())) or tried[0]._process is None:
            await asyncio.sleep(0.01)
        process = tried[0]._process
        asked[0].cancel()
        await asyncio.sleep(0.1)
        assert len(grammars._running_trials) == 1, "the other waits"
        asked[1].cancel()
        while grammars._running_trials:
            await asyncio.sleep(0.01)
        assert not grammars._num_waiting
        assert process.wait(60) == -signal.SIGKILL, "by itself it runs out of memory"

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_grammar_that_would_end_the_process_is_refused(grammars: Grammars) -> None:
    """llguidance overflows the stack; the next grammar is compiled as ever."""

    async def run() -> GrammarGuide:
        with pytest.raises(InvalidGrammarError, match="too large or nested too deep"):
            await grammars.guide(grammar_of(Form("json_schema", chained(5000))))
        return await grammars.guide(grammar_of(Form("json_schema", chained(5))))

    assert asyncio.run(run())._compiled.mask.any()
