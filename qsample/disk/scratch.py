"""Scratch folders next to the files that are made in them: they go with their process, or with the next one.

A scratch folder is called `.qsample-` and sixteen random hexadecimal digits. Its process holds a lock on the file
`owner` in it, which names the machine. A killed process leaves both. Whoever makes the next scratch folder in the same
place removes those of the same user whose lock is free, if their process ran on this machine. Another machine may not
see a lock on a network file system, and some file systems have no locks: such a folder goes after a week.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import stat
import time
import weakref
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final

from qsample.disk.locks import lock as _lock

OWNER: Final = "owner"
NEW: Final = "new"
REPLACED: Final = "replaced"
_NAME: Final = re.compile(r"\.qsample-[0-9a-f]{16}")
_FORMAT: Final = "qsample scratch folder of "
_LONGEST: Final = 7 * 24 * 3600  # seconds that a process whose lock cannot be seen may live
_own: set[Path] = set()  # of this process, which some file systems would let take its own lock


class ScratchFolder:
    """A folder in `parent` that is deleted by `cleanup`, or with the last reference to it, or at exit.

    Making it removes the folders that killed processes left in `parent`.

    Args:
        parent: an existing folder.
        target: the place in `parent` for `new`, if it goes anywhere. Its old content is moved to `replaced` first, and
            back from there if `new` did not arrive.

    Attributes:
        path: the folder.
        new: an empty folder in it, to work in.
        replaced: a free name in it.

    Raises:
        OSError: If no folder can be made in `parent`.
    """

    def __init__(self, parent: Path, target: Path | None = None) -> None:
        parent = parent.absolute()
        remove_abandoned(parent)
        self.path, lock = _make(parent)
        # The name in `replaced` says where it belongs.
        self.new, self.replaced = self.path / NEW, self.path / REPLACED / (target.name if target else NEW)
        _own.add(self.path)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())
        try:
            self.replaced.parent.mkdir()
            self.new.mkdir()
        except BaseException:
            self.cleanup()
            raise

    def cleanup(self) -> None:
        self._finalizer()

    def __enter__(self) -> ScratchFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cleanup()


def remove_abandoned(parent: Path) -> None:
    """Delete the scratch folders in `parent` whose processes are dead, as the module's docstring defines it."""
    try:
        with os.scandir(parent) as entries:
            found = [Path(entry.path) for entry in entries if _NAME.fullmatch(entry.name) and _is_ours(entry)]
    except OSError:
        return
    for folder in found:
        if folder not in _own:
            with suppress(OSError):
                _remove_if_abandoned(folder)


def outside_scratch(path: Path) -> Path:
    """`path`, or the folder around the outermost scratch folder that it lies in: the folder that a user knows."""
    inside = [parent.parent for parent in (path, *path.parents) if _NAME.fullmatch(parent.name)]
    return inside[-1] if inside else path


def _make(parent: Path) -> tuple[Path, FileIO]:
    """A new scratch folder and the file that holds its lock."""
    while True:
        folder = parent / f".qsample-{secrets.token_hex(8)}"
        folder.mkdir(0o700)
        # Between two of these calls, another process may take the folder for an abandoned one.
        try:
            lock = _open(folder / OWNER, os.O_CREAT | os.O_EXCL)
        except FileNotFoundError:
            continue
        try:
            locked = _lock(lock.fileno())
            if locked is not False and os.path.exists(folder / OWNER):
                lock.write(f"{_FORMAT}{platform.node() if locked else '?'}".encode())
                return folder, lock
            lock.close()
        except BaseException:
            lock.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _open(path: Path, flags: int = 0) -> FileIO:
    """A file that closes once, however often `close` is called."""
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return FileIO(path, "r+", opener=lambda name, _: os.open(name, os.O_RDWR | flags | safe, 0o600))


def _remove_if_abandoned(folder: Path) -> None:
    try:
        lock = _open(folder / OWNER)
    except FileNotFoundError:
        folder.rmdir()  # its process was killed between two calls; if it is not empty, it stays
        return
    with lock:
        status = os.fstat(lock.fileno())
        locked = _lock(lock.fileno()) if stat.S_ISREG(status.st_mode) else False
        if locked is False:
            return
        owner = lock.read(1 << 10) or b""
        if not owner.startswith(_FORMAT.encode()):
            if os.listdir(folder) != [OWNER]:  # else its process was killed before it had written its name
                return
        elif not _is_dead(locked, owner, status.st_mtime):
            return
        _put_back(folder)
        _delete(folder, lock)


def _is_dead(locked: bool | None, owner: bytes, since: float) -> bool:
    """Whether the process named in `owner` is dead, given that its lock is free."""
    seen = locked and owner == f"{_FORMAT}{platform.node()}".encode()
    return bool(seen) or time.time() - since > _LONGEST


def _put_back(folder: Path) -> None:
    """Return the content of `replaced` to its place. FileExistsError: that is taken, and not by `new`."""
    for old in (folder / REPLACED).glob("*"):
        target = folder.with_name(old.name)
        if not os.path.lexists(target):
            old.rename(target)
        elif os.path.lexists(folder / NEW):
            raise FileExistsError


def _remove(folder: Path, lock: FileIO, process: int) -> None:
    if os.getpid() == process:  # and not in a fork
        with suppress(OSError):
            _delete(folder, lock)
        lock.close()
        _own.discard(folder)


def _delete(folder: Path, lock: FileIO) -> None:
    """The file `owner` goes last: if this process is killed on the way, the next one knows the folder."""
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != OWNER:
            with suppress(OSError):
                entry.unlink()
    if os.listdir(folder) == [OWNER]:  # otherwise the next process tries again
        if os.name == "nt":  # an open file cannot be deleted there
            lock.close()
        (folder / OWNER).unlink()
        folder.rmdir()


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, not a link to one, of the same user."""
    return entry.is_dir(follow_symlinks=False) and (
        not hasattr(os, "geteuid") or entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    )
