"""Answers of grammars by rows with any stop tokens, or with none; by tables and by masks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qsample.request.grammar import Form, compile_grammar, grammar_of
from qsample.request.structured.automaton import Thoughts
from qsample.request.structured.grammars import Wish
from qsample.runtime import CausalLM, Engine, SamplingParams, load

MakeGrammar = Callable[[str], Any]
WORDS = "(yes|no|perhaps)( indeed)?!"
# No stop token, the beginning of texts, the end of texts, a letter, and two of them.
STOPS: tuple[tuple[int, ...], ...] = ((), (0,), (2,), (60,), (2, 2047))


@pytest.fixture(scope="module")
def model(adapted_server_package: Path) -> CausalLM:
    return load(adapted_server_package)


@pytest.fixture(params=["tables", "masks"])
def make(request: pytest.FixtureRequest, model: CausalLM) -> MakeGrammar:
    """expression → the grammar, for the graph or for masks."""
    if request.param == "tables":
        return lambda expression: model.grammar(regex=expression)
    tokenizer = model.grammars.tokenizer
    return lambda expression: compile_grammar(grammar_of(Form("regex", expression)), tokenizer)


def answers(model: CausalLM, grammar: Any, **options: Any) -> list[tuple[str, list[int], str]]:
    """(text without its stop token, tokens, finish reason) of some answers."""
    stops = options.get("eos_token_id", ())
    assert model.tokenizer is not None
    results = []
    for seed in range(3):
        given: dict[str, Any] = {"temperature": 3.0, "seed": seed, "max_new_tokens": 30}
        output = model.generate(["And", "The"], grammar=grammar, **{**given, **options})
        assert output.texts is not None
        for tokens, reason, text in zip(
            output.token_ids, output.finish_reasons, output.texts, strict=True
        ):
            ids = tokens[:-1] if tokens and tokens[-1] in stops else tokens
            whole = model.tokenizer.decode(ids)
            if "stop_strings" not in options:
                assert text == whole
            results.append((whole, tokens, reason))
    return results


@pytest.mark.parametrize("flush_every", [1, 4])
@pytest.mark.parametrize("stops", STOPS)
def test_an_answer_ends_where_its_form_does(
    model: CausalLM, make: MakeGrammar, stops: tuple[int, ...], flush_every: int
) -> None:
    grammar = make(WORDS)
    options: dict[str, Any] = {"eos_token_id": stops, "flush_every": flush_every}
    for text, tokens, reason in answers(model, grammar, **options):
        assert re.fullmatch(WORDS, text)
        assert reason == "stop"
        assert [token for token in tokens if token in stops] == tokens[-1:] * bool(stops)


def test_an_answer_that_may_go_on_ends_at_the_limit(model: CausalLM, make: MakeGrammar) -> None:
    for text, tokens, reason in answers(model, make("a+"), eos_token_id=(), max_new_tokens=7):
        assert re.fullmatch("a+", text)
        assert (len(tokens), reason) == (7, "length")


@pytest.mark.parametrize("stops", [(), (2,)])
def test_biases_masks_and_stop_strings_go_with_it(
    model: CausalLM, make: MakeGrammar, stops: tuple[int, ...]
) -> None:
    assert model.tokenizer is not None
    (yes,) = model.tokenizer.encode("y", add_special_tokens=False)
    biased = {"eos_token_id": stops, "logit_bias": {2: 50.0, 0: 50.0, yes: 100.0}}
    for text, _, reason in answers(model, make(WORDS), **biased):
        assert re.fullmatch(WORDS, text)
        assert text.startswith("y")
        assert reason == "stop"
    for text, _, reason in answers(model, make("a+"), eos_token_id=stops, stop_strings="aaaaa"):
        assert len(text) >= 5 or stops
        assert reason == "stop"


def test_rows_of_a_batch_have_their_own_stop_tokens(model: CausalLM, make: MakeGrammar) -> None:
    params = [
        SamplingParams(temperature=2.0, max_new_tokens=20, seed=seed, eos_token_id=stops)
        for seed, stops in enumerate(STOPS)
    ]
    grammars = [make(WORDS) for _ in STOPS]
    grammars[2] = None
    prompts = ["And"] * len(STOPS)
    output = model.generate(prompts, params, grammar=grammars)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt, params[row], grammar=grammars[row])
        assert alone.token_ids[0] == output.token_ids[row]
        assert alone.finish_reasons[0] == output.finish_reasons[row]


def test_requests_of_an_engine(model: CausalLM, make: MakeGrammar) -> None:
    """One ends with its form, and the next one gets its slot."""
    with Engine(model, slots=1) as engine:
        requests = [
            engine.add_request(
                "And", grammar=make(WORDS), eos_token_id=None, temperature=2.0, seed=seed
            )
            for seed in range(3)
        ]
        for seed, request in enumerate(requests):
            output = request.result(timeout=60)
            assert output.finish_reason == "stop"
            assert re.fullmatch(WORDS, output.text or "")
            alone = model.generate(
                "And", grammar=make(WORDS), eos_token_id=None, temperature=2.0, seed=seed
            )
            assert alone.token_ids[0] == output.token_ids


# Tables know the limit.


def test_answers_fit_every_limit(model: CausalLM) -> None:
    grammar = model.grammar(regex="(yes|no)(, (yes|no))*")
    shortest = grammar.without_stop.shortest
    assert shortest == grammar.shortest - 1
    for limit in range(shortest, shortest + 8):
        for text, tokens, reason in answers(model, grammar, eos_token_id=(), max_new_tokens=limit):
            assert re.fullmatch("(yes|no)(, (yes|no))*", text)
            assert len(tokens) <= limit
            # It ends before the limit only if no further word fits.
            assert reason in ("stop", "length")
            assert reason == "stop" or len(tokens) == limit
    with pytest.raises(ValueError, match=rf"the grammar has {shortest}; allow at least {shortest}"):
        model.generate("And", grammar=grammar, eos_token_id=(), max_new_tokens=shortest - 1)


def test_an_answer_as_long_as_its_limit_has_stopped(model: CausalLM, make: MakeGrammar) -> None:
    for text, tokens, reason in answers(model, make("a{5}"), eos_token_id=(), max_new_tokens=5):
        assert (text, reason) == ("aaaaa", "stop")
        assert len(tokens) <= 5


def test_thoughts_before_an_answer_without_a_stop_token(model: CausalLM) -> None:
    marks = Thoughts("<", ">", is_open=True)
    grammar = model.grammars.tables(Wish(Form("regex", WORDS), marks))
    for budget in (0, 3):
        for text, _, reason in answers(
            model, grammar, eos_token_id=(), thinking_token_budget=budget, max_new_tokens=60
        ):
            assert re.fullmatch(WORDS, text.split(">", 1)[1].lstrip("\n"))
            assert reason == "stop"


@pytest.mark.ci
def test_guesses_change_nothing(guessing_package: Path) -> None:
    """The end comes within a step of several tokens."""
    model = load(guessing_package)
    accepted = 0
    for expression in ("(yes|no), he said unto them", WORDS, "a{9}"):
        grammar = model.grammar(regex=expression)
        for seed in range(3):
            options: dict[str, Any] = {"grammar": grammar, "eos_token_id": (), "seed": seed}
            plain = model.generate("And", temperature=2.0, max_new_tokens=40, **options)
            guessed = model.generate(
                "And", temperature=2.0, max_new_tokens=40, prompt_lookup_num_tokens=7, **options
            )
            assert guessed.token_ids == plain.token_ids
            assert guessed.finish_reasons == plain.finish_reasons == ["stop"]
            assert re.fullmatch(expression, guessed.texts[0])  # type: ignore[index]
            accepted += guessed.timing.drafts.num_accepted_tokens
    assert accepted > 10


def test_logits_that_are_not_numbers_are_no_end(model: CausalLM, make: MakeGrammar) -> None:
    """The row is invalid, although its answer is complete: more might follow."""
    output = model.generate(
        "And",
        grammar=make("(a|the)+"),
        eos_token_id=(),
        logit_bias={token: float("-inf") for token in range(2048)},
        seed=1,
    )
    assert output.finish_reasons == ["invalid"]
    assert output.token_ids == [[]]
