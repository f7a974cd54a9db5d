"""What several tests of the compiler share."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsample.package.package import Package, read_package
from tests.helpers.fake_package import fake_package


@pytest.fixture(scope="session")
def llama(llama_package: Path) -> Package:
    """The portable package of a small random Llama."""
    return read_package(llama_package)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A portable package of a few nodes, which compiles within a second: one attention, and the whole sampler."""
    return fake_package(tmp_path_factory.mktemp("small") / "package")
