"""The user's cache of packages that were made of models given directly: each is made once, and found again.

An entry is a package in a folder named after its model and a hash of all that it follows from: the model's files (a
model of the hub: its commit), features and options, this package's code and ONNX Runtime. transformers does not count,
because an entry is found without it. A process makes an entry at a time, next to it and renamed into place; a user of
an entry holds a shared lock on its manifest, and a locked entry is not removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from time import sleep
from typing import Any, Final

from qsample.disk.locks import alone, is_at, lock
from qsample.disk.scratch import ScratchFolder
from qsample.disk.space import full_disk_named, trim
from qsample.disk.untrusted import read_json, read_text
from qsample.errors import PackageError, QsampleError
from qsample.package.manifest import MANIFEST_NAME, Manifest
from qsample.package.package import Package, read_package, sha256_of
from qsample.progress import Progress, Stage, unreported

PACKAGE_ROOT: Final = Path(__file__).resolve().parent.parent
CACHE_VARIABLE: Final = "QSAMPLE_CACHE"
LIMIT_VARIABLE: Final = "QSAMPLE_CACHE_LIMIT"
DEFAULT_LIMIT: Final = 50 * 10**9  # bytes
_ENTRY: Final = re.compile(r"[\w.+-]+-[0-9a-f]{16}")
_LOCKS: Final = ".locks"  # a folder with a lock file for each entry that was ever made
_SEAL: Final = (
    "sealed.json"  # the manifest's sha256, and the state of all files when the entry was made
)
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", re.IGNORECASE)
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that a cached package follows from. name: of the model, a part of the entry's name; letters that a file name
    should not have are replaced. parts: JSON-ready: the model's identity, features, options. model: its hub id or full
    path, which is not in the package."""

    name: str
    parts: dict[str, Any]
    model: str = ""

    @property
    def entry(self) -> str:
        """The name of the entry's folder."""
        text = json.dumps([self.parts, _code(), _runtime()], sort_keys=True, default=str)
        name = re.sub(r"[^\w.+-]+", "-", self.name).strip("-.")[:100] or "model"
        return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A package in the cache. model: its hub id or full path. last_used: seconds since the epoch. in_use: whether a
    process has it open."""

    path: Path
    model: str
    manifest: Manifest
    last_used: float
    in_use: bool

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.manifest.files.values())


def cache_folder() -> Path:
    """`$QSAMPLE_CACHE`, else `qsample` in the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "qsample"


def size_limit() -> int:
    """`$QSAMPLE_CACHE_LIMIT` in bytes. Raises QsampleError if that is not a size."""
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return DEFAULT_LIMIT
    if not (match := _SIZE.fullmatch(text)):
        raise QsampleError(f"{LIMIT_VARIABLE} is {text!r:.60}; give a size, such as 50GB or 800MB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def open_cached(
    recipe: Recipe, make: Callable[[Path], object], progress: Progress | None = None
) -> tuple[Package, FileIO]:
    """The package of `recipe`: from the cache, or made by `make` and put there; and the open lock that keeps it from
    being removed. If another process makes the package, `progress` is told, and this process waits.

    Least recently used entries go if the cache is larger than its limit, except this entry and entries in use. Raises
    QsampleError if the cache cannot be written. Errors of `make` are passed on, and nothing remains.
    """
    report = progress or unreported
    folder = cache_folder()
    limit = size_limit()
    path = folder / recipe.entry
    if found := _use(path):
        return found
    with ExitStack() as making:
        try:
            (folder / _LOCKS).mkdir(parents=True, exist_ok=True)
            making.enter_context(
                alone(folder / _LOCKS / path.name, lambda: report(Stage.WAITING, 0.0))
            )
        except OSError as error:
            raise QsampleError(
                f"cannot write to {folder}, the cache of compiled models ({error.strerror}); set {CACHE_VARIABLE} to "
                "another folder"
            ) from error
        if not (found := _use(path)):  # otherwise another process was faster
            if os.path.lexists(path):
                report(Stage.MAKING_AGAIN, 0.0)
                _delete(path)
            report(Stage.STARTING, 0.0)  # libraries take seconds to import
            with full_disk_named(folder), ScratchFolder(folder) as scratch:
                made = (
                    scratch.new / path.name
                )  # compile would keep a refused package next to another place
                make(made)
                seal = {
                    "entry": path.name,
                    "manifest": sha256_of(made / MANIFEST_NAME),
                    "files": _states(made),
                }
                seal["model"] = recipe.model
                (made / _SEAL).write_text(json.dumps(seal), "utf-8")
                made.rename(path)
            found = _use(path)
        if not found:
            raise PackageError(f"{path} was removed or damaged as soon as it was made; start again")
        trim(_entry_folders(folder), limit, remove)
        return found


