"""The seeds of the rows of a call."""

from __future__ import annotations

from qsample.runtime import CausalLM, SamplingParams
from tests.helpers.fake_cases import PROMPTS


def test_where_seeds_come_from(model: CausalLM) -> None:
    short = SamplingParams(max_new_tokens=1)
    seeded = SamplingParams(max_new_tokens=1, seed=9)
    assert model.generate(PROMPTS[:2], short, seed=5).seeds == [5, 6]
    assert model.generate(PROMPTS[:2], short, seed=[5, 5]).seeds == [5, 5]
    assert model.generate(PROMPTS[:2], seeded).seeds == [9, 10]
    assert model.generate(PROMPTS[:2], [seeded, seeded]).seeds == [9, 9]
    assert model.generate(PROMPTS[:2], [seeded, seeded], seed=1).seeds == [1, 2]
    assert model.generate(PROMPTS[:2], short, seed=2**63 - 1).seeds == [2**63 - 1, 0]
    half = model.generate(PROMPTS[:2], [seeded, short]).seeds
    assert half[0] == 9
    assert len({*half, *model.generate(PROMPTS[:2], short).seeds}) == 4
