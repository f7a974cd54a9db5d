"""sha256 of files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from qsample.errors import PackageError

_CHUNK: Final = 1 << 20


def sha256_of(path: Path) -> str:
    """In hexadecimal. Raises PackageError where the file cannot be read."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise PackageError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()
