"""Folders to write a package to: a caller's, or a temporary one; and one for what is only needed meanwhile."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class Destination:
    """Where a package is written to: the caller's path, or one in a temporary folder that `keep` hands over."""

    def __init__(self, path: str | Path | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="qsample-") if path is None else None
        self.path = Path(path) if path is not None else Path(self._folder.name) / "package"  # type: ignore[union-attr]

    def __enter__(self) -> Destination:
        return self

    def keep(self) -> tempfile.TemporaryDirectory[str] | None:
        folder, self._folder = self._folder, None
        return folder

    def __exit__(self, *exception: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def scratch_folder(path: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder on the disk that `path` will be on: the default folder for them is often in memory."""
    parent = next(
        (folder for folder in path.absolute().parents if folder.is_dir() and os.access(folder, os.W_OK)), None
    )
    return tempfile.TemporaryDirectory(prefix=".qsample-", dir=parent, ignore_cleanup_errors=True)
