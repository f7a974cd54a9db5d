"""sha256 of files, with progress."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from qsample.errors import PackageError
from qsample.progress import ByteProgress

_CHUNK: Final = 1 << 20


class Meter:
    """Counts hashed bytes for a progress callback."""

    def __init__(self, total: int, progress: ByteProgress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


def sha256_of(path: Path, meter: Meter) -> str:
    """In hexadecimal. Raises PackageError where the file cannot be read."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                meter.add(count)
    except OSError as error:
        raise PackageError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()
