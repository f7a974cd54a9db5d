"""The mean of numbers of consecutive tokens, with a confidence interval.

Tokens are correlated: an interval that took them for independent would be too narrow. So blocks of consecutive tokens
are resampled, the circular block bootstrap of Politis & Romano (1992), with the block length that Politis & White
(https://doi.org/10.1081/ETC-120028836) choose from the series' own correlations, as corrected by Patton, Politis &
White (https://doi.org/10.1080/07474930802459016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from qsample.contract.arrays import Array

RESAMPLES: Final = 2000
_MOST_BLOCKS: Final = 10_000  # of a resample; at this number, longer blocks than needed do no harm
_AT_ONCE: Final = 2**20  # blocks that are drawn together


@dataclass(frozen=True, slots=True)
class Estimate:
    """value: of the series as it is. low, high: the percentile interval around it."""

    value: float
    low: float
    high: float

    def map(self, function: Callable[[float], float]) -> Estimate:
        """`function` of all three; it grows with its argument."""
        return Estimate(function(self.value), function(self.low), function(self.high))


def estimate_means(
    columns: Mapping[str, Array], *, confidence: float = 0.95, seed: int = 0
) -> dict[str, Estimate]:
    """The mean of each column with its interval. The columns, [n] each with n >= 1, are numbers of the same tokens, and
    are resampled together, in blocks that are long enough for each of them."""
    series = {name: np.asarray(column, np.float64) for name, column in columns.items()}
    n = len(next(iter(series.values())))
    length = max(-(-n // _MOST_BLOCKS), *map(block_length, series.values()))
    tail = (1 - confidence) / 2
    estimates = {}
    for name, column in series.items():
        mean = float(column.mean())
        low = high = mean
        if math.isfinite(mean):
            means = _resampled_means(column, length, seed)
            low, high = np.quantile(means, [tail, 1 - tail])
        estimates[name] = Estimate(mean, float(low), float(high))
    return estimates


def block_length(series: Array) -> int:
    """The consecutive numbers of `series`, [n], that a block needs: 1 if they are not correlated, at most n / 3."""
    n = len(series)
    if n < 8 or not np.isfinite(series).all() or np.ptp(series) == 0:
        return 1
    patience = max(5, math.ceil(math.sqrt(math.log10(n))))
    most = min(math.ceil(math.sqrt(n)) + patience, n - 1)
    spectrum = np.fft.rfft(series - np.mean(series), 2 * n)
    covariances = np.fft.irfft(np.abs(spectrum) ** 2)[: most + 1] / n  # at lags 0 to `most`
    bound = 2 * math.sqrt(math.log10(n) / n)
    small = np.abs(covariances[1:] / covariances[0]) < bound
    # The first lag after which `patience` correlations in a row are as good as 0.
    lag = next(
        (start for start in range(len(small)) if small[start : start + patience].all()), most
    )
    width = min(2 * max(lag, 1), most)
    distances = np.arange(1, width + 1)
    weights = (
        np.minimum(1, 2 * (1 - distances / width)) * covariances[1 : width + 1]
    )  # a flat-topped window
    slope, level = 2 * (weights * distances).sum(), covariances[0] + 2 * weights.sum()
    if (
        level <= 0
    ):  # correlations that cancel each other: the mean is better known than of independent numbers
        return 1
    best = (2 * slope**2 / (4 / 3 * level**2)) ** (1 / 3) * n ** (1 / 3)
    longest = math.ceil(min(3 * math.sqrt(n), n / 3))
    return max(1, min(math.ceil(float(best)), longest))


def _resampled_means(series: Array, length: int, seed: int) -> Array:
    """[RESAMPLES]. The series is a ring; the last block is cut off so that a resample has the series' length."""
    n, centre = len(series), series.mean()
    sums = np.concatenate(
        [[0.0], np.cumsum(np.concatenate([series, series[: length - 1]]) - centre)]
    )
    rng, blocks = np.random.default_rng(seed), -(-n // length)
    rest, rows = n - (blocks - 1) * length, max(1, _AT_ONCE // blocks)
    means: list[Array] = []
    for first in range(0, RESAMPLES, rows):
        starts = rng.integers(0, n, (min(rows, RESAMPLES - first), blocks))
        whole, last = starts[:, :-1], starts[:, -1]
        totals = (sums[whole + length] - sums[whole]).sum(1) + sums[last + rest] - sums[last]
        means.append(totals / n + centre)
    return np.concatenate(means)
