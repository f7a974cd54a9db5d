"""The rows of a call: their seeds, and several rows of one prompt."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import (
    CausalLM,
    Engine,
    QueueFullError,
    Request,
    RequestFailedError,
    SamplingParams,
    load,
    prepare,
)
from qsample.runtime.decode.slots import Slots
from qsample.runtime.prepare import choose_seeds
from tests.helpers.fake_package import byte_tokenizer, compilation
from tests.helpers.requests import ENDLESS, FREE, expected, outcome, wait_for_token

PROMPTS = [[5, 6, 7], [9, 200, 31, 4, 5, 6, 7, 8, 9, 10, 11], [40] * 8]


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


@pytest.mark.parametrize("library", ["torch", "secrets"])
def test_fresh_seeds_survive_readers_of_json(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library == "secrets":
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    else:
        pytest.importorskip("torch")
    seeds = choose_seeds(None, SamplingParams(), 200)
    assert all(int(float(seed + 127)) == seed + 127 for seed in seeds), (
        "jq and JavaScript read float64"
    )
    assert len({*seeds}) == 200


def test_the_text_of_a_row_continues_its_prompt(model: CausalLM) -> None:
    ids = Tokenizer(byte_tokenizer()).encode("long before it: x🙂")
    (sequence,), _ = model.prepare(model.read(ids[:-2], max_new_tokens=5))
    assert sequence.delivery.text is not None
    assert [sequence.delivery.text.put(token) for token in ids[-2:]] == ["", "🙂"]


PENALISED_PARAMS = SamplingParams(
    temperature=0.9,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    max_new_tokens=12,
    eos_token_id=range(40, 60),
)


@pytest.fixture
def prefilled_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of prompt tokens of every row of every call, from now on."""
    tokens: list[int] = []
    plain = Slots.prefill

    def prefill(self: Slots, slot: int, *ids: np.ndarray, emit: bool, **rest: Any) -> None:
        tokens.extend(len(row) for row in ids)
        plain(self, slot, *ids, emit=emit, **rest)

    monkeypatch.setattr(Slots, "prefill", prefill)
    return tokens


@pytest.mark.parametrize("sampler", [True, False])
def test_rows_of_a_prompt_in_generate(
    sampler: bool, fake_model: Callable[..., CausalLM], prefilled_tokens: list[int]
) -> None:
    """The rows of a prompt are adjacent, as in transformers, and the seeds count over all rows."""
    model = fake_model(sampler=sampler)
    output = model.generate(PROMPTS, PENALISED_PARAMS, seed=20, num_return_sequences=3)
    rows = [prompt for prompt in PROMPTS for _ in range(3)]
    wanted = [expected(prompt, PENALISED_PARAMS, 20 + row) for row, prompt in enumerate(rows)]
    assert list(zip(output.token_ids, output.finish_reasons, strict=True)) == wanted
    assert output.seeds == list(range(20, 29))
    assert output.prompt_lengths == [len(prompt) for prompt in rows]
    assert len({tuple(tokens) for tokens in output.token_ids}) > 3
    assert output.sequences[:, :11].tolist() == [
        [0] * (11 - len(prompt)) + prompt for prompt in rows
    ]
    # The first prompt is shorter than a piece, and its rows cost less together. Of the last piece, at most
    # two tokens are read again.
    assert prefilled_tokens == [3, 3, 3, 4, 4, 3, 2, 2, 4, 4, 2, 2]


@pytest.mark.parametrize("double_buffering", [False, True])
@pytest.mark.parametrize("flush_every", [1, 4])
def test_more_rows_than_a_package_takes_wait(
    flush_every: int,
    double_buffering: bool,
    fake_model: Callable[..., CausalLM],
    prefilled_tokens: list[int],
) -> None:
    model = fake_model(compilation=compilation(batch_size=2, ctx_len=48))
    output = model.generate(
        PROMPTS[1],
        FREE,
        seed=3,
        num_return_sequences=5,
        flush_every=flush_every,
        double_buffering=double_buffering,
    )
    assert output.token_ids == [expected(PROMPTS[1], FREE, 3 + row)[0] for row in range(5)]
    assert prefilled_tokens == [4, 4, 3, 2, 2, 2, 2]


