"""Disks that are full, before work starts and when it fails: one line that names the folder and what is needed."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from qsample.errors import PackageError, causes_of

SCRATCH_NAME: Final = re.compile(r"\.qsample-[0-9a-f]{16}")  # of folders that a user need not know
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
# Libraries that write files by themselves raise other types, with the system's words in the text.
_FULL_TEXT: Final = re.compile(
    rf"no space left|disk quota exceeded|not enough space|os error ({errno.ENOSPC}|{errno.EDQUOT})\b",
    re.IGNORECASE,
)
_LIMITED_TEXT: Final = re.compile(rf"os error {errno.EFBIG}\)")
_SHORT_WRITE: Final = re.compile(
    r"\d+ requested and \d+ written|problem writing element"
)  # NumPy's, without a number
_NOTHING: Final = 1 << 16  # bytes free on a disk that a write of unknown failure must have filled

_IS_FULL: Final = (
    "the disk of {} is full; nothing was written. Free some space or choose another disk"
)
_IS_LIMITED: Final = (
    "{} takes no more of a file: a limit of its file system, a quota or one of this process (ulimit -f) is reached; "
    "nothing was written. Choose another disk"
)


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
    """Turn an error of the body that came of a full disk into a PackageError that names `folder`, missing or not.
    needed: bytes that `what`, the reader's name of the files, takes there, about; 0 if unknown."""
    try:
        yield
    except PackageError:
        raise
    except Exception as error:
        problem = _problem(error, folder)
        if problem is None:
            raise
        wanted = (
            f": {what} needs about {format_bytes(needed)}" if needed and problem is _IS_FULL else ""
        )
        raise PackageError(problem.format(outside_scratch(folder)) + wanted) from error


def _problem(error: BaseException, folder: Path) -> str | None:
    """The message about the disk of `folder` that explains `error`; None if it has another cause."""
    causes = causes_of(error)
    numbers = {cause.errno for cause in causes if isinstance(cause, OSError)}
    text = "\n".join(map(str, causes))
    existing = next(
        (parent for parent in (folder, *folder.parents) if os.path.isdir(parent)), Path()
    )
    nothing_free = shutil.disk_usage(existing).free < _NOTHING
    is_short = any(
        isinstance(cause, OSError) and _SHORT_WRITE.search(str(cause)) for cause in causes
    )
    if errno.EFBIG in numbers or _LIMITED_TEXT.search(text) or (is_short and not nothing_free):
        return _IS_LIMITED
    # ONNX Runtime may say no more than that a write failed.
    is_unclear = is_short or type(error).__module__ not in ("builtins", "qsample.errors")
    if numbers & _FULL or _FULL_TEXT.search(text) or (is_unclear and nothing_free):
        return _IS_FULL
    return None


def trim(paths: Iterable[Path], limit: int, remove: Callable[[Path], bool]) -> None:
    """Remove the files and folders that were used longest ago, as their times say, until the rest takes `limit` bytes.
    `remove` returns False for one that has to stay."""
    found = []
    for path in paths:
        with suppress(OSError):  # another process has removed it
            files = path.rglob("*") if path.is_dir() else [path]
            found.append(
                (path.stat().st_mtime_ns, sum(file.stat().st_size for file in files), path)
            )
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total > limit and remove(path):
            total -= size


def outside_scratch(path: Path) -> Path:
    """`path`, or the folder around the outermost scratch folder that it lies in: the folder that a user knows."""
    inside = [
        parent.parent for parent in (path, *path.parents) if SCRATCH_NAME.fullmatch(parent.name)
    ]
    return inside[-1] if inside else path


def format_bytes(count: int) -> str:
    """`12.3 MB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
