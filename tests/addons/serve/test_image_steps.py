"""Room that requests share, and the places that they hold."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from qsample.addons.serve.app import TimeLimit
from qsample.addons.serve.http import ApiError
from qsample.addons.serve.image_steps import FeatureRoom, Room
from qsample.addons.serve.models import Places
from qsample.runtime import QueueFullError


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_room_is_taken_in_the_order_of_asking() -> None:
    async def work() -> None:
        room = Room(10)
        order: list[str] = []

        async def take(name: str, count: int) -> None:
            await room.take(count)
            order.append(name)

        await take("first", 4)
        await take("second", 6)
        tasks = [asyncio.create_task(take(*each)) for each in (("large", 7), ("small", 1))]
        await settle()
        assert order == ["first", "second"]
        room.give_back(4)
        await settle()
        assert order == ["first", "second"], "the small one does not overtake"
        room.give_back(6)
        await asyncio.gather(*tasks)
        assert order == ["first", "second", "large", "small"]

    run(work())


def test_more_than_all_room_waits_until_all_is_free() -> None:
    async def work() -> None:
        room = Room(10)
        await room.take(1)
        task = asyncio.create_task(room.take(11))
        await settle()
        assert not task.done()
        room.give_back(1)
        await task
        last = asyncio.create_task(room.take(1))
        await settle()
        assert not last.done()
        room.give_back(11)
        await last
        await room.take(0)

    run(work())


def test_who_leaves_the_queue_takes_nothing() -> None:
    async def work() -> None:
        room = Room(10)
        await room.take(10)
        first, second = (asyncio.create_task(room.take(5)) for _ in range(2))
        await settle()
        first.cancel()
        await settle()
        room.give_back(5)
        await second
        assert first.cancelled()
        room.give_back(10)
        await room.take(10)

    run(work())


def test_a_request_gives_its_room_back_once() -> None:
    async def work() -> None:
        room = Room(10)
        mine = FeatureRoom(room)
        mine.give_back()
        await mine.take(3)
        await mine.take(4)
        other = asyncio.create_task(room.take(10))
        await settle()
        assert not other.done()
        mine.give_back()
        mine.give_back()
        await other
        further = asyncio.create_task(room.take(1))
        await settle()
        assert not further.done(), "nothing was given back twice"
        further.cancel()

    run(work())


def places_of(running: int, waiting: int, slots: int = 2, max_waiting: int = 4) -> Places:
    stats = SimpleNamespace(running=running, waiting=waiting, slots=slots, max_waiting=max_waiting)
    engine: Any = SimpleNamespace(stats=lambda: stats)
    return Places(engine)


def test_places_are_held_until_they_are_let_go() -> None:
    places = places_of(running=1, waiting=1)
    places.check(4)
    with pytest.raises(QueueFullError, match="2 of 6 places are taken and 5 were requested"):
        places.check(5)
    with places.hold(3) as let_go:
        places.check(1)
        with pytest.raises(QueueFullError, match="5 of 6 places are taken and 2 were requested"):
            places.hold(2).__enter__()
        with places.hold(1), pytest.raises(QueueFullError):
            places.check(1)
        let_go()
        places.check(4)
        let_go()
        places.check(4)
        with pytest.raises(QueueFullError):
            places.check(5)
    places.check(4)
    with pytest.raises(ZeroDivisionError), places.hold(4):
        raise ZeroDivisionError
    places.check(4)
    with pytest.raises(QueueFullError):
        places.check(5)
    places_of(running=2, waiting=4).check(0)


def test_the_time_of_a_request() -> None:
    async def work() -> None:
        limit = TimeLimit(None)
        async with limit.of_preparation():
            await asyncio.sleep(0)
        assert limit.seconds_left() is None

        limit = TimeLimit(50.0)
        first = limit.seconds_left()
        assert first is not None
        assert 0 < first <= 50
        await asyncio.sleep(0.01)
        second = limit.seconds_left()
        assert second is not None
        assert second < first

        limit = TimeLimit(0.01)
        with pytest.raises(ApiError) as raised:
            async with limit.of_preparation():
                await asyncio.sleep(600)
        assert (raised.value.status, raised.value.code) == (504, "timeout")
        with pytest.raises(ApiError, match="did not begin in the time"):
            limit.seconds_left()

    run(work())
