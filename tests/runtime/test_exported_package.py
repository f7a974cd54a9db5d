"""The runtime on a graph that the exporter made: state in place, row views and chunks change no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qsample import AutoModelForCausalLM
from qsample.runtime import CausalLM, Engine, SamplingParams, load
from qsample.runtime.decode.slots import Slots
from tests.helpers.filters import FILTERS

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


@pytest.mark.parametrize("chunk", [1, 4])
def test_chunking_changes_nothing(chunk: int, model: CausalLM) -> None:
    wanted = model.generate(PROMPTS, PARAMS, seed=11)
    got = model.generate(PROMPTS, PARAMS, seed=11, prefill_chunk_size=chunk)
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


FILTERED = [
    {"temperature": 1.5, "typical_p": 0.3, "epsilon_cutoff": 0.001},
    {"top_n_sigma": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.01},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": [5]},
    {"no_repeat_ngram_size": 1, "bad_words_ids": [[token] for token in range(100, 200)]},
    {"dynatemp_range": 0.8, "mirostat": 2, "mirostat_tau": 2.0},
    {},
]


def filtered_rows(count: int) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=count, eos_token_id=(), **row) for row in FILTERED]  # type: ignore[arg-type]


def test_filters_in_every_kind_of_package_and_batch(exported: Callable[..., Path], model: CausalLM) -> None:
    """Each changes its row and no other, wherever that row runs and whoever makes its random numbers."""
    made = load(exported("llama", filters=FILTERS))
    prompts, rows = [[7, 8, 9]] * len(FILTERED), filtered_rows(40)
    wanted = made.generate(prompts, rows, seed=3).token_ids
    plain = model.generate(prompts, [rows[-1]] * len(rows), seed=3).token_ids
    assert [ours == theirs for ours, theirs in zip(wanted, plain, strict=True)] == [False] * 5 + [True]
    assert len({*wanted[3], 7, 8, 9}) == 43
    assert not {*wanted[3]} & {*range(100, 200)}
    for features in ({"include_sampler": False}, {"seed_input": True}):
        assert load(exported("llama", filters=FILTERS, **features)).generate(prompts, rows, seed=3).token_ids == wanted
    with Engine(made, slots=4) as engine:  # rows join and move
        requests = [engine.add_request(prompts[:1], row, seed=seed) for seed, row in enumerate(rows, start=3)]
        assert [request.result(60).token_ids for request in requests] == wanted
    last = load(exported("llama", filters=FILTERS, filter_order="llama.cpp")).generate(prompts, rows, seed=3).token_ids
    assert last[3] == wanted[3]
    assert last[0] != wanted[0]


def test_a_compiled_package_has_the_filters(exported: Callable[..., Path], tmp_path: Path) -> None:
    portable = AutoModelForCausalLM.from_pretrained(exported("llama", filters=FILTERS))
    compiled = portable.compile(tmp_path / "cpu", ctx_len=64)
    prompts, rows = [[7, 8, 9]] * len(FILTERED), filtered_rows(20)
    assert compiled.generate(prompts, rows, seed=3).token_ids == portable.generate(prompts, rows, seed=3).token_ids
