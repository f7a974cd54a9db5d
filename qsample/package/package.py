"""Packages on the disk: written atomically, read back verified. A package is a folder with `qsample.json`, the
manifest: it lists every other file with its size and sha256."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from qsample.contract.interface import Features, Interface
from qsample.disk.replace import check_replaceable, flush, put_in_place
from qsample.disk.scratch import scratch_for
from qsample.disk.source_files import SourceFiles, Version, version_of
from qsample.disk.space import outside_scratch
from qsample.disk.untrusted import leads_out, read_json, read_text, referenced_files
from qsample.errors import PackageError, QsampleError
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
LARGEST_MANIFEST: Final = 1 << 23  # bytes; a model of a hundred layers needs 50 kB
_CRUMBS: Final = (
    ".DS_Store",
    "Thumbs.db",
    "desktop.ini",
)  # that a system's file browser leaves in any folder
_DAMAGED: Final = (
    ".json",
    ".jinja",
    ".onnx",
    ".onnx.data",
)  # files of a package whose manifest cannot be read
_SLOW_FROM: Final = 100_000_000  # bytes of a portable package, whose user is told to compile it
_OTHER_MODELS: Final = "in Python, AutoModelForCausalLM.from_pretrained opens other models"
_READINGS: Final = 50  # of a package that is replaced while it is read; on a busy machine 10 of them may fail in a row


@dataclass(frozen=True, slots=True)
class Package:
    """A package on disk, at the absolute `path`. identity: of the manifest's file when it was read, if known, and of a
    package with a trusted signature, of all files. signer: of that signature."""

    path: Path
    manifest: Manifest
    identity: tuple[Version | None, ...] | None = field(default=None, compare=False, repr=False)
    signer: Signer | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary})"

    @property
    def summary(self) -> str:
        """The package in a line."""
        manifest, compilation = self.manifest, self.manifest.compilation
        device = f" for {compilation.provider}, {compilation.ctx_len} tokens" if compilation else ""
        return f"{self.path}, {manifest.kind} package of {manifest.source.model_id}{device}, {manifest.interface.dtype}"

    @property
    def interface(self) -> Interface:
        """The dimensions and features that fix its graphs."""
        return self.manifest.interface

    def has(self, name: str) -> bool:
        """Whether the package holds a file of this name. Files that the manifest does not list are not part of it."""
        return name in self.manifest.files

    def file(self, name: str) -> Path:
        """The path of a file of the package; PackageError if it has no file of that name."""
        if not self.has(name):
            raise PackageError(f"{self.path} has no file {name}")
        return self.path / name

    def read_json(self, name: str) -> dict[str, Any]:
        """The JSON object in the file `name`; {} if the package has no such file; PackageError if it is no object."""
        if not self.has(name):
            return {}
        try:
            data = read_json(self.file(name), infinities=True)
        except (OSError, ValueError) as error:
            raise PackageError(
                f"cannot read {self.path / name}: {error}; export the package again"
            ) from error
        if not isinstance(data, dict):
            raise PackageError(f"{self.path / name} is not a JSON object; export the package again")
        return data

    def check_graph(self, name: str) -> None:
        """Raise PackageError if the file `name` is not ONNX, or refers to a file that the manifest does not list."""
        try:
            check_references(self.path, name, self.manifest.files)
        except (OSError, ValueError) as error:
            raise PackageError(
                f"{self.path / name} is not an ONNX file: {error}; export the package again"
            ) from error

    def check_not_replaced(self) -> None:
        """Raise PackageError if `path` has become another package since this one was read."""
        if self.is_replaced():
            raise PackageError(f"{self.path} was replaced while it was in use; open it again")

    def is_replaced(self) -> bool:
        """Whether `path` has become another package since this one was read."""
        return self.identity not in (
            None,
            _identity(self.path, () if self.signer is None else self.manifest.files),
        )


@dataclass(frozen=True, slots=True, repr=False)
class Unpublished(Package):
    """A package in a scratch folder, for further work: its graphs may refer to files elsewhere, `sources`."""

    sources: SourceFiles = field(default_factory=SourceFiles, compare=False, repr=False)

    def check_graph(self, name: str) -> None:
        """Nothing: this process wrote the graph itself."""

    def check_not_replaced(self) -> None:
        """Raise QsampleError if `sources` changed."""
        self.sources.check()


class PackageWriter:
    """The argument of `write_package`'s body: write files below `directory`, then call `finish` once. `target` is the
    place of the package."""

    def __init__(self, directory: Path, target: Path) -> None:
        self.directory = directory
        self.target = target
        self.manifest: Manifest | None = None
        self._known: dict[Path, tuple[Version | None, str]] = {}

    def put_aside(self) -> Path | None:
        """Publish to a free name next to the unchanged target, and return it; None if the target is temporary."""
        if outside_scratch(self.target) != self.target:
            return None
        names = (f"{self.target.name}.rejected{number or ''}" for number in itertools.count())
        self.target = next(
            path for name in names if not os.path.lexists(path := self.target.with_name(name))
        )
        return self.target

    def hashed(self, name: str, sha256: str) -> None:
        """Note the sha256, in hexadecimal, of a file of the package that was just written: it is not read again unless
        it changes before the body ends."""
        path = self.directory / name
        self._known[path] = version_of(path), sha256

    def sha256_of(self, path: Path) -> str:
        """Of a file of the package, in hexadecimal."""
        version, sha256 = self._known.get(path, (None, ""))
        return sha256 if version is not None and version == version_of(path) else sha256_of(path)

    def finish(self, manifest: Manifest) -> None:
        """Describe the package. `manifest.files` is ignored: files not yet `hashed` are hashed when the body ends."""
        self.manifest = manifest


@contextmanager
def write_package(
    path: str | Path, *, overwrite: bool = False, required_bytes: int = 0
) -> Iterator[PackageWriter]:
    """Write a package to `path`: all of it or nothing.

    The body writes into a scratch folder next to `path` (`disk.scratch`). When it ends, the files are hashed and
    flushed to the disk, and the folder is renamed into place; if it raises, KeyboardInterrupt included, the folder is
    removed and `path` is as before. The remains of a killed process next to `path` are removed first.

    With `overwrite`, a package at `path` is replaced, but never a folder that is not a package or holds foreign files;
    that is checked once more when the body has ended. If the file system can do it in one step (`disk.replace`
    describes the rest), the old package or the new package is at `path` at any time, even after a crash.

    Raises PackageError if `path` cannot be written, or the disk is full: `required_bytes`, an estimate, must be free.

    >>> with write_package("exported") as writer:
    ...     (writer.directory / "decoder.onnx").write_bytes(graph)
    ...     writer.finish(manifest)
    """
    target = Path(os.path.realpath(path))
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
    """Open the package at `path`. `verify` compares every file's sha256, not only presence and sizes; so do
    `trusted_keys`, of which one has to have signed the package. Raises PackageError, with the file's name, if the
    package is not intact."""
    return use_package(path, lambda package: package, verify=verify, trusted_keys=trusted_keys)


def use_package(
    path: str | Path,
    use: Callable[[Package], T],
    *,
    verify: bool = True,
    trusted_keys: TrustedKeys | None = None,
) -> T:
    """Open the package at `path` and return `use(package)`; `use` opens its files. If the package is replaced
    meanwhile, all of it starts again, so that no manifest and no graph of the old package meets a file of the new
    package; with `trusted_keys`, if any of its files is written to, too. Raises as `read_package` and `use` do."""
    folder = Path(path).absolute()
    for _ in range(_READINGS):
        before = _identity(folder)
        package = None
        try:
            package = _read(folder, before, verify, trusted_keys)
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


def _identity(folder: Path, files: Iterable[str] = ()) -> tuple[Version | None, ...] | None:
    """The version of the package in `folder` and of some of its files; None without a package."""
    manifest = version_of(folder / MANIFEST_NAME)
    return (
        None
        if manifest is None
        else (manifest, *(version_of(folder / name, changed=True) for name in files))
    )


def _read(
    folder: Path,
    identity: tuple[Version | None, ...] | None,
    verify: bool,
    trusted_keys: TrustedKeys | None,
) -> Package:
    if not os.path.isdir(folder):
        state = "not a folder" if os.path.exists(folder) else "missing"
        raise PackageError(f"{folder} is {state}; give a package's folder ({_OTHER_MODELS})")
    manifest, sha256 = _read_manifest(folder)
    for name, entry in manifest.files.items():
        check_file(folder, name, entry)
    signer = None
    if trusted_keys is not None:
        identity = _identity(folder, manifest.files)
        known = {
            MANIFEST_NAME: sha256,
            **{name: entry.sha256 for name, entry in manifest.files.items()},
        }
        hashes = {
            name: known.get(name) or sha256_of(folder / name) for name in files_to_sign(folder)
        }
        signer = check_signature(folder, hashes, trusted_keys)
    if verify or signer is not None:
        for name, entry in manifest.files.items():
            if sha256_of(folder / name) != entry.sha256:
                raise PackageError(
                    f"{folder / name} was altered: its sha256 is not the manifest's; export or download it again"
                )
    for name in manifest.interface.graphs:
        with suppress(
            OSError, ValueError
        ):  # a file that is not ONNX at all is reported by its reader
            check_references(folder, name, manifest.files)
    return Package(folder, manifest, identity, signer)


def _read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest, and its file's sha256 in hexadecimal."""
    try:
        text = read_text(folder / MANIFEST_NAME, LARGEST_MANIFEST)
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
    """Copy `package` to `path` as `write_package` would write it, and return the copy. Raises PackageError, and copies
    nothing, if the files no longer match the manifest."""
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
    """Raise PackageError if a package written to `path` would take the place of one of the folders `sources`; anything
    else among them, such as a hub id, is ignored."""
    target = Path(os.path.realpath(path))
    for source in sources:
        if Path(source).is_dir() and target in (
            origin := Path(os.path.realpath(source)),
            *origin.parents,
        ):
            inside = "" if target == origin else f" has {source} in it, which"
            raise PackageError(
                f"{path}{inside} is what the package is made from; choose another folder"
            )


