"""Locks on files. Two openings of a file are as two processes to the system."""

from __future__ import annotations

import errno
import os
import sys
import time
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from qsample.package.disk import locks
from qsample.package.disk.locks import alone, is_at, lock

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other locks")


@posix
def test_who_shares_a_lock(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as first, (tmp_path / "file").open() as second:
        assert lock(first.fileno(), shared=True) is True
        assert lock(second.fileno(), shared=True) is True
        assert lock(second.fileno()) is False
    with (tmp_path / "file").open() as first, (tmp_path / "file").open() as second:
        assert lock(first.fileno()) is True
        assert lock(second.fileno(), shared=True) is False
        assert lock(second.fileno()) is False


@posix
def test_a_lock_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte beyond the text, which other processes may read; the place in the file stays; no lock is shared."""
    held = set()

    def locking(descriptor: int, mode: int, count: int) -> None:
        place = (os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR))
        if place in held:
            raise PermissionError(errno.EACCES, "Permission denied")
        held.add(place)

    monkeypatch.setattr(locks, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(
        locks, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2), raising=False
    )
    (tmp_path / "file").write_text("of somebody")
    with (tmp_path / "file").open("r+") as first, (tmp_path / "file").open("r+") as second:
        assert lock(first.fileno(), shared=True) is None
        assert lock(first.fileno()) is True
        assert lock(second.fileno()) is False
        assert first.read() == "of somebody"
    assert all(place > 1 << 20 for _, place in held)


@posix
@pytest.mark.parametrize(
    ("number", "answer"), [(errno.ENOLCK, None), (errno.EACCES, False), (errno.EAGAIN, False)]
)
def test_what_the_system_answers(
    number: int, answer: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert lock(0) is answer
    if answer is None:
        with (
            alone(tmp_path / "lock", lambda: pytest.fail("waits")),
            alone(tmp_path / "lock", lambda: None),
        ):
            pass  # a file system without locks stops nobody


def test_whether_a_file_is_still_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with FileIO(path) as file:
        assert is_at(path, file)
        path.rename(tmp_path / "moved")
        assert not is_at(path, file)
        path.touch()
        assert not is_at(path, file)


@posix
def test_one_waits_for_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, waits, told = tmp_path / "lock", [], []
    first = alone(path, lambda: told.append(1))
    first.__enter__()
    assert path.stat().st_mode & 0o777 == 0o600

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            first.__exit__(None, None, None)

    monkeypatch.setattr(time, "sleep", sleep)
    with alone(path, lambda: told.append(2)):
        assert (waits, told) == ([0.1, 0.1], [2])
    with alone(path, lambda: told.append(3)):
        assert (len(waits), told) == (2, [2])


@posix
def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("mine")
    with pytest.raises(OSError, match="lock"), alone(tmp_path / "lock", lambda: None):
        pytest.fail("the body ran")
    assert not (tmp_path / "mine").exists()
