"""Streams show that they are alive while no token comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from qsample.addons.serve import http
from qsample.addons.serve.answers import Answers
from qsample.addons.serve.http import EventStream
from qsample.addons.serve.messages import MessageAnswers

INTERVAL_S = 0.02
ALIVE = b"alive"


class Client:
    """Reads a stream of two events. The second comes after a number of fillers, and takes some time to be sent."""

    def __init__(self, fillers: int, seconds_of_second: float) -> None:
        self.sent: list[dict[str, Any]] = []
        self._fillers = fillers
        self._seconds_of_second = seconds_of_second

    @property
    def texts(self) -> list[bytes]:
        return [message["body"] for message in self.sent[1:]]

    async def events(self) -> AsyncIterator[bytes]:
        yield b"first"
        while self.texts.count(ALIVE) < self._fillers:
            await asyncio.sleep(INTERVAL_S / 10)
        yield b"second"

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if message.get("body") == b"second":
            await asyncio.sleep(self._seconds_of_second)

    async def read(self) -> None:
        stream = EventStream(self.events(), lambda: None, {"X-Own": "1"}, ALIVE)
        await stream({"type": "http"}, self.receive, self.send)
        await asyncio.sleep(3 * INTERVAL_S)


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEP_ALIVE_S", INTERVAL_S)


@pytest.mark.parametrize("seconds_of_second", [0, 4 * INTERVAL_S])
def test_a_pause_is_filled_and_nothing_follows_the_end(seconds_of_second: float) -> None:
    client = Client(2, seconds_of_second)
    asyncio.run(client.read())
    assert (b"x-own", b"1") in client.sent[0]["headers"]
    fillers = client.texts.count(ALIVE)
    assert fillers >= 2
    assert client.texts == [b"first", *[ALIVE] * fillers, b"second", b""]
    more = [message["more_body"] for message in client.sent[1:]]
    assert more == [True] * (len(more) - 1) + [False]


def test_events_that_come_need_no_filler(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the stream is: each event begins the time anew."""
    now = [100.0]
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: now[0]))
    client = Client(0, 0)

    async def events() -> AsyncIterator[bytes]:
        for number in range(5):
            yield str(number).encode()
            await asyncio.sleep(1.5 * INTERVAL_S)  # The clock stands still meanwhile.
        now[0] += 2 * INTERVAL_S
        while ALIVE not in client.texts:
            await asyncio.sleep(INTERVAL_S / 10)

    async def read() -> None:
        stream = EventStream(events(), lambda: None, {}, ALIVE)
        await stream({"type": "http"}, client.receive, client.send)

    asyncio.run(read())
    assert client.texts == [b"0", b"1", b"2", b"3", b"4", ALIVE, b""]


def test_what_the_apis_send() -> None:
    assert Answers.keep_alive.startswith(b":"), "a comment, which every reader of events skips"
    assert MessageAnswers.keep_alive == b'event: ping\ndata: {"type":"ping"}\n\n'
