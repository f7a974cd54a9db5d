"""A folder → a path that leads to this folder, whatever is renamed meanwhile."""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from qsample.errors import PackageError

# Linux opens the folder of a descriptor by this name, whichever names the folder has.
_DESCRIPTORS_FOLDER: Final = Path("/proc/self/fd")


class PinnedFolder:
    """A folder that stays the same while other folders take its name, or the name of a folder
    around it. Only Linux has such paths; elsewhere `path` is the folder's own.

    Attributes:
        folder: The path by which the folder was found.
        path: The path by which its files are opened, in this process, as long as this object lives.
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder. Raises OSError if there is none."""
        self.folder = folder
        self.path = folder
        if sys.platform == "linux":
            descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            closed = weakref.finalize(self, os.close, descriptor)
            pinned = _DESCRIPTORS_FOLDER / str(descriptor)
            # Some sandboxes have no /proc.
            if pinned.is_dir():
                self.path = pinned
            else:
                closed()

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process has other descriptors."""
        return PinnedFolder, (self.folder,)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the folder as the caller does in each PackageError of the body."""
        try:
            yield
        except PackageError as error:
            text = re.sub(
                rf"{re.escape(str(self.path))}(?!\d)", lambda _: str(self.folder), str(error)
            )
            if text == str(error):
                raise
            raise PackageError(text) from error
