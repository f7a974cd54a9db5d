"""Scratch folders beside what is written: gone with the process that made them, or found by the next one.

A scratch folder is called `.qsample-` and sixteen digits, half of which follow from the other half. Its `owner.json`
says where and on which machine it was made, and is locked (flock) for as long as its process lives. A process that was
killed leaves both behind; whoever makes the next scratch folder beside it removes it, if

- it is surely ours: the name, the same user, and in `owner.json` the folder's own inode, which a copy would not have;
- its owner is surely dead: its lock is free, and its kernel is this one, or this machine's before a restart. A lock on
  a network file system may not be seen from another machine, so what another machine left stays for that one.

Nothing else is ever touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import uuid
import weakref
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, Final

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

OWNER: Final = "owner.json"
NEW: Final = "new"
REPLACED: Final = "replaced"
_NAME: Final = re.compile(r"\.qsample-([0-9a-f]{8})([0-9a-f]{8})")
_FORMAT: Final = "qsample scratch folder 1"
_LOCKED_BYTE: Final = 1 << 30  # Windows keeps others from reading what is locked
_own: set[Path] = set()  # of this process, which some file systems would let take its own lock


class ScratchFolder:
    """A folder in `parent` that is deleted by `cleanup`, or with the last reference to it, or at exit.

    Making one removes what killed processes left in `parent`. path: the folder. new: an empty folder in it, to work in.
    replaced: a free name in it. target: the place in `parent` where `new` goes, if it goes anywhere; what was there is
    moved to `replaced` first, and back from there if `new` did not arrive.

    Raises OSError where `parent` takes no folder.
    """

    def __init__(self, parent: Path, target: Path | None = None) -> None:
        parent = parent.absolute()
        remove_abandoned(parent)
        self.path, lock = _make(parent, target)
        self.new, self.replaced = self.path / NEW, self.path / REPLACED
        _own.add(self.path)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())
        try:
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
    """Delete the scratch folders in `parent` whose processes are surely dead; see the module's own text."""
    try:
        with os.scandir(parent) as entries:
            found = [Path(entry.path) for entry in entries if _is_name(entry.name) and _is_ours(entry.path)]
    except OSError:
        return
    for folder in found:
        if folder not in _own:
            with suppress(OSError):
                _remove_if_abandoned(folder)


def outside_scratch(path: Path) -> Path:
    """`path`, or the folder that holds the outermost scratch folder that it lies in: what a user knows of."""
    inside = [parent.parent for parent in (path, *path.parents) if _is_name(parent.name)]
    return inside[-1] if inside else path


def _make(parent: Path, target: Path | None) -> tuple[Path, FileIO]:
    """A new scratch folder and the file that holds its lock."""
    while True:
        folder = parent / _new_name()
        folder.mkdir(0o700)
        try:
            lock = _open(folder / OWNER, os.O_CREAT | os.O_EXCL)
        except FileNotFoundError:  # another process took the empty folder for an abandoned one
            continue
        try:
            locked = _lock(lock.fileno())
            if locked is False or not os.path.exists(folder / OWNER):  # likewise
                lock.close()
                continue
            owner = {
                "format": _FORMAT,
                "inode": os.stat(folder).st_ino,
                "target": None if target is None else str(target),
                "locked": locked is not None,
                "pid": os.getpid(),
                **_machine(),
            }
            lock.write(json.dumps(owner).encode())
            return folder, lock
        except BaseException:
            lock.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _open(path: Path, flags: int = 0) -> FileIO:
    """A file that closes once, however often it is asked to."""
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return FileIO(path, "r+", opener=lambda name, _: os.open(name, os.O_RDWR | flags | safe, 0o600))


def _remove_if_abandoned(folder: Path) -> None:
    try:
        lock = _open(folder / OWNER)
    except FileNotFoundError:
        folder.rmdir()  # it was killed between two calls; not empty, it stays
        return
    with lock:
        if not stat.S_ISREG(os.fstat(lock.fileno()).st_mode) or not _lock(lock.fileno()):
            return
        owner = _read_owner(lock)
        if owner is None:
            if os.listdir(folder) == [OWNER]:  # it was killed before it had written to it
                _delete(folder, lock)
        elif owner.get("inode") == os.stat(folder).st_ino and owner.get("locked") and _is_of_this_machine(owner):
            if os.path.lexists(folder / REPLACED) and not _put_back(folder, owner.get("target")):
                return
            _delete(folder, lock)


def _put_back(folder: Path, target: Any) -> bool:
    """Return what was being replaced to its place, if the replacement did not arrive there. False: no place for it."""
    if not isinstance(target, str) or Path(target).parent != folder.parent:
        return False
    if os.path.lexists(target):
        return not os.path.lexists(folder / NEW)
    (folder / REPLACED).rename(target)
    return True


def _remove(folder: Path, lock: FileIO, process: int) -> None:
    if os.getpid() == process:  # and not a fork of the one that made it
        with suppress(OSError):
            _delete(folder, lock)
        lock.close()
        _own.discard(folder)


def _delete(folder: Path, lock: FileIO) -> None:
    """What says whose it is goes last: whoever is killed on the way leaves a folder that can still be told."""
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != OWNER:
            with suppress(OSError):
                entry.unlink()
    if os.listdir(folder) == [OWNER]:  # what could not be deleted is tried again by the next process
        if os.name == "nt":  # an open file cannot be deleted there
            lock.close()
        (folder / OWNER).unlink()
        folder.rmdir()


def _lock(descriptor: int) -> bool | None:
    """Lock a file without waiting. False: another process holds it. None: this file system has no locks."""
    try:
        if sys.platform == "win32":
            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _read_owner(lock: FileIO) -> dict[str, Any] | None:
    """What `owner.json` says; None where it was not written to its end."""
    try:
        owner = json.loads(lock.read(1 << 16) or b"")
    except (ValueError, RecursionError):
        return None
    return owner if isinstance(owner, dict) and owner.get("format") == _FORMAT else None


def _new_name() -> str:
    token = secrets.token_hex(4)
    return f".qsample-{token}{_check_digits(token)}"


def _is_name(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and _check_digits(match[1]) == match[2]


def _check_digits(token: str) -> str:
    return hashlib.sha256(f"{_FORMAT} {token}".encode()).hexdigest()[:8]


def _is_ours(path: str) -> bool:
    """Whether it is a folder, no link to one, of the same user."""
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and (not hasattr(os, "geteuid") or status.st_uid == os.geteuid())


@cache
def _machine() -> dict[str, str]:
    """The kernel since its start ("" = unknown), and the machine: containers share the kernel and not the name."""
    return {
        "boot": _first_line("/proc/sys/kernel/random/boot_id"),
        "machine": f"{platform.node()} {_first_line('/etc/machine-id') or uuid.getnode()}",
    }


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _is_of_this_machine(owner: dict[str, Any]) -> bool:
    here = _machine()
    return bool(owner.get("machine") == here["machine"] or (here["boot"] and owner.get("boot") == here["boot"]))
