"""The engine: every request gets the tokens that it gets alone, whatever the others do."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.runtime import (
    CausalLM,
    Engine,
    EngineClosedError,
    QueueFullError,
    Request,
    RequestOutput,
    SamplingParams,
)
from qsample.runtime.decode.slots import Slots
from tests.helpers.fake_package import PIECE_SIZE, compilation
from tests.helpers.requests import (
    ENDLESS,
    FREE,
    expected,
    outcome,
    random_params,
    random_prompt,
    wait_for_token,
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_size": 3, "double_buffering": False},
        {"flush_every": 4, "prefill_chunk_size": 7, "slots": 3},
    ],
    ids=str,
)
def test_many_requests_give_the_tokens_that_each_gives_alone(
    options: dict[str, Any], model: CausalLM
) -> None:
    generator = random.Random(11)
    cases = [(random_prompt(generator), random_params(generator), seed) for seed in range(60)]
    with Engine(model, **{"slots": 8, "max_waiting": 20} | options) as engine:
        requests = [engine.add_request(prompt, params, seed=seed) for prompt, params, seed in cases]
        assert [outcome(request) for request in requests] == [expected(*case) for case in cases]


def test_requests_from_many_threads_in_any_order(model: CausalLM) -> None:
    generator = random.Random(4)
    cases = [(random_prompt(generator), random_params(generator), seed) for seed in range(40)]
    outcomes: dict[int, tuple[list[int], str]] = {}

    def ask(indices: list[int]) -> None:
        for index in indices:
            prompt, params, seed = cases[index]
            outcomes[index] = outcome(engine.add_request(prompt, params, seed=seed))

    order = list(range(40))
    generator.shuffle(order)
    with Engine(model, slots=4, max_waiting=1, prefill_chunk_size=5) as engine:
        threads = [threading.Thread(target=ask, args=(order[start::5],)) for start in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [outcomes[index] for index in range(40)] == [expected(*case) for case in cases]


@pytest.mark.parametrize("reuse_sampled_tokens", [False, True])
def test_a_conversation_goes_on_from_what_a_slot_holds(
    reuse_sampled_tokens: bool, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last whole piece that was read as a prompt, or, where asked for, from all but the newest token."""
    fed: list[list[int]] = []
    plain = Slots.prefill

    def prefill(self: Slots, slot: int, *ids: np.ndarray, emit: bool, **rest: Any) -> None:
        fed.extend(row.tolist() for row in ids)
        plain(self, slot, *ids, emit=emit, **rest)

    monkeypatch.setattr(Slots, "prefill", prefill)
    history, held = [9, 200, 31, 4, 5], 0
    options = {"reuse_sampled_tokens": True} if reuse_sampled_tokens else {}
    with Engine(model, slots=3, **options) as engine:  # type: ignore[arg-type]
        for turn in range(4):
            other = engine.add_request(
                [50 + turn] * 8, FREE, seed=99
            )  # someone else, in other slots
            fed.clear()
            request = engine.add_request(history, FREE, seed=turn)
            assert outcome(request) == expected(history, FREE, turn)
            assert outcome(other) == expected([50 + turn] * 8, FREE, 99)
            usage = request.result().usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(history), 20)
            assert usage.cached_tokens == held
            read = [token for row in fed if row[0] != 50 + turn for token in row]
            assert read == history[held:]
            held = (
                len(history) + 19
                if reuse_sampled_tokens
                else len(history) // PIECE_SIZE * PIECE_SIZE
            )
            history = [*history, *request.result().token_ids, 60 + turn, 61, 62]


def test_a_prompt_begins_like_one_that_runs(model: CausalLM) -> None:
    """What another slot holds is copied, whether its request runs, is being read, or ended."""
    prompts = [[7] * 9, [7] * 9 + [8], [7] * 6 + [9] * 8, [7] * 9, [7, 7, 6]]
    with Engine(model, slots=5) as engine:
        first = engine.add_request(prompts[0], ENDLESS, seed=0)
        wait_for_token(first)
        others = [
            engine.add_request(prompt, FREE, seed=seed)
            for seed, prompt in enumerate(prompts[1:], start=1)
        ]
        for request, prompt in zip(others, prompts[1:], strict=True):
            assert outcome(request) == expected(prompt, FREE, request.seed)
        assert outcome(first) == expected(prompts[0], ENDLESS, 0)
        # Whole pieces of 4 tokens; of the same prompt all but the last piece's last tokens, of which it has one.
        assert [request.result().usage.cached_tokens for request in others] == [8, 4, 8, 0]


