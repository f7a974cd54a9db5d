"""The engine: every request gets the tokens that it gets alone, whatever the others do."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.package import Package
from qsample.runtime import (
    CausalLM,
    Engine,
    EngineClosedError,
    QueueFullError,
    Request,
    SamplingParams,
    load,
)
from qsample.runtime.decode.slots import Slots
from tests.helpers import fake_reference
from tests.helpers.fake_package import MAX_POSITIONS, POISON, VOCAB, compilation
from tests.helpers.requests import random_params, random_prompt

FREE = SamplingParams(temperature=0.9, max_new_tokens=20, eos_token_id=())
ENDLESS = SamplingParams(temperature=0.9, max_new_tokens=240, eos_token_id=())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """The engine makes one decode step for each release."""
    steps = threading.Semaphore(0)
    plain = Slots.decode

    def decode(self: Slots, *, wait: bool = True) -> None:
        assert steps.acquire(timeout=60)
        plain(self, wait=wait)

    monkeypatch.setattr(Slots, "decode", decode)
    yield steps
    steps.release(100_000)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def expected(prompt: list[int], params: SamplingParams, seed: int) -> tuple[list[int], str]:
    return fake_reference.generate(prompt, params, seed, MAX_POSITIONS)


def outcome(request: Request) -> tuple[list[int], str]:
    output = request.result(60)
    return output.token_ids, output.finish_reason


# The right tokens.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_size": 3, "double_buffering": False},
        {"flush_every": 4, "prefill_chunk_size": 7},
        {"flush_every": 16, "slots": 3, "double_buffering": False},
    ],
    ids=str,
)
def test_two_hundred_requests_give_the_tokens_that_each_gives_alone(options: dict[str, Any], model: CausalLM) -> None:
    generator = random.Random(11)
    cases = [(random_prompt(generator), random_params(generator), seed) for seed in range(200)]
    with Engine(model, **{"slots": 8, "max_waiting": 20} | options) as engine:
        requests = [engine.add_request(prompt, params, seed=seed) for prompt, params, seed in cases]
        assert [outcome(request) for request in requests] == [expected(*case) for case in cases]


@pytest.mark.parametrize("sampler", [True, False])
def test_requests_from_many_threads_in_any_order(sampler: bool, fake_model: Callable[..., CausalLM]) -> None:
    generator = random.Random(4)
    cases = [(random_prompt(generator), random_params(generator), seed) for seed in range(40)]
    found: dict[int, tuple[list[int], str]] = {}

    def ask(places: list[int]) -> None:
        for place in places:
            prompt, params, seed = cases[place]
            found[place] = outcome(engine.add_request(prompt, params, seed=seed))

    order = list(range(40))
    generator.shuffle(order)
    with Engine(fake_model(sampler=sampler), slots=4, max_waiting=1, prefill_chunk_size=5) as engine:
        threads = [threading.Thread(target=ask, args=(order[start::5],)) for start in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [found[place] for place in range(40)] == [expected(*case) for case in cases]


def test_an_exported_graph(llama_package: Path) -> None:
    """Real attention and the real sampler, float32: neighbours, slots, chunks and reused prefixes change no token."""
    model = load(llama_package)
    generator = random.Random(6)
    prompts = [[generator.randrange(4, 260) for _ in range(generator.randrange(1, 30))] for _ in range(24)]
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
    alone = [model.generate(*row, seed=seed) for seed, row in enumerate(zip(prompts, params, strict=True))]
    prompts += [[*prompt, *output.new_token_ids[0][:5], 9] for prompt, output in zip(prompts, alone, strict=True)]
    params *= 2
    alone += [model.generate(prompts[seed], params[seed], seed=seed) for seed in range(24, 48)]
    for slots, chunk, flush_every in ((8, 8, 1), (3, 5, 4)):
        with Engine(model, slots=slots, prefill_chunk_size=chunk, flush_every=flush_every) as engine:
            requests = [
                engine.add_request(*row, seed=seed) for seed, row in enumerate(zip(prompts, params, strict=True))
            ]
            for request, output in zip(requests, alone, strict=True):
                assert outcome(request) == (output.new_token_ids[0], output.finish_reasons[0])


def test_a_conversation_reads_only_what_is_new(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[list[int]] = []
    plain = Slots.prefill

    def prefill(self: Slots, slot: int, *ids: np.ndarray, emit: bool) -> None:
        fed.extend(row.tolist() for row in ids)
        plain(self, slot, *ids, emit=emit)

    monkeypatch.setattr(Slots, "prefill", prefill)
    history = [9, 200, 31, 4, 5]
    with Engine(model, slots=3) as engine:
        for turn in range(4):
            other = engine.add_request([50 + turn] * 8, FREE, seed=99)  # someone else, in other slots
            request = engine.add_request(history, FREE, seed=turn)
            assert outcome(request) == expected(history, FREE, turn)
            assert outcome(other) == expected([50 + turn] * 8, FREE, 99)
            usage = request.result().usage
            new = len(history) if turn == 0 else 4  # the sampled token that was never fed, and three more
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(history), 20)
            assert usage.cached_tokens == len(history) - new
            assert history[-new:] in fed
            history = [*history, *request.result().token_ids, 60 + turn, 61, 62]


def test_a_long_prompt_does_not_hold_up_running_rows(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("prefill", "decode"):
        plain = getattr(Slots, name)

        def call(self: Slots, *args: Any, name: str = name, plain: Any = plain, **options: Any) -> None:
            calls.append(name)
            plain(self, *args, **options)

        monkeypatch.setattr(Slots, name, call)
    with Engine(model, slots=2, prefill_chunk_size=4) as engine:
        running = engine.add_request([5], ENDLESS, seed=0)
        next(iter(running))
        late = engine.add_request([6] * 40, FREE, seed=1)
        assert outcome(late) == expected([6] * 40, FREE, 1)
        assert outcome(running) == expected([5], ENDLESS, 0)
    chunks = [place for place, name in enumerate(calls) if name == "prefill"][1:]
    assert len(chunks) == 10
    assert all(calls[place + 1] == "decode" for place in chunks)
    assert calls[chunks[0] : chunks[-1] + 1] == ["prefill", "decode"] * 9 + ["prefill"]


@pytest.mark.parametrize("rows", [1, 32])
def test_a_step_is_one_run_of_the_graph_whatever_the_rows_ask_for(
    rows: int, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qsample.runtime.session.bound_graph import BoundGraph

    runs: list[int] = []
    plain = BoundGraph.run
    monkeypatch.setattr(BoundGraph, "run", lambda self, *, wait=True: (runs.append(1), plain(self, wait=wait))[1])
    params = [SamplingParams(temperature=row % 2, max_new_tokens=11, eos_token_id=()) for row in range(rows)]
    output = model.generate([[5 + row] for row in range(rows)], params, seed=0)
    assert len(runs) == 1 + 10  # one for all prompts, then one a step
    for row in range(rows):
        assert output.new_token_ids[row] == expected([5 + row], params[row], row)[0]


# What a request tells.


def test_deltas_join_to_the_output(model: CausalLM) -> None:
    wanted = model.generate("hello", FREE, seed=5)
    assert wanted.texts is not None
    for flush_every in (1, 4):
        with Engine(model, slots=2, flush_every=flush_every) as engine:
            request = engine.add_request("hello", FREE, seed=5)
            deltas, again = list(request), list(request)  # a second reader sees everything
        assert deltas == again
        assert [token for delta in deltas for token in delta.token_ids] == wanted.new_token_ids[0]
        assert "".join(delta.text or "" for delta in deltas) == wanted.texts[0]
        assert [len(delta.token_ids) for delta in deltas if delta.token_ids] == (
            [1] * 20 if flush_every == 1 else [1, 4, 4, 4, 4, 3]
        )
        output = request.result()
        assert (output.token_ids, output.text, output.seed) == (wanted.new_token_ids[0], wanted.texts[0], 5)
        assert (output.finish_reason, output.stop_string, output.outputs) == ("length", None, {})
        timing = output.timing
        assert timing.queue_seconds is not None
        assert timing.first_token_seconds == deltas[0].seconds
        assert 0 <= timing.queue_seconds < timing.first_token_seconds < timing.total_seconds
        assert [delta.seconds for delta in deltas] == sorted(delta.seconds for delta in deltas)


def test_a_package_without_a_tokenizer(fake_model: Callable[..., CausalLM]) -> None:
    with Engine(fake_model(tokenizer=False), slots=1) as engine:
        request = engine.add_request([5, 6], FREE, seed=1)
        assert {delta.text for delta in request} == {None}
        assert request.result().text is None
        assert outcome(request) == expected([5, 6], FREE, 1)


def test_stop_strings_and_a_seed_of_its_own(model: CausalLM) -> None:
    free = model.generate("hello", FREE, seed=3)
    assert free.texts is not None
    stop = next(character for character in free.texts[0][4:] if "!" <= character <= "~")
    wanted = model.generate("hello", FREE, seed=3, stop_strings=stop)
    for flush_every in (1, 8):
        with Engine(model, slots=2, flush_every=flush_every) as engine:
            request, neighbour = (
                engine.add_request("hello", FREE, seed=3, stop_strings=x) for x in ([stop, "~~~"], None)
            )
            output = request.result(60)
            assert "".join(delta.text or "" for delta in request) == output.text
            assert neighbour.result(60).text == free.texts[0]
            fresh = [engine.add_request("hello", max_new_tokens=3) for _ in range(2)]
            assert fresh[0].seed != fresh[1].seed
        assert wanted.texts == [output.text]
        assert (output.token_ids, output.finish_reason, output.stop_string) == (wanted.new_token_ids[0], "stop", stop)


def test_optional_outputs(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(logprobs=True, top_logprobs=3, probs=True)
    wanted = model.generate([5, 6], FREE, seed=2)
    with Engine(model, slots=3) as engine:
        engine.add_request([9], ENDLESS, seed=7)
        outputs = engine.add_request([5, 6], FREE, seed=2).result(60).outputs
    assert wanted.logprobs is not None
    np.testing.assert_allclose(outputs["logprobs"][:, 0], wanted.logprobs[0], rtol=1e-5)
    assert wanted.top_logprob_ids is not None
    assert outputs["top_logprob_ids"].tolist() == wanted.top_logprob_ids[0].tolist()
    assert outputs["probs"].shape == (20, VOCAB)
    with pytest.raises(ValueError, match="flush_every is 2 and the package returns logprobs"):
        Engine(model, flush_every=2)


def test_each_request_may_have_its_own_function_for_allowed_tokens(fake_model: Callable[..., CausalLM]) -> None:
    """One may sample 10, 11, 12 …, the other 100, 101 …; a third is free, and joins windows of one step."""

    def counting(start: int) -> Callable[..., None]:
        seen: list[Any] = []

        def only(step: Any, mask: np.ndarray) -> None:
            assert mask.shape == (1, VOCAB // 32)
            if seen:
                assert (step.tokens.tolist(), step.emitted.tolist()) == ([start + len(seen) - 1], [True])
            seen.append(step)
            mask[:] = 0
            token = start + len(seen) - 1
            mask[0, token // 32] = np.array(1 << token % 32, dtype=np.uint32).astype(np.int32)

        return only

    model = fake_model(allowed_tokens=True)
    with Engine(model, slots=3, flush_every=4) as engine:
        free = engine.add_request([7, 8], FREE, seed=1)
        guided = [engine.add_request([5], FREE, allowed_tokens=counting(start)) for start in (10, 100)]
        fixed = engine.add_request([6], FREE, allowed_tokens=np.array([1 << 5, *[0] * 9], dtype=np.int32))
        assert outcome(free) == expected([7, 8], FREE, 1)
        assert [request.result(60).token_ids for request in guided] == [list(range(10, 30)), list(range(100, 120))]
        assert fixed.result(60).token_ids == [5] * 20


def test_a_compiled_package(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(compilation=compilation(batch_size=2, ctx_len=48))
    with pytest.raises(ValueError, match="slots is 3 and the package was compiled for 2 rows at most"):
        Engine(model, slots=3)
    with Engine(model) as engine:
        assert (engine.slots, engine.capacity) == (2, 48)
        requests = [engine.add_request([5 + n], FREE, seed=n) for n in range(5)]
        assert [outcome(request) for request in requests] == [expected([5 + n], FREE, n) for n in range(5)]


# Asynchronous readers.


def test_async_readers_do_not_block_their_loop(model: CausalLM, gate: threading.Semaphore) -> None:
    async def read(request: Request) -> list[int]:
        return [token async for delta in request for token in delta.token_ids]

    async def main() -> None:
        requests = [engine.add_request([5 + n], FREE, seed=n) for n in range(6)]
        readers = [asyncio.create_task(read(request)) for request in requests]
        await asyncio.sleep(0.02)  # the engine stands still at the gate, and this goes on
        assert not any(reader.done() for reader in readers)
        gate.release(1000)
        for n, reader in enumerate(readers):
            assert await reader == expected([5 + n], FREE, n)[0]
        assert (await requests[3]).token_ids == expected([8], FREE, 3)[0]
        assert [len(request._listeners) for request in requests] == [0] * 6

    with Engine(model, slots=4) as engine:
        asyncio.run(asyncio.wait_for(main(), 60))


def test_a_reader_whose_event_loop_is_gone_harms_nobody(model: CausalLM, gate: threading.Semaphore) -> None:
    with Engine(model, slots=2) as engine:
        requests = [engine.add_request([5 + n], FREE, seed=n) for n in range(2)]
        loop = asyncio.new_event_loop()
        reader = aiter(requests[0])
        loop.run_until_complete(anext(reader))
        task = loop.create_task(anext(reader))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        gate.release(1000)
        assert [outcome(request) for request in requests] == [expected([5 + n], FREE, n) for n in range(2)]
        del task, reader


# What can go wrong.


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([5], {"temperature": -1}, "temperature is -1"),
        ([5], {"temprature": 1}, "did you mean 'temperature'"),
        ([5] * MAX_POSITIONS, {}, "prompt has 256 tokens and the context length is 256; give at most 255"),
        ([VOCAB], {}, f"prompt 0 has token id {VOCAB}"),
        (["one", "two"], {}, "2 prompts were given; add them one by one"),
        ([5], {"seed": -1}, "seed is -1"),
        ([5], {"stop_strings": ""}, "stop_strings is ''"),
        ([5], {"logit_bias": {5: 1.0}}, "logit_bias needs a package"),
        ([5], {"allowed_tokens": lambda step, mask: None}, "allowed_tokens needs a package"),
    ],
)
def test_a_wrong_request_is_refused_where_it_is_added(
    inputs: Any, options: dict[str, Any], message: str, model: CausalLM
) -> None:
    with Engine(model, slots=1) as engine:
        running = engine.add_request([5], FREE, seed=1)
        with pytest.raises(ValueError, match=message):
            engine.add_request(inputs, **options)
        assert outcome(running) == expected([5], FREE, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"max_waiting": -1}, "max_waiting is -1"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size is 0"),
        ({"flush_every": 1.5}, "flush_every is 1.5"),
    ],
)
def test_a_wrong_engine(options: dict[str, Any], message: str, model: CausalLM) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(model, **options)


def test_cancelling_in_the_queue_in_the_prompt_and_while_running(model: CausalLM, gate: threading.Semaphore) -> None:
    with Engine(model, slots=2, prefill_chunk_size=1) as engine:
        running = engine.add_request([5], ENDLESS, seed=0)
        gate.release(3)
        wait_until(lambda: len(running._deltas) >= 4)
        prefilling = engine.add_request([6] * 100, ENDLESS, seed=1)
        gate.release(2)
        wait_until(lambda: prefilling._sequence.consumed > 0)
        queued = engine.add_request([7], ENDLESS, seed=2)
        stays = engine.add_request([8], FREE, seed=3)
        for request in (queued, prefilling, running):
            request.cancel()
        gate.release(10_000)
        assert outcome(queued) == outcome(prefilling) == ([], "cancelled")
        assert queued.result().timing.queue_seconds is None
        assert prefilling.result().timing.queue_seconds is not None
        tokens, reason = outcome(running)
        assert reason == "cancelled"
        assert tokens == expected([5], ENDLESS, 0)[0][: len(tokens)]
        assert 3 <= len(tokens) < 240
        assert outcome(stays) == expected([8], FREE, 3)
        running.cancel()  # again, after its end
        assert outcome(engine.add_request([6] * 30, FREE, seed=4)) == expected([6] * 30, FREE, 4)


def test_a_poisoned_request_ends_alone_and_its_slot_is_used_again(model: CausalLM) -> None:
    with Engine(model, slots=1, prefill_chunk_size=2) as engine:
        poisoned = engine.add_request([5, POISON, 6, 7, 8], FREE, seed=1)
        after = [engine.add_request([5, 9, 6, 7][:n], FREE, seed=2) for n in (1, 4)]
        assert outcome(poisoned) == ([], "invalid")
        assert [outcome(request) for request in after] == [expected([5, 9, 6, 7][:n], FREE, 2) for n in (1, 4)]


def test_nothing_is_kept_of_a_row_that_had_no_token_to_sample(fake_model: Callable[..., CausalLM]) -> None:
    """Its last chunk was not committed, so the steps of others wrote where its keys and values would be."""
    prompt = [9, 200, 31, 4, 5, 6]
    with Engine(fake_model(allowed_tokens=True), slots=2, prefill_chunk_size=2) as engine:
        running = engine.add_request([5], ENDLESS, seed=0)
        next(iter(running))
        nothing = np.zeros(VOCAB // 32, dtype=np.int32)
        assert outcome(engine.add_request(prompt, FREE, allowed_tokens=nothing)) == ([], "invalid")
        seen = len(running._deltas)
        wait_until(lambda: len(running._deltas) > seen + 3)
        longer = [*prompt, 7, 8]
        assert outcome(engine.add_request(longer, FREE, seed=1)) == expected(longer, FREE, 1)
        assert not running.done


def test_a_function_that_raises_ends_its_request_alone(fake_model: Callable[..., CausalLM]) -> None:
    def broken(step: Any, mask: np.ndarray) -> None:
        if step is not None and step.tokens[0] >= 0:
            raise RuntimeError("the grammar has no more rules")

    with Engine(fake_model(allowed_tokens=True), slots=2) as engine:
        healthy = engine.add_request([6], FREE, seed=1)
        failing = engine.add_request([5], FREE, allowed_tokens=broken)
        with pytest.raises(RuntimeError, match="no more rules"):
            failing.result(60)
        with pytest.raises(RuntimeError, match="no more rules"):
            list(failing)
        assert outcome(healthy) == expected([6], FREE, 1)
        assert outcome(engine.add_request([7], FREE, seed=2)) == expected([7], FREE, 2)


def test_a_consumer_that_never_reads_holds_up_nobody(model: CausalLM) -> None:
    with Engine(model, slots=2, max_waiting=0) as engine:
        unread = [engine.add_request([5], FREE, seed=n) for n in range(12)]  # more than there are places
        assert outcome(engine.add_request([6], FREE, seed=1)) == expected([6], FREE, 1)
        assert outcome(unread[3]) == expected([5], FREE, 3)


def test_back_pressure(model: CausalLM, gate: threading.Semaphore) -> None:
    with Engine(model, slots=1, max_waiting=2) as engine:
        requests = [engine.add_request([5], FREE, seed=n) for n in range(3)]
        for timeout in (0, 0.01):
            with pytest.raises(QueueFullError, match="1 requests run and 2 wait"):
                engine.add_request([5], FREE, timeout=timeout)
        late: list[Request] = []
        thread = threading.Thread(target=lambda: late.append(engine.add_request([6], FREE, seed=9)))
        thread.start()
        assert late == []
        gate.release(1000)
        thread.join(60)
        assert outcome(late[0]) == expected([6], FREE, 9)
        assert [outcome(request) for request in requests] == [expected([5], FREE, n) for n in range(3)]


def test_a_result_that_takes_too_long(model: CausalLM, gate: threading.Semaphore) -> None:
    with Engine(model, slots=1) as engine:
        request = engine.add_request([5], FREE, seed=0)
        with pytest.raises(TimeoutError, match=r"has not ended after 0\.01 seconds"):
            request.result(0.01)
        gate.release(1000)
        assert outcome(request) == expected([5], FREE, 0)


def test_a_graph_that_fails_ends_every_request_with_its_error(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    added = threading.Event()

    def decode(self: Slots, *, wait: bool = True) -> None:
        added.wait(60)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Slots, "decode", decode)
    for double_buffering in (True, False):
        added.clear()
        with Engine(model, slots=1, double_buffering=double_buffering) as engine:
            requests = [engine.add_request([5], FREE) for _ in range(3)]
            added.set()
            for request in requests:
                with pytest.raises(EngineClosedError, match=r"its graph failed \(out of memory\)"):
                    request.result(60)
            with pytest.raises(EngineClosedError, match="out of memory"):
                engine.add_request([5], FREE)


def test_closing_cancels_and_releases_everything(model: CausalLM) -> None:
    before = threading.active_count()
    engine = Engine(model, slots=1, max_waiting=1)
    assert engine._loop is not None
    memory = weakref.ref(engine._loop._slots)
    requests = [engine.add_request([5], ENDLESS, seed=n) for n in range(2)]
    refused: list[BaseException] = []

    def wait_for_room() -> None:
        try:
            for _ in range(100):
                engine.add_request([6], ENDLESS)
        except EngineClosedError as error:
            refused.append(error)

    thread = threading.Thread(target=wait_for_room)
    thread.start()
    next(iter(requests[0]))
    engine.close()
    thread.join(60)
    assert len(refused) == 1
    assert requests[0].result(0).finish_reason in ("cancelled", "length")
    assert requests[1].done
    engine.close()
    with pytest.raises(EngineClosedError, match="the engine is closed; make a new one"):
        engine.add_request([5])
    gc.collect()
    assert memory() is None
    assert threading.active_count() == before
    assert len(model.generate([5], FREE, seed=0).new_token_ids[0]) == 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_flat_over_two_thousand_requests(fake: Callable[..., Package]) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    generator = random.Random(1)
    with Engine(load(fake().path, ctx_len=64, intra_op_num_threads=1), slots=8) as engine:
        readings = []
        for place in range(2000):
            params = SamplingParams(temperature=1.0, max_new_tokens=generator.randrange(1, 6))
            request = engine.add_request(random_prompt(generator), params, seed=place)
            if place % 7 == 0:
                request.cancel()
            if place % 500 == 499:
                request.result(60)
                gc.collect()
                readings.append(resident())
        assert len(engine._requests) <= 72
    # A leak of one row's state, 4 KiB and more, in each of the last 1,500 requests would be 6 MB.
    assert readings[-1] - readings[0] < 4e6


def test_the_interpreter_exits_with_an_engine_open(fake: Callable[..., Package]) -> None:
    import subprocess

    program = (
        "from qsample.runtime import Engine, load\n"
        f"engine = Engine(load({str(fake().path)!r}), slots=2)\n"
        "request = engine.add_request([5], max_new_tokens=200, temperature=1.0)\n"
        "next(iter(request))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
