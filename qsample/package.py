"""Writes packages to the disk atomically, and reads them back verified.

A package is a folder with `qsample.json`, the manifest, which lists every other file with its size and sha256.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from qsample.contract import Interface
from qsample.errors import PackageError
from qsample.manifest import MANIFEST_NAME, Compilation, FileEntry, Manifest, Source, TokenIds
from qsample.progress import ByteProgress

__all__ = [
    "MANIFEST_NAME",
    "Compilation",
    "FileEntry",
    "Manifest",
    "Package",
    "PackageError",
    "PackageWriter",
    "Source",
    "TokenIds",
    "copy_package",
    "read_package",
    "write_package",
]

_CHUNK: Final = 1 << 20
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Package:
    """A package on disk. path: absolute."""

    path: Path
    manifest: Manifest

    @property
    def interface(self) -> Interface:
        return self.manifest.interface

    def has(self, name: str) -> bool:
        """Whether the package holds a file of this name. Files that the manifest does not list are not part of it."""
        return name in self.manifest.files

    def file(self, name: str) -> Path:
        """The path of a file of the package; PackageError where it has none of that name."""
        if not self.has(name):
            raise PackageError(f"{self.path} has no file {name}")
        return self.path / name

    def read_json(self, name: str) -> dict[str, Any]:
        """The JSON object in a file; {} where the package has no such file. PackageError where it is no object."""
        if not self.has(name):
            return {}
        try:
            data = json.loads(self.file(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PackageError(f"cannot read {self.path / name}: {error}; export the package again") from error
        if not isinstance(data, dict):
            raise PackageError(f"{self.path / name} is not a JSON object; export the package again")
        return data


class PackageWriter:
    """What `write_package` hands to its body: write files below `directory`, then call `finish` once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: Manifest | None = None

    def finish(self, manifest: Manifest) -> None:
        """Say what the package is. `manifest.files` is ignored: the files on disk are hashed when the body ends."""
        self.manifest = manifest


@contextmanager
def write_package(
    path: str | Path, *, overwrite: bool = False, required_bytes: int = 0, progress: ByteProgress | None = None
) -> Iterator[PackageWriter]:
    """Write a package to `path`: all of it or nothing.

    The body writes into a fresh folder beside `path`. When it ends, the files are hashed, flushed to the disk and the
    folder is renamed into place; where it raises, KeyboardInterrupt included, the folder is removed and `path` is as
    before.

    Args:
        overwrite: replace a package that is already there. A folder that is not a package is never replaced.
        required_bytes: an estimate of the package's size; refused at once where the disk has less room.
        progress: called while the files are hashed, with the bytes done and the bytes in all.

    Raises PackageError where `path` cannot be written, and where the disk is full.

    >>> with write_package("exported") as writer:
    ...     (writer.directory / "decoder.onnx").write_bytes(graph)
    ...     writer.finish(manifest)
    """
    target = Path(os.path.realpath(path))
    _check_target(target, overwrite)
    created = _make_parents(target.parent)
    staging = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        try:
            staging.mkdir()
        except OSError as error:
            raise PackageError(f"cannot write to {target.parent}: {error.strerror}; choose another folder") from error
        free = shutil.disk_usage(staging).free
        if free < required_bytes:
            raise PackageError(
                f"{target.parent} has {_size(free)} free and the package needs about {_size(required_bytes)}; "
                "free some space or choose another disk"
            )
        writer = PackageWriter(staging)
        yield writer
        if writer.manifest is None:
            raise PackageError("nothing was published: the writer's finish(manifest) was not called")
        _seal(staging, writer.manifest, progress)
        _publish(staging, target)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        for folder in created:
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise PackageError(
                f"the disk of {target.parent} is full; nothing was written. Free some space or choose another disk"
            ) from error
        raise


