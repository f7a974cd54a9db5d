"""The user's cache of packages that were made from models given directly: each is made once, and
found again.

An entry is a package in a folder named after its model and a hash of all that the package follows
from: the model's files (for a model of the hub, its commit), features and options, the code of
qsample, and ONNX Runtime. transformers is not part of the hash, because an entry is found without
it.

One process at a time makes an entry, in another folder that is renamed into place. A user of an
entry holds a shared lock on its manifest, and a locked entry is not removed.
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
from time import monotonic, sleep
from typing import Any, Final

from qsample.errors import PackageError, QsampleError
from qsample.package.disk.locks import alone, is_at, lock
from qsample.package.disk.scratch import ScratchFolder
from qsample.package.disk.space import full_disk_named, trim
from qsample.package.disk.untrusted import read_json, read_text
from qsample.package.manifest import MANIFEST_NAME, Manifest
from qsample.package.package import Package, read_package, sha256_of
from qsample.progress import Progress, Stage, unreported

PACKAGE_ROOT: Final = Path(__file__).resolve().parent.parent
CACHE_VARIABLE: Final = "QSAMPLE_CACHE"
LIMIT_VARIABLE: Final = "QSAMPLE_CACHE_LIMIT"
DEFAULT_LIMIT_BYTES: Final = 50 * 10**9
_ENTRY_NAME: Final = re.compile(r"[\w.+-]+-[0-9a-f]{16}")
_MAX_MODEL_NAME_LENGTH: Final = 100  # characters
_LOCKS_FOLDER: Final = ".locks"  # it has a lock file for each entry that was ever made
# The file with the manifest's sha256 and the state of all files when the entry was made.
_SEAL_FILE: Final = "sealed.json"
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", re.IGNORECASE)
_LOCK_POLL_S: Final = 0.05
# A process that removes an entry renames it first, which takes no time.
_MAX_LOCK_WAIT_S: Final = 10
_BYTES_BY_UNIT: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that a cached package follows from.

    Attributes:
        name: the model's name, which becomes a part of the entry's name; letters that a file name
            should not have are replaced.
        parts: the model's identity, features and options, JSON-ready.
        model: the model's hub id or full path, which the package does not hold.
    """

    name: str
    parts: dict[str, Any]
    model: str = ""

    @property
    def entry(self) -> str:
        """The name of the entry's folder."""
        text = json.dumps([self.parts, _code(), _runtime()], sort_keys=True, default=str)
        name = re.sub(r"[^\w.+-]+", "-", self.name).strip("-.")
        name = name[:_MAX_MODEL_NAME_LENGTH] or "model"
        return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A package in the cache.

    Attributes:
        path: the entry's folder.
        model: the model's hub id or full path.
        manifest: the package's manifest.
        last_used: the time of the last use, in seconds since the epoch.
        in_use: whether a process has it open.
    """

    path: Path
    model: str
    manifest: Manifest
    last_used: float
    in_use: bool

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.manifest.files.values())


def cache_folder() -> Path:
    """The folder `$QSAMPLE_CACHE`, or else `qsample` in the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE, "")
    if chosen != "":
        return Path(chosen).absolute()
    folder = os.environ.get("XDG_CACHE_HOME", "")
    return Path(folder if folder != "" else Path.home() / ".cache").absolute() / "qsample"


def size_limit() -> int:
    """The limit `$QSAMPLE_CACHE_LIMIT` in bytes. Raises QsampleError if that is not a size."""
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return DEFAULT_LIMIT_BYTES
    match = _SIZE.fullmatch(text)
    if match is None:
        raise QsampleError(f"{LIMIT_VARIABLE} is {text!r:.60}; give a size, such as 50GB or 800MB")
    return int(float(match[1]) * _BYTES_BY_UNIT[match[2].lower()])


