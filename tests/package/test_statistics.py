"""Intervals for the mean of correlated numbers, where theory says what they have to be."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.contract.arrays import Array
from qsample.package.statistics import block_length, estimate_means


def autoregressive(n: int, rho: float, seed: int) -> Array:
    """x[t] = rho x[t - 1] + e[t], with variance 1."""
    from scipy.signal import lfilter

    noise = np.random.default_rng(seed).normal(size=n + 500) * np.sqrt(1 - rho**2)
    series: Array = lfilter([1.0], [1.0, -rho], noise)[500:]
    return series


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.8])
def test_the_block_length_of_an_autoregressive_series(rho: float) -> None:
    """sum |k| R(k) = 2 rho / (1 - rho)² and sum R(k) = (1 + rho) / (1 - rho) put into the published formula.

    A window without its flat top finds 0.76 to 0.91 of it."""
    n = 20_000
    ideal = (6 * rho**2 / (1 - rho**2) ** 2 * n) ** (1 / 3)
    found = np.median([block_length(autoregressive(n, rho, seed)) for seed in range(9)])
    assert found == pytest.approx(ideal, rel=0.08)


def test_blocks_of_numbers_that_are_not_correlated_are_short() -> None:
    rng = np.random.default_rng(0)
    assert np.median([block_length(rng.normal(size=20_000)) for _ in range(9)]) <= 5


@pytest.mark.parametrize(
    "series", [np.ones(100), np.arange(3.0), np.array([0.0]), np.array([1.0, np.inf] * 20)]
)
def test_series_without_correlations_to_speak_of(series: Array) -> None:
    assert block_length(series) == 1


@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_intervals_hold_the_truth_as_often_as_they_say(rho: float) -> None:
    """90 % intervals of 60 series; taken for independent, those with rho = 0.7 would hold the mean 51 times in 100."""
    hits = 0
    for seed in range(60):
        found = estimate_means({"x": autoregressive(500, rho, seed)}, confidence=0.9, seed=seed)[
            "x"
        ]
        hits += found.low <= 0 <= found.high
    assert 0.75 <= hits / 60 <= 0.99


def test_independent_numbers_have_the_classic_interval() -> None:
    series = np.random.default_rng(3).exponential(size=5000)
    found = estimate_means({"x": series})["x"]
    half = 1.96 * series.std() / np.sqrt(len(series))
    assert found.value == pytest.approx(series.mean())
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.15)


def test_columns_are_resampled_together() -> None:
    """The difference of two columns that move together is known far better than either."""
    first = autoregressive(4000, 0.5, 1)
    second = first + np.random.default_rng(2).normal(scale=0.01, size=4000)
    found = estimate_means({"a": first, "b": second, "difference": second - first})
    widths = {name: estimate.high - estimate.low for name, estimate in found.items()}
    assert widths["difference"] < widths["a"] / 20
    assert found["b"].low - found["a"].low == pytest.approx(found["difference"].value, abs=0.002)


def test_the_same_seed_gives_the_same_interval_and_a_wider_confidence_a_wider_one() -> None:
    columns = {"x": autoregressive(500, 0.4, 5)}
    assert estimate_means(columns, seed=1) == estimate_means(columns, seed=1)
    assert estimate_means(columns, seed=1) != estimate_means(columns, seed=2)
    wide, narrow = (estimate_means(columns, confidence=level)["x"] for level in (0.99, 0.5))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_what_is_infinite_stays_so() -> None:
    found = estimate_means({"x": np.array([1.0, np.inf, 2.0] * 10), "y": np.ones(30)})
    assert found["x"].value == found["x"].high == np.inf
    assert found["y"].low == found["y"].high == 1


def test_a_long_series_is_resampled_in_bounded_memory() -> None:
    import tracemalloc

    series = np.random.default_rng(0).normal(size=400_000)
    tracemalloc.start()
    estimate_means({"x": series})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 2**20


def published_block_length(series: Array) -> int:
    """The circular bootstrap's by Politis and White, and Patton's correction, from their text."""
    n = len(series)
    x = series.astype(np.float64) - series.mean()
    covariance = [float((x[: n - k] * x[k:]).sum()) / n for k in range(n)]
    patience = max(5, int(np.ceil(np.sqrt(np.log10(n)))))
    most = min(int(np.ceil(np.sqrt(n))) + patience, n - 1)
    small = [
        abs(covariance[k] / covariance[0]) < 2 * np.sqrt(np.log10(n) / n) for k in range(most + 1)
    ]
    lag = next((m for m in range(most) if all(small[m + 1 : m + 1 + patience])), most)
    width = min(2 * max(lag, 1), most)
    slope = level = 0.0
    for k in range(-width, width + 1):
        share = abs(k) / width
        flat_top = 1.0 if share <= 0.5 else 2 * (1 - share)
        slope += flat_top * abs(k) * covariance[abs(k)]
        level += flat_top * covariance[abs(k)]
    best = (2 * slope**2 / (4 / 3 * level**2)) ** (1 / 3) * n ** (1 / 3)
    return max(1, min(int(np.ceil(best)), int(np.ceil(min(3 * np.sqrt(n), n / 3)))))


@pytest.mark.parametrize("n", [8, 9, 30, 100, 1000])
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 0.99])
def test_the_block_length_is_the_published_one(n: int, rho: float) -> None:
    for seed in range(5):
        series = autoregressive(n, rho, seed)
        assert block_length(series) == published_block_length(series)
    assert block_length(np.arange(7.0)) == 1