def entries() -> list[Entry]:
    """The packages of the cache, the last used first; folders that are no entries are left out."""
    found = []
    for path in _entry_folders(cache_folder()):
        try:
            manifest = Manifest.from_json(read_text(path / MANIFEST_NAME))
            with FileIO(path / MANIFEST_NAME, "r") as file:
                in_use = lock(file.fileno()) is False
            model = read_json(path / _SEAL)["model"] or manifest.source.model_id
            found.append(Entry(path, str(model), manifest, path.stat().st_mtime, in_use))
        # Of another version, or damaged: `remove` takes it all the same.
        except (OSError, ValueError, LookupError, TypeError, PackageError):
            continue
    return sorted(found, key=lambda entry: entry.last_used, reverse=True)


def remove(path: Path) -> bool:
    """Remove an entry; False if a process has it open."""
    try:
        file = FileIO(path / MANIFEST_NAME, "r")
    except OSError:
        return True
    with file:
        if lock(file.fileno()) is False:
            return False
        if is_at(path / MANIFEST_NAME, file):  # otherwise it was removed or made again since
            _delete(path)
    return True


def clear() -> tuple[int, int]:
    """Remove all entries that no process has open; the numbers of removed and of kept entries."""
    removed = [remove(path) for path in _entry_folders(cache_folder())]
    return sum(removed), len(removed) - sum(removed)


def _code() -> str:
    """sha256 over this package's code, because it makes the entries."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE_ROOT.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE_ROOT)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _runtime() -> str:
    for distribution in ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"):
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return "no onnxruntime"


def _use(path: Path) -> tuple[Package, FileIO] | None:
    """The verified package at `path` with its lock; None if it is missing, damaged or a stranger's."""
    manifest = path / MANIFEST_NAME
    try:
        if not _is_trusted(path):
            return None
        file = FileIO(manifest, "r")
    except OSError:
        return None
    while (free := lock(file.fileno(), shared=True)) is False and is_at(manifest, file):
        sleep(0.05)  # another process looks at it, or removes it
    try:
        if free is not False and is_at(manifest, file):
            seal = read_json(path / _SEAL)
            if seal["entry"] != path.name:
                raise PackageError(f"{path} was another entry")
            # Hashing takes seconds; files are hashed again only if they were written to.
            untouched = seal["files"] == _states(path)
            if not untouched and seal["manifest"] != sha256_of(manifest):
                raise PackageError(f"{manifest} was altered")
            package = read_package(path, verify=not untouched)
            with suppress(OSError):  # a cache that is only read
                os.utime(path)
            return package, file
    except (PackageError, OSError, ValueError, LookupError, TypeError):
        pass
    file.close()
    return None


def _is_trusted(path: Path) -> bool:
    """Whether an entry has plain files and folders only, each of this user, of the owner of the whole cache, or of
    root: if others can write to the cache, they may make entries, too."""
    trusted = {path.parent.stat().st_uid, os.getuid() if hasattr(os, "getuid") else 0, 0}
    states = [one.lstat() for one in (path, *path.rglob("*"))]
    return all(
        (stat.S_ISREG(one.st_mode) or stat.S_ISDIR(one.st_mode)) and one.st_uid in trusted
        for one in states
    )


def _states(folder: Path) -> list[list[Any]]:
    """Name, size and times of the files of an entry. No program can set the last time, of any change."""
    files = (
        (path.relative_to(folder).as_posix(), path.stat()) for path in sorted(folder.rglob("*"))
    )
    return [
        [name, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        for name, status in files
        if name != _SEAL and not stat.S_ISDIR(status.st_mode)
    ]


def _entry_folders(folder: Path) -> list[Path]:
    """The entries in `folder`, damaged ones too; nothing else that may be there."""
    try:
        return [
            Path(entry.path)
            for entry in os.scandir(folder)
            if _ENTRY.fullmatch(entry.name)
            and entry.is_dir(follow_symlinks=False)
            and os.path.isfile(os.path.join(entry.path, MANIFEST_NAME))
        ]
    except OSError:
        return []


def _delete(path: Path) -> None:
    """Delete an entry: other processes see all of it or nothing."""
    with ScratchFolder(path.parent) as scratch:
        try:
            path.rename(scratch.new / "entry")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise PackageError(f"cannot remove {path}: {error.strerror}; is it in use?") from error
