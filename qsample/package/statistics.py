"""The mean of numbers of consecutive tokens, with a confidence interval.

Consecutive tokens are correlated, so an interval for independent numbers would be too narrow.
Blocks of consecutive tokens are resampled instead, the circular block bootstrap of Politis & Romano
(1992), with the block length that Politis & White (https://doi.org/10.1081/ETC-120028836) choose
from the series' own correlations, as corrected by Patton, Politis & White
(https://doi.org/10.1080/07474930802459016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from qsample.contract.arrays import Array

RESAMPLES: Final = 2000
# The largest number of blocks in a resample. With so many, longer blocks than needed do no harm.
_MAX_BLOCKS: Final = 10_000
_BLOCKS_PER_DRAW: Final = 2**20


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate with an interval.

    Attributes:
        value: The value for the series itself.
        low: The lower end of the percentile interval.
        high: The upper end of the percentile interval.
    """

    value: float
    low: float
    high: float

    def map(self, function: Callable[[float], float]) -> Estimate:
        """Apply an increasing function to all three numbers."""
        return Estimate(function(self.value), function(self.low), function(self.high))


def estimate_means(
    columns: Mapping[str, Array], *, confidence: float = 0.95, seed: int = 0
) -> dict[str, Estimate]:
    """Estimate the mean of each column.

    Args:
        columns: Numbers of the same tokens by name, [n] each with n >= 1. They are resampled
            together, in blocks that are long enough for each of them.
        confidence: The probability of the interval.
        seed: The seed of the resamples.
    """
    series = {name: np.asarray(column, np.float64) for name, column in columns.items()}
    n = len(next(iter(series.values())))
    length = max(-(-n // _MAX_BLOCKS), *map(block_length, series.values()))
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
    """The number of consecutive numbers in a block: 1 if they are not correlated, at most n / 3.
    series: [n]."""
    n = len(series)
    if n < 8 or not np.isfinite(series).all() or np.ptp(series) == 0:
        return 1
    patience = max(5, math.ceil(math.sqrt(math.log10(n))))
    most = min(math.ceil(math.sqrt(n)) + patience, n - 1)
    spectrum = np.fft.rfft(series - np.mean(series), 2 * n)
    # The covariances at the lags 0 to `most`.
    covariances = np.fft.irfft(np.abs(spectrum) ** 2)[: most + 1] / n
    bound = 2 * math.sqrt(math.log10(n) / n)
    small = np.abs(covariances[1:] / covariances[0]) < bound
    # The first lag after which `patience` consecutive correlations are insignificant.
    lags = (start for start in range(len(small)) if small[start : start + patience].all())
    lag = next(lags, most)
    width = min(2 * max(lag, 1), most)
    distances = np.arange(1, width + 1)
    flat_top_window = np.minimum(1, 2 * (1 - distances / width))
    weights = flat_top_window * covariances[1 : width + 1]
    slope = 2 * (weights * distances).sum()
    level = covariances[0] + 2 * weights.sum()
    # If the correlations cancel each other, the mean is known better than for independent numbers.
    if level <= 0:
        return 1
    best = (2 * slope**2 / (4 / 3 * level**2)) ** (1 / 3) * n ** (1 / 3)
    longest = math.ceil(min(3 * math.sqrt(n), n / 3))
    return max(1, min(math.ceil(float(best)), longest))


def _resampled_means(series: Array, length: int, seed: int) -> Array:
    """The means of resamples, [RESAMPLES].

    The series is a ring, and the last block is cut off, so that a resample is as long as the
    series.
    """
    n = len(series)
    centre = series.mean()
    ring = np.concatenate([series, series[: length - 1]])
    sums = np.concatenate([[0.0], np.cumsum(ring - centre)])
    rng = np.random.default_rng(seed)
    blocks = -(-n // length)
    last_length = n - (blocks - 1) * length
    rows = max(1, _BLOCKS_PER_DRAW // blocks)
    means: list[Array] = []
    for first in range(0, RESAMPLES, rows):
        starts = rng.integers(0, n, (min(rows, RESAMPLES - first), blocks))
        whole = starts[:, :-1]
        last = starts[:, -1]
        totals = (sums[whole + length] - sums[whole]).sum(1)
        totals = totals + sums[last + last_length] - sums[last]
        means.append(totals / n + centre)
    return np.concatenate(means)
