"""Processed images → the rows that stand for them in a prompt, computed by vision.onnx, and kept
for images that come again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from qsample.contract.arrays import Array
from qsample.errors import QsampleError
from qsample.images.prompt import ProcessedImage
from qsample.ort.options import SessionOptions
from qsample.ort.session import VISION, open_vision
from qsample.package.package import Package

DEFAULT_CACHE_BYTES: Final = 256 << 20


class VisionEncoder:
    """A package's vision.onnx, for any number of threads. It runs a single image at a time, because
    its operators use all threads; so their memory is bounded, too."""

    def __init__(
        self,
        package: Package,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        provider: str | Sequence[str] | None = None,
        options: SessionOptions | None = None,
    ) -> None:
        """Open the session.

        Args:
            package: the package.
            cache_bytes: the most bytes of features that are kept. The images that were used longest
                ago are dropped first.
            provider, options: the arguments of `open_sessions`, whose errors are raised.
        """
        self._path = package.path / VISION
        self._session = open_vision(package, provider, options)
        self._session_lock = threading.Lock()
        self._cache_lock = threading.Lock()  # It guards the next three.
        # Key of an image → its features; the image that was used longest ago is the first.
        self._cached: OrderedDict[bytes, Array] = OrderedDict()
        self._cached_bytes = 0
        # Key of an image → its features that are being computed.
        self._running: dict[bytes, Future[Array]] = {}
        self._max_cached_bytes = cache_bytes

    def stop(self) -> None:
        """End the run for an image soon, with an error, and begin no other."""
        self._session.stop()

    def features(self, image: ProcessedImage) -> Array:
        """The rows for an image's n placeholders, [n, C] in the package's dtype, read-only. Threads
        that ask for the same image at the same time share a run. Raises QsampleError if it
        fails."""
        if image.features is not None:
            return image.features
        with self._cache_lock:
            cached = self._cached.get(image.key)
            if cached is not None:
                self._cached.move_to_end(image.key)
                return cached
            shared = self._running.get(image.key)
            future = self._running.setdefault(image.key, Future())
        if shared is not None:
            return shared.result()
        try:
            features = self._run(image)
        except BaseException as error:
            with self._cache_lock:
                del self._running[image.key]
            future.set_exception(error)
            raise
        with self._cache_lock:
            del self._running[image.key]
            self._cache(image.key, features)
        future.set_result(features)
        return features

    def _cache(self, key: bytes, features: Array) -> None:
        """Keep the features of an image, and drop the oldest features for them."""
        if features.nbytes > self._max_cached_bytes:
            return
        self._cached[key] = features
        self._cached_bytes += features.nbytes
        while self._cached_bytes > self._max_cached_bytes:
            _, dropped = self._cached.popitem(last=False)
            self._cached_bytes -= dropped.nbytes

    def _run(self, image: ProcessedImage) -> Array:
        with self._session_lock:
            try:
                result = self._session.features(image.pixel_values, image.grid)
            except Exception as error:
                shape = "x".join(map(str, image.pixel_values.shape))
                raise QsampleError(
                    f"{self._path} cannot read an image of {shape} pixel values: {error}"
                ) from error
        features: Array = result[image.rows]
        features.setflags(write=False)
        return features
