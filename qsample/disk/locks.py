"""Locks on files: for one process, or shared by several. The system frees them when their process ends, however it
ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_LOCKED_BYTE: Final = 1 << 30  # Windows keeps others from reading a locked byte
_PAUSE: Final = 0.1  # seconds between two looks at a lock


def lock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Lock a file without waiting, until it is closed. shared: beside others who share the lock.

    Returns:
        False: another process holds a lock in the way. None: this file system, or Windows for a shared lock, has none.
    """
    try:
        if sys.platform == "win32":
            if shared:
                return None
            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def is_at(path: Path, file: FileIO) -> bool:
    """Whether the open `file` is the one at `path` now: it may have been replaced or deleted before it was locked."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def taken_lock(path: Path) -> FileIO | None:
    """The lock file `path`, made and locked; None if another process holds it. OSError: it cannot be made."""
    safe = getattr(os, "O_NOFOLLOW", 0)
    while True:
        file = FileIO(path, "r+", opener=lambda name, _: os.open(name, os.O_RDWR | os.O_CREAT | safe, 0o600))
        if lock(file.fileno()) is False:
            file.close()
            return None
        if is_at(path, file):  # otherwise its last owner has deleted it
            return file
        file.close()


def waited_lock(path: Path, waiting: Callable[[], None]) -> FileIO:
    """As `taken_lock`, after every other process. waiting: called once if there is another."""
    file = taken_lock(path)
    if file is None:
        waiting()
    while file is None:
        time.sleep(_PAUSE)
        file = taken_lock(path)
    return file


def release(path: Path, file: FileIO) -> None:
    """Delete the lock file `path` that was taken, and free the lock."""
    with suppress(OSError):  # Windows keeps open files; the next owner deletes it
        path.unlink()
    file.close()
