"""Two folders swap their names at once, or nothing happens and the caller is told."""

from __future__ import annotations

import ctypes
import errno
import sys
from pathlib import Path

import pytest

from qsample.disk import exchange as module
from qsample.disk.exchange import exchange


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name)
    return tmp_path / "a", tmp_path / "b"


def names(*folders: Path) -> list[str]:
    return [(folder / "name").read_text() for folder in folders]


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="no such call here")
def test_names_are_swapped(folders: tuple[Path, Path]) -> None:
    if not exchange(*folders):
        pytest.skip("this file system cannot")
    assert names(*folders) == ["b", "a"]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM])
def test_what_a_file_system_without_it_answers(
    code: int, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_exchange", lambda first, second: code)
    assert exchange(*folders) is False
    assert names(*folders) == ["a", "b"]


def test_other_errors_are_raised(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        exchange(folders[0], tmp_path / "missing")
    assert names(*folders) == ["a", "b"]


def test_a_system_or_a_library_without_the_call(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda *_, **__: object())
        assert exchange(*folders) is False
    monkeypatch.setattr(sys, "platform", "win32")
    assert exchange(*folders) is False
    assert names(*folders) == ["a", "b"]


def test_names_that_are_no_text(tmp_path: Path) -> None:
    folders = [tmp_path / "\udcff", tmp_path / "ü b"]
    for folder in folders:
        folder.mkdir()
    if exchange(*folders):
        assert all(folder.is_dir() for folder in folders)
