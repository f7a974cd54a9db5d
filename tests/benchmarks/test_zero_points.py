"""benchmarks/zero_points.py: the graphs that it times."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest


def test_each_form_has_its_zero_points(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside NumPy, with products that round their inputs to 8 bits."""
    zero_points = benchmark("zero_points")
    for name, value in (("LAYERS", 1), ("MATRICES", ((64, 32),)), ("WIDEST", 64)):
        monkeypatch.setattr(zero_points, name, value)
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (32, 2, 16), np.uint8)
    scales = rng.uniform(0.001, 0.002, (32, 2)).astype(np.float32)
    levels = np.stack([packed & 15, packed >> 4], -1).reshape(32, 2, 32).astype(float)
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    for form, zeros in (("without", [8, 8]), ("in 4 bits", [8, 7]), ("float", [7.5, 7.5])):
        weights = ((levels - np.array(zeros)[:, None]) * scales[..., None]).reshape(32, 64)
        wanted = x + (x @ weights.T).max(1, keepdims=True)
        (got,) = zero_points.make_session(32, form).run(None, {"x": x})
        np.testing.assert_allclose(got, wanted, atol=2e-3, err_msg=form)
    times = zero_points.measure({"without": zero_points.make_session(32, "without")}, x)
    assert len(times["without"]) == zero_points.MOST_TURNS