def _seal(staging: Path, manifest: Manifest, sha256: Callable[[Path], str]) -> None:
    """Hash every file, write the manifest last, and flush all of it to the disk. sha256: of a file, in hexadecimal."""
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
    Manifest.from_json(text)  # a published package can be read back
    (staging / MANIFEST_NAME).write_text(text, encoding="utf-8")
    if os.name == "posix":  # elsewhere a folder cannot be opened
        for path in (
            *paths,
            staging / MANIFEST_NAME,
            *(path for path in staging.rglob("*") if path.is_dir()),
            staging,
        ):
            flush(path)


def check_features(package: Package, wanted: Features, dtype: str | None) -> None:
    """Raise QsampleError if the package lacks `wanted` or has another dtype: an export fixes both. dtype: None for
    any."""
    present = package.interface.features
    for name, argument in (("sampler", "include_sampler"), ("filter_order", "filter_order")):
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
        way = (
            'compile it with provider="cuda", dtype="bfloat16"'
            if dtype == "bfloat16"
            else "export it again with that"
        )
        raise QsampleError(f"{package.path} holds {held}, not {dtype}; leave dtype out, or {way}")


def faster_way(package: Package) -> str | None:
    """How to make a package faster, in a sentence, if it is portable and of a size at which that matters."""
    size = sum(entry.bytes for entry in package.manifest.files.values())
    if package.manifest.compilation is not None or size < _SLOW_FROM:
        return None
    if package.manifest.packed_weights is not None:  # they are in few bits already
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
    """Raise PackageError if the file or folder at `path`, now or formerly `target`, must not be replaced."""
    check_replaceable(
        path,
        target,
        "package",
        lambda folder: (folder / MANIFEST_NAME).is_file(),
        foreign_files,
        overwrite,
    )


