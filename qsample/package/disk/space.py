"""Full disks: found before work starts, and recognised when it fails. Messages name the folder and
the needed space."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from qsample.errors import PackageError, causes_of

# The names of scratch folders, which a user need not know.
SCRATCH_NAME: Final = re.compile(r"\.qsample-[0-9a-f]{16}")
# Clocks of file servers differ from this machine's clock by less.
_MAX_CLOCK_SKEW_NS: Final = 24 * 3600 * 10**9
_FULL_DISK_ERRORS: Final = {errno.ENOSPC, errno.EDQUOT}
# Libraries that write files raise other types, with the system's message in the text.
_FULL_TEXT: Final = re.compile(
    rf"no space left|disk quota exceeded|not enough space|os error ({errno.ENOSPC}|{errno.EDQUOT})\b",
    re.IGNORECASE,
)
_LIMITED_TEXT: Final = re.compile(rf"os error {errno.EFBIG}\)")
# NumPy's errors have no number.
_SHORT_WRITE_TEXT: Final = re.compile(r"\d+ requested and \d+ written|problem writing element")
# If fewer bytes are free, a failed write without a clear error has filled the disk.
_MIN_FREE_BYTES: Final = 1 << 16

_FULL_MESSAGE: Final = (
    "the disk of {} is full; nothing was written. Free some space or choose another disk"
)
_LIMIT_MESSAGE: Final = (
    "{} takes no more of a file: a limit of its file system, a quota or one of this process (ulimit -f) is reached; "
    "nothing was written. Choose another disk"
)


def check_free(folder: Path, needed: int, what: str) -> None:
    """Raise PackageError if a disk has too little space.

    Args:
        folder: A folder on the disk.
        needed: The number of bytes that must be free.
        what: The name of the content in the message.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PackageError(
            f"{outside_scratch(folder)} has {format_bytes(free)} free and {what} needs about {format_bytes(needed)}; "
            "free some space or choose another disk"
        )


@contextmanager
def full_disk_named(folder: Path, needed: int = 0, what: str = "the work") -> Iterator[None]:
    """Replace an error of the body that a full disk caused by a PackageError that names the folder.

    Args:
        folder: The folder, which may be missing.
        needed: An estimate of the bytes that the content takes; 0 if unknown.
        what: The name of the content in the message.
    """
    try:
        yield
    except PackageError:
        raise
    except Exception as error:
        problem = _problem(error, folder)
        if problem is None:
            raise
        message = problem.format(outside_scratch(folder))
        if needed > 0 and problem is _FULL_MESSAGE:
            message += f": {what} needs about {format_bytes(needed)}"
        raise PackageError(message) from error


def _problem(error: BaseException, folder: Path) -> str | None:
    """The message about the disk of a folder that explains an error; None if it has another
    cause."""
    causes = causes_of(error)
    system_errors = [cause for cause in causes if isinstance(cause, OSError)]
    numbers = {cause.errno for cause in system_errors}
    text = "\n".join(map(str, causes))
    is_filled = shutil.disk_usage(_existing(folder)).free < _MIN_FREE_BYTES
    is_short = any(_SHORT_WRITE_TEXT.search(str(cause)) for cause in system_errors)
    if errno.EFBIG in numbers or _LIMITED_TEXT.search(text) or (is_short and not is_filled):
        return _LIMIT_MESSAGE
    # ONNX Runtime may only report that a write failed.
    is_unclear = is_short or type(error).__module__ not in ("builtins", "qsample.errors")
    if numbers & _FULL_DISK_ERRORS or _FULL_TEXT.search(text) or (is_unclear and is_filled):
        return _FULL_MESSAGE
    return None


def _existing(folder: Path) -> Path:
    """The folder, or the closest folder around it that exists."""
    for parent in (folder, *folder.parents):
        if os.path.isdir(parent):
            return parent
    return Path()


def trim(paths: Iterable[Path], limit: int, remove: Callable[[Path], bool]) -> None:
    """Remove the files and folders that were used longest ago until the rest fits.

    Args:
        paths: The files and folders. The times of their last modification count.
        limit: The number of bytes that the rest may take.
        remove: A function that removes a path, or returns False if the path has to stay.
    """
    used = list[_Used]()
    latest = time.time_ns() + _MAX_CLOCK_SKEW_NS
    for path in paths:
        # Another process may have removed it.
        with suppress(OSError):
            files = path.rglob("*") if path.is_dir() else [path]
            size = sum(file.stat().st_size for file in files)
            time_ns = path.stat().st_mtime_ns
            # A clock that was wrong has written a time in the future. The path would otherwise be
            # the last used until then, and new paths would be removed as soon as they are made.
            if time_ns > latest:
                time_ns -= latest
            used.append(_Used(time_ns, size, path))
    total = sum(item.size for item in used)
    for item in sorted(used):
        if total > limit and remove(item.path):
            total -= item.size


class _Used(NamedTuple):
    """A file or a folder: the time of its last modification in nanoseconds, its size in bytes, its
    path."""

    time_ns: int
    size: int
    path: Path


def outside_scratch(path: Path) -> Path:
    """The folder around the outermost scratch folder that a path lies in, which the user knows;
    otherwise the path."""
    for parent in (*reversed(path.parents), path):
        if SCRATCH_NAME.fullmatch(parent.name):
            return parent.parent
    return path


def format_bytes(count: int) -> str:
    """A size in words, such as `12.3 MB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