def test_seeds_and_parameters_of_the_rows_of_a_prompt(model: CausalLM) -> None:
    rows = [
        SamplingParams(temperature=1.2, max_new_tokens=6, seed=70),
        SamplingParams(max_new_tokens=9, seed=3),
    ]
    output = model.generate(PROMPTS[:2], rows, num_return_sequences=2)
    assert output.seeds == [70, 71, 3, 4]
    wanted = [
        expected(PROMPTS[row // 2], rows[row // 2], seed)[0]
        for row, seed in enumerate(output.seeds)
    ]
    assert output.token_ids == wanted
    assert model.generate(PROMPTS[:2], rows, seed=[9, 8, 7, 6], num_return_sequences=2).seeds == [
        9,
        8,
        7,
        6,
    ]
    fresh = model.generate(
        PROMPTS[0], do_sample=True, num_return_sequences=4, max_new_tokens=2
    ).seeds
    assert len(set(fresh)) == 4


def test_num_return_sequences_of_the_generation_config(fake_model: Callable[..., CausalLM]) -> None:
    settings = {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "max_new_tokens": 3}
    model = fake_model(generation_config=settings)
    assert len(model.generate(PROMPTS).token_ids) == 6
    assert len(model.generate(PROMPTS, num_return_sequences=1).token_ids) == 3
    assert len(model.generate(PROMPTS, num_return_sequences=None).token_ids) == 3
    assert (
        len(model.generate(PROMPTS, generation_config={"num_return_sequences": 3}).token_ids) == 9
    )
    assert len(model.generate(PROMPTS, FREE).token_ids) == 3
    with Engine(model, slots=2) as engine:
        assert isinstance(engine.add_request(PROMPTS[0]), Request)


@pytest.mark.parametrize("model_type", ["llama", pytest.param("mamba", marks=pytest.mark.slow)])
def test_rows_of_a_prompt_in_an_exported_graph(
    model_type: str, exported: Callable[..., Path], prefilled_tokens: list[int]
) -> None:
    """Real attention, and recurrent states, which exist only at the end of a common piece."""
    generator = np.random.default_rng(4)
    prompts = [generator.integers(4, 250, length).tolist() for length in (70, 30)]
    model = load(exported(model_type))
    params = SamplingParams(temperature=1.0, max_new_tokens=8, eos_token_id=())
    wanted = [model.generate(prompts[row // 3], params, seed=row).token_ids[0] for row in range(6)]
    prefilled_tokens.clear()
    assert model.generate(prompts, params, seed=0, num_return_sequences=3).token_ids == wanted
    assert sum(prefilled_tokens) == (
        70 + 2 + 2 + 30 + 2 + 2 if model_type == "llama" else 64 + 3 * 6 + 3 * 30
    )
    with Engine(model, slots=2) as engine:
        requests = [
            engine.add_requests(prompt, params, num_return_sequences=3, seed=3 * row)
            for row, prompt in enumerate(prompts)
        ]
        assert [outcome(request)[0] for rows in requests for request in rows] == wanted


# In an engine.


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_rows_of_a_prompt_in_an_engine(
    slots: int, model: CausalLM, prefilled_tokens: list[int]
) -> None:
    with Engine(model, slots=slots) as engine:
        rows = [
            engine.add_requests(prompt, PENALISED_PARAMS, num_return_sequences=4, seed=10 * index)
            for index, prompt in enumerate(PROMPTS)
        ]
        for index, (prompt, requests) in enumerate(zip(PROMPTS, rows, strict=True)):
            assert [request.seed for request in requests] == [10 * index + row for row in range(4)]
            for request in requests:
                assert outcome(request) == expected(prompt, PENALISED_PARAMS, request.seed)
        usage = [request.result().usage.cached_tokens for request in rows[1]]
        assert usage == [0, 9, 9, 9]
    assert sum(prefilled_tokens) <= 4 * 3 + (11 + 3 * 2) + (8 + 3 * 2)


def test_a_row_that_leaves_takes_no_other_with_it(
    model: CausalLM, gate: threading.Semaphore
) -> None:
    with Engine(model, slots=3) as engine:
        first, *others = engine.add_requests(PROMPTS[1], FREE, num_return_sequences=5, seed=0)
        wait_for_token(first)
        first.cancel()
        others[2].cancel()  # it waits
        gate.release(1000)
        assert first.result(60).finish_reason == others[2].result(60).finish_reason == "cancelled"
        for row in (1, 2, 4):
            assert outcome(others[row - 1]) == expected(PROMPTS[1], FREE, row)


def test_requests_are_added_all_or_none(model: CausalLM, gate: threading.Semaphore) -> None:
    with Engine(model, slots=2, max_waiting=3) as engine:
        running = engine.add_requests([5], ENDLESS, num_return_sequences=2, seed=0)
        with pytest.raises(QueueFullError, match="2 requests run and 3 wait"):
            engine.add_requests(PROMPTS[0], FREE, num_return_sequences=4, seed=0, timeout=0)
        waiting = engine.add_requests(PROMPTS[0], FREE, num_return_sequences=3, seed=0, timeout=0)
        with pytest.raises(QueueFullError):
            engine.add_request(PROMPTS[0], FREE, timeout=0)
        for request in running:
            request.cancel()
        gate.release(1000)
        for seed, request in enumerate(waiting):
            assert outcome(request) == expected(PROMPTS[0], FREE, seed)


class CountingMasks:
    """Allows row r only the tokens 100 + 10 r to 109 + 10 r, and raises once, after some token."""

    def __init__(self, last: int = 10**6) -> None:
        self.tokens, self.last = 0, last

    def __call__(self, step: Any, mask: np.ndarray) -> None:
        self.tokens += 0 if step is None else int(step.emitted.sum())
        if self.tokens > self.last:
            self.last = 10**6
            raise LookupError("enough")
        mask[:] = 0
        for row in range(len(mask)):
            for token in range(100 + 10 * row, 110 + 10 * row):
                mask[row].view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


def test_a_function_writes_the_masks_of_all_rows(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(allowed_tokens=True)
    wanted = model.generate(
        PROMPTS[1], FREE, seed=2, num_return_sequences=3, allowed_tokens=CountingMasks()
    ).token_ids
    assert [{token // 10 for token in row} for row in wanted] == [{10}, {11}, {12}]
    with Engine(model, slots=2) as engine:
        other = engine.add_request(PROMPTS[0], FREE, seed=1)
        options: dict[str, Any] = {"num_return_sequences": 3, "seed": 2}
        rows = engine.add_requests(PROMPTS[1], FREE, allowed_tokens=CountingMasks(), **options)
        assert [outcome(request)[0] for request in rows] == wanted
        failing = engine.add_requests(PROMPTS[1], FREE, allowed_tokens=CountingMasks(4), **options)
        for request in failing:
            with pytest.raises(RequestFailedError, match="raised LookupError"):
                request.result(60)
        assert outcome(other) == expected(PROMPTS[0], FREE, 1)
        assert outcome(engine.add_request(PROMPTS[2], FREE, seed=9)) == expected(
            PROMPTS[2], FREE, 9
        )


@pytest.mark.parametrize("double_buffering", [False, True])
def test_vllms_parameters_in_generate_and_in_an_engine(
    double_buffering: bool, fake_model: Callable[..., CausalLM]
) -> None:
    model = fake_model(allowed_tokens=True)
    letter = Tokenizer(byte_tokenizer()).encode("a", add_special_tokens=False)[0]
    options: Any = {
        "max_tokens": 12,
        "ignore_eos": True,
        "allowed_token_ids": [letter],
        "repetition_detection": {"max_pattern_size": 1, "min_count": 5},
    }
    stops: Any = {**options, "stop": "aaa", "repetition_detection": None}
    output = model.generate(PROMPTS, n=2, seed=1, **options, double_buffering=double_buffering)
    assert output.token_ids == [[letter] * 5] * 6
    assert output.finish_reasons == ["repetition"] * 6
    output = model.generate(PROMPTS, **stops, double_buffering=double_buffering)
    assert output.texts == [""] * 3
    output = model.generate(PROMPTS, **stops, include_stop_str_in_output=True)
    assert output.texts == ["aaa"] * 3
    with Engine(model, slots=2, double_buffering=double_buffering) as engine:
        request = engine.add_request(PROMPTS[0], n=1, **options)
        assert "".join(delta.text or "" for delta in request) == "aaaaa"
        assert outcome(request) == ([letter] * 5, "repetition")
        assert engine.add_request(PROMPTS[0], **stops).result(60).stop_string == "aaa"
        with pytest.raises(ValueError, match="add_request adds one request"):
            engine.add_request(PROMPTS[0], n=2, **options)


def test_allowed_token_ids_that_are_wrong(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(allowed_tokens=True)
    mask = np.full(model.interface.vocab_size // 32, -1, np.int32)
    with pytest.raises(ValueError, match="allowed_token_ids and allowed_tokens were given"):
        model.generate(PROMPTS, allowed_token_ids=[5], allowed_tokens=mask)
    with pytest.raises(ValueError, match="allowed_token_ids is 99999; give token ids of the model"):
        model.generate(PROMPTS, allowed_token_ids=[5, 99999])
    with pytest.raises(ValueError, match=r"exported with allowed_tokens=True .* or grammars=True"):
        fake_model().generate(PROMPTS, allowed_token_ids=[5])


@pytest.mark.parametrize("rows", [[(5,), (6, 7, 8)], [(6, 7, 8), (5,)], [(5,), (6, 7, 8), (9, 4)]])
def test_sequences_of_different_lengths_end_in_the_same_column(rows: list[tuple[int, ...]]) -> None:
    array = prepare._ids("bad_words_ids", rows, 20, sequences=True)
    assert array.tolist() == [[*[-1] * (3 - len(ids)), *ids] for ids in rows]
