"""Image features: the rows that an image's placeholders take, computed once, kept within their memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qsample.errors import PackageError, QsampleError
from qsample.images.features import VisionEncoder
from qsample.images.processing import ImageProcessor
from qsample.images.prompt import ProcessedImage
from qsample.ort.session import VisionSession
from qsample.package.package import Package
from tests.helpers.fake_images import DIM, ROWS, features_of, picture

BYTES = 4 * DIM  # of a placeholder


@pytest.fixture
def package(fake: Callable[..., Package]) -> Package:
    return fake(image=ROWS)


def image(package: Package, *size: int, seed: int = 0) -> ProcessedImage:
    processor = ImageProcessor.of(package)
    assert processor is not None
    return processor.process(picture(*size, seed=seed))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of patches of each run."""
    seen: list[int] = []
    plain = VisionSession.features

    def features(self: VisionSession, pixel_values: np.ndarray, grid: Any = None) -> np.ndarray:
        seen.append(len(pixel_values))
        return plain(self, pixel_values, grid)

    monkeypatch.setattr(VisionSession, "features", features)
    return seen


def test_each_placeholder_gets_its_row(package: Package) -> None:
    encoder, given = VisionEncoder(package), image(package, 16, 8)
    got = encoder.features(given)
    assert (got.dtype, got.shape, got.flags.writeable) == (np.dtype("float32"), (8, DIM), False)
    np.testing.assert_allclose(got, features_of(given), atol=1e-5)
    chosen = replace(given, key=b"other rows", rows=np.array([7, 0, 0]))
    np.testing.assert_array_equal(encoder.features(chosen), got[[7, 0, 0]])


def test_those_used_longest_ago_go(package: Package, runs: list[int]) -> None:
    one, other, third = (image(package, 8, 8, seed=seed) for seed in range(3))
    encoder = VisionEncoder(package, 2 * 4 * BYTES)
    for given in (one, other, one, third, one):  # the other one goes
        encoder.features(given)
    assert len(runs) == 3
    encoder.features(other)
    assert len(runs) == 4
    large = image(package, 16, 16)  # more than everything: nothing goes for it
    for given in (large, other, large):
        encoder.features(given)
    assert runs == [4] * 4 + [16] * 2
    for _ in range(2):
        VisionEncoder(package, 0).features(one)
    assert len(runs) == 8


def test_threads_that_ask_at_once_share_a_run(
    package: Package, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, given, asked = VisionEncoder(package, 0), image(package), threading.Semaphore(0)
    plain = VisionEncoder._run

    class Computed(dict[bytes, Any]):
        def get(self, key: bytes, default: Any = None) -> Any:
            asked.release()
            return super().get(key, default)

    def run(self: VisionEncoder, image: ProcessedImage) -> np.ndarray:
        assert all(asked.acquire(timeout=60) for _ in range(4))
        return plain(self, image)

    monkeypatch.setattr(encoder, "_running", Computed())
    monkeypatch.setattr(VisionEncoder, "_run", run)
    with ThreadPoolExecutor(4) as threads:
        results = [*threads.map(encoder.features, [given] * 4)]
    assert runs == [6]
    assert all(result is results[0] for result in results)


def test_an_image_that_fails_is_named_and_may_come_again(package: Package) -> None:
    encoder, given = VisionEncoder(package), image(package)
    wrong = replace(given, pixel_values=given.pixel_values[:, :5])
    for _ in range(2):
        with pytest.raises(
            QsampleError, match=r"vision\.onnx cannot read an image of 6x5 pixel values"
        ):
            encoder.features(wrong)
    assert encoder.features(given).shape == (6, DIM)


def test_a_damaged_file_is_named(fake: Callable[..., Package]) -> None:
    package = fake(image=ROWS, generation_config={})
    (package.path / "vision.onnx").write_bytes(b"nothing")
    with pytest.raises(PackageError, match=r"vision\.onnx"):
        VisionEncoder(package)


def test_an_image_that_comes_again_has_the_same_features(package: Package, runs: list[int]) -> None:
    encoder, given = VisionEncoder(package), image(package, 8, 8)
    first = encoder.features(given)
    assert encoder.features(given) is first
    assert len(runs) == 1
    ready = np.ones((4, DIM), np.float32)
    assert encoder.features(replace(given, features=ready)) is ready
    assert len(runs) == 1


def test_features_are_kept_up_to_the_bytes_and_no_further(
    package: Package, runs: list[int]
) -> None:
    given = image(package, 8, 8)  # 4 placeholders
    for size, kept in ((4 * BYTES, 1), (4 * BYTES - 1, 0), (0, 0)):
        encoder = VisionEncoder(package, size)
        runs.clear()
        for _ in range(2):
            assert encoder.features(given).shape == (4, DIM)
        assert len(runs) == 2 - kept
    assert VisionEncoder(package)._max_cached_bytes == 256 * 1024 * 1024


def test_a_stopped_encoder_runs_for_no_further_image(package: Package) -> None:
    encoder, first = VisionEncoder(package), image(package, 8, 8)
    features = encoder.features(first)
    encoder.stop()
    for _ in range(2):
        with pytest.raises(QsampleError, match="cannot read an image"):
            encoder.features(image(package, 12, 8, seed=1))
    assert encoder.features(first) is features, "what is kept needs no run"
