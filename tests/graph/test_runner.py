"""The driver of decode graphs: its states, chunks of a prompt, and graphs given as a file or a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qsample.graph.join import cut_at_logits, return_logits
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.package.package import Package, read_package
from tests.helpers.fake_images import AXIAL, DIM

CAPACITY = 12
IDS = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])


def test_states_move_on_and_the_cache_is_written_in_place(llama_package: Path) -> None:
    package = read_package(llama_package)
    runner = GraphRunner(
        load_graph(package.file("decoder.onnx")), package.path, package.interface, CAPACITY
    )
    state = runner.start(2)
    assert state.keys() == {spec.name for spec in package.interface.decoder.states}
    cache = state["past_key_values.0.key"]
    assert cache.shape == (2, 2, CAPACITY, 16)
    assert not cache.any()
    greedy = runner.step(IDS, np.array([4, 2]), state)["next_ids"]
    assert state["lengths"].tolist() == [4, 2]
    assert state["past_key_values.0.key"] is cache
    assert cache[0, :, :4].any(axis=(0, 2)).all()
    assert not cache[:, :, 4:].any()
    state = runner.start(2)
    warm = runner.step(IDS, np.array([4, 2]), state, {"temperature": 1.5})["next_ids"]
    assert greedy.shape == warm.shape == (2, 1)


@pytest.mark.parametrize("weights_mapped", [False, True])
def test_a_prompt_in_chunks_has_the_same_logits(llama_package: Path, weights_mapped: bool) -> None:
    package = read_package(llama_package)
    model = cut_at_logits(load_graph(package.file("decoder.onnx")), package.interface)
    runner = GraphRunner(
        model, package.path, package.interface, CAPACITY, weights_mapped=weights_mapped
    )
    whole = runner.step(IDS, np.array([4, 4]), runner.start(2))["logits"]
    state = runner.start(2)
    runner.step(IDS[:, :3], np.array([3, 3]), state)
    last = runner.step(IDS[:, 3:], np.ones(2), state)["logits"]
    assert state["lengths"].tolist() == [4, 4]
    np.testing.assert_allclose(last, whole, atol=1e-5 * np.abs(whole).max())


def test_images_are_off_unless_they_are_given(fake: Callable[..., Package]) -> None:
    """A row of features takes the place of an id; without inputs of images, the graph is that of the text model."""
    plain, package = fake(), fake(image=AXIAL)

    def logits(package: Package, **images: np.ndarray) -> np.ndarray:
        model = return_logits(load_graph(package.file("decoder.onnx")))
        runner = GraphRunner(model, package.path, package.interface, CAPACITY)
        return runner.step(IDS, np.array([4, 4]), runner.start(2), images)["logits"]

    text = logits(plain)
    np.testing.assert_array_equal(logits(package), text)
    rows, features = np.full(IDS.shape, -1), np.random.default_rng(0).standard_normal((3, DIM))
    rows[1, 2] = 2
    seen = logits(package, image_rows=rows, image_features=features)
    np.testing.assert_array_equal(seen[0], text[0])
    assert np.abs(seen[1] - text[1]).max() > 0.01
    moved = logits(
        package, position_offsets=np.array([[[0] * 3] * 4, [[0] * 3] * 2 + [[5] * 3] * 2])
    )
    np.testing.assert_array_equal(moved[0], text[0])
    assert np.abs(moved[1] - text[1]).max() > 0.01
