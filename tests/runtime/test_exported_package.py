"""The runtime on a graph that the exporter made: state in place, row views and chunks change no token."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qsample.runtime import CausalLM, SamplingParams, load
from qsample.runtime.decode.slots import Slots

PROMPTS = [np.random.default_rng(n).integers(4, 260, n).tolist() for n in (3, 17, 9, 1)]
PARAMS = [
    SamplingParams(temperature=0, max_new_tokens=40),
    SamplingParams(temperature=0.9, top_k=30, top_p=0.9, repetition_penalty=1.2, max_new_tokens=40),
    SamplingParams(min_p=0.02, presence_penalty=0.5, frequency_penalty=0.3, max_new_tokens=40, eos_token_id=()),
    SamplingParams(temperature=1.3, min_new_tokens=10, max_new_tokens=30, eos_token_id=tuple(range(100, 140))),
]


@pytest.fixture(scope="module")
def model(llama_package: Path) -> CausalLM:
    return load(llama_package)


@pytest.mark.parametrize(("in_place", "chunk"), list(itertools.product([True, False], [None, 1, 4])))
def test_in_place_and_chunking_change_nothing(in_place: bool, chunk: int | None, model: CausalLM) -> None:
    wanted = model.generate(PROMPTS, PARAMS, seed=11)
    got = model.generate(PROMPTS, PARAMS, seed=11, in_place=in_place, prefill_chunk_size=chunk)
    assert got.token_ids == wanted.token_ids
    assert got.finish_reasons == wanted.finish_reasons


@pytest.mark.parametrize("sampler", [True, False])
def test_prompts_in_one_run_give_the_same_tokens_as_alone(sampler: bool, exported: Callable[..., Path]) -> None:
    model = load(exported("llama") if sampler else exported("llama", include_sampler=False))
    prompts = [np.random.default_rng(row).integers(4, 260, 20).tolist() for row in range(4)]
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        plain = Slots.prefill
        patch.setattr(
            Slots,
            "prefill",
            lambda self, slot, *ids, emit: (calls.append(len(ids)), plain(self, slot, *ids, emit=emit)),
        )
        got = model.generate(prompts, PARAMS, seed=11)
    assert calls == [4]
    for row, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True)):
        assert model.generate([prompt], params, seed=11 + row).token_ids == [got.token_ids[row]]


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_row_gives_the_same_tokens_alone_and_in_any_row(chunk: int | None, model: CausalLM) -> None:
    wanted = model.generate(PROMPTS, PARAMS, seed=11).token_ids
    for row, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        alone = model.generate([prompt], params, seed=11 + row, prefill_chunk_size=chunk)
        assert alone.token_ids == [wanted[row]]
    order = [2, 0, 3, 1]
    moved = model.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order], seed=[11 + i for i in order])
    assert moved.token_ids == [wanted[i] for i in order]


def test_the_capacity_changes_nothing(model: CausalLM, llama_package: Path) -> None:
    wanted = model.generate(PROMPTS, PARAMS, seed=11).token_ids
    assert load(llama_package, ctx_len=200).generate(PROMPTS, PARAMS, seed=11).token_ids == wanted
