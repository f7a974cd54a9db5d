"""Measuring a package: consistent figures of the runs that were asked for, and clear errors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from qsample.contract.tensors import RUNNING
from qsample.runtime import CausalLM, SamplingParams
from qsample.runtime import bench as bench_module
from qsample.runtime.bench import LockStep, measure
from qsample.runtime.decode.slots import Slots
from qsample.runtime.prepare import parameter_row
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
