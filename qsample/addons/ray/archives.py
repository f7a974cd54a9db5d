"""Packages as archives: sent with a job, or opened from shared storage on each machine once."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Final

from qsample.disk.replace import put_in_place
from qsample.disk.scratch import ScratchFolder
from qsample.errors import PackageError
from qsample.package.package import MANIFEST_NAME, read_package

CACHE_VARIABLE: Final = "QSAMPLE_RAY_CACHE"


def pack(package: str | Path) -> bytes:
    """A package's folder as an uncompressed tar archive: weights do not compress. Raises PackageError for other
    folders."""
    opened = read_package(package)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in sorted([MANIFEST_NAME, *opened.manifest.files]):
            archive.add(opened.path / name, name, recursive=False)
    return buffer.getvalue()


def open_archive(archive: Path | bytes) -> Path:
    """The folder of an archive's package on this machine; the first process that asks for it unpacks it.

    Folders are named after the archive's contents and kept in the system's temporary folder, or in $QSAMPLE_RAY_CACHE.
    The archive is a tar file, compressed or not, of a package's files or of its folder, or the bytes of such a file.
    Raises PackageError if it does not hold a package.
    """
    user = (
        os.getuid() if hasattr(os, "getuid") else 0
    )  # Windows gives each user a temporary folder, and files no uid
    root = Path(
        os.environ.get(CACHE_VARIABLE) or Path(tempfile.gettempdir()) / f"qsample-ray-{user}"
    )
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    if root.stat().st_uid != user:  # in a folder that everybody may write to
        raise PackageError(
            f"{root} belongs to somebody else; set {CACHE_VARIABLE} to a folder of your own"
        )
    target = root / _hash(archive)[:32]
    if (found := _whole(target)) is not None:
        return found
    with ScratchFolder(root, target) as scratch:
        _unpack(archive, scratch.new)
        package = _package_in(scratch.new)
        if package is None:
            raise PackageError(
                f"{_name(archive)} does not hold a package: it has no {MANIFEST_NAME}, nor has a folder in it"
            )
        try:
            read_package(package, verify=False)  # the hashes are compared when it is opened
        except PackageError as error:
            raise PackageError(f"{_name(archive)} holds a damaged package: {error}") from None
        # The same package of a faster process, or one that lost files, as temporary folders do, may be there.
        put_in_place(scratch, target, lambda path: None)
        return target / package.relative_to(scratch.new)


def _hash(archive: Path | bytes) -> str:
    with _opened(archive) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _opened(archive: Path | bytes) -> io.BytesIO | io.BufferedReader:
    return io.BytesIO(archive) if isinstance(archive, bytes) else archive.open("rb")


def _unpack(archive: Path | bytes, target: Path) -> None:
    try:
        with _opened(archive) as source, tarfile.open(fileobj=source, mode="r:*") as opened:
            opened.extractall(target, filter="data")
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk; the error of a damaged .gz or .bz2 has no number
        raise PackageError(f"{_name(archive)} is not a tar archive of a package: {error}") from None


def _package_in(folder: Path) -> Path | None:
    """The folder or a folder in it that is a package; None if there is none."""
    if not folder.is_dir():
        return None
    return next(
        (path for path in (folder, *sorted(folder.iterdir())) if (path / MANIFEST_NAME).is_file()),
        None,
    )


def _whole(folder: Path) -> Path | None:
    """The package in a folder that was unpacked earlier, if it and its files are still there."""
    try:
        found = _package_in(folder)
        return None if found is None else read_package(found, verify=False).path
    except (OSError, PackageError):
        return None


def _name(archive: Path | bytes) -> str:
    return "the archive that was sent" if isinstance(archive, bytes) else str(archive)