@pytest.mark.parametrize(("chunk", "pieces"), [(None, 1), (8, 2)])
def test_a_long_prompt_does_not_hold_up_running_rows(
    chunk: int | None, pieces: int, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("prefill", "decode"):
        plain = getattr(Slots, name)

        def call(
            self: Slots, *args: Any, name: str = name, plain: Any = plain, **options: Any
        ) -> None:
            calls.append(name)
            plain(self, *args, **options)

        monkeypatch.setattr(Slots, name, call)
    with Engine(model, slots=2, prefill_chunk_size=chunk) as engine:
        running = engine.add_request([5], ENDLESS, seed=0)
        wait_for_token(running)
        late = engine.add_request([6] * 40, FREE, seed=1)
        assert outcome(late) == expected([6] * 40, FREE, 1)
        assert outcome(running) == expected([5], ENDLESS, 0)
    read = [index for index, name in enumerate(calls) if name == "prefill"][1:]
    assert len(read) == 10
    assert calls[read[0] : read[-1] + 2] == [*["prefill"] * pieces, "decode"] * (10 // pieces)


@pytest.mark.parametrize("rows", [1, 32])
def test_a_step_is_one_run_of_the_graph_whatever_the_rows_ask_for(
    rows: int, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qsample.ort.bound_graph import BoundGraph

    runs: list[int] = []
    plain = BoundGraph.run
    monkeypatch.setattr(
        BoundGraph, "run", lambda self, *, wait=True: (runs.append(1), plain(self, wait=wait))[1]
    )
    params = [
        SamplingParams(temperature=row % 2, max_new_tokens=11, eos_token_id=())
        for row in range(rows)
    ]
    output = model.generate([[5 + row] for row in range(rows)], params, seed=0)
    assert len(runs) == 1 + 10  # one for all prompts, then one a step
    for row in range(rows):
        assert output.token_ids[row] == expected([5 + row], params[row], row)[0]


def test_the_slots_of_a_compiled_package(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(compilation=compilation(batch_size=2, ctx_len=48))
    with pytest.raises(
        ValueError, match="slots is 3 and the package was compiled for 2 rows at most"
    ):
        Engine(model, slots=3)
    with Engine(model) as engine:
        assert (engine.slots, engine.capacity) == (2, 48)


@pytest.mark.parametrize("slots", [1, 4])
def test_outputs_come_in_the_order_of_the_prompts(
    slots: int, model: CausalLM, gate: threading.Semaphore
) -> None:
    generator = random.Random(3)
    cases = [(random_prompt(generator), random_params(generator), seed) for seed in range(20)]
    read: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for index, (prompt, _, _) in enumerate(cases):
            read.append(index)
            if index == slots + 1:  # nothing has ended so far
                gate.release(100_000)
            yield prompt

    with Engine(model, slots=slots, max_waiting=2) as engine:
        outputs = engine.map(prompts(), each=[{"params": params} for _, params, _ in cases], seed=0)
        first = next(outputs)
        assert len(read) < 20  # as far as there is room
        found = [first, *outputs]
    assert [(output.token_ids, output.finish_reason) for output in found] == [
        expected(*case) for case in cases
    ]
    assert [output.seed for output in found] == list(range(20))


def test_errors_come_in_their_places(model: CausalLM) -> None:
    prompts: list[Any] = [[5], [], [-1], [6]]
    options = [{}, {"allowed_tokens": print}, {}, {"seed": 7}]
    with Engine(model, slots=2) as engine:
        outputs = list(engine.map(prompts, FREE, each=options, seed=3, return_errors=True))
        assert [isinstance(output, RequestOutput) for output in outputs] == [
            True,
            False,
            False,
            True,
        ]
        assert all(isinstance(outputs[index], ValueError) for index in (1, 2))
        assert [output.seed for output in outputs if not isinstance(output, Exception)] == [3, 7]
        raising = engine.map(prompts, FREE, each=options)
        assert len(next(raising).token_ids) == 20
        with pytest.raises(ValueError, match="no prompt was given"):
            next(raising)
        assert list(raising) == []
        given = iter([[], [5]])
        first, second = engine.map(given, FREE, seed=1, return_errors=True)
        assert isinstance(first, ValueError)
        assert not isinstance(second, Exception)
        assert (second.token_ids, second.finish_reason) == expected([5], FREE, 2)
        with pytest.raises(ValueError, match="no prompt was given"):
            next(engine.map(given := iter([[], [5]]), FREE))
        assert next(given) == [5], "no more was read"
        with pytest.raises(ValueError, match="shorter"):
            list(engine.map([[5], [6]], FREE, each=[{}]))


def test_an_iterator_that_is_closed_cancels_the_rest_and_a_closed_engine_ends_it(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[Request] = []
    cancel = Request.cancel
    monkeypatch.setattr(
        Request, "cancel", lambda request: (cancelled.append(request), cancel(request))[1]
    )
    with Engine(model, slots=1) as engine:
        outputs = engine.map(
            [[5], [6], [7]], each=[{"params": FREE}, {"params": ENDLESS}, {"params": ENDLESS}]
        )
        next(outputs)
        outputs.close()  # type: ignore[attr-defined]
        assert len(cancelled) == 2
        assert engine.drain(60)
        with pytest.raises(EngineClosedError):
            list(engine.map([[5]], return_errors=True))


def ways_to_add(engine: Engine, model: CausalLM) -> list[Callable[..., Request]]:
    """Each with the same options: `add_request`, `add_requests` and `add`."""

    def add(prompt: list[int], params: SamplingParams, seed: int = 0, **options: Any) -> Request:
        return engine.add(model.read(prompt, params, seed=seed, num_return_sequences=1), **options)[
            0
        ]

    return [
        engine.add_request,
        lambda *given, **options: engine.add_requests(*given, num_return_sequences=1, **options)[0],
        add,
    ]


def test_each_way_to_add_takes_the_options_of_an_engine(
    model: CausalLM, gate: threading.Semaphore
) -> None:
    with Engine(model, slots=3, max_waiting=3) as engine:
        requests = [add([5], FREE, seed=1, priority=2) for add in ways_to_add(engine, model)]
        requests += [add([5], FREE, seed=1) for add in ways_to_add(engine, model)]
        for add in ways_to_add(engine, model):
            with pytest.raises(QueueFullError):
                add([5], FREE, timeout=0)
        gate.release(100_000)
        assert [outcome(request) for request in requests] == [expected([5], FREE, 1)] * 6
        assert [request._sequence.request.priority for request in requests] == [2] * 3 + [0] * 3


@pytest.mark.parametrize("way", range(3))
def test_a_request_whose_reader_gave_up(way: int, model: CausalLM) -> None:
    params = SamplingParams(max_new_tokens=60, eos_token_id=())
    with Engine(model, slots=1) as engine:
        for options, reason in (({}, "cancelled"), ({"cancel_if_abandoned": False}, "length")):
            request = ways_to_add(engine, model)[way]([5], params, **options)
            reader = iter(request)
            next(reader)
            reader.close()  # type: ignore[attr-defined]
            assert request.result(60).finish_reason == reason


def test_prefixes_from_files_and_a_folder(model: CausalLM, tmp_path: Path) -> None:
    assert model.save_prefix([7] * 9, tmp_path / "sevens") == 8
    folder, prompt = tmp_path / "kept", [*[7] * 8, 5]
    for most, kept in ((1, False), (1 << 20, True)):
        with Engine(
            model,
            slots=1,
            prefixes=[tmp_path / "sevens"],
            prefix_cache_dir=folder,
            prefix_cache_bytes=most,
        ) as engine:
            for seed, (asked, cached) in enumerate(((prompt, 8), ([9] * 9, 0))):
                request = engine.add_request(asked, FREE, seed=seed)
                assert outcome(request) == expected(asked, FREE, seed)
                assert request.result().usage.cached_tokens == cached
        assert any(folder.iterdir()) == kept
    with Engine(model, slots=1, prefix_cache_dir=folder) as engine:
        request = engine.add_request([9] * 9, FREE, seed=1)
        assert outcome(request) == expected([9] * 9, FREE, 1)
        assert request.result().usage.cached_tokens == 8
