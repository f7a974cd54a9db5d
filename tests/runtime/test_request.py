"""Requests: what they tell their readers, in threads and in coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsample.contract.tensors import RUNNING, STOPPED
from qsample.runtime import (
    CausalLM,
    Delta,
    Engine,
    Request,
)
from qsample.runtime.decode.loop import DecodeLoop
from qsample.runtime.sequence import Sequence
from tests.helpers.requests import (
    ENDLESS,
    FREE,
    expected,
    make_sequence,
    outcome,
    read_tokens,
    wait_for_token,
    wait_until,
)


def test_deltas_join_to_the_output(model: CausalLM) -> None:
    wanted = model.generate("hello", FREE, seed=5)
    assert wanted.texts is not None
    for flush_every in (1, 4):
        with Engine(model, slots=2, flush_every=flush_every) as engine:
            request = engine.add_request("hello", FREE, seed=5)
            deltas, again = list(request), list(request)  # a second reader sees everything
        assert deltas == again
        assert [token for delta in deltas for token in delta.token_ids] == wanted.token_ids[0]
        assert "".join(delta.text or "" for delta in deltas) == wanted.texts[0]
        assert [len(delta.token_ids) for delta in deltas if delta.token_ids] == (
            [1] * 20 if flush_every == 1 else [1, 4, 4, 4, 4, 3]
        )
        output = request.result()
        assert (output.token_ids, output.text, output.seed) == (
            wanted.token_ids[0],
            wanted.texts[0],
            5,
        )
        assert (output.finish_reason, output.stop_string, output.outputs) == ("length", None, {})
        timing = output.timing
        assert timing.queue_seconds is not None
        assert timing.first_token_seconds == deltas[0].seconds
        assert 0 <= timing.queue_seconds < timing.first_token_seconds < timing.total_seconds
        assert [delta.seconds for delta in deltas] == sorted(delta.seconds for delta in deltas)


def test_callbacks_at_the_end_and_after_it(model: CausalLM) -> None:
    told: list[Request] = []

    def stop(request: Request) -> None:
        raise KeyboardInterrupt

    with Engine(model, slots=1) as engine:
        request = engine.add_request([9], ENDLESS)
        request.add_done_callback(told.append)
        assert not told
        request.cancel()
        wait_until(lambda: told == [request])
    request.add_done_callback(told.append)
    assert told == [request, request]
    with pytest.warns(RuntimeWarning, match="a callback of a request raised .*division"):
        request.add_done_callback(lambda request: 1 / 0)
    with pytest.warns(RuntimeWarning, match="KeyboardInterrupt"), pytest.raises(KeyboardInterrupt):
        request.add_done_callback(stop)


def test_optional_outputs_of_deltas(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(logprobs=True, top_logprobs=3, probs=True)
    with Engine(model, slots=3) as engine:
        engine.add_request([9], ENDLESS, seed=7)
        request = engine.add_request([5, 6], FREE, seed=2)
        deltas, outputs = list(request), request.result(60).outputs
    for name in outputs:
        parts = [delta.outputs[name] for delta in deltas if delta.token_ids]
        np.testing.assert_array_equal(np.concatenate(parts), outputs[name])
    # A token keeps none of the outputs of the other slots, for as long as a request runs.
    assert {output["probs"].base for output in request._sequence.progress.outputs} == {None}


def test_async_readers_do_not_block_their_loop(model: CausalLM, gate: threading.Semaphore) -> None:
    async def main() -> None:
        requests = [engine.add_request([5 + n], FREE, seed=n) for n in range(6)]
        readers = [asyncio.create_task(read_tokens(request)) for request in requests]
        await asyncio.sleep(0.02)  # the engine waits at the gate, and this goes on
        assert not any(reader.done() for reader in readers)
        gate.release(1000)
        for n, reader in enumerate(readers):
            assert await reader == expected([5 + n], FREE, n)[0]
        assert (await requests[3]).token_ids == expected([8], FREE, 3)[0]
        assert not any(request._feed.has_readers for request in requests)

    with Engine(model, slots=4) as engine:
        asyncio.run(asyncio.wait_for(main(), 60))


class RaisingLoop(asyncio.SelectorEventLoop):
    def call_soon_threadsafe(self, *args: Any, **options: Any) -> Any:
        raise SystemExit("no more calls")


@pytest.mark.parametrize("make", [asyncio.new_event_loop, RaisingLoop])
def test_a_reader_without_its_event_loop_affects_no_other_reader(
    make: Callable[[], asyncio.AbstractEventLoop], model: CausalLM, gate: threading.Semaphore
) -> None:
    with Engine(model, slots=2) as engine:
        requests = [engine.add_request([5 + n], FREE, seed=n) for n in range(2)]
        loop = make()
        reader = aiter(requests[0])
        wait_for_token(requests[0])
        loop.run_until_complete(anext(reader))
        task = loop.create_task(anext(reader))
        loop.run_until_complete(asyncio.sleep(0))
        if make is not RaisingLoop:
            loop.close()
        gate.release(1000)
        assert [outcome(request) for request in requests] == [
            expected([5 + n], FREE, n) for n in range(2)
        ]
        if make is RaisingLoop:
            task.cancel()
            loop.run_until_complete(asyncio.wait([task]))
            loop.close()
        del task, reader


def test_cancelling_in_the_queue_in_the_prompt_and_while_running(
    model: CausalLM, gate: threading.Semaphore
) -> None:
    with Engine(model, slots=2, prefill_chunk_size=1) as engine:
        running = engine.add_request([5], ENDLESS, seed=0)
        gate.release(3)
        wait_until(lambda: running.completion_tokens >= 4)
        prefilling = engine.add_request([6] * 100, ENDLESS, seed=1)
        gate.release(2)
        wait_until(lambda: prefilling._sequence.placement.tokens_read > 0)
        queued = engine.add_request([7], ENDLESS, seed=2)
        stays = engine.add_request([8], FREE, seed=3)
        for request in (queued, prefilling, running) * 2:
            request.cancel()  # the second time it is about to end
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


def test_a_request_that_is_added_and_cancelled_while_the_engine_takes_others(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Request] = []
    plain = DecodeLoop.add

    def add_and_cancel() -> None:
        late.append(engine.add_request([7], FREE, seed=2))
        late[0].cancel()

    def add(self: DecodeLoop, sequence: Sequence) -> None:
        plain(self, sequence)
        if not late:
            thread = threading.Thread(target=add_and_cancel)
            thread.start()
            thread.join(60)

    monkeypatch.setattr(DecodeLoop, "add", add)
    with Engine(model, slots=2) as engine:
        assert outcome(engine.add_request([6], FREE, seed=1)) == expected([6], FREE, 1)
        assert outcome(late[0]) == ([], "cancelled")
        assert outcome(engine.add_request([8], FREE, seed=3)) == expected([8], FREE, 3)


def test_a_consumer_that_never_reads_holds_up_no_other_request(model: CausalLM) -> None:
    with Engine(model, slots=2, max_waiting=0) as engine:
        unread = [
            engine.add_request([5], FREE, seed=n) for n in range(12)
        ]  # more than the engine holds
        assert outcome(engine.add_request([6], FREE, seed=1)) == expected([6], FREE, 1)
        assert outcome(unread[3]) == expected([5], FREE, 3)


@pytest.mark.parametrize("in_a_coroutine", [False, True])
def test_nothing_is_lost_of_a_request_that_ends_while_it_is_read(
    in_a_coroutine: bool, model: CausalLM
) -> None:
    """Its last tokens come, and it ends, between a reader's look at what there is and its next one."""

    class EndsWhenRead(list[Delta]):
        def __len__(self) -> int:
            return self.ended_after(super().__len__())

        def __getitem__(self, index: Any) -> Any:
            return self.ended_after(super().__getitem__(index))

        def ended_after(self, value: Any) -> Any:
            if request._sequence.status == RUNNING:
                request._sequence.progress.sampled += [7, 8]
                request._sequence.progress.status = STOPPED
                request.update()
                request.finish("stop")
            return value

    async def read() -> list[int]:
        return [token async for delta in request for token in delta.token_ids]

    request = Request(make_sequence(model, [5], FREE, 0, 64), lambda _: None, lambda: None)
    request._feed.deltas = EndsWhenRead()
    tokens = (
        asyncio.run(read())
        if in_a_coroutine
        else [token for delta in request for token in delta.token_ids]
    )
    assert tokens == request.result(0).token_ids == [7, 8]
