"""Files of a user's that are read for minutes: whether they are still the ones that were found first."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qsample.errors import QsampleError

Version = tuple[int, ...]


def version_of(path: Path) -> Version | None:
    """What tells the file at `path` from one that takes its place, or is written over it; None where there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class SourceFiles:
    """The versions of some files. Around the work with them (`with`), it says of an error that comes after a change
    what it came of."""

    def __init__(self) -> None:
        self._versions: dict[Path, Version | None] = {}

    def add(self, paths: Iterable[Path]) -> None:
        """Take note of files that are to be read from now on."""
        for path in paths:
            self._versions.setdefault(path, version_of(path))

    def check(self, cause: BaseException | None = None) -> None:
        """Raise QsampleError where a file is no longer what it was. cause: what went wrong, if anything did."""
        for path, version in self._versions.items():
            if (now := version_of(path)) != version:
                change = "was deleted" if now is None else "was replaced or written to"
                raise QsampleError(
                    f"{path} {change} while it was in use, and nothing was published; start again when all "
                    "of the checkpoint is there"
                ) from cause

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.check(error)
