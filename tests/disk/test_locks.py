"""Locks on files. Two openings of a file are as two processes to the system."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qsample.disk import locks
from qsample.disk.locks import is_at, lock, release, taken_lock, waited_lock

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
@pytest.mark.parametrize(("number", "answer"), [(errno.ENOLCK, None), (errno.EACCES, False), (errno.EAGAIN, False)])
def test_what_the_system_answers(number: int, answer: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert lock(0) is answer


@posix
def test_a_lock_file_has_one_owner(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    file = taken_lock(path)
    assert file is not None
    assert path.stat().st_mode & 0o777 == 0o600
    assert taken_lock(path) is None
    release(path, file)
    assert (file.closed, path.exists()) == (True, False)
    file = taken_lock(path)
    assert file is not None
    path.unlink()
    release(path, file)  # what is gone is no error
    assert file.closed


def test_a_file_system_without_locks_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "lock", lambda descriptor: None)
    files = [taken_lock(tmp_path / "lock"), taken_lock(tmp_path / "lock")]
    for file in files:
        assert file is not None
        file.close()


@posix
def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("mine")
    with pytest.raises(OSError, match="lock"):
        taken_lock(tmp_path / "lock")
    assert not (tmp_path / "mine").exists()


@posix
@pytest.mark.parametrize("change", [Path.unlink, lambda path: (path.unlink(), path.touch())], ids=["gone", "new"])
def test_the_file_of_an_owner_that_went_is_not_taken(
    change: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking it, the last owner deletes it, and the next one makes it anew."""
    path, real, seen = tmp_path / "lock", locks.lock, []

    def late(descriptor: int) -> bool | None:
        seen.append(descriptor)
        if len(seen) == 1:
            change(path)
        return real(descriptor)

    monkeypatch.setattr(locks, "lock", late)
    file = taken_lock(path)
    assert file is not None
    assert (len(seen), is_at(path, file)) == (2, True)
    assert taken_lock(path) is None
    release(path, file)


@posix
def test_one_waits_for_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, waits, told = tmp_path / "lock", [], []
    file = taken_lock(path)
    assert file is not None

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            release(path, file)

    monkeypatch.setattr(time, "sleep", sleep)
    second = waited_lock(path, lambda: told.append(1))
    assert (waits, told, is_at(path, second)) == ([0.1, 0.1], [1], True)
    release(path, second)
    release(path, waited_lock(path, lambda: told.append(2)))
    assert (len(waits), told) == (2, [1])
