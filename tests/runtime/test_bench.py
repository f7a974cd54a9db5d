"""Measuring a package: consistent figures of the runs that were asked for, and clear errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from qsample.contract.tensors import RUNNING
from qsample.runtime import CausalLM, SamplingParams
from qsample.runtime import bench as bench_module
from qsample.runtime.bench import LockStep, measure
from qsample.runtime.decode.slots import Slots
from qsample.runtime.prepare import parameter_row
from tests.helpers.fake_images import ROWS, SIDE
from tests.helpers.fake_package import MAX_POSITIONS


@pytest.mark.parametrize("sampler", [True, False])
def test_figures(
    sampler: bool, fake_model: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"prefill": 0, "decode": 0}
    for name in calls:

        def counted(  # type: ignore[no-untyped-def]
            self: Slots,
            *arguments: object,
            name: str = name,
            plain: object = getattr(Slots, name),
            **options: object,
        ):
            calls[name] += 1
            plain(self, *arguments, **options)  # type: ignore[operator]
            # No row stops early: every step is a full one.
            assert (self.read().status == RUNNING).all() or name == "prefill"

        monkeypatch.setattr(Slots, name, counted)
    measured = measure(
        fake_model(sampler=sampler),
        3,
        5,
        7,
        SamplingParams(temperature=1.0, eos_token_id=range(300)),
        2,
    )
    assert (measured.rows, measured.prompt_tokens, measured.new_tokens) == (3, 5, 7)
    assert calls == {"prefill": 3 * 3 * 2, "decode": 3 * (7 + bench_module._WARM_UP_STEPS)}
    assert measured.tokens_per_second == pytest.approx(3 * 1000 / measured.decode_ms)
    assert measured.prefill_tokens_per_second == pytest.approx(
        3 * 5 * 1000 / measured.first_token_ms
    )
    assert 0 < measured.decode_ms <= measured.decode_ms_p90


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"new_tokens": 0}, "new_tokens is 0"),
        ({"repetitions": 0}, "repetitions is 0"),
        (
            {"prompt_tokens": MAX_POSITIONS - 10, "new_tokens": 10},
            f"need {MAX_POSITIONS + 4} places, .* has {MAX_POSITIONS}",
        ),
    ],
)
def test_wrong_options(
    options: dict[str, int], message: str, fake_model: Callable[..., CausalLM]
) -> None:
    with pytest.raises(ValueError, match=message):
        measure(fake_model(), **options)


def test_lock_step_gives_the_tokens_of_generate(model: CausalLM) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    params = SamplingParams(temperature=0.9, max_new_tokens=8, eos_token_id=())
    parameters = [parameter_row(model.interface, params, len(prompt), 64) for prompt in prompts]
    loop = LockStep(model.sessions, parameters, [4, 5], 64)
    tokens = [
        loop.prefill([np.array(prompt) for prompt in prompts]),
        *(loop.decode() for _ in range(7)),
    ]
    assert np.stack(tokens, axis=1).tolist() == model.generate(prompts, params, seed=4).token_ids


def test_figures_of_images(fake_model: Callable[..., CausalLM]) -> None:
    """An image before each prompt: its tokens count, and other images come each time."""
    measured = measure(fake_model(image=ROWS), 2, 5, 3, repetitions=2, image=(3 * SIDE, 2 * SIDE))
    assert measured.image_tokens == 6
    # The image's beginning, its placeholders and its end, after the token that begins a text.
    assert measured.prompt_tokens == 1 + 1 + 6 + 1 + 5
    assert measured.vision_ms > 0
    assert measured.prefill_tokens_per_second == pytest.approx(
        2 * measured.prompt_tokens * 1000 / measured.first_token_ms
    )
    with pytest.raises(ValueError, match="reads text only"):
        measure(fake_model(), image=(8, 8))
    plain = measure(fake_model(), 1, 2, 1, repetitions=1)
    assert (plain.image_tokens, plain.vision_ms, plain.tokens_per_step) == (0, 0, 1)


def test_figures_by_hand(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run warms up; of the others, medians. Steps of 10 to 40 ms, prompts of 100 and 300 ms."""
    seconds = iter([9, *[9] * 4, 0.1, 0.01, 0.02, 0.03, 0.04, 0.3, 0.01, 0.02, 0.03, 0.04])

    def timed(call: Callable[[], object]) -> float:
        call()
        return next(seconds)

    monkeypatch.setattr(bench_module, "_seconds", timed)
    measured = measure(model, 2, 5, 4, repetitions=2)
    assert next(seconds, None) is None
    assert measured.first_token_ms == pytest.approx(200)
    assert measured.prefill_tokens_per_second == pytest.approx(2 * 5 / 0.2)
    assert measured.decode_ms == pytest.approx(25)
    assert measured.decode_ms_p90 == pytest.approx(40)
    assert measured.tokens_per_second == pytest.approx(2 / 0.025)


def test_guesses_count_at_the_mean_step(
    fake_model: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fake_model(num_speculative_tokens=4, logit_bias=True)
    seconds = itertools.cycle([1, 0.01, 0.01, 0.04])

    def timed(call: Callable[[], object]) -> float:
        call()
        return next(seconds)

    monkeypatch.setattr(bench_module, "_seconds", timed)
    repeating = SamplingParams(
        temperature=0, prompt_lookup_num_tokens=4, logit_bias=dict.fromkeys((68, 69), 50.0)
    )
    measured = measure(model, 1, 8, 3, repeating, 1)
    assert measured.tokens_per_step > 1
    assert measured.tokens_per_second == pytest.approx(measured.tokens_per_step / 0.02)


def test_rows_use_adapters_in_turns(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=8, eos_token_id=())
    parameters = [parameter_row(model.interface, params, 1, 64)] * 3
    one, two = object(), object()
    loop = LockStep(model.sessions, parameters, [4, 5, 6], 64, [one, two])  # type: ignore[list-item]
    assert [adapter for _, _, adapter in loop._rows] == [one, two, one]
    assert [seed for _, seed, _ in loop._rows] == [4, 5, 6]
    assert [
        adapter for _, _, adapter in LockStep(model.sessions, parameters, [4, 5, 6], 64)._rows
    ] == [None] * 3


def test_the_peak_of_memory_is_of_this_process() -> None:
    assert 10 << 20 < bench_module.peak_memory_bytes() < 1 << 44
