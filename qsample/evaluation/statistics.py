"""The mean of numbers of consecutive tokens, with a confidence interval.

Tokens are correlated: an interval that took them for independent would be too narrow. So blocks of consecutive tokens
are resampled, the circular block bootstrap of Politis & Romano (1992), with the block length that Politis & White
(https://doi.org/10.1081/ETC-120028836) choose from the series' own correlations, as corrected by Patton, Politis &
White (https://doi.org/10.1080/07474930802459016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from qsample.contract.arrays import Array

RESAMPLES: Final = 2000
_MOST_BLOCKS: Final = 10_000  # of a resample; with so many, longer blocks than needed do no harm
_AT_ONCE: Final = 2**20  # blocks that are drawn together


@dataclass(frozen=True, slots=True)
class Estimate:
    """value: of the series as it is. low, high: the percentile interval around it."""

    value: float
    low: float
    high: float

    def map(self, function: Callable[[float], float]) -> Estimate:
        """`function`, which grows with its argument, of all three."""
        return Estimate(function(self.value), function(self.low), function(self.high))


def estimate_means(columns: Mapping[str, Array], *, confidence: float = 0.95, seed: int = 0) -> dict[str, Estimate]:
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
            means = _resampled_means(column, length, _draw(n, length, seed))
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
    covariances = _autocovariances(series, most)
    bound = 2 * math.sqrt(math.log10(n) / n)
    small = np.abs(covariances[1:] / covariances[0]) < bound
    lag = most  # after it, `patience` correlations in a row are as good as 0
    for start in range(len(small)):
        if small[start : start + patience].all():
            lag = start
            break
    width = min(2 * max(lag, 1), most)
    distances = np.arange(1, width + 1)
    weights = np.minimum(1, 2 * (1 - distances / width)) * covariances[1 : width + 1]  # a flat-topped window
    slope, level = 2 * (weights * distances).sum(), covariances[0] + 2 * weights.sum()
    if level <= 0:  # correlations that cancel each other: the mean is better known than of independent numbers
        return 1
    best = (2 * slope**2 / (4 / 3 * level**2)) ** (1 / 3) * n ** (1 / 3)
    longest = math.ceil(min(3 * math.sqrt(n), n / 3))
    return max(1, min(math.ceil(float(best)), longest))


def _autocovariances(series: Array, most: int) -> Array:
    """[most + 1]: at lags 0 to `most`."""
    n = len(series)
    spectrum = np.fft.rfft(series - np.mean(series), 2 * n)
    covariances: Array = np.fft.irfft(np.abs(spectrum) ** 2)[: most + 1] / n
    return covariances


def _draw(n: int, length: int, seed: int) -> Iterator[Array]:
    """The starts of the blocks of each resample: arrays [resamples, blocks], RESAMPLES rows in all."""
    rng, blocks = np.random.default_rng(seed), -(-n // length)
    rows = max(1, _AT_ONCE // blocks)
    for first in range(0, RESAMPLES, rows):
        yield rng.integers(0, n, (min(rows, RESAMPLES - first), blocks))


def _resampled_means(series: Array, length: int, draws: Iterator[Array]) -> Array:
    """[RESAMPLES]. The series is a ring; the last block is cut off so that a resample has as many numbers."""
    n = len(series)
    centre = series.mean()
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([series, series[: length - 1]]) - centre)])
    means = []
    for starts in draws:
        rest = n - (starts.shape[1] - 1) * length
        whole, last = starts[:, :-1], starts[:, -1]
        totals = (sums[whole + length] - sums[whole]).sum(1) + sums[last + rest] - sums[last]
        means.append(totals / n + centre)
    result: Array = np.concatenate(means)
    return result
