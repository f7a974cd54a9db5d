"""Images in another process: the same numbers as in this one, and what ends it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from qsample.errors import ArgumentError, EngineClosedError
from qsample.images import worker as worker_module
from qsample.images.decode import ImageLimits
from qsample.images.processing import ImageProcessor
from qsample.images.worker import ImageWorker
from qsample.package.package import Package, read_package
from tests.helpers import hostile_images
from tests.helpers.fake_images import AXIAL, ROWS


@pytest.fixture(scope="module")
def worker() -> Iterator[ImageWorker]:
    made = ImageWorker(ImageLimits(2 << 20, 4_000_000))
    yield made
    made.close()


@pytest.fixture(
    params=[
        "rows",
        "axial",
        pytest.param("smolvlm", marks=pytest.mark.ci),
        pytest.param("qwen2_vl", marks=pytest.mark.ci),
    ]
)
def processor(
    request: pytest.FixtureRequest,
    fake: Callable[..., Package],
    image_package: Callable[..., Path],
) -> ImageProcessor:
    shapes = {"rows": ROWS, "axial": AXIAL}
    if request.param in shapes:
        package = fake(image=shapes[request.param])
    else:
        package = read_package(image_package(request.param))
    made = ImageProcessor.of(package)
    assert made is not None
    return made


def test_the_numbers_are_those_of_this_process(
    worker: ImageWorker, processor: ImageProcessor
) -> None:
    for file in (
        hostile_images.photo(300, 200),
        hostile_images.photo(90, 250, seed=2),
        hostile_images.large_png(70, 50, "RGBA"),
    ):
        here = processor.process(file)
        there = worker.process(file, processor, "image 0")
        assert (there.key, there.grid, there.size, there.text) == (
            here.key,
            here.grid,
            here.size,
            here.text,
        )
        np.testing.assert_array_equal(there.pixel_values, here.pixel_values)
        np.testing.assert_array_equal(there.rows, here.rows)
        assert (there.pixel_values.dtype, there.rows.dtype) == (np.float32, np.int64)
    assert worker.size(file, "image 0") == (70, 50)


def test_arguments_make_the_same_processor(processor: ImageProcessor) -> None:
    made = ImageProcessor.of_arguments(json.loads(json.dumps(processor.arguments)))
    file = hostile_images.photo(90, 70)
    assert made.process(file).key == processor.process(file).key


def test_errors_have_the_name_of_the_image(worker: ImageWorker) -> None:
    for file, message in (
        (b"<svg>", "image 7 begins with b'<svg>'"),
        (hostile_images.large_png(2001, 2000), "image 7 has 2001 x 2000 = 4002000 pixels"),
        (bytes(3 << 20), "image 7 has more than 2097152 bytes"),
        (hostile_images.png_of_texts(100), "image 7 is a PNG file that is not read: it has more"),
    ):
        with pytest.raises(ArgumentError, match=message):
            worker.size(file, "image 7")
    assert worker.size(hostile_images.large_png(9, 8), "image 0") == (9, 8)


@pytest.mark.ci
def test_an_end_refuses_an_image_and_not_the_next(worker: ImageWorker) -> None:
    file = hostile_images.large_png(9, 8)
    assert worker.size(file, "image 0") == (9, 8)
    process = worker._process._process
    assert process is not None
    process.kill()
    process.wait()
    with pytest.raises(ArgumentError, match="image 3 takes too much time or memory to read"):
        worker.size(file, "image 3")
    assert worker.size(file, "image 0") == (9, 8)


def test_threads_take_turns(worker: ImageWorker) -> None:
    sizes: dict[int, tuple[int, int]] = {}

    def ask(width: int) -> None:
        sizes[width] = worker.size(hostile_images.large_png(width, 8), "image 0")

    threads = [threading.Thread(target=ask, args=[width]) for width in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sizes == {width: (width, 8) for width in range(1, 9)}


def test_a_closed_worker_reads_no_more() -> None:
    made = ImageWorker(ImageLimits())
    made.close()
    for _ in range(2):
        with pytest.raises(EngineClosedError, match="the server ends"):
            made.size(hostile_images.large_png(9, 8), "image 0")
    assert made._process._process is None


def test_an_image_has_time_and_memory_by_its_size(
    processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second for a header, 0.15 s a megapixel as it is and as it is resized; 12 and 96 bytes a pixel."""
    seconds: list[float] = []
    num_bytes: list[int] = []

    @contextmanager
    def processor_time(limit: float) -> Iterator[None]:
        seconds.append(limit)
        yield

    monkeypatch.setattr(worker_module, "processor_time", processor_time)
    monkeypatch.setattr(worker_module, "limit_memory", num_bytes.append)
    limits = ImageLimits(2 << 20, 4_000_000)
    file = hostile_images.large_png(2000, 1500)
    read = worker_module._read_image
    assert read({"name": "image 0"}, file, limits).fields == {"size": [2000, 1500]}
    assert (seconds, num_bytes) == ([0.5], [64 << 20])
    seconds.clear()
    num_bytes.clear()
    answer = read({"name": "image 0", "processor": processor.arguments}, file, limits)
    layout = processor.layout(2000, 1500)
    resized = layout.width * layout.height
    assert seconds == [0.5, pytest.approx(0.5 + 0.15 * (3 + resized / 1e6))]
    assert num_bytes == [64 << 20, (64 << 20) + 12 * 3_000_000 + 96 * resized]
    assert answer.parts[0] == processor.process(file).key
