"""Packages on the disk: written atomically, verified when they are read.

A package is a folder with `qsample.json`, the manifest, which lists every other file with its size
and sha256.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeVar

from qsample.checks import as_path
from qsample.contract.interface import CHOICES, Features, Interface
from qsample.errors import PackageError, QsampleError
from qsample.package.disk.pinned import PinnedFolder
from qsample.package.disk.replace import check_replaceable, flush, put_in_place
from qsample.package.disk.scratch import scratch_for
from qsample.package.disk.source_files import SourceFiles, Version, version_of
from qsample.package.disk.space import outside_scratch
from qsample.package.disk.untrusted import (
    MAX_FILE_BYTES,
    leads_out,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    referenced_files,
)
from qsample.package.manifest import (
    MANIFEST_NAME,
    MODEL_PACKAGE_NAME,
    Compilation,
    FileEntry,
    Manifest,
    Source,
    TokenIds,
    model_package,
)
from qsample.package.signature import (
    SIGNATURE_NAME,
    Signer,
    TrustedKeys,
    check_signature,
    files_to_sign,
)

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
# The manifest of a model with a hundred layers has 50 kB.
MAX_MANIFEST_BYTES: Final = 1 << 23
# The largest tokenizer.json of a known model has 35 MB.
_MAX_TEXT_BYTES: Final = 1 << 28
# File browsers leave these in any folder.
_FILE_BROWSER_NAMES: Final = (".DS_Store", "Thumbs.db", "desktop.ini")
# The files of a package whose manifest cannot be read are recognised by these.
_PACKAGE_SUFFIXES: Final = (".json", ".jinja", ".onnx", ".onnx.data")
# The user of a larger portable package is advised to compile it.
_MIN_BYTES_FOR_ADVICE: Final = 100_000_000
_OTHER_MODELS: Final = "in Python, AutoModelForCausalLM.from_pretrained opens other models"
# The largest number of attempts to read a package that is replaced meanwhile. On a busy machine,
# ten may fail in a row.
_MAX_READINGS: Final = 50
# File systems round the times of files down to ticks of at most this length.
_FILE_TIME_TICK_S: Final = 0.01

# The versions of the manifest's file and of further files.
_Identity = tuple[Version | None, ...]


@dataclass(frozen=True, slots=True)
class Package:
    """A package on the disk.

    Attributes:
        path: The absolute path of its folder.
        manifest: Its metadata.
        identity: The version of the manifest's file when it was read, and for a package with a
            trusted signature the versions of all files; None if unknown.
        signer: The trusted signer; None if no signature was checked.
        pinned: The folder that was verified; None if no signature was checked.
    """

    path: Path
    manifest: Manifest
    identity: _Identity | None = field(default=None, compare=False, repr=False)
    signer: Signer | None = field(default=None, compare=False, repr=False)
    pinned: PinnedFolder | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary})"

    @property
    def summary(self) -> str:
        """A description of the package in one line."""
        manifest = self.manifest
        compilation = manifest.compilation
        device = f" for {compilation.provider}, {compilation.ctx_len} tokens" if compilation else ""
        return f"{self.path}, {manifest.kind} package of {manifest.source.model_id}{device}, {manifest.interface.dtype}"

    @property
    def interface(self) -> Interface:
        """The dimensions and features that fix its graphs."""
        return self.manifest.interface

    def has(self, name: str) -> bool:
        """Whether the package has a file of that `name`. Files that the manifest does not list are
        not part of it."""
        return name in self.manifest.files

    @property
    def place(self) -> Path:
        """The folder whose files are opened: `path`, or with a trusted signer the folder that was
        verified, even if another has its name now."""
        return self.path if self.pinned is None else self.pinned.path

    def file(self, name: str) -> Path:
        """The path of the file `name`, to be opened within `use_package` or `verified_again`.
        Raises PackageError if the package has no such file."""
        if not self.has(name):
            raise PackageError(f"{self.path} has no file {name}")
        return self.place / name

    def read_text(self, name: str, largest: int = _MAX_TEXT_BYTES) -> str:
        """The text of the file `name`, in UTF-8. With a trusted signer, it is the signed text,
        whenever it is read.

        Raises PackageError if the package has no such file, or it is not UTF-8, has more than
        `largest` bytes, or was altered."""
        path = self.path / name
        try:
            content = read_bytes(self.file(name), largest)
            text = content.decode("utf-8")
        except (OSError, ValueError) as error:
            raise PackageError(f"cannot read {path}: {error}; export the package again") from error
        is_signed = self.signer is not None
        if is_signed and hashlib.sha256(content).hexdigest() != self.manifest.files[name].sha256:
            raise _altered(path)
        return text

    def read_json(self, name: str) -> dict[str, Any]:
        """The JSON object in the file `name`; {} if the package has no such file. Raises
        PackageError for anything else."""
        if not self.has(name):
            return {}
        text = self.read_text(name, MAX_FILE_BYTES)
        try:
            data = parse_json(text, infinities=True)
        except ValueError as error:
            raise PackageError(
                f"cannot read {self.path / name}: {error}; export the package again"
            ) from error
        if not isinstance(data, dict):
            raise PackageError(f"{self.path / name} is not a JSON object; export the package again")
        return data

    def check_graph(self, name: str) -> None:
        """Raise PackageError if the file `name` is not ONNX, or refers to a file that the manifest
        does not list."""
        try:
            check_references(self.place, name, self.manifest.files)
        except (OSError, ValueError) as error:
            raise PackageError(
                f"{self.path / name} is not an ONNX file: {error}; export the package again"
            ) from error

    def check_not_replaced(self) -> None:
        """Raise PackageError if the package at `path` was replaced since it was read."""
        if self.is_replaced():
            raise PackageError(f"{self.path} was replaced while it was in use; open it again")

    def is_replaced(self) -> bool:
        """Whether the package at `path` was replaced since it was read."""
        if self.identity is None:
            return False
        if self.identity[:1] != _identity(self.path):
            return True
        return self.signer is not None and self.identity != _identity(
            self.place, self.manifest.files
        )

    @contextmanager
    def verified_again(self, name: str) -> Iterator[None]:
        """Verify a graph that the body opens long after the package was read.

        The graph and the files that it refers to are compared with the manifest in memory before
        the body, and must be the same files after it.

        Args:
            name: the path of the graph's file in the package.

        Raises:
            PackageError: a file differs, for example because the package was replaced.
        """
        with self.named():
            try:
                before = _verified(self.place, self.manifest, [name])
                check_references(self.place, name, self.manifest.files)
                parts = sorted(referenced_files(self.place / name))
                before += _verified(self.place, self.manifest, parts)
            except (PackageError, OSError, ValueError) as error:
                raise self._no_longer(str(error)) from error
            try:
                yield
            finally:
                if before != _versions(self.place, [name]) + _versions(self.place, parts):
                    raise self._no_longer(f"{self.path / name} was written to while it was opened")

    def named(self) -> AbstractContextManager[None]:
        """A context whose errors name `path` in place of `place`."""
        return nullcontext() if self.pinned is None else self.pinned.named()

    def _no_longer(self, reason: str) -> PackageError:
        return PackageError(
            f"{self.path} is no longer the package that was opened ({reason}); open it again"
        )


@dataclass(frozen=True, slots=True, repr=False)
class Unpublished(Package):
    """A package in a scratch folder, for further work.

    Attributes:
        sources: The files elsewhere that its graphs may refer to.
    """

    sources: SourceFiles = field(default_factory=SourceFiles, compare=False, repr=False)

    def check_graph(self, name: str) -> None:
        """Do nothing: this process wrote the graph."""

    def check_not_replaced(self) -> None:
        """Raise QsampleError if a file in `sources` changed."""
        self.sources.check()


class PackageWriter:
    """Writes a package, in the body of `write_package`: write files below `directory`, then call
    `finish` once.

    Attributes:
        directory: The scratch folder.
        target: The path of the package.
        manifest: The metadata; None before `finish`.
    """

    def __init__(self, directory: Path, target: Path) -> None:
        self.directory = directory
        self.target = target
        self.manifest: Manifest | None = None
        self._known_hashes: dict[Path, tuple[Version | None, str]] = {}

    def put_aside(self) -> Path | None:
        """Publish to a free name next to the target, which stays unchanged.

        Returns:
            The new target; None if the target is temporary.
        """
        if outside_scratch(self.target) != self.target:
            return None
        for number in itertools.count():
            suffix = "" if number == 0 else str(number)
            path = self.target.with_name(f"{self.target.name}.rejected{suffix}")
            if not os.path.lexists(path):
                self.target = path
                break
        return self.target

    def hashed(self, name: str, sha256: str) -> None:
        """Note the hash of a file that was just written, which is not read again unless it changes.

        Args:
            name: The name of the file.
            sha256: Its sha256, in hexadecimal.
        """
        path = self.directory / name
        self._known_hashes[path] = version_of(path), sha256

    def sha256_of(self, path: Path) -> str:
        """The sha256 of a file of the package, in hexadecimal."""
        version, sha256 = self._known_hashes.get(path, (None, ""))
        return sha256 if version is not None and version == version_of(path) else sha256_of(path)

    def finish(self, manifest: Manifest) -> None:
        """Describe the package. `manifest.files` is ignored: other files than the `hashed` are
        hashed when the body ends."""
        self.manifest = manifest


@contextmanager
def write_package(
    path: str | Path, *, overwrite: bool = False, required_bytes: int = 0
) -> Iterator[PackageWriter]:
    """Write a package: all of it or nothing.

    The body writes to a scratch folder next to `path` (`disk.scratch`). When it ends, the files are
    hashed and flushed to the disk, and the folder is renamed. If it raises, KeyboardInterrupt
    included, the folder is removed and `path` is unchanged. The remains of a killed process next to
    `path` are removed first.

    A package is replaced in one step if the file system can do that (`disk.replace` describes other
    file systems): the old or the new package is at `path` at any time, even after a crash.

    Args:
        path: The path of the package.
        overwrite: Whether a package at `path` is replaced. A folder that is not a package or has
            foreign files is never replaced; that is checked again when the body has ended.
        required_bytes: An estimate of the space that must be free.

    Raises:
        PackageError: `path` cannot be written, or the disk is full.

    >>> with write_package("exported") as writer:
    ...     (writer.directory / "decoder.onnx").write_bytes(graph)
    ...     writer.finish(manifest)
    """
    target = Path(os.path.realpath(as_path("path", path)))
    check_target(target, target, overwrite)
    with scratch_for(target, required_bytes, "the package") as scratch:
        writer = PackageWriter(scratch.new, target)
        yield writer
        if writer.manifest is None:
            raise PackageError(
                "nothing was published: the writer's finish(manifest) was not called"
            )
        _seal(scratch.new, writer.manifest, writer.sha256_of)
        place = writer.target
        put_in_place(scratch, place, lambda path: check_target(path, place, overwrite))


def read_package(
    path: str | Path, verify: bool = True, *, trusted_keys: TrustedKeys | None = None
) -> Package:
    """Open a package.

    Args:
        path: The path of the package.
        verify: Whether the sha256 of every file is compared, not only presence and size.
        trusted_keys: The keys of which one must have signed the package; None to take it unsigned.
            They imply `verify`.

    Raises:
        PackageError: The package is not intact; the message names the file.
    """
    return use_package(path, lambda package: package, verify=verify, trusted_keys=trusted_keys)


def use_package(
    path: str | Path,
    use: Callable[[Package], T],
    *,
    verify: bool = True,
    trusted_keys: TrustedKeys | None = None,
) -> T:
    """Open a package and return `use(package)`, which opens its files.

    If the package is replaced meanwhile, everything starts again, so that no manifest and no graph
    of the old package meets a file of the new package. With `trusted_keys`, everything also starts
    again if any file is written to.

    Args:
        path: The path of the package.
        use: A function of the package.
        verify: See `read_package`.
        trusted_keys: See `read_package`.

    Raises:
        PackageError: The package is not intact, or is replaced over and over. `use` may raise other
            errors.
    """
    folder = as_path("path", path).absolute()
    for _ in range(_MAX_READINGS):
        before = _identity(folder)
        package = None
        try:
            package = _read(folder, before, verify, trusted_keys)
            with package.named():
                result = use(package)
        except Exception:
            if _identity(folder) == before and (package is None or not package.is_replaced()):
                raise
            continue
        if not package.is_replaced():
            return result
    raise PackageError(
        f"{folder} is replaced over and over while it is read; wait until it is no longer written"
    )


def _identity(folder: Path, files: Iterable[str] = ()) -> _Identity | None:
    """The version of the package in a folder and of some of its files; None without a package."""
    manifest = version_of(folder / MANIFEST_NAME)
    return None if manifest is None else (manifest, *_versions(folder, files))


def _versions(folder: Path, files: Iterable[str]) -> _Identity:
    """The versions of files and of the folders between them and `folder`.

    They change even if a file, or one of these folders, is replaced and put back. `folder` itself
    may be replaced and put back if it is not pinned: outside of Linux, its own version is there,
    too.
    """
    names = list(files)
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents} - {"."}
    versions = [version_of(folder / name, changed=True) for name in (*names, *sorted(folders))]
    if sys.platform != "linux":
        versions += [version_of(folder, changed=True), version_of(folder.parent)]
    return tuple(versions)


def _let_time_pass() -> None:
    """Wait until a change of a file gets another time than the changes so far."""
    time.sleep(_FILE_TIME_TICK_S)


def _verified(folder: Path, manifest: Manifest, names: Iterable[str]) -> _Identity:
    """Compare files with the manifest, and return their versions. While they have these versions,
    they are the files that were compared."""
    files = list(names)
    versions = _versions(folder, files)
    _let_time_pass()
    _check_hashes(folder, manifest, files)
    return versions


def _check_hashes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise PackageError if files are not the files of the manifest."""
    for name in names:
        check_file(folder, name, manifest.files[name])
        if sha256_of(folder / name) != manifest.files[name].sha256:
            raise _altered(folder / name)


