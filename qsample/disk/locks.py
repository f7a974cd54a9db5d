"""Locks on files: for one process, or shared by several. The system frees them when their process ends, even killed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_LOCKED_BYTE: Final = 1 << 30  # Windows lets no other process read a locked byte
_PAUSE: Final = 0.1  # seconds between two looks at a lock


def lock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Lock a file without waiting, until it is closed; `shared` with other processes that say so. False: another
    process holds a lock in the way. None: this file system, or Windows for a shared lock, has none."""
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


@contextmanager
def alone(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Run the body in one process at a time. The processes lock the file at `path`; it is made if it is missing (or
    OSError is raised), and stays: a process may wait for it. `waiting` is called once if another process runs it."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with FileIO(path, "r+", opener=lambda name, _: os.open(name, flags, 0o600)) as file:
        if lock(file.fileno()) is False:
            waiting()
            while lock(file.fileno()) is False:
                time.sleep(_PAUSE)
        yield
