"""The fixtures of other exporters' files, unpacked once for all test processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import made_once
from tests.helpers.foreign import unpack


@pytest.fixture(scope="session")
def decoder(shared_folder: Path) -> Callable[[str], tuple[Path, str | None]]:
    """ "NAME" or `NAME/FILE` → the folder of that fixture, and the file."""

    def find(kind: str) -> tuple[Path, str | None]:
        name, _, file = kind.partition("/")
        folder = made_once(shared_folder / f"foreign-{name}", lambda path: unpack(name, path))
        return folder, file or None

    return find
