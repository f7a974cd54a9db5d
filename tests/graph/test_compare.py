"""How far apart the numbers of two graphs are: NaN and infinities are no rounding, and give no scale."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qsample.graph.compare import largest_difference, largest_finite

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("got", "wanted", "difference"),
    [
        ([1.0, -2.0], [1.5, 1.0], 3.0),
        ([4.0, 0.0], [1.0, 0.0], 3.0),
        ([2.0, 2.0], [2.0, 2.0], 0.0),
        ([], [], 0.0),
        ([INF, -INF, 1.0], [INF, -INF, 1.25], 0.25),  # masks that both apply
        ([INF], [-INF], INF),
        ([1.0, INF], [1.0, 5.0], INF),
        ([NAN, 1.0], [0.0, 1.0], NAN),
        ([0.0], [NAN], NAN),
        ([NAN], [NAN], NAN),
    ],
)
def test_the_largest_difference(got: list[float], wanted: list[float], difference: float) -> None:
    found = largest_difference(np.array(got), np.array(wanted))
    assert isinstance(found, float)
    assert found == difference or (math.isnan(found) and math.isnan(difference))


@pytest.mark.parametrize(
    ("arrays", "largest"),
    [
        ([[1.0, -3.0]], 3.0),
        ([[1.0, -3.0], [2.0]], 3.0),
        ([[1.0], [-7.0, 2.0]], 7.0),
        ([[0.5, INF, -INF, NAN]], 0.5),
        ([[INF], [NAN]], 0.0),
        ([[]], 0.0),
    ],
)
def test_the_largest_finite_number(arrays: list[list[float]], largest: float) -> None:
    assert largest_finite(*map(np.array, arrays)) == largest
