"""The images of requests, on their way from addresses to features: who waits, and what the server
holds meanwhile.

Only bytes that have their room are in memory, however many requests wait: first the files, then the
pixels of few requests at once, then the features until their answer ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from qsample.addons.serve.images import MediaReader
from qsample.addons.serve.models import ServedModel
from qsample.addons.serve.settings import ServeSettings
from qsample.images.prompt import ProcessedImage

T = TypeVar("T")

# While an image of one request is read, vision.onnx can run for another.
_MAX_REQUESTS_AT_ONCE: Final = 2
# The files of requests that wait, in the size of the largest file.
_MAX_FILES_IN_MEMORY: Final = 4
# The features of requests that wait or run. They are beside the cache of features.
_MAX_FEATURE_BYTES: Final = 256 << 20


class Room:
    """A number of bytes that requests share. They wait for it in the order in which they come."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._num_taken = 0
        self._turn = asyncio.Lock()
        self._given_back = asyncio.Event()

    async def take(self, num_bytes: int) -> None:
        """Wait until bytes are free, and take them. More bytes than there are wait until all are
        free."""
        async with self._turn:
            while self._num_taken > 0 and self._num_taken + num_bytes > self._num_bytes:
                self._given_back.clear()
                await self._given_back.wait()
            self._num_taken += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Give back bytes that were taken. Only the thread of the event loop may call this."""
        self._num_taken -= num_bytes
        self._given_back.set()


class FeatureRoom:
    """What a request has taken of the room for features, until it gives that back."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._num_bytes = 0

    async def take(self, num_bytes: int) -> None:
        """Wait for further bytes."""
        await self._room.take(num_bytes)
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        """Give back all bytes. Further calls do nothing."""
        num_bytes = self._num_bytes
        self._num_bytes = 0
        self._room.give_back(num_bytes)


class ImageSteps:
    """The images of a server's requests."""

    def __init__(self, settings: ServeSettings) -> None:
        self._reader = MediaReader(
            settings.max_image_bytes,
            settings.allowed_media_domains,
            settings.allowed_local_media_path,
        )
        self._files = Room(_MAX_FILES_IN_MEMORY * settings.max_image_bytes)
        self._features = Room(_MAX_FEATURE_BYTES)
        self._turns = asyncio.Semaphore(_MAX_REQUESTS_AT_ONCE)
        self._threads = ThreadPoolExecutor(
            _MAX_REQUESTS_AT_ONCE, thread_name_prefix="qsample-images"
        )

    def feature_room(self) -> FeatureRoom:
        """The room for the features of a request, nothing of which is taken yet."""
        return FeatureRoom(self._features)

    @asynccontextmanager
    async def turn(
        self, model: ServedModel, addresses: Sequence[str]
    ) -> AsyncIterator[list[ProcessedImage]]:
        """The images at the addresses, as vision.onnx reads them, while few other requests have
        theirs.

        Raises:
            ApiError: an image cannot be read.
        """
        num_bytes = self._reader.check(addresses)
        await self._files.take(num_bytes)
        try:
            files = await self._reader.read(addresses)
            async with self._turns:
                yield await self._run(model.process_images, files)
        finally:
            self._files.give_back(num_bytes)

    async def see(
        self, model: ServedModel, images: Sequence[ProcessedImage], room: FeatureRoom
    ) -> list[ProcessedImage]:
        """Images with their features.

        Args:
            model: the model.
            images: the images, while it is their turn.
            room: takes the bytes of the features.
        """
        await room.take(model.feature_bytes(images))
        return await self._run(model.model.images.with_features, images)

    def close(self) -> None:
        """End without waiting for images, whose models are closed already."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, work, *arguments)
