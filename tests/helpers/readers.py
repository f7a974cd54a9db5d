"""Ways in which the reader of a request gives up, in a thread and in a coroutine."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import pytest

from qsample.runtime import Delta, Request


def break_out(request: Request) -> None:
    for _ in request:
        break


def raise_inside(request: Request) -> None:
    with suppress(ZeroDivisionError):
        for _ in request:
            _ = 1 / 0


def close_the_iterator(request: Request) -> None:
    reader = iter(request)
    next(reader)
    reader.close()  # type: ignore[attr-defined]


def drop_the_iterator(request: Request) -> None:
    next(iter(request))


def drop_a_cycle(request: Request) -> None:
    class Holder:
        def __init__(self, reader: Iterator[Delta]) -> None:
            self.reader, self.itself = reader, self

    next(Holder(iter(request)).reader)
    gc.collect()


async def async_break(request: Request) -> None:
    async for _ in request:
        break


async def async_raise(request: Request) -> None:
    with suppress(ZeroDivisionError):
        async for _ in request:
            _ = 1 / 0


async def async_close(request: Request) -> None:
    reader = aiter(request)
    await anext(reader)
    await reader.aclose()  # type: ignore[attr-defined]
    with pytest.raises(StopAsyncIteration):
        await anext(reader)


async def cancel(task: asyncio.Task[object]) -> None:
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancelled_while_awaiting(request: Request) -> None:
    await cancel(asyncio.ensure_future(request))


async def cancelled_while_iterating(request: Request) -> None:
    async def read() -> None:
        reader = aiter(request)  # a variable, which the task's exception keeps alive
        async for _ in reader:
            pass

    task = asyncio.create_task(read())
    await cancel(task)


async def cancelled_between_two_deltas(request: Request) -> None:
    async def read() -> None:
        async for _ in request:
            await asyncio.sleep(60)

    await cancel(asyncio.create_task(read()))


async def too_slow(request: Request) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(request, 0.01)


async def left_pending_by_its_loop(request: Request) -> None:
    task = asyncio.ensure_future(request)
    await asyncio.sleep(0.01)
    del task  # asyncio.run cancels it


THREADED: list[Callable[[Request], None]] = [
    break_out, raise_inside, close_the_iterator, drop_the_iterator, drop_a_cycle,
]  # fmt: skip
COROUTINES: list[Callable[[Request], Awaitable[None]]] = [
    async_break, async_raise, async_close, cancelled_while_awaiting, cancelled_while_iterating,
    cancelled_between_two_deltas, too_slow, left_pending_by_its_loop,
]  # fmt: skip
