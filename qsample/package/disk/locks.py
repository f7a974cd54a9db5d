"""Locks on files, for one process or shared by several.

The system frees the locks of a process when it ends, even if it is killed.
"""

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

# Windows lets no other process read a locked byte, so this byte lies after all content.
_LOCKED_BYTE: Final = 1 << 30
_POLL_INTERVAL_S: Final = 0.1


def lock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Lock a file without waiting, until it is closed.

    Args:
        descriptor: The descriptor of the open file.
        shared: Whether other processes may also hold a shared lock.

    Returns:
        True if the file is locked, False if another process holds a lock on it, and None if the
        file system, or Windows for a shared lock, has no locks.
    """
    try:
        if sys.platform == "win32":
            if shared:
                return None
            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def is_at(path: Path, file: FileIO) -> bool:
    """Whether an open file is the file at `path` now: it may have been replaced or deleted before
    it was locked."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        return False


@contextmanager
def alone(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Run the body in one process at a time.

    Args:
        path: The file that the processes lock. It is made if it is missing, and stays, because
            another process may wait for it.
        waiting: A function that is called once if another process runs the body.

    Raises:
        OSError: The file cannot be made.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with FileIO(path, "r+", opener=lambda name, _: os.open(name, flags, 0o600)) as file:
        if lock(file.fileno()) is False:
            waiting()
            while lock(file.fileno()) is False:
                time.sleep(_POLL_INTERVAL_S)
        yield
