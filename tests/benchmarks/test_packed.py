"""The benchmark of packed weights: its table, and its products of each form."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture
def packed(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("packed")


def test_the_table(packed: ModuleType) -> None:
    """Ratios are taken within a round: the machine halves its speed after the first."""
    figures = {"file": 4e6, "package": 5e6, "peak_anonymous": 2e9, "seconds": 60.0}
    steps = {"int4": [1.0, 2.0], "Q4_K_M": [1.5, 3.0], "Q4_K_M, llama.cpp": [3.0, 6.0]}
    _, rows = packed.table_rows({"compiled": {"int4": figures, "Q4_K_M": figures}, "steps": steps})
    assert rows[0][-5:] == ["60.0", "1.5", "", "", "1.00"]
    assert rows[1] == ["Q4_K_M", "4", "5", "2,000", "60.0", "2.2", "4.5", "2.00", "0.67"]


@pytest.mark.parametrize("form", [(4, 32, True, True), (8, 16, False, False)])
def test_a_product(form: tuple[int, int, bool, bool], packed: ModuleType) -> None:
    (result,) = packed.product(*form).run(None, {"x": np.ones((1, packed.K), np.float32)})
    assert result.shape == (1, packed.N)
    assert np.isfinite(result).all()
