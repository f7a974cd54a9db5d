"""What the process of a worker does with a message, and what its owner does with the answer; both in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample.errors import ArgumentError, EngineClosedError, QsampleError
from qsample.images import worker as module
from qsample.images.decode import ImageLimits
from qsample.images.processing import ImageProcessor
from qsample.images.worker import ImageWorker
from qsample.limited_process import Message, ProcessEndedError
from tests.helpers.fake_images import MANIFEST
from tests.helpers.hostile_images import encoded
from tests.images.test_processing import A

FILE = encoded(A, "PNG")
WIDTH, HEIGHT = A.size


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The limits that are set, which would hold for this process."""
    found: list[tuple[str, float]] = []

    @contextmanager
    def processor_time(seconds: float) -> Iterator[None]:
        found.append(("seconds", seconds))
        yield

    monkeypatch.setattr(module, "limit_memory", lambda size: found.append(("bytes", size)))
    monkeypatch.setattr(module, "processor_time", processor_time)
    return found


def test_the_size_of_a_file(limits: list[tuple[str, float]]) -> None:
    answer = module._read_image({"name": "it"}, FILE, ImageLimits())
    assert answer.fields == {"size": [WIDTH, HEIGHT]}
    assert limits == [
        ("bytes", module._BYTES_BESIDE_PIXELS),
        ("seconds", module._SECONDS_OF_A_HEADER),
    ]


def test_pixels_are_those_of_a_processor_here(limits: list[tuple[str, float]]) -> None:
    processor = ImageProcessor(MANIFEST, axial=True, identity=b"part")
    fields = {"name": "it", "processor": processor.arguments}
    answer = module._read_image(fields, FILE, ImageLimits())
    wanted = processor.process(FILE)
    key, values, rows = answer.parts
    assert bytes(key) == wanted.key
    assert np.array_equal(
        np.frombuffer(values, np.float32).reshape(answer.fields["shape"]), wanted.pixel_values
    )
    assert np.frombuffer(rows, np.int64).tolist() == wanted.rows.tolist()
    described = (answer.fields["grid"], answer.fields["size"], answer.fields["text"])
    assert described == (wanted.grid, wanted.size, wanted.text)
    # Memory and time grow with the pixels of the file and of the resized image.
    layout = processor.layout(WIDTH, HEIGHT)
    pixels, resized = WIDTH * HEIGHT, layout.width * layout.height
    assert limits[2:] == [
        ("bytes", pixels * module._BYTES_OF_A_PIXEL + resized * module._BYTES_OF_A_RESIZED_PIXEL
         + module._BYTES_BESIDE_PIXELS),
        ("seconds", pytest.approx(module._SECONDS_OF_A_HEADER
         + module._SECONDS_OF_A_MEGAPIXEL * (pixels + resized) / 1e6)),
    ]  # fmt: skip


def test_the_limits_are_those_of_the_first_message(
    limits: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message has an answer, and a refusal does not end the process."""

    def broken(fields: Any, file: bytes, limits: ImageLimits) -> Message:
        raise {b"m": MemoryError(), b"q": QsampleError("no Pillow")}[file]

    plain = module._read_image
    monkeypatch.setattr(
        module,
        "_read_image",
        lambda *given: (broken if given[1] in (b"m", b"q") else plain)(*given),
    )
    small = Message({"most_pixels": WIDTH * HEIGHT - 1})
    files = [FILE, b"no image", b"m", b"q"]
    messages = [small, *(Message({"name": "it"}, [file]) for file in files), None]
    answers: list[Message] = []
    monkeypatch.setattr(module, "next_message", lambda: messages.pop(0))
    monkeypatch.setattr(module, "answer_message", answers.append)
    module._read_images()
    assert answers[0].fields == {}
    first, second, memory, failed = (answer.fields for answer in answers[1:])
    assert "it has" in first["refused"]
    assert second["refused"].startswith("it ")
    assert memory == {"refused": "it takes too much memory to read; make it smaller"}
    assert failed == {"failed": "no Pillow"}


def worker(answer: Any) -> ImageWorker:
    """A worker whose process gives that answer, or raises it."""
    made = ImageWorker.__new__(ImageWorker)
    asked: list[Message] = []

    def ask(message: Message) -> Message:
        asked.append(message)
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]

    made._lock = threading.Lock()
    made._is_closed = False
    made._process = SimpleNamespace(ask=ask, stop=lambda: None, asked=asked)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (Message({"refused": "it is too large"}), ArgumentError, "^it is too large$"),
        (Message({"failed": "no Pillow"}), QsampleError, "^no Pillow$"),
        (ProcessEndedError(is_late=False), ArgumentError, "^it takes too much time or memory to read; make it smaller"),
    ],
)  # fmt: skip
def test_answers_that_are_errors(answer: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        worker(answer)._answer({"name": "it"}, b"file")
    assert type(raised.value) is error
    assert getattr(raised.value, "argument", "images") == "images"


def test_an_answer_becomes_an_image() -> None:
    rows, values = np.array([2, 0]), np.arange(6, dtype=np.float32)
    fields: dict[str, Any] = {"shape": [2, 3], "grid": [1, 2], "size": None, "text": "t"}
    given = worker(Message(fields, [b"key", values.tobytes(), rows.tobytes()]))
    processor = ImageProcessor(MANIFEST)
    image = given.process(b"file", processor, "it")
    assert (image.key, image.grid, image.size, image.text) == (b"key", (1, 2), None, "t")
    assert image.pixel_values.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert image.rows.tolist() == [2, 0]
    (asked,) = given._process.asked  # type: ignore[attr-defined]
    assert asked.fields == {"name": "it", "processor": processor.arguments}
    assert list(asked.parts) == [b"file"]
    fields |= {"grid": None, "size": [3, 4]}
    image = given.process(b"file", processor, "it")
    assert (image.grid, image.size) == (None, (3, 4))


def test_a_worker_that_is_closed_before_or_during_a_file() -> None:
    closed = worker(Message({}))
    closed.close()
    with pytest.raises(EngineClosedError):
        closed._answer({"name": "it"}, b"")
    assert closed._process.asked == []  # type: ignore[attr-defined]
    during = worker(None)

    def ask(message: Message) -> Message:
        during.close()
        raise ProcessEndedError(is_late=True)

    during._process = SimpleNamespace(ask=ask, stop=lambda: None)  # type: ignore[assignment]
    with pytest.raises(EngineClosedError):
        during._answer({"name": "it"}, b"")
