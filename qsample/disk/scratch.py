"""Scratch folders next to the files that are made in them: they go with their process, or with the next one.

A scratch folder is called `.qsample-` and sixteen random hexadecimal digits. Its process holds a lock on the file
`owner` in it, and the file names the machine. A killed process leaves both. The next process that makes a scratch
folder in the same place removes the folders of the same user whose lock is free, if their process ran on this machine.
A network file system may not show locks to other machines, and some have none: such a folder goes after a week.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Final

from qsample.disk.locks import is_at, lock
from qsample.disk.space import SCRATCH_NAME, check_free, full_disk_named
from qsample.errors import PackageError

OWNER: Final = "owner"
NEW: Final = "new"
REPLACED: Final = "replaced"
_FORMAT: Final = b"qsample scratch folder of "
_LONGEST: Final = 7 * 24 * 3600  # seconds that a process whose lock cannot be seen may live
_own: set[Path] = set()  # of this process: some file systems let a process take its lock twice


class ScratchFolder:
    """A folder in `parent` that is deleted by `cleanup`, or with the last reference to it, or at exit.

    Making it removes the folders that killed processes left in `parent`; PackageError if no folder can be made there.

    Attributes:
        path: the folder.
        new: an empty folder in it, to work in; `target` is its later place in `parent`, if any.
        replaced: a free name in it, for the old content of `target`; this returns from there if `new` does not arrive.
    """

    def __init__(self, parent: Path, target: Path | None = None) -> None:
        parent = parent.absolute()
        remove_abandoned(parent)
        try:
            with full_disk_named(parent):
                self.path, owner = _make(parent)
        except OSError as error:
            raise PackageError(
                f"cannot write to {parent}: {error.strerror}; choose another folder"
            ) from error
        # The name in `replaced` says where it belongs.
        self.new, self.replaced = (
            self.path / NEW,
            self.path / REPLACED / (target.name if target else NEW),
        )
        _own.add(self.path)
        self._finalizer = weakref.finalize(self, _remove, self.path, owner, os.getpid())

    def cleanup(self) -> None:
        self._finalizer()

    def __enter__(self) -> ScratchFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cleanup()


def scratch_near(path: Path) -> ScratchFolder:
    """A scratch folder on the future disk of `path`: the disk of temporary files is often memory. Raises PackageError
    if no folder can be made there."""
    parent = next(
        (
            folder
            for folder in path.absolute().parents
            if folder.is_dir() and os.access(folder, os.W_OK)
        ),
        None,
    )
    return ScratchFolder(parent or Path(tempfile.gettempdir()))


@contextmanager
def scratch_for(target: Path, needed: int, what: str) -> Iterator[ScratchFolder]:
    """A scratch folder next to `target`, whose missing parents are made; they are removed if the body raises. needed:
    bytes, about, that must be free on the disk. what: the reader's name of what is made. Raises PackageError if the
    folder cannot be made, or the disk is full, before the body or in it."""
    parent = target.parent
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PackageError(
            f"cannot create {parent}: {error.strerror}; choose another folder"
        ) from error
    try:
        with ScratchFolder(parent, target) as scratch, full_disk_named(parent, needed, what):
            check_free(parent, needed, what)
            yield scratch
    except BaseException:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        raise


class Destination:
    """The folder of a new package: the caller's path, or a path in a temporary folder that `keep` hands over."""

    def __init__(self, path: str | Path | None) -> None:
        self._folder = ScratchFolder(Path(tempfile.gettempdir())) if path is None else None
        self.path = Path(path) if path is not None else self._folder.new / "package"  # type: ignore[union-attr]

    def __enter__(self) -> Destination:
        return self

    def keep(self) -> ScratchFolder | None:
        folder, self._folder = self._folder, None
        return folder

    def __exit__(self, *exception: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def remove_abandoned(parent: Path) -> None:
    """Delete the scratch folders in `parent` whose processes are dead, as the module's docstring defines it."""
    try:
        with os.scandir(parent) as entries:
            found = [
                Path(entry.path)
                for entry in entries
                if SCRATCH_NAME.fullmatch(entry.name) and _is_ours(entry)
            ]
    except OSError:
        return
    for folder in found:
        if folder not in _own:
            with suppress(OSError):
                _remove_if_abandoned(folder)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, not a link to one, of the same user."""
    return entry.is_dir(follow_symlinks=False) and (
        not hasattr(os, "geteuid") or entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    )


def _make(parent: Path) -> tuple[Path, FileIO]:
    """A new scratch folder, and its file `owner` that holds the lock."""
    while True:
        folder = parent / f".qsample-{secrets.token_hex(8)}"
        folder.mkdir(0o700)
        # Between two of these calls, another process may take the folder for an abandoned one.
        try:
            owner = FileIO(folder / OWNER, "x+")
        except FileNotFoundError:
            continue
        try:
            locked = lock(owner.fileno())
            if locked is not False and is_at(folder / OWNER, owner):
                owner.write(_FORMAT + (platform.node() if locked else "?").encode())
                (folder / NEW).mkdir()
                (folder / REPLACED).mkdir()
                return folder, owner
            owner.close()
        except BaseException:
            owner.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _remove_if_abandoned(folder: Path) -> None:
    if not os.path.lexists(folder / OWNER):
        folder.rmdir()  # its process was killed between two calls; if it is not empty, it stays
    elif (folder / OWNER).is_file() and not (folder / OWNER).is_symlink():
        with FileIO(folder / OWNER, "r+") as owner:
            if _is_abandoned(folder, owner):
                _delete(folder, owner)


def _is_abandoned(folder: Path, owner: FileIO) -> bool:
    locked = lock(owner.fileno())
    if locked is False:
        return False
    text = owner.read(1 << 10)
    if not text.startswith(_FORMAT):
        return os.listdir(folder) == [
            OWNER
        ]  # its process was killed before it had written its name
    seen = bool(locked) and text == _FORMAT + platform.node().encode()
    return seen or time.time() - os.fstat(owner.fileno()).st_mtime > _LONGEST


def _remove(folder: Path, owner: FileIO, process: int) -> None:
    if os.getpid() == process:  # and not in a fork
        with suppress(OSError):
            _delete(folder, owner)
        owner.close()
        _own.discard(folder)


def _delete(folder: Path, owner: FileIO) -> None:
    """Return the content of `replaced` to its place if `new` did not get there, and delete everything else; the file
    `owner` last: if this process is killed on the way, the next one knows the folder."""
    for old in (folder / REPLACED).glob("*"):
        if (folder / NEW).exists():
            old.rename(_free_name(folder.with_name(old.name)))
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != OWNER:
            with suppress(OSError):
                entry.unlink()
    if os.listdir(folder) == [OWNER]:  # otherwise the next process tries again
        if os.name == "nt":  # an open file cannot be deleted there
            owner.close()
        (folder / OWNER).unlink()
        folder.rmdir()


def _free_name(path: Path) -> Path:
    """`path`; if something has come to be there meanwhile, the first free name beside it."""
    number = 0
    while os.path.lexists(free := path.with_name(f"{path.name}.old{number}") if number else path):
        number += 1
    return free
