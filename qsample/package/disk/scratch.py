"""Scratch folders next to the files that are made in them. They are deleted with their process, or
by the next process.

A scratch folder is named `.qsample-` and sixteen random hexadecimal digits. Its process holds a
lock on the file `owner` in it, and the file names the machine. A killed process leaves both. The
next process that makes a scratch folder in the same place removes the folders of the same user
whose lock is free, if their process ran on this machine. A network file system may not show locks
to other machines, and some have no locks: such a folder is removed after a week.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Final

from qsample.errors import PackageError
from qsample.package.disk.locks import is_at, lock
from qsample.package.disk.space import SCRATCH_NAME, check_free, full_disk_named

OWNER_NAME: Final = "owner"
NEW_NAME: Final = "new"
REPLACED_NAME: Final = "replaced"
_OWNER_PREFIX: Final = b"qsample scratch folder of "
# The longest life of a process whose lock cannot be seen.
_MAX_AGE_S: Final = 7 * 24 * 3600
# The folders of this process: some file systems let a process take its lock twice.
_own_folders: set[Path] = set()


class ScratchFolder:
    """A folder that is deleted by `cleanup`, with the last reference to it, or at exit.

    Attributes:
        path: The folder.
        new: An empty folder in it, to work in.
        replaced: A free name in it for the old content of the target, which is moved back from
            there if `new` does not get its place.
    """

    def __init__(self, parent: Path, target: Path | None = None) -> None:
        """Make the folder, and remove the folders that killed processes left in the same place.

        Args:
            parent: The folder around it.
            target: The later place of `new` in `parent`, if any.

        Raises:
            PackageError: No folder can be made there.
        """
        parent = parent.absolute()
        remove_abandoned(parent)
        try:
            with full_disk_named(parent):
                self.path, owner = _make(parent)
        except OSError as error:
            raise PackageError(
                f"cannot write to {parent}: {error.strerror}; choose another folder"
            ) from error
        self.new = self.path / NEW_NAME
        # The name in the folder `replaced` is the name of its place in `parent`.
        self.replaced = self.path / REPLACED_NAME / (target.name if target else NEW_NAME)
        _own_folders.add(self.path)
        self._finalizer = weakref.finalize(self, _remove, self.path, owner, os.getpid())

    def cleanup(self) -> None:
        """Delete the folder."""
        self._finalizer()

    def __enter__(self) -> ScratchFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cleanup()


def scratch_near(path: Path) -> ScratchFolder:
    """A scratch folder on the future disk of `path`: the disk of temporary files is often memory.

    Raises PackageError if no folder can be made there.
    """
    for folder in path.absolute().parents:
        if folder.is_dir() and os.access(folder, os.W_OK):
            return ScratchFolder(folder)
    return ScratchFolder(Path(tempfile.gettempdir()))


@contextmanager
def scratch_for(target: Path, needed: int, what: str) -> Iterator[ScratchFolder]:
    """A scratch folder next to a target, for the body.

    Args:
        target: The target. Its missing parents are made, and removed if the body raises.
        needed: An estimate of the bytes that must be free on the disk.
        what: The name of the content in messages.

    Raises:
        PackageError: The folder cannot be made, or the disk is full, before the body or in it.
    """
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
    """The folder of a new package: the caller's path, or a path in a temporary folder that `keep`
    hands over."""

    def __init__(self, path: str | Path | None) -> None:
        self._folder = ScratchFolder(Path(tempfile.gettempdir())) if path is None else None
        self.path = Path(path) if path is not None else self._folder.new / "package"  # type: ignore[union-attr]

    def __enter__(self) -> Destination:
        return self

    def keep(self) -> ScratchFolder | None:
        """Hand over the temporary folder; None if the caller gave a path."""
        folder = self._folder
        self._folder = None
        return folder

    def __exit__(self, *exception: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def remove_abandoned(parent: Path) -> None:
    """Delete the scratch folders in `parent` whose processes have ended, as the module's docstring
    describes."""
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
        if folder not in _own_folders:
            with suppress(OSError):
                _remove_if_abandoned(folder)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder of the same user, and not a link to a folder."""
    if not entry.is_dir(follow_symlinks=False):
        return False
    return not hasattr(os, "geteuid") or entry.stat(follow_symlinks=False).st_uid == os.geteuid()


def _make(parent: Path) -> tuple[Path, FileIO]:
    """Make a scratch folder; returns it, and its file `owner`, which holds the lock."""
    while True:
        folder = parent / f".qsample-{secrets.token_hex(8)}"
        folder.mkdir(0o700)
        # Between two of these calls, another process may remove the folder as abandoned.
        try:
            owner = FileIO(folder / OWNER_NAME, "x+")
        except FileNotFoundError:
            continue
        try:
            locked = lock(owner.fileno())
            if locked is not False and is_at(folder / OWNER_NAME, owner):
                owner.write(_OWNER_PREFIX + (platform.node() if locked else "?").encode())
                (folder / NEW_NAME).mkdir()
                (folder / REPLACED_NAME).mkdir()
                return folder, owner
            owner.close()
        except BaseException:
            owner.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _remove_if_abandoned(folder: Path) -> None:
    if not os.path.lexists(folder / OWNER_NAME):
        # Its process was killed between two calls. The folder stays if it is not empty.
        folder.rmdir()
    elif (folder / OWNER_NAME).is_file() and not (folder / OWNER_NAME).is_symlink():
        with FileIO(folder / OWNER_NAME, "r+") as owner:
            if _is_abandoned(folder, owner):
                _delete(folder, owner)


def _is_abandoned(folder: Path, owner: FileIO) -> bool:
    locked = lock(owner.fileno())
    if locked is False:
        return False
    text = owner.read(1 << 10)
    if not text.startswith(_OWNER_PREFIX):
        # Its process was killed before it wrote the name of the machine.
        return os.listdir(folder) == [OWNER_NAME]
    is_of_this_machine = text == _OWNER_PREFIX + platform.node().encode()
    if locked and is_of_this_machine:
        return True
    # Both times are of the file system's clock: this machine's clock may be wrong.
    with tempfile.TemporaryFile(dir=folder.parent) as new:
        now = os.fstat(new.fileno()).st_mtime
    return now - os.fstat(owner.fileno()).st_mtime > _MAX_AGE_S


def _remove(folder: Path, owner: FileIO, process: int) -> None:
    """Delete a folder, but not from a fork. process: The id of the process that made it."""
    if os.getpid() == process:
        with suppress(OSError):
            _delete(folder, owner)
        owner.close()
        _own_folders.discard(folder)


def _delete(folder: Path, owner: FileIO) -> None:
    """Move the content of `replaced` back to its place if `new` did not get there, and delete
    everything else.

    The file `owner` comes last: if this process is killed meanwhile, the next process recognises
    the folder.
    """
    for old in (folder / REPLACED_NAME).glob("*"):
        if (folder / NEW_NAME).exists():
            old.rename(_free_name(folder.with_name(old.name)))
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != OWNER_NAME:
            with suppress(OSError):
                entry.unlink()
    # If something is left, the next process tries again.
    if os.listdir(folder) == [OWNER_NAME]:
        # An open file cannot be deleted on Windows.
        if os.name == "nt":
            owner.close()
        (folder / OWNER_NAME).unlink()
        folder.rmdir()


def _free_name(path: Path) -> Path:
    """`path`, or if something is there now, the first free name next to it."""
    free = path
    number = 0
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}.old{number}")
    return free
