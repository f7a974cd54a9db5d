"""Moves a finished folder to its place, so that everybody sees its old content or all of the new one."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from qsample.errors import PackageError

_ATTEMPTS: Final = 100  # only a process that makes and removes the folder all the time needs more than three
_AT_FDCWD: Final = -100  # Linux: paths are relative to the working directory
_SWAP: Final = 2  # RENAME_EXCHANGE of Linux's renameat2(2), RENAME_SWAP of macOS's renamex_np(2)
# The answers of a system, a file system or a sandbox that lacks the call. EPERM may also be meant: then the renames in
# its place fail as well, and say so.
_UNSUPPORTED: Final = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)


def publish(made: Path, target: Path, replaced: Path, check: Callable[[Path], None]) -> None:
    """Give the folder `made` the name `target`. A folder that it replaces is left at `made` or `replaced`.

    A plain rename of a folder, which POSIX lets replace an empty folder and nothing else, and Windows nothing at all,
    never deletes anything: of two writers, one gets the name. A package is replaced by exchanging the two names. If the
    file system cannot do that, the name is missing between two renames.

    Args:
        made: the finished folder.
        target: its new name.
        replaced: a free name on the same file system.
        check: raises PackageError if the file or folder at a path has to stay. It gets `target` if something is there,
            and the replaced folder once more after nobody else can reach it; that goes back if it is refused.

    Raises:
        PackageError: If the system refuses, and from `check`.
    """
    try:
        for _ in range(_ATTEMPTS):
            if os.path.lexists(target):
                check(target)
                if not _is_empty(target):
                    _replace(made, target, replaced, check)
                    break
                if os.name == "nt":
                    target.rmdir()
            try:
                made.rename(target)
                break
            except OSError:
                # If another folder has come to be there since, look at it. Otherwise the system means it.
                if not os.path.lexists(target) or _is_empty(target):
                    raise
        else:
            raise PackageError(f"{target} is replaced over and over by somebody else; choose another folder")
    except OSError as error:
        raise PackageError(
            f"cannot move the package to {target}: {error.strerror}; choose another folder on the same disk, whose "
            "parent folder can be written to"
        ) from error
    if os.name == "posix":  # elsewhere a folder cannot be opened
        with suppress(OSError):  # the package is there; some file systems cannot flush a folder
            flush(target.parent)


def _replace(made: Path, target: Path, replaced: Path, check: Callable[[Path], None]) -> None:
    new = os.stat(made).st_ino
    try:
        if exchange(made, target):
            check(made)
            return
    except BaseException:
        with suppress(OSError):
            if os.lstat(target).st_ino == new:
                exchange(made, target)
        raise
    try:
        target.rename(replaced)
        check(replaced)
        made.rename(target)
    except BaseException as error:
        if os.path.lexists(replaced):
            _put_back(replaced, target, error)
        raise


def _put_back(replaced: Path, target: Path, reason: BaseException) -> None:
    try:
        if os.path.lexists(target):
            raise FileExistsError
        replaced.rename(target)
    except OSError:  # it must not be deleted with its folder
        for number in range(1, 1000):
            kept = target.with_name(f"{target.name}.old{number}")
            if not os.path.lexists(kept):
                replaced.rename(kept)
                raise PackageError(
                    f"{target} was written by somebody else meanwhile; the package that was there is {kept}"
                ) from reason


def exchange(first: Path, second: Path) -> bool:
    """Give two folders of one file system each other's name, at once: nobody sees either name missing.

    Returns:
        False, and nothing is changed, if the system or the file system cannot: Windows, a C library without the call
        (glibc before 2.28), NFS and other file systems.

    Raises:
        OSError: If it can, and is not permitted.
    """
    problem = _exchange(os.fsencode(first), os.fsencode(second))
    if problem in _UNSUPPORTED:
        return False
    if problem:
        raise OSError(problem, os.strerror(problem), str(first), None, str(second))
    return True


def _exchange(first: bytes, second: bytes) -> int:
    """The system call, which the standard library lacks; 0, or the reason of its failure as in `errno`."""
    name = {"linux": "renameat2", "darwin": "renamex_np"}.get(sys.platform)
    call: Any = getattr(ctypes.CDLL(None, use_errno=True), name, None) if name else None
    if call is None:
        return errno.ENOSYS
    if sys.platform == "darwin":
        failed = call(ctypes.c_char_p(first), ctypes.c_char_p(second), ctypes.c_uint(_SWAP))
    else:
        folder = ctypes.c_int(_AT_FDCWD)
        failed = call(folder, ctypes.c_char_p(first), folder, ctypes.c_char_p(second), ctypes.c_uint(_SWAP))
    return ctypes.get_errno() if failed else 0


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
