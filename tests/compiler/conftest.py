"""What several tests of the compiler share."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsample.package import Package, read_package


@pytest.fixture(scope="session")
def llama(llama_package: Path) -> Package:
    """The portable package of a small random Llama."""
    return read_package(llama_package)
