"""Those who wait for a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from qsample.runtime.request.outputs import Delta

if TYPE_CHECKING:
    from qsample.runtime.request.handle import Request


class Reader:
    """Somebody who waits for a request, on its condition; or, in a coroutine, on `event`."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self.event = asyncio.Event()

    def wake(self) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self.event.set)
            except BaseException:  # most likely it was closed, so nobody waits there any more
                self._loop = None


class AsyncDeltas(AsyncIterator[Delta]):
    """The deltas of a request in a coroutine. No generator: those wait for their event loop to be collected."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._reader: Reader | None = None  # since the first `anext`
        self._seen = 0
        self._closed = False

    async def __anext__(self) -> Delta:
        request = self._request
        if self._reader is None:
            self._reader = Reader(asyncio.get_running_loop())
            request._readers.add(self._reader)
        while not self._closed:
            self._reader.event.clear()
            done = request.done  # before the deltas: none comes after that
            if self._seen < len(request._deltas):
                self._seen += 1
                return request._deltas[self._seen - 1]
            if done:
                self._close()
                request._result()
                break
            request._may_wait(self._reader)
            try:
                await self._reader.event.wait()
            except BaseException:  # its task was cancelled
                if request._cancel_if_abandoned:
                    self._close()
                    self._reader.event.set()  # for another task that waits here
                raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Give up."""
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._reader is not None and not self._closed:
            self._request._leave(self._reader)
        self._closed = True
