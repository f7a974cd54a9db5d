"""Images of strangers → the inputs of vision.onnx, in another process with limits.

A file of a few bytes may cost its reader minutes or gigabytes. `qsample.images.structure` refuses
the known kinds; whatever else there is ends this process, and not the server.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Final

import numpy as np

from qsample.errors import ArgumentError, EngineClosedError, QsampleError
from qsample.images.decode import ImageLimits, read_size
from qsample.images.processing import ImageProcessor
from qsample.images.prompt import ProcessedImage
from qsample.limited_process import (
    LimitedProcess,
    Message,
    ProcessEndedError,
    answer_message,
    limit_memory,
    next_message,
    processor_time,
)

# The processor time of an image, several times what a slow processor takes.
_SECONDS_OF_A_HEADER: Final = 0.5
_SECONDS_OF_A_MEGAPIXEL: Final = 0.15
# The time by the clock, for a process that stands still.
_MAX_SECONDS: Final = 60.0
# Pillow has 4 bytes for a pixel, and at most three images of the whole size.
_BYTES_OF_A_PIXEL: Final = 12
# Some families read an image twice, and have four arrays of float32 in between.
_BYTES_OF_A_RESIZED_PIXEL: Final = 2 * 4 * 3 * 4
_BYTES_BESIDE_PIXELS: Final = 64 << 20
_CLOSED: Final = "images are read no more, because the server ends"


class ImageWorker:
    """Reads images, one at a time, in a process that starts with the first image. Any number of
    threads may use it."""

    def __init__(self, limits: ImageLimits) -> None:
        """limits: the largest image to read."""
        self._limits = limits
        self._process = LimitedProcess(__name__, _MAX_SECONDS, self._give_limits)
        self._lock = threading.Lock()
        self._is_closed = False

    def size(self, file: bytes, name: str) -> tuple[int, int]:
        """Width and height in the header of an image file, before any rotation. name: the name of
        the image in messages. Raises as `process` does."""
        width, height = self._answer({"name": name}, file).fields["size"]
        return width, height

    def process(self, file: bytes, processor: ImageProcessor, name: str) -> ProcessedImage:
        """The inputs of vision.onnx for an image file, and its placeholders.

        Args:
            file: the bytes of the file.
            processor: the processor of the package.
            name: the name of the image in messages.

        Raises:
            ArgumentError: the file is no image within the limits, or takes too much to read.
            EngineClosedError: the worker was closed.
            QsampleError: Pillow is missing.
        """
        answer = self._answer({"name": name, "processor": processor.arguments}, file)
        fields: Any = answer.fields
        key, values, rows = answer.parts
        return ProcessedImage(
            key=bytes(key),
            pixel_values=np.frombuffer(values, np.float32).reshape(fields["shape"]),
            grid=_pair(fields["grid"]),
            rows=np.frombuffer(rows, np.int64),
            size=_pair(fields["size"]),
            text=fields["text"],
        )

    def close(self) -> None:
        """End the work on an image, and begin no other."""
        self._is_closed = True
        self._process.stop()

    def _give_limits(self, ask: Any) -> None:
        ask(Message(asdict(self._limits)))

    def _answer(self, fields: dict[str, Any], file: bytes) -> Message:
        with self._lock:
            if self._is_closed:
                raise EngineClosedError(_CLOSED)
            try:
                answer = self._process.ask(Message(fields, [file]))
            except ProcessEndedError:
                if self._is_closed:
                    raise EngineClosedError(_CLOSED) from None
                raise ArgumentError(
                    f"{fields['name']} takes too much time or memory to read; make it smaller, or "
                    "save it in another program",
                    "images",
                ) from None
        match answer.fields:
            case {"refused": str() as text}:
                raise ArgumentError(text, "images")
            case {"failed": str() as text}:
                raise QsampleError(text)
        return answer


def _pair(values: list[int] | None) -> tuple[int, int] | None:
    return None if values is None else (values[0], values[1])


def _read_images() -> None:
    """The process of an `ImageWorker`.

    The first message has the limits of images. Each other message has a file and its name, and the
    arguments of a processor if more than the file's size is wanted.
    """
    first = next_message()
    assert first is not None
    limits = ImageLimits(**first.fields)
    answer_message(Message({}))
    while (message := next_message()) is not None:
        try:
            answer = _read_image(message.fields, bytes(message.parts[0]), limits)
        except (ArgumentError, MemoryError) as error:
            answer = Message({"refused": _refusal(error, message.fields["name"])})
        except QsampleError as error:  # Pillow is missing.
            answer = Message({"failed": str(error)})
        answer_message(answer)


def _refusal(error: Exception, name: str) -> str:
    if isinstance(error, MemoryError):
        return f"{name} takes too much memory to read; make it smaller"
    return str(error)


def _read_image(fields: Any, file: bytes, limits: ImageLimits) -> Message:
    name: str = fields["name"]
    limit_memory(_BYTES_BESIDE_PIXELS)
    with processor_time(_SECONDS_OF_A_HEADER):
        width, height = read_size(file, limits, name)
    if "processor" not in fields:
        return Message({"size": [width, height]})
    processor = _processor(json.dumps(fields["processor"]))
    layout = processor.layout(width, height, name)
    limit_memory(
        width * height * _BYTES_OF_A_PIXEL
        + layout.width * layout.height * _BYTES_OF_A_RESIZED_PIXEL
        + _BYTES_BESIDE_PIXELS
    )
    megapixels = (width * height + layout.width * layout.height) / 1e6
    seconds = _SECONDS_OF_A_HEADER + _SECONDS_OF_A_MEGAPIXEL * megapixels
    with processor_time(seconds):
        image = processor.process(file, limits, name)
    values = np.ascontiguousarray(image.pixel_values)
    rows = np.ascontiguousarray(image.rows, np.int64)
    described = {
        "shape": values.shape,
        "grid": image.grid,
        "size": image.size,
        "text": image.text,
    }
    return Message(described, [image.key, values.data, rows.data])


@lru_cache(maxsize=16)
def _processor(arguments: str) -> ImageProcessor:
    """The processor of a package, by its arguments as JSON."""
    return ImageProcessor.of_arguments(json.loads(arguments))


if __name__ == "__main__":
    _read_images()