def _altered(path: Path) -> PackageError:
    return PackageError(
        f"{path} was altered: its sha256 is not the manifest's; export or download it again"
    )


def _read(
    folder: Path, identity: _Identity | None, verify: bool, trusted_keys: TrustedKeys | None
) -> Package:
    """Read a package. identity: The version of the package."""
    if not os.path.isdir(folder):
        state = "not a folder" if os.path.exists(folder) else "missing"
        raise PackageError(f"{folder} is {state}; give a package's folder ({_OTHER_MODELS})")
    if trusted_keys is not None:
        return _read_signed(folder, trusted_keys)
    manifest, _ = _read_manifest(folder)
    for name, entry in manifest.files.items():
        check_file(folder, name, entry)
    if verify:
        _check_hashes(folder, manifest, manifest.files)
    _check_graphs(folder, manifest)
    return Package(folder, manifest, identity)


def _read_signed(folder: Path, trusted_keys: TrustedKeys) -> Package:
    """Read a package that one of the keys must have signed."""
    pinned = PinnedFolder(folder)
    place = pinned.path
    with pinned.named():
        before = _identity(place)
        manifest, manifest_sha256 = _read_manifest(place)
        for name, entry in manifest.files.items():
            check_file(place, name, entry)
        stated = {name: entry.sha256 for name, entry in manifest.files.items()}
        stated[MANIFEST_NAME] = manifest_sha256
        hashes = {
            name: stated[name] if name in stated else sha256_of(place / name)
            for name in files_to_sign(place)
        }
        signer = check_signature(place, hashes, trusted_keys)
        identity = (*(before or ()), *_verified(place, manifest, manifest.files))
        _check_graphs(place, manifest)
    return Package(folder, manifest, identity, signer, pinned)