def read_package(path: str | Path, verify: bool = True, progress: ByteProgress | None = None) -> Package:
    """Open the package at `path`. Raises PackageError, naming the file, where it is not intact.

    verify: also compare every file's sha256; without it only presence and sizes.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise PackageError(f"{folder} is {'not a folder' if folder.exists() else 'missing'}; give a package's folder")
    try:
        text = (folder / MANIFEST_NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PackageError(f"{folder} is not a qsample package: it has no {MANIFEST_NAME}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PackageError(f"cannot read {folder / MANIFEST_NAME}: {error}") from error
    try:
        manifest = Manifest.from_json(text)
    except PackageError as error:
        raise PackageError(f"{folder}: {error}") from error
    for name, entry in manifest.files.items():
        _check_size(folder, name, entry)
    if verify:
        meter = _Meter(sum(entry.bytes for entry in manifest.files.values()), progress)
        for name, entry in manifest.files.items():
            if _hash(folder / name, meter) != entry.sha256:
                raise PackageError(
                    f"{folder / name} was altered: its sha256 is not the manifest's; export or download it again"
                )
    return Package(folder, manifest)


def copy_package(
    package: Package, path: str | Path, *, overwrite: bool = False, progress: ByteProgress | None = None
) -> Package:
    """Copy `package` to `path` as `write_package` would write it, and return the copy.

    Raises PackageError, and copies nothing, where the files are no longer those of the manifest.
    """
    size = sum(entry.bytes for entry in package.manifest.files.values())
    with write_package(path, overwrite=overwrite, required_bytes=size) as writer:
        meter = _Meter(size, progress)
        for name, entry in package.manifest.files.items():
            _check_size(package.path, name, entry)
            (writer.directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package.path / name, writer.directory / name)
            if _hash(writer.directory / name, meter) != entry.sha256:
                raise PackageError(f"{package.path / name} was altered since the package was made; export it again")
        writer.finish(package.manifest)
    return Package(Path(path).absolute(), package.manifest)


def check_not_source(path: str | Path, *sources: str | Path) -> None:
    """Raise PackageError where a package written to `path` would take the place of what it is made from.

    sources: folders; what is none, a hub id say, is passed over.
    """
    target = Path(os.path.realpath(path))
    for source in sources:
        if Path(source).is_dir() and target in (origin := Path(os.path.realpath(source)), *origin.parents):
            inside = "" if target == origin else f" has {source} in it, which"
            raise PackageError(f"{path}{inside} is what the package is made from; choose another folder")


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise PackageError(f"{target} is a file; give a folder for the package")
    if not any(target.iterdir()):
        return
    if not (target / MANIFEST_NAME).is_file():
        raise PackageError(
            f"{target} is not empty and not a qsample package, so it is not replaced; choose another folder"
        )
    if not overwrite:
        raise PackageError(f"{target} already holds a package; pass overwrite=True to replace it")


def _make_parents(parent: Path) -> list[Path]:
    """Create `parent`; the folders that were missing, innermost first."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PackageError(f"cannot create {parent}: {error.strerror}; choose another folder") from error
    return missing


def _seal(staging: Path, manifest: Manifest, progress: ByteProgress | None) -> None:
    """Hash every file, write the manifest last, and flush all of it to the disk."""
    paths = sorted(path for path in staging.rglob("*") if not path.is_dir())
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise PackageError(f"{path.relative_to(staging)} is not a plain file; a package holds plain files only")
    meter = _Meter(sum(path.stat().st_size for path in paths), progress)
    files = {}
    for path in paths:
        digest = _hash(path, meter)
        files[path.relative_to(staging).as_posix()] = FileEntry(digest, path.stat().st_size)
    files.pop(MANIFEST_NAME, None)
    text = replace(manifest, files=files).to_json()
    Manifest.from_json(text)  # what is published can be read back
    (staging / MANIFEST_NAME).write_text(text, encoding="utf-8")
    if os.name == "posix":  # elsewhere a folder cannot be opened
        for path in (*paths, staging / MANIFEST_NAME, *(path for path in staging.rglob("*") if path.is_dir()), staging):
            _flush(path)


def _publish(staging: Path, target: Path) -> None:
    """Rename `staging` to `target`; what was there is put back if that fails, and deleted if it does not."""
    aside = staging.with_suffix(".old")
    try:
        if target.exists():
            target.rename(aside)
        staging.rename(target)
    except BaseException as error:
        if aside.exists() and not target.exists():
            aside.rename(target)
        if isinstance(error, OSError) and error.errno not in _DISK_FULL:
            raise PackageError(f"cannot move the package to {target}: {error.strerror}") from error
        raise
    finally:
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Meter:
    """Counts hashed bytes for a progress callback."""

    def __init__(self, total: int, progress: ByteProgress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


def _hash(path: Path, meter: _Meter) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                meter.add(count)
    except OSError as error:
        raise PackageError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _check_size(folder: Path, name: str, entry: FileEntry) -> None:
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise PackageError(f"{folder / MANIFEST_NAME} lists {name!r}, which lies outside the package")
    path = folder / name
    if not path.is_file():
        raise PackageError(f"{path} is missing; export or download the package again")
    size = path.stat().st_size
    if size != entry.bytes:
        problem = "truncated" if size < entry.bytes else "altered"
        raise PackageError(
            f"{path} is {problem}: it has {size} bytes and the manifest says {entry.bytes}; export or download "
            "the package again"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
