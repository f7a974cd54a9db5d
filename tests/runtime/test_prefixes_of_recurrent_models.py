"""Recurrent states that were saved: who goes on from them gets what a fresh `generate` gives, whatever else ran."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qsample.contract.arrays import DTYPES
from qsample.ort.buffers import SavedRows
from qsample.runtime import CausalLM, Engine, RequestOutput, SamplingParams, load
from qsample.runtime.decode.prefixes import SavedStates
from tests.helpers.sessions import with_prompt_calls
from tests.helpers.tiny_models import random_model

PIECE = 16
CTX_LEN = 256
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=7, eos_token_id=())
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=7, eos_token_id=())
# Recurrences alone, and beside attention; and convolutions beside attention.
KINDS = [
    "qwen3_5_text",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mamba", "mamba2", "lfm2")),
]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, exported: Callable[..., Path]) -> CausalLM:
    """With short pieces, so that a short prompt has several."""
    opened = load(exported(request.param, logprobs=True), ctx_len=CTX_LEN)
    return CausalLM(opened.package, with_prompt_calls(opened.sessions, piece_size=PIECE), CTX_LEN)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=length)


def check_output(output: RequestOutput, model: CausalLM, prompt: list[int], seed: int) -> None:
    """It is what a batch of its own gives, where nothing is held; as far as it goes.

    The log-probabilities, too: a recurrence may forget so much that hardly a token shows what it started from.
    """
    fresh = model.generate([prompt], SAMPLED, seed=seed)
    count = len(output.token_ids)
    assert output.token_ids == fresh.token_ids[0][:count]
    assert fresh.logprobs is not None
    if count:
        logprobs = output.outputs["logprobs"][:, 0]
        np.testing.assert_allclose(logprobs, fresh.logprobs[0][:count].ravel(), atol=1e-4)


def ask(engine: Engine, model: CausalLM, prompt: list[int], seed: int = 0) -> tuple[list[int], int]:
    """The tokens, which were checked, without pads, and how many of the prompt's were not read again."""
    output = engine.add_request(prompt, SAMPLED, seed=seed).result(120)
    check_output(output, model, prompt, seed)
    assert len(output.token_ids) == 7
    return without_pads(output.token_ids), output.usage.cached_tokens


def without_pads(tokens: list[int]) -> list[int]:
    """A prompt of token ids has no pad in its middle."""
    return [token or 3 for token in tokens]


def row_bytes(model: CausalLM) -> int:
    return sum(
        DTYPES[state.dtype].itemsize * math.prod(state.shape) for state in model.interface.recurrent
    )


@pytest.mark.ci
def test_a_conversation_goes_on_from_its_last_turn(model: CausalLM) -> None:
    history = prompt(1, 70)
    with Engine(model, slots=2) as engine:
        for turn, cached in enumerate((0, 64, 64, 80, 96)):
            answer, reused = ask(engine, model, history, turn)
            assert reused == cached
            history = [*history, *answer, 70 + turn, 71]
        stats = engine.stats().prefixes
    assert (stats.prompts, stats.hits) == (5, 4)
    assert stats.cached_tokens == 64 + 64 + 80 + 96
    assert stats.prompt_tokens == 70 + 79 + 88 + 97 + 106
    assert stats.saved_states == 3  # after 64, 80 and 96 tokens
    assert stats.saved_bytes == 3 * row_bytes(model)


@pytest.mark.ci
def test_greedy_tokens_are_those_of_transformers(model: CausalLM) -> None:
    reference = random_model(model.package.manifest.source.model_type or "")
    history = prompt(2, 41)
    with Engine(model, slots=1) as engine:
        for turn in range(3):
            ids = torch.tensor([history])
            options = {"do_sample": False, "max_new_tokens": 7, "eos_token_id": None}
            wanted = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
            answer = engine.add_request(history, GREEDY).result(120).token_ids
            assert answer == wanted[0, len(history) :].tolist()
            history = [*history, *without_pads(answer), 70 + turn, 71]
        assert engine.stats().prefixes.hits == 2


def test_the_same_prompt_again(model: CausalLM) -> None:
    """At least one token has to be read, so one that ends with a piece goes on from before its last one."""
    with Engine(model, slots=1) as engine:
        for length, cached in ((16, 0), (17, 16), (32, 16), (48, 32)):
            one = prompt(length, length)
            assert ask(engine, model, one)[1] == 0
            assert ask(engine, model, one, 1)[1] == cached
            assert ask(engine, model, [*one, 5, 6])[1] == length // PIECE * PIECE


def test_the_third_prompt_that_begins_alike_goes_on_from_where_the_second_left_the_first(
    model: CausalLM,
) -> None:
    system = prompt(3, 40)
    with Engine(model, slots=2) as engine:
        for user, cached in enumerate((0, 0, 32, 32)):
            assert ask(engine, model, [*system, *prompt(4 + user, 30)], user)[1] == cached


