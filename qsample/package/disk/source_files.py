"""Checks whether the files of a user, which are read for minutes, are still the same."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qsample.errors import QsampleError

Version = tuple[int, ...]


def version_of(path: Path, *, changed: bool = False) -> Version | None:
    """Numbers that change if a file is replaced or written to.

    Args:
        path: The path of the file.
        changed: Whether the time of the last change of any kind, names and permissions included, is
            among the numbers. No program can set this time.

    Returns:
        None if there is no file.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    version = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return (*version, status.st_ctime_ns) if changed else version


class SourceFiles:
    """The versions of some files.

    As a context around the work with them, it replaces an error that a change of the files caused
    by a message about that change.
    """

    def __init__(self) -> None:
        self._versions: dict[Path, Version | None] = {}

    def add(self, paths: Iterable[Path]) -> None:
        """Remember the versions of files that are about to be read."""
        for path in paths:
            self._versions.setdefault(path, version_of(path))

    @property
    def paths(self) -> frozenset[Path]:
        """All files that were added."""
        return frozenset(self._versions)

    def check(self, cause: BaseException | None = None) -> None:
        """Raise QsampleError if a file has changed. cause: The exception that this explains, if
        any."""
        for path, version in self._versions.items():
            now = version_of(path)
            if now != version:
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
