"""Moves a finished folder or file to its place: readers see the old content or all of the new content."""

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

from qsample.disk.scratch import ScratchFolder
from qsample.errors import PackageError

_AT_FDCWD: Final = -100  # Linux: paths are relative to the working directory
_SWAP: Final = 2  # RENAME_EXCHANGE of Linux's renameat2(2), RENAME_SWAP of macOS's renamex_np(2)
_IN_USE: Final = (
    ", or end the program that has a file of the package there open: Windows moves no open file"
)
# The answers of a system, a file system or a sandbox that lacks the call. EPERM may also be meant: then the renames in
# its place fail as well, and say so.
_UNSUPPORTED: Final = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)


def put_in_place(scratch: ScratchFolder, target: Path, check: Callable[[Path], None]) -> None:
    """Give the finished folder `scratch.new` the name `target` on its file system; PackageError if the system refuses.

    A folder that it replaces goes with the scratch folder. A plain rename of a folder never deletes anything: POSIX
    lets it replace an empty folder and nothing else, Windows nothing at all. Of two writers, one gets the name. A
    package is replaced by exchanging the two names; if the file system cannot, the name is missing between two renames.

    `check` raises PackageError if the file or folder at a path has to stay. It gets `target` if something is there, and
    the replaced folder once more, out of reach of other programs; it goes back if it is refused.
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
                # If another folder has come to be there since, look at it. Otherwise the system means it.
                if not os.path.lexists(target) or _is_empty(target):
                    raise
    except OSError as error:
        raise PackageError(
            f"cannot move the package to {target}: {error.strerror}; choose another folder on the same disk, whose "
            f"parent folder can be written to{_IN_USE if os.name == 'nt' else ''}"
        ) from error
    if os.name == "posix":  # elsewhere a folder cannot be opened
        with suppress(OSError):  # the package is there; some file systems cannot flush a folder
            flush(target.parent)


def _replace(scratch: ScratchFolder, target: Path, check: Callable[[Path], None]) -> None:
    made = os.stat(scratch.new).st_ino
    try:
        if exchange(scratch.new, target):
            check(scratch.new)
            return
    except BaseException:
        with suppress(OSError):
            if os.lstat(target).st_ino == made:
                exchange(scratch.new, target)
        raise
    target.rename(scratch.replaced)  # from where the scratch folder returns it unless `new` arrives
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
    """Raise PackageError unless nothing, an empty folder, or something that may be overwritten is at `path`. `path` is
    `target`, the reader's name of it, or where it was moved. With the caller's consent `overwrite`, a folder of the
    kind `kind`, as `is_one` tells, may be overwritten if all its files came with it: no `foreign_files`."""
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
    if not any(path.iterdir()):
        return
    if not is_one(path):
        raise PackageError(
            f"{target} is not empty and not a qsample {kind}, so it is not replaced; choose another folder"
        )
    if not overwrite:
        raise PackageError(f"{target} already holds a {kind}; pass overwrite=True to replace it")
    if foreign := list(islice(foreign_files(path), 3)):
        raise PackageError(
            f"{target} holds files that are not its {kind}'s ({', '.join(foreign)}), so it is not replaced; move them "
            "elsewhere, or choose another folder"
        )


def exchange(first: Path, second: Path) -> bool:
    """Give two folders of one file system each other's name, at once: neither name is ever missing. Returns False, and
    changes nothing, if the system or the file system cannot: Windows, a C library without the call (glibc before 2.28),
    NFS and other file systems. Raises OSError if it can, and is not permitted."""
    name = {"linux": "renameat2", "darwin": "renamex_np"}.get(sys.platform)
    call: Any = getattr(ctypes.CDLL(None, use_errno=True), name, None) if name else None
    if call is None:
        return False
    folder = [ctypes.c_int(_AT_FDCWD)] if sys.platform == "linux" else []
    if call(*folder, os.fsencode(first), *folder, os.fsencode(second), ctypes.c_uint(_SWAP)) == 0:
        return True
    problem = ctypes.get_errno()
    if problem in _UNSUPPORTED:
        return False
    raise OSError(problem, os.strerror(problem), str(first), None, str(second))


def _is_empty(path: Path) -> bool:
    try:
        return path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    except FileNotFoundError:
        return False


def flush(path: Path) -> None:
    """Have a file or folder on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def file_aside(target: Path) -> Iterator[Path]:
    """A free name next to `target` for a file that replaces it when the body ends; it is deleted if the body raises.
    Raises OSError if the system refuses."""
    aside = target.with_name(f".qsample-{os.getpid()}.part")
    try:
        yield aside
        aside.replace(target)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