def foreign_files(folder: Path) -> Iterator[str]:
    """Files that the manifest in `folder`, of any version, does not list; without a readable manifest, files of other
    kinds than a package holds."""
    try:
        listed = read_json(folder / MANIFEST_NAME, LARGEST_MANIFEST)["files"].keys()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        listed = None
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in sorted(files + links):
            path = (Path(root) / name).relative_to(folder).as_posix()
            known = path in listed if listed is not None else name.endswith(_DAMAGED)
            if not known and path not in (MANIFEST_NAME, SIGNATURE_NAME) and name not in _CRUMBS:
                yield path


def check_file(folder: Path, name: str, entry: FileEntry) -> None:
    """Raise PackageError if a file is missing, not a plain file, outside the package or of another size."""
    path = folder / name
    try:
        if not path.is_file():  # a pipe or a device would block
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
    """Raise PackageError if an ONNX file refers to a file that is not listed, ValueError if it is not ONNX."""
    unlisted = sorted(referenced_files(folder / name) - set(listed))
    if unlisted:
        raise PackageError(
            f"{folder / name} refers to the file {unlisted[0]!r:.120}, which {MANIFEST_NAME} does not list; do not use "
            "this package"
        )


def sha256_of(path: Path) -> str:
    """In hexadecimal; PackageError if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PackageError(f"cannot read {path}: {error.strerror}") from error