def open_cached(
    recipe: Recipe, make: Callable[[Path], object], progress: Progress | None = None
) -> tuple[Package, FileIO]:
    """The package of a recipe, from the cache or made and put there.

    If the cache is larger than its limit, least recently used entries are removed, except this
    entry and entries in use.

    Args:
        recipe: all that the package follows from.
        make: a function that writes the package to a folder. Its errors are passed on, and nothing
            remains.
        progress: called with a stage and the fraction done, also while another process makes the
            package.

    Returns:
        The package, and the open lock that keeps it from being removed.

    Raises:
        QsampleError: if the cache cannot be written.
        PackageError: if the entry is gone or damaged as soon as it was made.
    """
    report = progress or unreported
    folder = cache_folder()
    limit = size_limit()
    path = folder / recipe.entry
    _check_folder(folder)
    found = _use(path)
    if found is not None:
        return found
    with ExitStack() as making:
        try:
            (folder / _LOCKS_FOLDER).mkdir(parents=True, exist_ok=True)
            _check_locks(folder)
            lock_file = folder / _LOCKS_FOLDER / path.name
            making.enter_context(alone(lock_file, lambda: report(Stage.WAITING, 0.0)))
        except OSError as error:
            raise QsampleError(
                f"cannot write to {folder}, the cache of compiled models ({error.strerror}); set {CACHE_VARIABLE} to "
                "another folder"
            ) from error
        found = _use(path)
        if found is None:  # no other process was faster
            if os.path.lexists(path):
                report(Stage.MAKING_AGAIN, 0.0)
                _delete(path)
            report(Stage.STARTING, 0.0)  # libraries take seconds to import
            _make_entry(path, recipe, make)
            found = _use(path)
        if found is None:
            raise PackageError(f"{path} was removed or damaged as soon as it was made; start again")
        trim(_own_entries(folder), limit, remove)
        return found


def _make_entry(path: Path, recipe: Recipe, make: Callable[[Path], object]) -> None:
    """Make an entry in a scratch folder of the cache, seal it, and rename it into place."""
    folder = path.parent
    with full_disk_named(folder), ScratchFolder(folder) as scratch:
        # In a folder of the same name inside: compile would keep a refused package beside it.
        made = scratch.new / path.name
        make(made)
        seal = {
            "entry": path.name,
            "manifest": sha256_of(made / MANIFEST_NAME),
            "files": _states(made),
            "model": recipe.model,
        }
        (made / _SEAL_FILE).write_text(json.dumps(seal), "utf-8")
        made.rename(path)


def entries() -> list[Entry]:
    """The packages of the cache, the last used first; folders that are not entries are left out."""
    found = []
    for path in _entry_folders(cache_folder()):
        try:
            manifest = Manifest.from_json(read_text(path / MANIFEST_NAME))
            with FileIO(path / MANIFEST_NAME, "r") as file:
                in_use = lock(file.fileno()) is False
            model = read_json(path / _SEAL_FILE)["model"] or manifest.source.model_id
            found.append(Entry(path, str(model), manifest, path.stat().st_mtime, in_use))
        # An entry of another version, or a damaged one, which `remove` removes all the same.
        except (OSError, ValueError, LookupError, TypeError, PackageError):
            continue
    return sorted(found, key=lambda entry: entry.last_used, reverse=True)


def remove(path: Path) -> bool:
    """Remove an entry. Returns False if a process has it open."""
    try:
        file = FileIO(path / MANIFEST_NAME, "r")
    except OSError:
        return True
    with file:
        if lock(file.fileno()) is False:
            return False
        if is_at(path / MANIFEST_NAME, file):  # it was neither removed nor made again since
            _delete(path)
    return True


def clear() -> tuple[int, int]:
    """Remove all entries that no process has open, except other users' entries. Returns the numbers
    of removed and of kept entries."""
    were_removed = [remove(path) for path in _own_entries(cache_folder())]
    removed = sum(were_removed)
    return removed, len(were_removed) - removed


