"""The driver of decode graphs: its states, chunks of a prompt, and graphs given as a file or a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qsample.graph.join import cut_at_logits, return_logits
from qsample.graph.runner import GraphRunner, error_of_scores, scores_of_last_tokens
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
    turned = runner.step(IDS[::-1], np.array([4, 4]), runner.start(2))["logits"]
    np.testing.assert_allclose(turned[::-1], whole, atol=1e-5 * np.abs(whole).max())
    assert np.abs(whole[0] - whole[1]).max() > 0.01, "of other ids"


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


def test_a_token_after_the_last_of_each_row_is_scored() -> None:
    """At places row by row, padding included; a difference of NaN is none of 0, and masks on both sides are none."""
    given = scores_of_last_tokens(IDS, np.array([4, 2]), np.array([1, 0]))
    assert {name: (array.tolist(), array.dtype.name) for name, array in given.items()} == {
        "scored_places": ([3, 5], "int32"),
        "scored_ids": ([1, 0], "int32"),
    }
    logits = np.log(np.array([[1, 3], [4, 4]], np.float32)) + 5
    scores = np.log([[0.75], [0.5]]) + np.array([[0.25], [-0.125]])
    ids = np.array([1, 0])
    results = {"logits": logits, "prompt_logprobs": scores}
    assert error_of_scores(results, ids) == pytest.approx(0.25, abs=1e-6)
    logits[0, 1] = scores[0] = -np.inf
    assert error_of_scores(results, ids) == pytest.approx(0.125, abs=1e-6)
    scores[1] = np.nan
    assert np.isnan(error_of_scores(results, ids))
