"""Moves a finished folder or file to its place: readers see the old content, or all of the new
content."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from qsample.errors import PackageError
from qsample.package.disk.scratch import ScratchFolder, remove_abandoned
from qsample.package.disk.space import full_disk_named

# With this value of Linux, paths are relative to the working directory.
_AT_FDCWD: Final = -100
# RENAME_EXCHANGE of Linux's renameat2(2), and RENAME_SWAP of macOS's renamex_np(2).
_EXCHANGE_FLAG: Final = 2
_OPEN_FILE_ADVICE: Final = (
    ", or end the program that has a file of the package there open: Windows moves no open file"
)
# A system, a file system or a sandbox that lacks the call reports these. EPERM may also have
# another cause: then the plain renames fail as well, with a message.
_UNSUPPORTED_ERRORS: Final = (
    errno.ENOSYS,
    errno.EINVAL,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EPERM,
)
_MAX_LISTED_FILES: Final = 3


def put_in_place(scratch: ScratchFolder, target: Path, check: Callable[[Path], None]) -> None:
    """Give a finished folder its name.

    A folder that it replaces is deleted with the scratch folder. A plain rename of a folder never
    deletes anything: on POSIX it can replace only an empty folder, on Windows nothing. If two
    processes write, only one of them gets the name. A package is replaced by exchanging the two
    names; on a file system that cannot do that, the name is missing between two renames.

    Args:
        scratch: The scratch folder, whose folder `new` is finished.
        target: The name, on the same file system.
        check: A function that raises PackageError if the file or folder at a path must stay. It is
            called with `target` if something is there, and once more with the replaced folder, out
            of reach of other programs; a folder that it refuses is moved back.

    Raises:
        PackageError: The system refuses.
    """
    try:
        while True:
            if os.path.lexists(target):
                check(target)
                if not _is_empty(target):
                    _replace(scratch, target, check)
                    break
                if os.name == "nt":
                    target.rmdir()
            try:
                scratch.new.rename(target)
                break
            except OSError:
                # If another process has made a folder there, check that one. Otherwise this is a
                # refusal.
                if not os.path.lexists(target) or _is_empty(target):
                    raise
    except OSError as error:
        advice = _OPEN_FILE_ADVICE if os.name == "nt" else ""
        raise PackageError(
            f"cannot move the package to {target}: {error.strerror}; choose another folder on the same disk, whose "
            f"parent folder can be written to{advice}"
        ) from error
    # Elsewhere a folder cannot be opened.
    if os.name == "posix":
        # The package is there, and some file systems cannot flush a folder.
        with suppress(OSError):
            flush(target.parent)


def _replace(scratch: ScratchFolder, target: Path, check: Callable[[Path], None]) -> None:
    """Replace a folder that is not empty; see `put_in_place`."""
    new_inode = os.stat(scratch.new).st_ino
    try:
        if exchange(scratch.new, target):
            check(scratch.new)
            return
    except BaseException:
        with suppress(OSError):
            if os.lstat(target).st_ino == new_inode:
                exchange(scratch.new, target)
        raise
    # The scratch folder moves it back from there if `new` does not get its place.
    target.rename(scratch.replaced)
    check(scratch.replaced)
    scratch.new.rename(target)


def check_replaceable(
    path: Path,
    target: Path,
    kind: str,
    is_one: Callable[[Path], bool],
    foreign_files: Callable[[Path], Iterator[str]],
    overwrite: bool,
) -> None:
    """Raise PackageError unless nothing, an empty folder, or a folder that may be overwritten is at
    a path.

    Args:
        path: The path, which is `target` or the path to which it was moved.
        target: The name of the folder in messages.
        kind: The name of the kind of folder that may be overwritten.
        is_one: A function that returns whether a folder is of that kind.
        foreign_files: A function that returns the files of a folder that do not belong to it; a
            folder with such files is not overwritten.
        overwrite: Whether the caller allows overwriting.
    """
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise PackageError(
                f"cannot write to {target!s:.200}…: the name is too long; choose another"
            ) from error
        return
    if path.is_symlink() or not path.is_dir():
        raise PackageError(f"{target} is a file; give a folder for the {kind}")
    # A killed process may have left its scratch folder in it.
    remove_abandoned(path)
    if not any(path.iterdir()):
        return
    if not is_one(path):
        raise PackageError(
            f"{target} is not empty and not a qsample {kind}, so it is not replaced; choose another folder"
        )
    if not overwrite:
        raise PackageError(f"{target} already holds a {kind}; pass overwrite=True to replace it")
    foreign = list(islice(foreign_files(path), _MAX_LISTED_FILES))
    if foreign:
        raise PackageError(
            f"{target} holds files that are not its {kind}'s ({', '.join(foreign)}), so it is not replaced; move them "
            "elsewhere, or choose another folder"
        )


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders of one file system in one step: neither name is ever
    missing.

    Returns:
        False, and nothing changes, if the system or the file system cannot do it: Windows, a C
        library without the call (glibc before 2.28), NFS and other file systems.

    Raises:
        OSError: It is not permitted.
    """
    name = {"linux": "renameat2", "darwin": "renamex_np"}.get(sys.platform)
    call: Any = getattr(ctypes.CDLL(None, use_errno=True), name, None) if name is not None else None
    if call is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    flag = ctypes.c_uint(_EXCHANGE_FLAG)
    if sys.platform == "linux":
        folder = ctypes.c_int(_AT_FDCWD)
        result = call(folder, names[0], folder, names[1], flag)
    else:
        result = call(*names, flag)
    if result == 0:
        return True
    problem = ctypes.get_errno()
    if problem in _UNSUPPORTED_ERRORS:
        return False
    raise OSError(problem, os.strerror(problem), str(first), None, str(second))


def _is_empty(path: Path) -> bool:
    try:
        return path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    except FileNotFoundError:
        return False


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def file_aside(target: Path, folder: Path | None = None) -> Iterator[Path]:
    """Replace a file when the body ends.

    Args:
        target: The file.
        folder: A folder of the same file system for the scratch folder; by default the target's.
            If this process is killed, the next one that writes a file there removes the remains.

    Yields:
        A free name for the new file, which is deleted if the body raises.

    Raises:
        OSError: The system refuses.
        PackageError: No scratch folder can be made, or the disk is full.
    """
    place = folder or target.parent
    with full_disk_named(place), ScratchFolder(place) as scratch:
        aside = scratch.new / target.name
        yield aside
        aside.replace(target)
