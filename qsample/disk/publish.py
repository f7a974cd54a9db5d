"""Moves a finished folder to its place, so that everybody sees what was there before or the whole new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from qsample.disk.exchange import exchange
from qsample.errors import PackageError

_ATTEMPTS: Final = 100  # only somebody who makes and removes the folder all the time needs more than three


def publish(made: Path, target: Path, replaced: Path, check: Callable[[Path], None]) -> None:
    """Give the folder `made` the name `target`. What it replaces is left at `made` or `replaced`, for the caller to
    delete.

    replaced: a free name on the same file system. check: called with a path where something is, an empty folder or
    more; raises PackageError where it has to stay. It looks at what is being replaced once more when nobody else can
    reach it any longer, and that goes back if it is refused.

    A plain rename of a folder, which POSIX lets replace an empty folder and nothing else, and Windows nothing at all,
    never deletes anything: of two writers, one gets the name. A package is replaced by exchanging the two names. Where
    the file system cannot do that, the name is missing between two renames.

    Raises PackageError where the system refuses, and what `check` raises.
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
                # Something came to be there since: look at it. Otherwise the system means it.
                if not os.path.lexists(target) or _is_empty(target):
                    raise
        else:
            raise PackageError(f"{target} is replaced over and over by somebody else; choose another folder")
    except OSError as error:
        raise PackageError(
            f"cannot move the package to {target}: {error.strerror}; choose another folder on the same disk, whose "
            "parent folder can be written to"
        ) from error
    _flush_folder(target.parent)


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


def _is_empty(path: Path) -> bool:
    try:
        return path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    except FileNotFoundError:
        return False


def _flush_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        with suppress(OSError):  # the package is there; some file systems cannot flush a folder
            flush(folder)


def flush(path: Path) -> None:
    """Have a file or folder on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