def _check_graphs(folder: Path, manifest: Manifest) -> None:
    """Raise PackageError if a graph refers to a file that the manifest does not list."""
    for name in manifest.interface.graphs:
        # The reader of a graph reports a file that is not ONNX at all.
        with suppress(OSError, ValueError):
            check_references(folder, name, manifest.files)


def _read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest, and the sha256 of its file in hexadecimal."""
    try:
        text = read_text(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise PackageError(
            f"{folder} is not a qsample package: it has no {MANIFEST_NAME}; give a folder that export or compile wrote "
            f"({_OTHER_MODELS})"
        ) from None
    except (OSError, ValueError) as error:
        raise PackageError(f"cannot read {folder / MANIFEST_NAME}: {error}") from error
    try:
        return Manifest.from_json(text), hashlib.sha256(text.encode()).hexdigest()
    except PackageError as error:
        raise PackageError(f"{folder}: {error}") from error


def copy_package(package: Package, path: str | Path, *, overwrite: bool = False) -> Package:
    """Copy a package to `path` with `write_package`, and return the copy.

    Raises PackageError, and copies nothing, if the files no longer match the manifest.
    """
    size = sum(entry.bytes for entry in package.manifest.files.values())
    with write_package(path, overwrite=overwrite, required_bytes=size) as writer:
        for name, entry in package.manifest.files.items():
            check_file(package.path, name, entry)
            (writer.directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package.path / name, writer.directory / name)
            if sha256_of(writer.directory / name) != entry.sha256:
                raise PackageError(
                    f"{package.path / name} was altered since the package was made; export it again"
                )
        writer.finish(package.manifest)
    return Package(Path(path).absolute(), package.manifest)


def check_not_source(path: str | Path, *sources: str | Path) -> None:
    """Raise PackageError if a package written to `path` would take the place of its sources.

    Args:
        path: The path of the package.
        sources: Folders; anything else, such as a hub id, is ignored.
    """
    target = Path(os.path.realpath(as_path("path", path)))
    for source in sources:
        if not Path(source).is_dir():
            continue
        origin = Path(os.path.realpath(source))
        if target in (origin, *origin.parents):
            inside = "" if target == origin else f" has {source} in it, which"
            raise PackageError(
                f"{path}{inside} is what the package is made from; choose another folder"
            )


def _seal(staging: Path, manifest: Manifest, sha256: Callable[[Path], str]) -> None:
    """Hash every file, write the manifest last, and flush everything to the disk.

    Args:
        staging: The folder of the package.
        manifest: The metadata without files.
        sha256: A function that returns the sha256 of a file, in hexadecimal.
    """
    described = json.dumps(model_package({".": manifest}), indent=2, sort_keys=True) + "\n"
    (staging / MODEL_PACKAGE_NAME).write_text(described, encoding="utf-8")
    paths = sorted(path for path in staging.rglob("*") if not path.is_dir())
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise PackageError(
                f"{path.relative_to(staging)} is not a plain file; a package holds plain files only"
            )
    files = {}
    for path in paths:
        files[path.relative_to(staging).as_posix()] = FileEntry(sha256(path), path.stat().st_size)
    files.pop(MANIFEST_NAME, None)
    text = replace(manifest, files=files).to_json()
    # A manifest that cannot be read back is not published.
    Manifest.from_json(text)
    (staging / MANIFEST_NAME).write_text(text, encoding="utf-8")
    # Elsewhere a folder cannot be opened.
    if os.name == "posix":
        folders = [path for path in staging.rglob("*") if path.is_dir()]
        for path in (*paths, staging / MANIFEST_NAME, *folders, staging):
            flush(path)


def check_features(package: Package, wanted: Features, dtype: str | None) -> None:
    """Raise QsampleError if a package lacks features or has another dtype: an export fixes both.

    Args:
        package: The package.
        wanted: The features that it must have.
        dtype: The dtype that it must have; None for any.
    """
    present = package.interface.features
    arguments = {"sampler": "include_sampler", **{name: name for name in CHOICES}}
    for name, argument in arguments.items():
        if getattr(wanted, name) != getattr(present, name):
            raise QsampleError(
                f"{package.path} was exported with {argument}={getattr(present, name)!r}; open it with that, or export "
                "it again"
            )
    numbers = [
        entry.name for entry in fields(Features) if isinstance(getattr(wanted, entry.name), int)
    ]
    missing = [name for name in numbers if getattr(wanted, name) > getattr(present, name)]
    missing += [f"the filter {name}" for name in wanted.filters if name not in present.filters]
    if missing:
        raise QsampleError(
            f"{package.path} was exported without {', '.join(missing)}; export it again with them"
        )
    held = package.interface.dtype
    if dtype not in (None, held):
        way = "export it again with that"
        if dtype == "bfloat16":
            way = 'compile it with provider="cuda", dtype="bfloat16"'
        raise QsampleError(f"{package.path} holds {held}, not {dtype}; leave dtype out, or {way}")


def faster_way(package: Package) -> str | None:
    """Advice on a faster package, in a sentence, if the package is portable and large enough;
    otherwise None."""
    size = sum(entry.bytes for entry in package.manifest.files.values())
    if package.manifest.compilation is not None or size < _MIN_BYTES_FOR_ADVICE:
        return None
    if package.manifest.packed_weights is not None:
        # The weights already have few bits.
        return (
            f"{package.path} is portable, for any device; `qsample compile {package.path} OUT`, or "
            'model.compile("OUT") in Python, makes it for one, with the same weights'
        )
    return (
        f"{package.path} is portable, and about as fast as transformers; compiled with weights in 4 bits it is several "
        f'times as fast: `qsample compile {package.path} OUT --weights int4`, or model.compile("OUT", weights="int4") '
        "in Python"
    )


def check_target(path: Path, target: Path, overwrite: bool) -> None:
    """Raise PackageError if the file or folder at `path`, which is or was at `target`, must not be
    replaced."""
    check_replaceable(
        path,
        target,
        "package",
        lambda folder: (folder / MANIFEST_NAME).is_file(),
        foreign_files,
        overwrite,
    )


def foreign_files(folder: Path) -> Iterator[str]:
    """The files in a folder that do not belong to its package.

    These are the files that the manifest, of any version, does not list; without a readable
    manifest, the files of other kinds than a package has.
    """
    try:
        listed = read_json(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES)["files"].keys()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        listed = None
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in sorted(files + links):
            path = (Path(root) / name).relative_to(folder).as_posix()
            known = path in listed if listed is not None else name.endswith(_PACKAGE_SUFFIXES)
            if (
                not known
                and path not in (MANIFEST_NAME, SIGNATURE_NAME)
                and name not in _FILE_BROWSER_NAMES
            ):
                yield path


def check_file(folder: Path, name: str, entry: FileEntry) -> None:
    """Raise PackageError if a file is missing, not a plain file, outside the package or of another
    size."""
    path = folder / name
    try:
        # The reading of a pipe or a device would block.
        if not path.is_file():
            raise PackageError(f"{path} is missing; export or download the package again")
        if leads_out(path, [folder]):
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


def check_references(folder: Path, name: str, listed: Collection[str]) -> None:
    """Raise PackageError if an ONNX file refers to a file that is not listed, ValueError if it is
    not ONNX."""
    unlisted = sorted(referenced_files(folder / name) - set(listed))
    if unlisted:
        raise PackageError(
            f"{folder / name} refers to the file {unlisted[0]!r:.120}, which {MANIFEST_NAME} does not list; do not use "
            "this package"
        )


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal. Raises PackageError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PackageError(f"cannot read {path}: {error.strerror}") from error
