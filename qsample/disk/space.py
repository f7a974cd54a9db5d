"""Disks that are full, before work starts and when it fails: one line that names the folder and what is needed."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from qsample.disk.scratch import outside_scratch
from qsample.errors import PackageError

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
# Libraries that write files by themselves raise types of their own, with the system's words in the text.
_FULL_TEXT: Final = re.compile(
    rf"no space left|disk quota exceeded|not enough space|os error ({errno.ENOSPC}|{errno.EDQUOT})\b", re.IGNORECASE
)
_SHORT_WRITE: Final = re.compile(r"\d+ requested and \d+ written|problem writing element")  # NumPy's, without a number
_NOTHING: Final = 1 << 16  # bytes free on a disk that a write of unknown failure must have filled


def check_free(folder: Path, needed: int, what: str) -> None:
    """Raise PackageError if the disk of `folder` has fewer than `needed` bytes free for `what`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PackageError(
            f"{outside_scratch(folder)} has {format_bytes(free)} free and {what} needs about {format_bytes(needed)}; "
            "free some space or choose another disk"
        )


@contextmanager
def full_disk_named(folder: Path, needed: int = 0, what: str = "the work") -> Iterator[None]:
    """Turn an error inside the `with` block that came of a full disk into a PackageError that names `folder`.

    Args:
        folder: a folder on the disk; it may be missing.
        needed: bytes that `what` takes there, about; 0 = unknown.
        what: the reader's name of the files.
    """
    try:
        yield
    except PackageError:
        raise
    except Exception as error:
        if _limited(error, folder):
            raise PackageError(
                f"{outside_scratch(folder)} takes no more of a file: a limit of its file system, a quota or one of "
                "this process (ulimit -f) is reached; nothing was written. Choose another disk"
            ) from error
        if not came_of_full_disk(error, folder):
            raise
        wanted = f": {what} needs about {format_bytes(needed)}" if needed else ""
        raise PackageError(
            f"the disk of {outside_scratch(folder)} is full; nothing was written. Free some space or choose another "
            f"disk{wanted}"
        ) from error


def came_of_full_disk(error: BaseException, folder: Path) -> bool:
    """Whether an error says that a disk is full; or is not Python's own while that of `folder` is full."""
    if any(_number(link) in _FULL or _FULL_TEXT.search(str(link)) for link in _chain(error)):
        return True
    # ONNX Runtime may say no more than that a write failed.
    unclear = type(error).__module__ not in ("builtins", "qsample.errors") or _is_short_write(error)
    return unclear and _free(folder) < _NOTHING


def _limited(error: BaseException, folder: Path) -> bool:
    too_large = f"os error {errno.EFBIG})"
    if any(_number(link) == errno.EFBIG or too_large in str(link) for link in _chain(error)):
        return True
    return _is_short_write(error) and _free(folder) >= _NOTHING


def _is_short_write(error: BaseException) -> bool:
    return any(isinstance(link, OSError) and _SHORT_WRITE.search(str(link)) for link in _chain(error))


def _number(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(16):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _free(folder: Path) -> int:
    existing = next((parent for parent in (folder, *folder.parents) if os.path.isdir(parent)), Path())
    return shutil.disk_usage(existing).free


def format_bytes(count: int) -> str:
    """`12.3 MB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