def test_several_rows_of_one_prompt(model: CausalLM) -> None:
    with Engine(model, slots=3) as engine:
        for turn, cached in enumerate(([0, 32, 32, 32], [32, 32, 32, 32])):
            requests = engine.add_requests(
                prompt(8, 40), SAMPLED, num_return_sequences=4, seed=turn
            )
            outputs = [request.result(120) for request in requests]
            assert [output.usage.cached_tokens for output in outputs] == cached
            for row, output in enumerate(outputs):
                check_output(output, model, prompt(8, 40), turn + row)


def test_keys_and_values_that_were_overwritten_are_read_again(model: CausalLM) -> None:
    """States alone are not enough where there is attention, and are everything where there is none."""
    first, other = prompt(9, 60), prompt(10, 60)
    with Engine(model, slots=1) as engine:
        for one in (first, other):
            ask(engine, model, one)
        assert ask(engine, model, first)[1] == (0 if model.interface.key_values else 48)
    with Engine(model, slots=2) as engine:
        for one in (first, other, other):
            ask(engine, model, one)
        assert ask(engine, model, first)[1] == 48


def test_a_prompt_goes_on_from_a_slot_that_still_runs(model: CausalLM) -> None:
    long = replace(SAMPLED, max_new_tokens=60)
    with Engine(model, slots=2) as engine:
        running = engine.add_request(prompt(13, 50), long, seed=0, cancel_if_abandoned=False)
        next(iter(running))
        assert ask(engine, model, [*prompt(13, 50), 7], 1)[1] == 48
        assert (
            running.result(120).token_ids
            == model.generate([prompt(13, 50)], long, seed=0).token_ids[0]
        )


def test_answers_are_gone_on_from_where_that_was_asked_for(model: CausalLM) -> None:
    history = prompt(11, 37)
    with Engine(model, slots=2, reuse_sampled_tokens=True) as engine:
        for turn in range(4):
            answer, reused = ask(engine, model, history, turn)
            assert reused == (
                0 if turn == 0 else len(history) - 3
            )  # all but the newest token and the turn
            history = [*history, *answer, 70 + turn, 71]


def test_none_are_kept_where_none_were_asked_for(model: CausalLM) -> None:
    with Engine(model, slots=1, saved_states=0) as engine:
        for _ in range(2):
            assert ask(engine, model, prompt(12, 40))[1] == 0
        assert (engine.stats().prefixes.saved_states, engine.stats().prefixes.saved_bytes) == (0, 0)


Done = list[tuple[list[int], int, RequestOutput]]


def conversations(engine: Engine, count: int, seed: int) -> Done:
    """Some that go on, some where the user goes back, some that begin alike or are given up; several at once."""
    generator = random.Random(seed)
    histories = [prompt(generator.randrange(3), generator.randrange(1, 90)) for _ in range(4)]
    done: Done = []
    pending = []
    for number in range(count):
        which = generator.randrange(len(histories))
        asked = list(histories[which])
        request = engine.add_request(asked, SAMPLED, seed=number)
        if generator.random() < 0.2:
            for _ in zip(range(generator.randrange(3)), request, strict=False):
                pass
            request.cancel()
        pending.append((asked, number, which, request))
        while len(pending) > generator.randrange(4):
            asked, asked_with, which, request = pending.pop(generator.randrange(len(pending)))
            output = request.result(120)
            done.append((asked, asked_with, output))
            if len(asked) > 200 or generator.random() < 0.2:
                histories[which] = asked[: generator.randrange(1, len(asked) + 1)]
            else:
                histories[which] = [
                    *asked,
                    *without_pads(output.token_ids),
                    *prompt(number, generator.randrange(1, 20)),
                ]
    return done


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_conversations(count: int, model: CausalLM) -> None:
    for slots, places in ((1, 2), (3, 4)):
        with Engine(model, slots=slots, saved_states=places) as engine:
            done = conversations(engine, count // 2, slots)
            stats = engine.stats().prefixes
        assert stats.hits > count / 20
        assert 0 < stats.saved_states <= places
        assert stats.saved_bytes == stats.saved_states * row_bytes(model)
        assert len(done) > count / 3
        for asked, seed, output in done:
            check_output(output, model, asked, seed)


# That the tests above would see it.


def talk(model: CausalLM) -> None:
    with Engine(model, slots=2) as engine:
        histories = [prompt(20, 40), prompt(21, 40)]
        for turn in range(4):
            answer, _ = ask(engine, model, histories[turn % 2], turn)
            histories[turn % 2] += answer
        assert engine.stats().prefixes.hits == 2


def test_stale_states_would_be_seen(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    talk(model)
    monkeypatch.setattr(SavedRows, "restore", lambda self, place, row: None)
    with pytest.raises(AssertionError):
        talk(model)


def test_states_of_another_prompt_would_be_seen(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    use: Callable[..., int | None] = SavedStates.use
    monkeypatch.setattr(
        SavedStates, "use", lambda self, tokens: None if use(self, tokens) is None else 0
    )
    with pytest.raises(AssertionError):
        talk(model)
