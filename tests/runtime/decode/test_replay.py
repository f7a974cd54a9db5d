"""Captured graphs: neither runs before the capture nor replays change a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsample.runtime import CausalLM, Engine, SamplingParams
from qsample.runtime.bench import measure
from tests.helpers import fake_reference
from tests.helpers.capturing import capturing
from tests.helpers.fake_package import MAX_POSITIONS
from tests.helpers.requests import wait_for_token

PROMPTS = [[5, 6, 7], [9, 200, 31, 4, 5, 6, 7, 8, 9, 10, 11], [77]]
# A token that is counted twice changes later tokens.
PARAMS = SamplingParams(
    temperature=0.9, frequency_penalty=0.6, presence_penalty=0.3, max_new_tokens=30, eos_token_id=()
)


def expected(prompts: list[list[int]], params: SamplingParams, seed: int) -> list[list[int]]:
    return [
        fake_reference.generate(prompt, params, seed + row, MAX_POSITIONS)[0]
        for row, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("double_buffering", [False, True])
@pytest.mark.parametrize("flush_every", [1, 4])
def test_one_batch_after_another(model: CausalLM, flush_every: int, double_buffering: bool) -> None:
    replaying, session = capturing(model)
    options: dict[str, Any] = {"flush_every": flush_every, "double_buffering": double_buffering}
    for seed, prompts in enumerate([PROMPTS, PROMPTS[::-1], PROMPTS]):
        got = replaying.generate(prompts, PARAMS, seed=seed, **options)
        assert got.token_ids == expected(prompts, PARAMS, seed)
    assert len(session.captured) == 2, (
        "the same batch over the same memory: one graph for each side"
    )
    assert session.replayed >= 3 * 29
    assert len({thread for thread, _ in session.captured}) == 1


def test_batches_of_other_sizes_capture_anew(model: CausalLM) -> None:
    replaying, session = capturing(model)
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
        assert replaying.generate(prompts, PARAMS, seed=3).token_ids == expected(prompts, PARAMS, 3)
    assert sorted(number for _, number in session.captured) == [1, 2, 3, 4, 5, 6]


def test_a_batch_that_was_left_early_is_used_again(model: CausalLM) -> None:
    """A stop string ends a row that the graph would go on with."""
    replaying, _ = capturing(model)
    text = replaying.generate(PROMPTS[:1], PARAMS, seed=1).texts
    assert text is not None
    stopped = replaying.generate(PROMPTS[:1], PARAMS, seed=1, stop_strings=text[0][3:6])
    assert stopped.finish_reasons == ["stop"]
    assert replaying.generate(PROMPTS[2:], PARAMS, seed=2).token_ids == expected(
        PROMPTS[2:], PARAMS, 2
    )


def test_guided_rows_are_replayed_on_the_same_thread(fake_model: Callable[..., CausalLM]) -> None:
    """Each replay reads the mask that was written for it: even tokens and odd ones by turns."""

    turns = np.zeros(len(PROMPTS), np.int64)

    def guide(step: Any, mask: np.ndarray) -> None:
        turns[:] = 0 if step is None else turns + step.emitted
        mask[:] = np.where(turns % 2, -0x55555556, 0x55555555)[:, None]

    replaying, session = capturing(fake_model(allowed_tokens=True))
    got = replaying.generate(PROMPTS, PARAMS, seed=5, allowed_tokens=guide)
    assert [[token % 2 for token in row] for row in got.token_ids] == [[0, 1] * 15] * 3
    assert replaying.generate(PROMPTS, PARAMS, seed=5).token_ids == expected(PROMPTS, PARAMS, 5)
    assert len(session.captured) == 2


def test_a_parameter_that_grows_while_others_run(model: CausalLM) -> None:
    """More stop ids than any row had need another buffer, so the graphs are captured again while rows
    run."""
    replaying, session = capturing(model)
    many = SamplingParams(
        temperature=0.9, frequency_penalty=0.6, max_new_tokens=20, eos_token_id=range(300, 309)
    )
    with Engine(replaying, slots=2, prefill_chunk_size=4) as engine:
        first = engine.add_request(PROMPTS[0], PARAMS, seed=0)
        wait_for_token(first)
        second = engine.add_request(PROMPTS[1], many, seed=1)
        assert second.result(60).token_ids == expected([PROMPTS[1]], many, 1)[0]
        assert first.result(60).token_ids == expected([PROMPTS[0]], PARAMS, 0)[0]
    assert len(session.captured) == 4


def test_measuring(model: CausalLM) -> None:
    replaying, session = capturing(model)
    measure(replaying, 2, 4, 4, repetitions=1)
    assert len(session.captured) == 4  # two batches
    assert session.replayed == 2 * (3 + 4)
