"""Writes packages to the disk atomically, and reads them back verified.

A package is a folder with `qsample.json`, the manifest, which lists every other file with its size and sha256.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from qsample.disk.hashes import sha256_of
from qsample.disk.publish import flush, publish
from qsample.disk.scratch import ScratchFolder
from qsample.disk.source_files import SourceFiles, Version, version_of
from qsample.disk.space import check_free, full_disk_named
from qsample.disk.strict_json import read_json, read_text
from qsample.errors import PackageError, QsampleError
from qsample.interface import Features, Interface
from qsample.manifest import MANIFEST_NAME, Compilation, FileEntry, Manifest, Source, TokenIds
from qsample.package_folder import LARGEST_MANIFEST, check_file, check_references, check_target

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
    "Unpublished",
    "copy_package",
    "read_package",
    "use_package",
    "write_package",
]

T = TypeVar("T")
_READINGS: Final = 50  # of a package that is replaced while it is read; on a busy machine 10 of them may fail in a row


@dataclass(frozen=True, slots=True)
class Package:
    """A package on disk. path: absolute. identity: of the manifest's file when it was read, None = unknown."""

    path: Path
    manifest: Manifest
    identity: tuple[int, ...] | None = field(default=None, compare=False, repr=False)

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
            data = read_json(self.file(name), infinities=True)
        except (OSError, ValueError) as error:
            raise PackageError(f"cannot read {self.path / name}: {error}; export the package again") from error
        if not isinstance(data, dict):
            raise PackageError(f"{self.path / name} is not a JSON object; export the package again")
        return data

    def check_graph(self, name: str) -> None:
        """Raise PackageError where an ONNX file refers to a file that the manifest does not list, or is none."""
        try:
            check_references(self.path, name, self.manifest.files)
        except (OSError, ValueError) as error:
            raise PackageError(f"{self.path / name} is not an ONNX file: {error}; export the package again") from error

    def check_not_replaced(self) -> None:
        """Raise PackageError where another package has come to be at `path` since this one was read."""
        if self.identity not in (None, _identity(self.path)):
            raise PackageError(f"{self.path} was replaced while it was in use; open it again")


@dataclass(frozen=True, slots=True)
class Unpublished(Package):
    """A package in a scratch folder, for the work that goes on with it: its graphs may refer to files elsewhere,
    `sources`."""

    sources: SourceFiles = field(default_factory=SourceFiles, compare=False, repr=False)

    def check_graph(self, name: str) -> None:
        """What this process wrote itself needs no check."""

    def check_not_replaced(self) -> None:
        """Raise QsampleError where `sources` changed."""
        self.sources.check()


