"""What the folder of a package may hold: looked at before its files are read, and before it is replaced."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from qsample.disk.onnx_references import referenced_files
from qsample.disk.strict_json import read_json
from qsample.errors import PackageError
from qsample.manifest import MANIFEST_NAME, FileEntry

LARGEST_MANIFEST: Final = 1 << 23  # bytes; that of a model of a hundred layers has 50 kB
_CRUMBS: Final = (".DS_Store", "Thumbs.db", "desktop.ini")  # that a system's file browser leaves in any folder
_DAMAGED: Final = (".json", ".jinja", ".onnx", ".onnx.data")  # what a package holds whose manifest cannot be read


def check_target(path: Path, target: Path, overwrite: bool) -> None:
    """Raise PackageError where what is at `path`, which is `target` or was it, must not be replaced."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise PackageError(f"{target} is a file; give a folder for the package")
    if not any(path.iterdir()):
        return
    if not (path / MANIFEST_NAME).is_file():
        raise PackageError(
            f"{target} is not empty and not a qsample package, so it is not replaced; choose another folder"
        )
    if not overwrite:
        raise PackageError(f"{target} already holds a package; pass overwrite=True to replace it")
    if foreign := list(islice(_foreign_files(path), 3)):
        raise PackageError(
            f"{target} holds files that are not its package's ({', '.join(foreign)}), so it is not replaced; move them "
            "elsewhere, or choose another folder"
        )


def _foreign_files(folder: Path) -> Iterator[str]:
    """Files that the manifest in `folder` does not list. It may be of any version; where it cannot be read, those of
    other kinds than a package holds."""
    try:
        listed = read_json(folder / MANIFEST_NAME, LARGEST_MANIFEST)["files"].keys()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        listed = None
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in sorted(files + links):
            path = (Path(root) / name).relative_to(folder).as_posix()
            known = path in listed if listed is not None else name.endswith(_DAMAGED)
            if not known and path != MANIFEST_NAME and name not in _CRUMBS:
                yield path


def check_file(folder: Path, name: str, entry: FileEntry) -> None:
    """Raise PackageError where a file is missing, no plain file, outside the package or of another size."""
    path = folder / name
    try:
        if not path.is_file():  # nor a pipe or a device, which would be waited for
            raise PackageError(f"{path} is missing; export or download the package again")
        if not _lies_in(folder, path):
            raise PackageError(
                f"{path} is a link that leads out of the package; copy the file into the package if you trust it"
            )
        size = path.stat().st_size
    except OSError as error:
        raise PackageError(f"cannot read {path}: {error.strerror}") from error
    if size != entry.bytes:
        problem = "truncated" if size < entry.bytes else "altered"
        raise PackageError(
            f"{path} is {problem}: it has {size} bytes and the manifest says {entry.bytes}; export or download "
            "the package again"
        )


def _lies_in(folder: Path, path: Path) -> bool:
    """Whether links lead from `path` to a file below `folder`, or to where the Hugging Face hub's cache keeps the files
    of all its snapshots: `blobs` beside `snapshots`."""
    whole, real = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    cached = whole.parent.parent / "blobs" if whole.parent.name == "snapshots" else whole
    return real.is_relative_to(whole) or real.parent == cached


def check_references(folder: Path, name: str, listed: Collection[str]) -> None:
    """Raise PackageError where an ONNX file refers to one that is not listed, ValueError where it is no ONNX file."""
    unlisted = sorted(referenced_files(folder / name) - set(listed))
    if unlisted:
        raise PackageError(
            f"{folder / name} refers to the file {unlisted[0]!r:.120}, which {MANIFEST_NAME} does not list; do not use "
            "this package"
        )
