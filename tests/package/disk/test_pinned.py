"""A pinned folder: found again under other names, named as the caller does, opened anew elsewhere."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest

from qsample.errors import PackageError
from qsample.package.disk.pinned import PinnedFolder


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins a folder")
def test_it_stays_whatever_is_renamed(tmp_path: Path) -> None:
    folder = tmp_path / "outer" / "a"
    folder.mkdir(parents=True)
    (folder / "x").write_text("first")
    pinned = PinnedFolder(folder)
    (tmp_path / "outer").rename(tmp_path / "aside")
    folder.mkdir(parents=True)
    (folder / "x").write_text("second")
    assert (pinned.path / "x").read_text() == "first"
    assert [path.name for path in pinned.path.iterdir()] == ["x"]
    again = pickle.loads(pickle.dumps(pinned))
    assert (again.path / "x").read_text() == "second"
    number = int(pinned.path.name)
    del pinned
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_errors_have_the_name_of_the_folder(tmp_path: Path) -> None:
    pinned = PinnedFolder(tmp_path)
    longer = f"{pinned.path}0"
    with pytest.raises(PackageError) as caught, pinned.named():
        raise PackageError(f"{pinned.path / 'x'} and {pinned.path}: not {longer}")
    # Elsewhere the folder has its own name anyway.
    other = longer if pinned.path != tmp_path else f"{tmp_path}0"
    assert str(caught.value) == f"{tmp_path / 'x'} and {tmp_path}: not {other}"
    error = PackageError("of something else")
    with pytest.raises(PackageError) as same, pinned.named():
        raise error
    assert same.value is error


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    if sys.platform == "linux":
        for path in (tmp_path / "file", tmp_path / "missing"):
            with pytest.raises(OSError, match=path.name):
                PinnedFolder(path)