class PackageWriter:
    """What `write_package` hands to its body: write files below `directory`, then call `finish` once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: Manifest | None = None

    def finish(self, manifest: Manifest) -> None:
        """Say what the package is. `manifest.files` is ignored: the files on disk are hashed when the body ends."""
        self.manifest = manifest


@contextmanager
def write_package(path: str | Path, *, overwrite: bool = False, required_bytes: int = 0) -> Iterator[PackageWriter]:
    """Write a package to `path`: all of it or nothing.

    The body writes into a scratch folder beside `path` (`disk.scratch`). When it ends, the files are hashed, flushed to
    the disk and the folder is renamed into place; where it raises, KeyboardInterrupt included, the folder is removed
    and `path` is as before. What a killed process left beside `path` is removed first.

    A package that is replaced changes in one step where the file system can do that: whoever opens `path` at any time,
    even after a crash, finds the old package or the new one. `disk.publish` says what happens elsewhere.

    Args:
        overwrite: replace a package that is already there. A folder that is not a package, or holds files that are not
            the package's, is never replaced. `path` is looked at once more when the body has ended.
        required_bytes: an estimate of the package's size; refused at once where the disk has less room.

    Raises PackageError where `path` cannot be written, and where the disk is full.

    >>> with write_package("exported") as writer:
    ...     (writer.directory / "decoder.onnx").write_bytes(graph)
    ...     writer.finish(manifest)
    """
    target = Path(os.path.realpath(path))
    check_target(target, target, overwrite)
    created = _make_parents(target.parent)
    try:
        with _scratch_folder(target) as scratch, full_disk_named(target.parent, required_bytes, "the package"):
            staging = scratch.new
            check_free(target.parent, required_bytes, "the package")
            writer = PackageWriter(staging)
            yield writer
            if writer.manifest is None:
                raise PackageError("nothing was published: the writer's finish(manifest) was not called")
            _seal(staging, writer.manifest)
            publish(staging, target, scratch.replaced, lambda path: check_target(path, target, overwrite))
    except BaseException:
        for folder in created:
            with suppress(OSError):
                folder.rmdir()
        raise


def _scratch_folder(target: Path) -> ScratchFolder:
    try:
        with full_disk_named(target.parent):
            return ScratchFolder(target.parent, target)
    except OSError as error:
        raise PackageError(f"cannot write to {target.parent}: {error.strerror}; choose another folder") from error


def read_package(path: str | Path, verify: bool = True) -> Package:
    """Open the package at `path`. Raises PackageError, naming the file, where it is not intact.

    verify: also compare every file's sha256; without it only presence and sizes.
    """
    return use_package(path, lambda package: package, verify=verify)


def use_package(path: str | Path, use: Callable[[Package], T], *, verify: bool = True) -> T:
    """Open the package at `path` and return `use(package)`, which opens its files.

    Where the package is replaced meanwhile, all of it starts anew, so that no manifest and no graph of the old package
    meets a file of the new one. Raises PackageError as `read_package` does, and what `use` raises.
    """
    folder = Path(path).absolute()
    for _ in range(_READINGS):
        before = _identity(folder)
        try:
            result = use(_read(folder, before, verify))
        except Exception:
            if _identity(folder) == before:
                raise
            continue
        if _identity(folder) == before:
            return result
    raise PackageError(f"{folder} is replaced over and over while it is read; wait until it is not written any more")


def _identity(folder: Path) -> Version | None:
    """What tells the package that is in `folder` now from one that replaces it; None where there is none."""
    return version_of(folder / MANIFEST_NAME)


def _read(folder: Path, identity: Version | None, verify: bool) -> Package:
    if not os.path.isdir(folder):
        state = "not a folder" if os.path.exists(folder) else "missing"
        raise PackageError(f"{folder} is {state}; give a package's folder")
    manifest = _read_manifest(folder)
    for name, entry in manifest.files.items():
        check_file(folder, name, entry)
    if verify:
        for name, entry in manifest.files.items():
            if sha256_of(folder / name) != entry.sha256:
                raise PackageError(
                    f"{folder / name} was altered: its sha256 is not the manifest's; export or download it again"
                )
    for name in manifest.interface.graphs:
        with suppress(OSError, ValueError):  # what is no ONNX file at all is said by what opens it
            check_references(folder, name, manifest.files)
    return Package(folder, manifest, identity)


def _read_manifest(folder: Path) -> Manifest:
    try:
        text = read_text(folder / MANIFEST_NAME, LARGEST_MANIFEST)
    except FileNotFoundError:
        raise PackageError(
            f"{folder} is not a qsample package: it has no {MANIFEST_NAME}; give a folder that export or compile wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise PackageError(f"cannot read {folder / MANIFEST_NAME}: {error}") from error
    try:
        return Manifest.from_json(text)
    except PackageError as error:
        raise PackageError(f"{folder}: {error}") from error


def copy_package(package: Package, path: str | Path, *, overwrite: bool = False) -> Package:
    """Copy `package` to `path` as `write_package` would write it, and return the copy.

    Raises PackageError, and copies nothing, where the files are no longer those of the manifest.
    """
    size = sum(entry.bytes for entry in package.manifest.files.values())
    with write_package(path, overwrite=overwrite, required_bytes=size) as writer:
        for name, entry in package.manifest.files.items():
            check_file(package.path, name, entry)
            (writer.directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package.path / name, writer.directory / name)
            if sha256_of(writer.directory / name) != entry.sha256:
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


def _make_parents(parent: Path) -> list[Path]:
    """Create `parent`; the folders that were missing, innermost first."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PackageError(f"cannot create {parent}: {error.strerror}; choose another folder") from error
    return missing


def _seal(staging: Path, manifest: Manifest) -> None:
    """Hash every file, write the manifest last, and flush all of it to the disk."""
    paths = sorted(path for path in staging.rglob("*") if not path.is_dir())
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise PackageError(f"{path.relative_to(staging)} is not a plain file; a package holds plain files only")
    files = {}
    for path in paths:
        files[path.relative_to(staging).as_posix()] = FileEntry(sha256_of(path), path.stat().st_size)
    files.pop(MANIFEST_NAME, None)
    text = replace(manifest, files=files).to_json()
    Manifest.from_json(text)  # what is published can be read back
    (staging / MANIFEST_NAME).write_text(text, encoding="utf-8")
    if os.name == "posix":  # elsewhere a folder cannot be opened
        for path in (*paths, staging / MANIFEST_NAME, *(path for path in staging.rglob("*") if path.is_dir()), staging):
            flush(path)


def check_features(package: Package, wanted: Features, dtype: str | None) -> None:
    """Raise QsampleError where the package lacks `wanted`, or has another dtype; None = any. An export fixes both."""
    present = package.interface.features
    if wanted.sampler != present.sampler:
        raise QsampleError(
            f"{package.path} was exported with include_sampler={present.sampler}; open it with that, or export it again"
        )
    if wanted.filter_order != present.filter_order:
        raise QsampleError(
            f"{package.path} was exported with filter_order={present.filter_order!r}; open it with that, or export it "
            "again"
        )
    numbers = [entry.name for entry in fields(Features) if isinstance(getattr(wanted, entry.name), int)]
    missing = [name for name in numbers if getattr(wanted, name) > getattr(present, name)]
    missing += [f"the filter {name}" for name in wanted.filters if name not in present.filters]
    if missing:
        raise QsampleError(f"{package.path} was exported without {', '.join(missing)}; export it again with them")
    if dtype not in (None, package.interface.dtype):
        raise QsampleError(
            f"{package.path} holds {package.interface.dtype}, not {dtype}; export it again with that dtype"
        )
