"""Readers that give up: their request is cancelled, unless somebody else reads it or they asked for the opposite."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from qsample.runtime import CausalLM, Delta, Engine, Request
from tests.helpers.readers import COROUTINES, THREADED, break_out
from tests.helpers.requests import (
    ENDLESS,
    FREE,
    expected,
    outcome,
    read_tokens,
    wait_for_token,
    wait_until,
)


def leave(how: Callable[[Request], object], request: Request, gate: threading.Semaphore) -> None:
    """The first tokens come, and then none until the reader is gone."""
    gate.release(2)
    wait_for_token(request)

    async def run() -> None:
        await how(request)  # type: ignore[misc]

    if how in COROUTINES:
        asyncio.run(run())
    else:
        how(request)
    gate.release(100_000)


@pytest.mark.parametrize("how", [*THREADED, *COROUTINES], ids=lambda how: how.__name__)
def test_a_request_that_is_given_up_is_cancelled(
    how: Callable[[Request], object],
    model: CausalLM,
    gate: threading.Semaphore,
    only_new_garbage: None,
) -> None:
    with Engine(model, slots=2) as engine:
        neighbour = engine.add_request([6], FREE, seed=1)
        request = engine.add_request([5], ENDLESS, seed=0)
        leave(how, request, gate)
        output = request.result(60)
        assert output.finish_reason == "cancelled"
        assert output.token_ids == expected([5], ENDLESS, 0)[0][: len(output.token_ids)]
        assert outcome(neighbour) == expected([6], FREE, 1)
        assert not request._feed.has_readers


@pytest.mark.parametrize("how", [*THREADED, *COROUTINES], ids=lambda how: how.__name__)
def test_a_request_that_is_to_go_on(
    how: Callable[[Request], object],
    model: CausalLM,
    gate: threading.Semaphore,
    only_new_garbage: None,
) -> None:
    with Engine(model, slots=1) as engine:
        request = engine.add_request([5], FREE, seed=0, cancel_if_abandoned=False)
        leave(how, request, gate)
        assert outcome(request) == expected([5], FREE, 0)


@pytest.mark.parametrize(
    "wait", [lambda request: request.result(60), list], ids=["result", "iterate"]
)
def test_one_of_several_readers_gives_up(
    wait: Callable[[Request], object], model: CausalLM, gate: threading.Semaphore
) -> None:
    with Engine(model, slots=2) as engine:
        request = engine.add_request([5], FREE, seed=0)
        thread = threading.Thread(target=wait, args=(request,))
        thread.start()
        wait_until(lambda: request._feed.has_readers)
        gate.release(1)
        break_out(request)
        gate.release(1000)
        thread.join(60)
        assert outcome(request) == expected([5], FREE, 0)


def test_a_result_that_timed_out_has_not_given_up(
    model: CausalLM, gate: threading.Semaphore
) -> None:
    with Engine(model, slots=1) as engine:
        request = engine.add_request([5], FREE, seed=0)
        with pytest.raises(TimeoutError, match=r"has not ended after 0\.001 seconds"):
            request.result(0.001)
        gate.release(1000)
        assert outcome(request) == expected([5], FREE, 0)


def test_an_iterator_that_read_nothing_has_not_given_up(model: CausalLM) -> None:
    async def main() -> None:
        aiter(request)

    with Engine(model, slots=1) as engine:
        request = engine.add_request([5], FREE, seed=0)
        iter(request)
        asyncio.run(main())
        assert outcome(request) == expected([5], FREE, 0)


def test_a_cancelled_task_gives_up_at_once_although_its_iterator_lives(
    model: CausalLM, gate: threading.Semaphore
) -> None:
    async def main() -> None:
        reader = aiter(request)
        await anext(reader)
        tasks = [asyncio.ensure_future(anext(reader)) for _ in range(2)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        with pytest.raises(StopAsyncIteration):
            await tasks[1]
        assert not request._feed.has_readers

    with Engine(model, slots=1) as engine:
        request = engine.add_request([5], ENDLESS, seed=0)
        asyncio.run(asyncio.wait_for(main(), 60))
        gate.release(1000)
        assert request.result(60).finish_reason == "cancelled"


def test_shield_lets_a_request_go_on(model: CausalLM, gate: threading.Semaphore) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(request), 0.01)
        gate.release(1000)
        assert (await request).token_ids == expected([5], FREE, 0)[0]

    with Engine(model, slots=1) as engine:
        request = engine.add_request([5], FREE, seed=0)
        asyncio.run(main())


def test_waiting_for_the_next_delta_a_little_at_a_time(
    model: CausalLM, gate: threading.Semaphore
) -> None:
    """As a server does that sends something in between; the iterator loses nothing."""

    async def main() -> list[int]:
        reader: AsyncIterator[Delta] = aiter(request)
        tokens: list[int] = []
        while True:
            try:
                tokens += (await asyncio.wait_for(anext(reader), 0.005)).token_ids
            except TimeoutError:
                gate.release(3)
            except StopAsyncIteration:
                return tokens

    with Engine(model, slots=1) as engine:
        request = engine.add_request([5], FREE, seed=0, cancel_if_abandoned=False)
        assert asyncio.run(main()) == expected([5], FREE, 0)[0]


def test_two_threads_and_two_tasks_read_the_same_request(model: CausalLM) -> None:
    async def main(request: Request) -> list[list[int]]:
        return await asyncio.gather(read_tokens(request), read_tokens(request))

    with Engine(model, slots=1) as engine:
        for seed in range(5):
            request = engine.add_request([5], FREE, seed=seed)
            seen: list[list[int]] = []
            threads = [
                threading.Thread(
                    target=lambda: seen.append([t for d in request for t in d.token_ids])  # noqa: B023
                )
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            seen += asyncio.run(main(request))
            for thread in threads:
                thread.join(60)
            assert seen == [expected([5], FREE, seed)[0]] * 4
