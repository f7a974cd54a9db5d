"""Folders to write to: a caller's or a temporary folder for a package, and scratch folders for everything else."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from qsample.disk.scratch import ScratchFolder
from qsample.disk.space import full_disk_named
from qsample.errors import PackageError


class Destination:
    """The folder of a new package: the caller's path, or a path in a temporary folder that `keep` hands over."""

    def __init__(self, path: str | Path | None) -> None:
        self._folder = ScratchFolder(Path(tempfile.gettempdir())) if path is None else None
        self.path = Path(path) if path is not None else self._folder.new / "package"  # type: ignore[union-attr]

    def __enter__(self) -> Destination:
        return self

    def keep(self) -> ScratchFolder | None:
        folder, self._folder = self._folder, None
        return folder

    def __exit__(self, *exception: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def scratch_folder(path: Path) -> ScratchFolder:
    """A scratch folder on the future disk of `path`: that of temporary files is often in memory.

    Raises:
        PackageError: If no folder can be made there.
    """
    parent = next(
        (folder for folder in path.absolute().parents if folder.is_dir() and os.access(folder, os.W_OK)), None
    )
    return scratch_in(parent or Path(tempfile.gettempdir()))


def scratch_in(parent: Path, target: Path | None = None) -> ScratchFolder:
    """A scratch folder in `parent`, for `target`; PackageError if it cannot be made."""
    try:
        with full_disk_named(parent):
            return ScratchFolder(parent, target)
    except OSError as error:
        raise PackageError(f"cannot write to {parent}: {error.strerror}; choose another folder") from error
