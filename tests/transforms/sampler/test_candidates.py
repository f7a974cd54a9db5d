"""Chunked selection against a sort, ties included, and what counts as a valid row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qsample.transforms.sampler import candidates, sizes
from tests.helpers.sampler_cases import WITH_PROBS, eager, interface, make_inputs

FACE = interface(4, WITH_PROBS)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = np.array([[1, 7, 7, 7]], np.float32)
    assert eager(FACE)(logits, make_inputs(FACE, temperature=0))["next_ids"][0, 0] == 1


@pytest.mark.parametrize(
    ("vocab", "chunk_size", "count"), [(1, 1, 1), (50, 7, 50), (300, 16, 5), (300, 16, 64), (997, 1, 30)]
)
@pytest.mark.parametrize("ties", [False, True])
def test_selection_equals_a_stable_sort(vocab: int, chunk_size: int, count: int, ties: bool) -> None:
    logits = np.random.default_rng(vocab).normal(size=(8, vocab)).astype(np.float32)
    logits = np.round(logits) if ties else logits
    order = np.argsort(-logits, kind="stable", axis=1)
    chunks = candidates.split(torch.from_numpy(logits), chunk_size)
    values, ids = candidates.top_candidates(chunks, count)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, order[:, :count], 1))
    np.testing.assert_array_equal(candidates.argmax(chunks), order[:, :1])
    # torch.topk leaves the order of equal values open; their ids are the lowest ones, but of the last value.
    inner = values.numpy() > values.numpy()[:, -1:]
    for row in range(8):
        assert set(ids[row][inner[row]].tolist()) == set(order[row][: inner[row].sum()].tolist())


def test_valid_rows() -> None:
    rows = torch.zeros(6, 40)
    rows[1, 7], rows[2, 39], rows[3, 0] = torch.nan, torch.inf, -torch.inf
    rows[4, :] = -torch.inf
    rows[5, 11], rows[5, 12] = 3e38, -3e38
    chunks = candidates.split(rows, 16)
    valid = candidates.is_valid(chunks, chunks.maxima.amax(-1))
    assert valid.tolist() == [True, False, False, True, False, True]


@pytest.mark.parametrize(
    ("vocab", "size"), [(1, 1), (100, 100), (128_256, 128), (151_936, 128), (50_257, 128), (97, 97)]
)
def test_block_sizes(vocab: int, size: int) -> None:
    assert sizes.block_size(vocab) == size
