"""Thresholds by radix selection, against NumPy in float64: sorts and cumulative sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qsample.transforms.sampler.radix_search import find_threshold, make_keys

ROWS, VOCAB = 16, 20_000
Array = np.ndarray


def logits_of(kind: str, rng: np.random.Generator) -> Array:
    normal = rng.normal(size=(ROWS, VOCAB)).astype(np.float32)
    if kind == "bfloat16":  # thousands of tokens share a value
        return torch.from_numpy(normal * 2 + 9).to(torch.bfloat16).to(torch.float32).numpy()
    if kind == "float16":
        return (normal * 2).astype(np.float16).astype(np.float32)
    if kind == "masked":
        return np.where(rng.random((ROWS, VOCAB)) < 0.9, -np.inf, normal).astype(np.float32)
    if kind == "outlier":  # a range a hundred times as wide as what holds the weight
        normal[:, 7] = -60
        normal[:, 9] = normal.max(axis=1) + 1
        return normal
    if kind == "alike":
        return np.full((ROWS, VOCAB), 1.5, np.float32)
    return normal * {"flat": np.float32(0.01), "normal": np.float32(3), "peaked": np.float32(30)}[kind]


KINDS = ("normal", "flat", "peaked", "bfloat16", "float16", "masked", "outlier", "alike")


def searched(logits: Array, temperature: Array, weights: Array, target: Array) -> tuple[Array, Array, Array]:
    values, heat = torch.from_numpy(logits), torch.from_numpy(temperature)
    keys = make_keys(values, values.amax(-1, keepdim=True), heat)
    found = find_threshold(values, keys, torch.from_numpy(weights), lambda total: torch.from_numpy(target))
    return found.value.numpy(), found.exact.numpy(), found.passed.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_the_kth_largest(kind: str) -> None:
    rng = np.random.default_rng(1)
    logits = logits_of(kind, rng)
    k = rng.choice([1, 2, 65, 100, 1000, 1024, 5000, VOCAB], (ROWS, 1))
    temperature = rng.choice([0.5, 1, 5], (ROWS, 1)).astype(np.float32)
    value, exact, passed = searched(logits, temperature, np.ones(logits.shape), k.astype(np.float64))
    wanted = np.take_along_axis(-np.sort(-logits, axis=1), k - 1, axis=1)
    # What is so far below the largest that its weight is 0 may pass: it cannot be drawn.
    weightless = wanted <= logits.max(1, keepdims=True) - 104 * temperature
    assert exact.all()
    assert (np.where(weightless, value <= wanted, value == wanted)).all()
    np.testing.assert_array_equal((passed == (logits >= wanted)).all(1) | weightless[:, 0], True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_nucleus(kind: str) -> None:
    rng = np.random.default_rng(2)
    logits = logits_of(kind, rng)
    temperature = rng.choice([0.7, 1, 2], (ROWS, 1)).astype(np.float32)
    weights = np.exp((logits - logits.max(1, keepdims=True)) / temperature).astype(np.float64)
    top_p = rng.choice([1e-9, 0.3, 0.9, 0.95, 0.999], (ROWS, 1))
    target = top_p * weights.sum(1, keepdims=True)
    value, exact, _ = searched(logits, temperature, weights, target)
    assert exact.all()
    for row in range(ROWS):
        order = np.argsort(-logits[row], kind="stable")
        values, first = np.unique(-logits[row][order], return_index=True)
        sums = np.concatenate([[0], weights[row][order].cumsum()])[first]  # of what is strictly larger
        wanted = -values[sums < target[row, 0]].max()
        # Sums in another order may put a neighbour at the edge.
        assert value[row, 0] == wanted or np.abs(sums - target[row, 0]).min() < 1e-12 * target[row, 0]


def test_two_logits_in_a_cell_are_told() -> None:
    """The range is 100, so values that differ by 1e-30 near 0 share a cell; a threshold above or below it is exact."""
    logits = np.float32([[100, 1e-30, 0, -1]])
    for k, is_exact in ((1, True), (2, False), (3, False), (4, True)):
        _, exact, _ = searched(logits, np.float32([[2]]), np.ones((1, 4)), np.float64([[k]]))
        assert exact[0, 0] == is_exact


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_keys_of_invalid_logits_are_cells(bad: float) -> None:
    """Such rows do not draw; a histogram takes no index that it does not have."""
    logits = torch.tensor([[0.0, bad, 1.0], [bad, bad, bad], [-np.inf, -np.inf, -np.inf]])
    keys = make_keys(logits, logits.amax(-1, keepdim=True), torch.tensor([[1.0], [0.0], [np.nan]]))
    assert ((keys >= 0) & (keys < 2**30)).all()
