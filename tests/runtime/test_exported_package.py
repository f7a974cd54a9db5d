"""The runtime on a graph that the exporter made: state in place, row views and chunks change no token."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qsample import AutoModelForCausalLM
from qsample.runtime import CausalLM, Engine, SamplingParams, load
from qsample.runtime.decode.slots import Slots
from tests.helpers.filters import FILTERS
from tests.helpers.requests import outcome

PROMPTS = [np.random.default_rng(n).integers(4, 260, n).tolist() for n in (3, 17, 9, 1)]
PARAMS = [
    SamplingParams(temperature=0, max_new_tokens=40),
    SamplingParams(temperature=0.9, top_k=30, top_p=0.9, repetition_penalty=1.2, max_new_tokens=40),
    SamplingParams(
        min_p=0.02, presence_penalty=0.5, frequency_penalty=0.3, max_new_tokens=40, eos_token_id=()
    ),
    SamplingParams(
        temperature=1.3, min_new_tokens=10, max_new_tokens=30, eos_token_id=tuple(range(100, 140))
    ),
]


@pytest.fixture(scope="module")
def model(llama_package: Path) -> CausalLM:
    return load(llama_package)


@pytest.mark.parametrize("sampler", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_prompts_in_one_run_give_the_same_tokens_as_alone(
    sampler: bool, exported: Callable[..., Path]
) -> None:
    model = load(exported("llama") if sampler else exported("llama", include_sampler=False))
    prompts = [np.random.default_rng(row).integers(4, 260, 20).tolist() for row in range(4)]
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        plain = Slots.prefill
        patch.setattr(
            Slots,
            "prefill",
            lambda self, slot, *ids, **more: (
                calls.append(len(ids)),
                plain(self, slot, *ids, **more),
            ),
        )
        got = model.generate(prompts, PARAMS, seed=11)
    assert calls == [4]
    for row, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True)):
        assert model.generate([prompt], params, seed=11 + row).token_ids == [got.token_ids[row]]


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_row_gives_the_same_tokens_alone_and_in_any_row(
    chunk: int | None, model: CausalLM
) -> None:
    wanted = model.generate(PROMPTS, PARAMS, seed=11).token_ids
    for row, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        alone = model.generate([prompt], params, seed=11 + row, prefill_chunk_size=chunk)
        assert alone.token_ids == [wanted[row]]
    order = [2, 0, 3, 1]
    moved = model.generate(
        [PROMPTS[i] for i in order], [PARAMS[i] for i in order], seed=[11 + i for i in order]
    )
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


@pytest.mark.ci
def test_filters_in_every_batch(
    exported: Callable[..., Path], model: CausalLM, tmp_path: Path
) -> None:
    """Each changes its row and no other, wherever that row runs."""
    portable = AutoModelForCausalLM.from_pretrained(exported("llama", filters=FILTERS))
    prompts, rows = [[7, 8, 9]] * len(FILTERED), filtered_rows(40)
    wanted = portable.generate(prompts, rows, seed=3).token_ids
    plain = model.generate(prompts, [rows[-1]] * len(rows), seed=3).token_ids
    assert [ours == theirs for ours, theirs in zip(wanted, plain, strict=True)] == [False] * 5 + [
        True
    ]
    assert len({*wanted[3], 7, 8, 9}) == 43
    assert not {*wanted[3]} & {*range(100, 200)}
    portable.compile(tmp_path / "cpu", ctx_len=64)
    with Engine(load(tmp_path / "cpu"), slots=4) as engine:  # rows join and move
        requests = [
            engine.add_request(prompts[:1], row, seed=seed)
            for seed, row in enumerate(rows, start=3)
        ]
        assert [request.result(60).token_ids for request in requests] == wanted


@pytest.mark.slow
def test_filters_in_every_kind_of_package(exported: Callable[..., Path]) -> None:
    """The host samples the same tokens as the graph; the other order of filters gives other tokens."""
    prompts, rows = [[7, 8, 9]] * len(FILTERED), filtered_rows(40)
    wanted = load(exported("llama", filters=FILTERS)).generate(prompts, rows, seed=3).token_ids
    on_host = load(exported("llama", filters=FILTERS, include_sampler=False))
    assert on_host.generate(prompts, rows, seed=3).token_ids == wanted
    last = (
        load(exported("llama", filters=FILTERS, filter_order="llama.cpp"))
        .generate(prompts, rows, seed=3)
        .token_ids
    )
    assert last[3] == wanted[3]
    assert last[0] != wanted[0]


def test_an_engine_gives_the_tokens_of_generate(model: CausalLM) -> None:
    """Neighbours, slots, chunks and reused prefixes change no token."""
    generator = random.Random(6)
    prompts = [
        [generator.randrange(4, 260) for _ in range(generator.randrange(1, 30))] for _ in range(12)
    ]
    params = [
        SamplingParams(
            temperature=generator.choice([0, 0.8, 1.2]),
            top_k=generator.choice([0, 20]),
            top_p=generator.choice([1.0, 0.9]),
            repetition_penalty=generator.choice([1.0, 1.2]),
            frequency_penalty=generator.choice([0.0, 0.2]),
            max_new_tokens=generator.randrange(2, 30),
            eos_token_id=tuple(range(100, 120)),
        )
        for _ in prompts
    ]
    alone = [
        model.generate(*row, seed=seed)
        for seed, row in enumerate(zip(prompts, params, strict=True))
    ]
    prompts += [
        [*prompt, *output.token_ids[0][:5], 9]
        for prompt, output in zip(prompts, alone, strict=True)
    ]
    params *= 2
    alone += [model.generate(prompts[seed], params[seed], seed=seed) for seed in range(12, 24)]
    with Engine(model, slots=3, prefill_chunk_size=5, flush_every=4) as engine:
        requests = [
            engine.add_request(*row, seed=seed)
            for seed, row in enumerate(zip(prompts, params, strict=True))
        ]
        for request, output in zip(requests, alone, strict=True):
            assert outcome(request) == (output.token_ids[0], output.finish_reasons[0])
