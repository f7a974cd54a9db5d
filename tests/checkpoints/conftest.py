"""What several tests of checkpoints share."""

from __future__ import annotations

import pytest

from qsample.checkpoints import mapped_weights
from qsample.transforms import deferred


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of 1,000 numbers are placeholders already."""
    for module in (mapped_weights, deferred):
        monkeypatch.setattr(module, "SMALLEST", 1000)
