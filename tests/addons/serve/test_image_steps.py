"""Room that requests share, and the time that they may take."""

from __future__ import annotations

import asyncio
import base64
import time
from types import SimpleNamespace
from typing import Any

import pytest

from qsample.addons.serve.app import TimeLimit
from qsample.addons.serve.http import ApiError
from qsample.addons.serve.image_steps import FeatureRoom, ImageSteps, Room
from qsample.addons.serve.settings import ServeSettings


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


class FakeModel:
    """Reads files as their lengths."""

    def __init__(self) -> None:
        self.at_once = 0
        self.most_at_once = 0
        self.model = SimpleNamespace(images=self)

    def process_images(self, files: list[bytes]) -> list[int]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(0.02)
        self.at_once -= 1
        return [len(file) for file in files]

    def with_features(self, images: list[int]) -> list[str]:
        return [f"seen {image}" for image in images]

    def feature_bytes(self, images: list[int]) -> int:
        return sum(images)


def data_url(size: int) -> str:
    return "data:image/png;base64," + base64.b64encode(bytes(size)).decode()


def test_images_are_read_and_seen_in_their_turn() -> None:
    async def work() -> None:
        steps = ImageSteps(ServeSettings(models={"m": "p"}, max_image_bytes=1000))
        model: Any = FakeModel()

        async def one(number: int) -> list[Any]:
            room = steps.feature_room()
            async with steps.turn(model, [data_url(number), data_url(number + 1)]) as images:
                assert images == [number, number + 1]
                seen = await steps.see(model, images, room)
            assert steps._features._num_taken >= 2 * number + 1
            room.give_back()
            return seen

        found = await asyncio.gather(*map(one, range(1, 9)))
        assert found == [[f"seen {n}", f"seen {n + 1}"] for n in range(1, 9)]
        assert model.most_at_once == 2
        assert (steps._features._num_taken, steps._files._num_taken) == (0, 0)
        # What fails gives everything back, too.
        with pytest.raises(ApiError, match="give data:image/png"):
            async with steps.turn(model, ["data:text/html;base64,AAAA"]):
                raise AssertionError
        with pytest.raises(ZeroDivisionError):
            async with steps.turn(model, [data_url(3)]):
                raise ZeroDivisionError
        assert steps._files._num_taken == 0
        async with steps.turn(model, [data_url(3)]) as images:
            assert images == [3]
        steps.close()

    run(work())


def test_room_for_four_of_the_largest_files_and_features_of_256_mib() -> None:
    async def work() -> None:
        steps = ImageSteps(ServeSettings(models={"m": "p"}, max_image_bytes=1000))
        for room, most in ((steps._files, 4000), (steps._features, 2**28)):
            await room.take(1)
            await room.take(most - 1)
            more = asyncio.create_task(room.take(1))
            await settle()
            assert not more.done()
            room.give_back(1)
            await more
        steps.close()

    run(work())


def test_two_requests_at_once_have_their_pixels() -> None:
    async def work() -> None:
        steps = ImageSteps(ServeSettings(models={"m": "p"}, max_image_bytes=1000))
        model: Any = FakeModel()
        entered: asyncio.Queue[int] = asyncio.Queue()
        may_leave = [asyncio.Event() for _ in range(3)]

        async def one(number: int) -> None:
            async with steps.turn(model, [data_url(3)]):
                entered.put_nowait(number)
                await may_leave[number].wait()

        tasks = [asyncio.create_task(one(number)) for number in range(2)]
        assert {await entered.get(), await entered.get()} == {0, 1}
        assert steps._turns.locked(), "a third has to wait"
        tasks.append(asyncio.create_task(one(2)))
        may_leave[0].set()
        assert await entered.get() == 2
        for event in may_leave:
            event.set()
        await asyncio.gather(*tasks)
        assert not steps._turns.locked()
        steps.close()

    run(work())
