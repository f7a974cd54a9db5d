"""Steps that give a row several tokens change none: in the loop, in an engine, in generate.

The package checks guesses with the graphs of qsample over a model of random weights. NumPy computes the
expected tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.contract.tensors import STATUS_NAMES
from qsample.runtime import CausalLM, Engine, SamplingParams, load
from qsample.runtime.decode.loop import DecodeLoop
from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
from qsample.runtime.decode.slots import Slots
from qsample.runtime.sequence import NO_DRAFTS, DraftStats, Sequence
from tests.helpers import fake_reference
from tests.helpers.fake_graphs import GUESSING_CAPACITY as CAPACITY
from tests.helpers.fake_package import POISON
from tests.helpers.requests import make_sequence, outcome, random_params

FEATURES = {
    "num_speculative_tokens": 4,
    "logprobs": True,
    "top_logprobs": 3,
    "logit_bias": True,
    "allowed_tokens": True,
}
# A bias towards three tokens, with which a text repeats itself.
REPEATING_BIAS = dict.fromkeys((68, 69, 70), 12.0)
# Without optional outputs, tokens may be read after several steps.
GUESSING_FEATURES = {"num_speculative_tokens": 4, "logit_bias": True}
Wanted = list[tuple[list[int], str]]


@pytest.fixture(scope="session")
def guessing_model(fake_model: Callable[..., CausalLM]) -> CausalLM:
    return fake_model(**GUESSING_FEATURES)


def make_requests(
    model: CausalLM, count: int, guesses: int = 4, *, predicts: bool = True
) -> tuple[list[Sequence], Wanted]:
    """Random requests, many of texts that repeat themselves, some with predictions unless `predicts`
    is False; and the reference's answers."""
    generator, made, wanted = random.Random(3), [], []
    for seed in range(count):
        repeats = generator.random() < 0.7
        letters = [*REPEATING_BIAS] if repeats else range(3, 290)
        prompt = generator.choices(letters, k=generator.choice([1, 2, 3, 5, 6, 9, 11, 14]))
        params = random_params(generator, 48)
        if repeats:
            params = replace(params, logit_bias=REPEATING_BIAS, repetition_penalty=1.0)
        answer = fake_reference.generate(prompt, params, seed, CAPACITY)
        params = replace(
            params,
            prompt_lookup_num_tokens=generator.choice([0, guesses, guesses, min(guesses, 2)]),
        )
        expected_tokens = None
        if guesses and predicts and generator.random() < 0.4:
            expected = [token if generator.random() < 0.8 else 3 for token in answer[0]]
            expected_tokens = np.array(expected or [3])
        made.append(
            make_sequence(model, prompt, params, seed, CAPACITY, expected_tokens=expected_tokens)
        )
        wanted.append(answer)
    return made, wanted


