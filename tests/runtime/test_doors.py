"""One scenario through both doors: `generate` for a batch, and an engine for requests."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import CausalLM, Engine, SamplingParams
from tests.helpers import fake_reference
from tests.helpers.fake_package import POISON, VOCAB, ascii_piece, byte_tokenizer, compilation
from tests.helpers.requests import FREE, GREEDY, PROMPTS, RANDOM, expected, mixed

pytestmark = pytest.mark.parametrize("door", ["generate", "engine"])


@dataclass
class Answer:
    tokens: list[int]
    reason: str
    text: str | None
    seed: int
    outputs: dict[str, Any]


def ask(
    door: str, model: CausalLM, prompts: list[Any], params: Any, seed: int, **options: Any
) -> list[Answer]:
    """The answers to the prompts; row i has the seed `seed` + i. options: of both doors, flush_every of the engine."""
    if door == "generate":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "rows .* ended early: the model gave NaN")
            output = model.generate(prompts, params, seed=seed, **options)
        texts = output.texts or [None] * len(prompts)
        rows = zip(output.token_ids, output.finish_reasons, texts, output.seeds, strict=True)
        names = [
            name
            for name in ("logprobs", "top_logprobs", "top_logprob_ids", "probs")
            if output[name] is not None
        ]
        return [
            Answer(*row, {name: output[name][index, : len(row[0])] for name in names})
            for index, row in enumerate(rows)
        ]
    own = params if isinstance(params, list) else [params] * len(prompts)
    run = {
        name: options.pop(name) for name in ("flush_every", "double_buffering") if name in options
    }
    with Engine(model, slots=2, **run) as engine:
        requests = [
            engine.add_request(prompt, one, seed=seed + row, **options)
            for row, (prompt, one) in enumerate(zip(prompts, own, strict=True))
        ]
        found = [request.result(60) for request in requests]
    return [
        Answer(one.token_ids, one.finish_reason, one.text, one.seed, {**one.outputs})
        for one in found
    ]


@pytest.mark.parametrize("sampler", [True, False])
@pytest.mark.parametrize("params", [GREEDY, RANDOM, mixed()], ids=["greedy", "random", "mixed"])
def test_tokens_are_those_of_the_reference(
    params: Any, sampler: bool, door: str, fake_model: Callable[..., CausalLM]
) -> None:
    answers = ask(door, fake_model(sampler=sampler), PROMPTS, params, 40)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        own = params[row] if isinstance(params, list) else params
        assert (answer.tokens, answer.reason) == expected(prompt, own, 40 + row)
        assert answer.seed == 40 + row


def test_a_row_with_invalid_logits_ends_alone(
    door: str, fake_model: Callable[..., CausalLM]
) -> None:
    for sampler in (True, False):
        answers = ask(
            door, fake_model(sampler=sampler), [PROMPTS[0], [5, POISON, 6], [5, 9]], GREEDY, 1
        )
        assert (answers[1].tokens, answers[1].reason) == ([], "invalid")
        for row, prompt in ((0, PROMPTS[0]), (2, [5, 9])):
            assert (answers[row].tokens, answers[row].reason) == expected(prompt, GREEDY, 1 + row)


def test_a_compiled_package(door: str, fake_model: Callable[..., CausalLM]) -> None:
    """More prompts than its rows take turns, and a row ends where the context is full."""
    model = fake_model(compilation=compilation(batch_size=2, ctx_len=48))
    wanted = fake_model().generate(PROMPTS, mixed(), seed=1)
    answers = ask(door, model, PROMPTS, mixed(), 1)
    assert [answer.tokens for answer in answers] == wanted.token_ids
    assert [answer.reason for answer in answers] == wanted.finish_reasons
    (full,) = ask(door, model, [[5] * 40], SamplingParams(temperature=0, eos_token_id=()), 1)
    assert (len(full.tokens), full.reason) == (8, "length")


def test_stop_strings(door: str, model: CausalLM) -> None:
    free = ask(door, model, ["hello", "other"], FREE, 3)
    assert free[0].text is not None
    assert free[1].text is not None
    stop = ascii_piece(free[0].text)
    count = next(
        n for n in range(41) if stop in Tokenizer(byte_tokenizer()).decode(free[0].tokens[:n])
    )
    for flush_every, double_buffering in itertools.product((1, 4, 16), (True, False)):
        options = {
            "flush_every": flush_every,
            "double_buffering": double_buffering,
            "stop_strings": [stop, "zzzz"],
        }
        answers = ask(door, model, ["hello", "other"], FREE, 3, **options)
        assert [one.text for one in answers] == [
            free[0].text.split(stop)[0],
            free[1].text.split(stop)[0],
        ]
        assert (answers[0].tokens, answers[0].reason) == (free[0].tokens[:count], "stop")


def test_a_package_without_a_tokenizer(door: str, fake_model: Callable[..., CausalLM]) -> None:
    (answer,) = ask(door, fake_model(tokenizer=False), [[5, 6]], FREE, 1)
    assert (answer.tokens, answer.reason) == expected([5, 6], FREE, 1)
    assert answer.text is None


def test_optional_outputs(door: str, fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(logprobs=True, top_logprobs=3, probs=True)
    short = SamplingParams(temperature=0.7, max_new_tokens=2)
    for prompt, answer in zip(
        PROMPTS, ask(door, model, PROMPTS[:2], [short, RANDOM], 4), strict=False
    ):
        count = len(answer.tokens)
        assert (
            answer.outputs["top_logprobs"].shape
            == answer.outputs["top_logprob_ids"].shape
            == (count, 3)
        )
        assert answer.outputs["probs"].shape == (count, VOCAB)
        for step in range(count):
            raw = fake_reference.logits([*prompt, *answer.tokens[:step]])
            log_probabilities = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
            of_token = log_probabilities[answer.tokens[step]]
            assert np.ravel(answer.outputs["logprobs"][step]) == pytest.approx(of_token, abs=1e-4)
            assert answer.outputs["top_logprob_ids"][step].tolist() == np.argsort(-raw)[:3].tolist()
            assert answer.outputs["probs"][step].sum() == pytest.approx(1, abs=1e-4)
