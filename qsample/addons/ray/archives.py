"""Packages as archives, which are sent with a job, or opened from shared storage once on each
machine."""

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

from qsample.errors import PackageError
from qsample.package.disk.replace import put_in_place
from qsample.package.disk.scratch import ScratchFolder
from qsample.package.package import MANIFEST_NAME, read_package

CACHE_VARIABLE: Final = "QSAMPLE_RAY_CACHE"


def pack(package: str | Path) -> bytes:
    """A package's folder as a tar archive. It is not compressed, because weights do not compress.

    Raises:
        PackageError: the folder is not a package.
    """
    opened = read_package(package)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in sorted([MANIFEST_NAME, *opened.manifest.files]):
            archive.add(opened.path / name, name, recursive=False)
    return buffer.getvalue()


def open_archive(archive: Path | bytes) -> Path:
    """The folder of an archive's package on this machine. The first process that asks for it
    unpacks it.

    Folders are named after the archive's contents, and kept in the system's temporary folder or in
    $QSAMPLE_RAY_CACHE.

    Args:
        archive: a tar file, compressed or not, of a package's files or of its folder, or the bytes
            of such a file.

    Raises:
        PackageError: the archive does not hold a package.
    """
    root = _cache_folder()
    target = root / _hash(archive)[:32]
    unpacked = _complete_package(target)
    if unpacked is not None:
        return unpacked
    with ScratchFolder(root, target) as scratch:
        _unpack(archive, scratch.new)
        package = _package_in(scratch.new)
        if package is None:
            raise PackageError(
                f"{_name(archive)} does not hold a package: it has no {MANIFEST_NAME}, "
                "nor has a folder in it"
            )
        try:
            # The hashes are compared when the package is opened.
            read_package(package, verify=False)
        except PackageError as error:
            raise PackageError(f"{_name(archive)} holds a damaged package: {error}") from None
        # A faster process may have put the same package there, or the package that is there may
        # have lost files, as packages in temporary folders do.
        put_in_place(scratch, target, lambda path: None)
        return target / package.relative_to(scratch.new)


def _cache_folder() -> Path:
    """The folder of the unpacked packages, which belongs to this user."""
    # Windows gives each user a temporary folder, and its files have no uid.
    user = os.getuid() if hasattr(os, "getuid") else 0
    given = os.environ.get(CACHE_VARIABLE)
    folder = (
        Path(given)
        if given not in (None, "")
        else Path(tempfile.gettempdir()) / f"qsample-ray-{user}"
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Every user may write to the system's temporary folder.
    if folder.stat().st_uid != user:
        raise PackageError(
            f"{folder} belongs to somebody else; set {CACHE_VARIABLE} to a folder of your own"
        )
    return folder


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
        # An error of the disk has a number. The error of a damaged .gz or .bz2 has none.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise PackageError(f"{_name(archive)} is not a tar archive of a package: {error}") from None


def _package_in(folder: Path) -> Path | None:
    """The package that `folder` or a folder in it is; None if neither is a package."""
    if not folder.is_dir():
        return None
    for candidate in (folder, *sorted(folder.iterdir())):
        if (candidate / MANIFEST_NAME).is_file():
            return candidate
    return None


def _complete_package(folder: Path) -> Path | None:
    """The package in a folder that was unpacked earlier, if it and its files are still there."""
    try:
        package = _package_in(folder)
        return None if package is None else read_package(package, verify=False).path
    except (OSError, PackageError):
        return None


def _name(archive: Path | bytes) -> str:
    return "the archive that was sent" if isinstance(archive, bytes) else str(archive)
