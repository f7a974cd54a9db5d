"""Folders to write a package to."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsample.disk.destination import scratch_folder
from qsample.errors import PackageError


def test_a_folder_that_takes_no_other_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PackageError) as told:
        scratch_folder(tmp_path / "no" / "package")
    assert str(told.value) == f"cannot write to {tmp_path}: Permission denied; choose another folder"