@pytest.mark.parametrize(
    ("flush_every", "double_buffering", "slots"),
    [(1, False, 3), (1, True, 5), (4, True, 4), (4, False, 1)],
)
def test_requests_that_come_and_go(
    flush_every: int,
    double_buffering: bool,
    slots: int,
    guessing_model: CausalLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[tuple[int, ...]] = []
    plain = Slots.prefill

    def prefill(self: Slots, slot: int, *ids: np.ndarray, emit: bool, **rest: Any) -> None:
        joined.append(tuple(map(len, ids)))
        plain(self, slot, *ids, emit=emit, **rest)

    monkeypatch.setattr(Slots, "prefill", prefill)
    # A prediction takes a read after each step.
    sequences, wanted = make_requests(guessing_model, 30, predicts=flush_every == 1)
    config = SchedulerConfig.of(
        guessing_model.sessions, flush_every=flush_every, prefill_chunk_size=8
    )
    device = Slots(guessing_model.sessions, slots, CAPACITY)
    loop = DecodeLoop(
        device, Scheduler(slots, config), lambda one: one.take(), double_buffering=double_buffering
    )
    with loop:
        for one in sequences:
            loop.add(one)
        while loop.busy:
            loop.step()
    found = [(one.progress.sampled, STATUS_NAMES[one.status]) for one in sequences]
    assert found == wanted
    total = sum((one.progress.drafts for one in sequences), NO_DRAFTS)
    later = sum(max(len(tokens) - 1, 0) for tokens, _ in wanted)
    assert total.num_steps + total.num_accepted_tokens == later
    assert total.num_drafts <= total.num_steps
    assert 10 < total.num_accepted_tokens < total.num_draft_tokens
    assert slots < 4 or any(len(set(lengths)) > 1 for lengths in joined)


def test_outputs_belong_to_each_token_of_a_step(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(**FEATURES)
    prompt = [68, 69, 70, 68, 69]
    params = SamplingParams(
        temperature=0.7, logit_bias=REPEATING_BIAS, max_new_tokens=30, eos_token_id=()
    )
    plain = model.generate([prompt, [70] * 3], params, seed=4)
    guess = replace(params, prompt_lookup_num_tokens=4)
    streamed: list[Any] = []

    class Streamer:
        def put(self, value: np.ndarray) -> None:
            streamed.append(value.reshape(-1).tolist())

        def end(self) -> None:
            streamed.append("end")

    both = model.generate([prompt, [70] * 3], [guess, params], seed=4)
    alone = model.generate(
        [prompt], guess, seed=4, streamer=Streamer(), prediction=plain.token_ids[0]
    )
    assert streamed == [prompt, *([token] for token in plain.token_ids[0]), "end"]
    assert both.token_ids == plain.token_ids
    for output, rows in ((both, 2), (alone, 1)):
        assert output.token_ids == plain.token_ids[:rows]
        for name in ("logprobs", "top_logprobs", "top_logprob_ids"):
            wanted = getattr(plain, name)[:rows]
            np.testing.assert_allclose(getattr(output, name), wanted, rtol=1e-5, atol=1e-5)
    late = model.generate([prompt, [70] * 3], [guess, params], seed=4, flush_every=4)
    followed = model.generate([prompt], guess, seed=4, flush_every=4, prediction=plain.token_ids[0])
    for output, early in (
        (late, both),
        (followed, alone),
    ):  # the outputs of steps of different numbers of tokens
        for name in ("logprobs", "top_logprobs", "top_logprob_ids"):
            assert getattr(output, name).tobytes() == getattr(early, name).tobytes()
    assert plain.timing.drafts == DraftStats(num_steps=58)
    assert alone.timing.drafts.num_accepted_tokens > 20
    assert alone.timing.steps < 9


def test_guided_rows_get_one_token_a_step(
    fake_model: Callable[..., CausalLM],
) -> None:
    model = fake_model(**FEATURES)
    seen: list[int] = []

    def guide(step: Any, mask: np.ndarray) -> None:
        if step is not None:
            seen.append(int(step.tokens[0]))
        mask[:] = -1  # every token, and at every other place two of them
        if len(seen) % 2:
            mask[:] = 0
            mask[0, 68 // 32] = 1 << 4 | 1 << 5

    params = SamplingParams(
        temperature=0.3, max_new_tokens=20, eos_token_id=(), logit_bias=REPEATING_BIAS
    )
    params = replace(params, prompt_lookup_num_tokens=4)
    output = model.generate(
        [[68, 69, 70] * 4], params, seed=1, allowed_tokens=guide, prediction=[68, 69] * 9
    )
    assert seen == output.token_ids[0][: len(seen)]
    assert len(seen) >= 19
    assert set(output.token_ids[0][1::2]) <= {68, 69}
    assert output.timing.drafts == DraftStats(num_steps=19)


def test_criteria_and_stop_strings_inside_a_step(fake_model: Callable[..., CausalLM]) -> None:
    """Tokens after the end are left out, although the same step gave them."""
    model, prompt = fake_model(**GUESSING_FEATURES), [68, 69, 70] * 3
    params = SamplingParams(
        temperature=0.0, logit_bias=REPEATING_BIAS, max_new_tokens=40, eos_token_id=()
    )
    whole = model.generate([prompt], params)
    assert whole.texts is not None
    expected = whole.token_ids[0]
    for place in range(8, 14):
        end = len(prompt) + place
        for options in (
            {"stop_strings": whole.texts[0][place : place + 5]},
            {"stopping_criteria": lambda ids, scores, end=end: ids.shape[1] >= end},
        ):
            plain = model.generate([prompt], params, **options)
            found = model.generate([prompt], params, prediction=expected, **options)
            assert (found.token_ids, found.texts) == (plain.token_ids, plain.texts)
            assert found.finish_reasons == ["stop"]
            assert found.timing.drafts.num_accepted_tokens > 3


def test_guesses_in_an_engine(guessing_model: CausalLM) -> None:
    """Requests that come and go, go on from each other's prompts, and are cancelled."""
    generator = random.Random(8)
    head = generator.choices([*REPEATING_BIAS], k=18)
    with Engine(guessing_model, slots=3, max_waiting=64) as engine:
        added = []
        for seed in range(24):
            prompt = head[: generator.choice([4, 8, 12, 18])] + generator.choices(
                [*REPEATING_BIAS, 7, POISON + 1], k=seed % 4
            )
            params = replace(
                random_params(generator, 30), logit_bias=REPEATING_BIAS, repetition_penalty=1.0
            )
            wanted = fake_reference.generate(prompt, params, seed, CAPACITY)
            more = {"prediction": wanted[0] or [3]} if seed % 5 == 0 else {}
            params = replace(params, prompt_lookup_num_tokens=generator.choice([0, 3, 4]))
            request = engine.add_request(prompt, params, seed=seed, **more)
            if seed % 7 == 6:
                request.cancel()
            added.append((request, wanted))
        reused = accepted = 0
        for request, (tokens, reason) in added:
            found, why = outcome(request)
            assert (found, why) == (tokens, reason) or (
                why == "cancelled" and found == tokens[: len(found)]
            )
            usage = request.result().usage
            reused, accepted = (
                reused + usage.cached_tokens,
                accepted + usage.drafts.num_accepted_tokens,
            )
        assert reused > 50
        assert accepted > 20


@pytest.mark.slow
@pytest.mark.parametrize("guesses", [0, 3, 7])
def test_guesses_in_an_engine_over_a_compiled_package(
    guesses: int, guessing_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tails of any lengths behind slots' and stored prefixes are read together: each request gets the tokens that
    `generate` gives it alone, without guesses."""
    model, generator = load(guessing_package, intra_op_num_threads=1), random.Random(1)
    head = generator.choices(range(5, model.interface.vocab_size), k=150)
    asked, wanted = [], []
    for seed in range(24):
        prompt = head[: generator.choice([0, 5, 64, 70, 128, 140])]
        prompt = prompt + generator.choices(range(5, 60), k=generator.choice([1, 2, 3, 7, 12, 30]))
        params = replace(random_params(generator, 40), eos_token_id=())
        asked.append((prompt, replace(params, prompt_lookup_num_tokens=guesses), seed))
        wanted.append(model.generate([prompt], params, seed=seed).token_ids[0])
    joined: list[tuple[int, ...]] = []
    plain = Slots.prefill

    def prefill(self: Slots, slot: int, *ids: np.ndarray, emit: bool, **rest: Any) -> None:
        joined.append(tuple(map(len, ids)))
        plain(self, slot, *ids, emit=emit, **rest)

    monkeypatch.setattr(Slots, "prefill", prefill)
    for _ in range(2):  # the second engine loads prefixes
        with Engine(model, slots=4, max_waiting=64, prefix_cache_dir=tmp_path / "kept") as engine:
            added = [
                engine.add_request(prompt, params, seed=seed) for prompt, params, seed in asked
            ]
            assert [request.result().token_ids for request in added] == wanted
            drafts = sum((request.result().usage.drafts for request in added), NO_DRAFTS)
            assert (drafts.num_draft_tokens > 0) == (guesses > 0)
    assert any(len(set(lengths)) > 1 for lengths in joined)


def test_a_package_without_guesses(model: CausalLM) -> None:
    assert (
        model.generate([[5]], max_new_tokens=2, prompt_lookup_num_tokens=None, seed=1).timing.drafts
        == NO_DRAFTS
    )


def test_nothing_is_guessed_if_that_would_change_tokens(fake: Callable[..., Any]) -> None:
    """The fake package has a float32 cache, over which no processor rounds one token like several, as
    `load` reports."""
    with pytest.warns(
        UserWarning,
        match="guesses are off here .*one token otherwise than several.*compile it again",
    ):
        exact = load(fake(**GUESSING_FEATURES).path)
    assert not exact.sessions.guesses
    assert not exact.sessions.prompts.ragged
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "do_sample": False,
        "logit_bias": REPEATING_BIAS,
    }
    plain = exact.generate([[68, 69, 70] * 3], **options)
    asked = exact.generate([[68, 69, 70] * 3], prompt_lookup_num_tokens=4, **options)
    assert asked.token_ids == plain.token_ids
    assert asked.timing.drafts.num_draft_tokens == 0
