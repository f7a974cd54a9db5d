"""Processed images → the rows that stand for them in a prompt, by vision.onnx; those that come again are kept."""

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
    """A package's vision.onnx, for any number of threads. It runs one image at a time: its operators use all threads,
    and their memory is that of a single image."""

    def __init__(
        self,
        package: Package,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        provider: str | Sequence[str] | None = None,
        options: SessionOptions | None = None,
    ) -> None:
        """cache_bytes: of the features that are kept; the images used longest ago go. provider, options, errors: as of
        `open_sessions`."""
        self._path = package.path / VISION
        self._session = open_vision(package, provider, options)
        self._running = threading.Lock()
        self._changed = threading.Lock()  # guards the next five
        self._kept: OrderedDict[bytes, Array] = OrderedDict()  # the one used longest ago first
        self._bytes, self._most_bytes = 0, cache_bytes
        self._computed: dict[bytes, Future[Array]] = {}  # now

    def features(self, image: ProcessedImage) -> Array:
        """[n, C] in the package's dtype, read-only: the rows for the image's n placeholders. Threads that ask for the
        same image at once share a run. Raises QsampleError if it fails."""
        if image.features is not None:
            return image.features
        with self._changed:
            kept = self._kept.get(image.key)
            if kept is not None:
                self._kept.move_to_end(image.key)
                return kept
            shared = self._computed.get(image.key)
            future = self._computed.setdefault(image.key, Future())
        if shared is not None:
            return shared.result()
        try:
            features = self._run(image)
        except BaseException as error:
            with self._changed:
                del self._computed[image.key]
            future.set_exception(error)
            raise
        with self._changed:
            del self._computed[image.key]
            self._keep(image.key, features)
        future.set_result(features)
        return features

    def _keep(self, key: bytes, features: Array) -> None:
        if features.nbytes > self._most_bytes:
            return
        self._kept[key] = features
        self._bytes += features.nbytes
        while self._bytes > self._most_bytes:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes

    def _run(self, image: ProcessedImage) -> Array:
        with self._running:
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
