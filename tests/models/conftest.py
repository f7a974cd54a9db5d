"""A cache of the test's own, and a package to fill it with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qsample.models import cache
from qsample.package.package import Package


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, which does not exist yet."""
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(fake: Callable[..., Package]) -> Path:
    return fake().path