def _code() -> str:
    """The sha256 of qsample's code, which makes the entries."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE_ROOT.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE_ROOT)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _runtime() -> str:
    """The installed ONNX Runtime and its version."""
    for distribution in ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"):
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return "no onnxruntime"


def _use(path: Path) -> tuple[Package, FileIO] | None:
    """The verified package at `path` with its lock; None if it is missing, damaged or a
    stranger's."""
    manifest = path / MANIFEST_NAME
    try:
        if not _is_trusted(path):
            return None
        file = FileIO(manifest, "r")
    except OSError:
        return None
    is_locked = lock(file.fileno(), shared=True)
    patience = monotonic() + _MAX_LOCK_WAIT_S
    while is_locked is False and is_at(manifest, file):
        sleep(_LOCK_POLL_S)  # another process looks at it, or removes it
        is_locked = lock(file.fileno(), shared=True)
        if is_locked is False and monotonic() > patience:
            file.close()
            raise QsampleError(
                f"another process, perhaps another user's, has locked {manifest} for {_MAX_LOCK_WAIT_S} s; end it, or "
                f"set {CACHE_VARIABLE} to another folder"
            )
    try:
        if is_locked is not False and is_at(manifest, file):
            seal = read_json(path / _SEAL_FILE)
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


def _check_folder(folder: Path) -> None:
    """Raise QsampleError if every user may replace the entries of a cache after they were
    checked."""
    with suppress(OSError):
        mode = folder.stat().st_mode
        is_writable = mode & stat.S_IWOTH != 0
        is_sticky = mode & stat.S_ISVTX != 0
        if os.name == "posix" and is_writable and not is_sticky:
            raise QsampleError(
                f"every user may replace the files in {folder}, the cache of compiled models; `chmod +t {folder}`, or "
                f"set {CACHE_VARIABLE} to another folder"
            )


def _check_locks(folder: Path) -> None:
    """Raise QsampleError if the folder of the locks is a link, or another user's."""
    locks = folder / _LOCKS_FOLDER
    status = locks.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in _trusted_owners(folder):
        raise QsampleError(
            f"{locks} is a link, or another user's; remove it, or set {CACHE_VARIABLE} to another folder"
        )


def _trusted_owners(folder: Path) -> set[int]:
    """The ids of this user, of the owner of a cache, and of root."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return {folder.stat().st_uid, user, 0}


def _own_entries(folder: Path) -> list[Path]:
    """The entries that this user may remove: its own, or all in a cache of its own; for root, all.
    Other users' entries would take the place of its own, however large they claim to be."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    own = list[Path]()
    for path in _entry_folders(folder):
        with suppress(OSError):
            if user in (0, path.lstat().st_uid, folder.stat().st_uid):
                own.append(path)
    return own


def _is_trusted(path: Path) -> bool:
    """Whether an entry has only plain files and folders, each owned by this user, the owner of the
    whole cache, or root: if other users can write to the cache, they may make entries, too."""
    trusted_owners = _trusted_owners(path.parent)
    for one in (path, *path.rglob("*")):
        status = one.lstat()
        is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
        if not is_plain or status.st_uid not in trusted_owners:
            return False
    return True


def _states(folder: Path) -> list[list[Any]]:
    """Name, size and times of the files of an entry. The last is the time of any change, which no
    program can set."""
    states = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        status = path.stat()
        if name != _SEAL_FILE and not stat.S_ISDIR(status.st_mode):
            states.append([name, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    return states


def _entry_folders(folder: Path) -> list[Path]:
    """The folders of the entries in a folder, damaged ones included; other files and folders are
    left out."""
    try:
        return [
            Path(entry.path)
            for entry in os.scandir(folder)
            if _ENTRY_NAME.fullmatch(entry.name)
            and entry.is_dir(follow_symlinks=False)
            and os.path.isfile(os.path.join(entry.path, MANIFEST_NAME))
        ]
    except OSError:
        return []


def _delete(path: Path) -> None:
    """Delete an entry, so that other processes see all of it or nothing."""
    with ScratchFolder(path.parent) as scratch:
        try:
            path.rename(scratch.new / "entry")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise PackageError(
                f"cannot remove {path}: {error.strerror}; is it in use, or another user's? {CACHE_VARIABLE} names "
                "another cache"
            ) from error
