"""ONNX Runtime's model packages: the `manifest.json` of a package, and bundles of the variants of a
model.

ONNX Runtime 1.32 opens both with `onnxruntime.ModelPackage` (microsoft/onnxruntime#27786). A bundle
is a folder with a `manifest.json` and a folder for each target's qsample package; equal files are
one file on the disk. Each package stays whole, and its hashes are verified when it is loaded: ONNX
Runtime verifies nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from qsample.checks import as_path
from qsample.errors import PackageError, shown
from qsample.package.disk.replace import check_replaceable, put_in_place
from qsample.package.disk.scratch import scratch_for
from qsample.package.disk.untrusted import leads_out, problem_of_name, read_json
from qsample.package.manifest import MANIFEST_NAME, MODEL_PACKAGE_NAME, model_package
from qsample.package.package import Package, foreign_files, read_package, sha256_of
from qsample.package.signature import SIGNATURE_NAME, files_to_sign, signed_hashes

PORTABLE: Final = "portable"
_MAX_BUNDLE_MANIFEST_BYTES: Final = 1 << 20


def bundle(
    out: str | Path, packages: Sequence[str | Path], *, overwrite: bool = False
) -> list[str]:
    """Put packages of a model into a bundle.

    Args:
        out: The folder of the bundle.
        packages: Folders of packages with the same tokenizer and vocabulary, each for another
            target. A portable package is the variant "portable".
        overwrite: Whether a bundle at `out` is replaced.

    Returns:
        The names of the variants.

    Raises:
        PackageError: A package is damaged, two packages are for the same target, they are not of
            the same model, or `out` cannot be written.
    """
    opened = {str(path): read_package(path) for path in packages}
    if not opened:
        raise PackageError("no package was given; give at least one")
    variants: dict[str, Package] = {}
    for path, package in opened.items():
        name = variant_name(package)
        if name in variants:
            raise PackageError(
                f"{variants[name].path} and {path} are both {name}; give one package for each target"
            )
        variants[name] = package
    _check_same_model(variants)
    target = Path(os.path.realpath(as_path("out", out)))
    _check_target(target, target, overwrite)
    size = sum(
        entry.bytes for package in variants.values() for entry in package.manifest.files.values()
    )
    with scratch_for(target, size, "the bundle") as scratch:
        copies: dict[str, Path] = {}
        for name, package in variants.items():
            _copy_package(package, scratch.new / name, copies)
        manifests = {name: package.manifest for name, package in variants.items()}
        text = json.dumps(model_package(manifests), indent=2) + "\n"
        (scratch.new / MODEL_PACKAGE_NAME).write_text(text, encoding="utf-8")
        put_in_place(scratch, target, lambda path: _check_target(path, target, overwrite))
    return list(variants)


def _copy_package(package: Package, folder: Path, copies: dict[str, Path]) -> None:
    """Copy a package to a folder of the bundle, and check the copy. copies: The files of the bundle
    so far by sha256; a file that is already there gets a second name."""
    signed = signed_hashes(package.path)
    # A signature may cover more than the manifest lists, such as a README.md.
    files = {MANIFEST_NAME, *package.manifest.files}
    if signed:
        files |= {SIGNATURE_NAME, *files_to_sign(package.path)}
    for file in sorted(files):
        copy = folder / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        entry = package.manifest.files.get(file)
        if entry is not None and entry.sha256 in copies:
            _link(copies[entry.sha256], copy)
            continue
        if leads_out(package.path / file, [package.path]):
            raise PackageError(f"{package.path / file} is a link that leads out of the package")
        shutil.copyfile(package.path / file, copy)
        if entry is not None:
            copies[entry.sha256] = copy
    read_package(folder)
    _check_signed(package, folder, signed)


def _check_signed(package: Package, copy: Path, signed: Mapping[str, str]) -> None:
    """Raise PackageError if the copy of a signed package is not what was signed."""
    if not signed:
        return
    copied = {file: sha256_of(copy / file) for file in files_to_sign(copy)}
    changes = signed.items() ^ copied.items()
    if changes:
        raise PackageError(
            f"{package.path} is not what was signed: {min(changes)[0]!r:.120} was added, removed or "
            "altered since; sign it again, or remove its model.sig to bundle it unsigned"
        )


def variant_name(package: Package) -> str:
    """The name of a package in a bundle: its provider, or "portable"."""
    compilation = package.manifest.compilation
    return PORTABLE if compilation is None else compilation.provider


def is_bundle(path: str | Path) -> bool:
    """Whether a folder is a bundle."""
    return bool(_variants(Path(path)))


def variants_in(path: str | Path) -> dict[str, Path]:
    """The folder of each variant of a bundle by name; {} if `path` is not a bundle."""
    return {name: Path(path) / place for name, place in _variants(Path(path)).items()}


def package_in(path: str | Path, provider: str | Sequence[str] | None = None) -> str | Path:
    """The folder of the package to load.

    Args:
        path: The folder of a bundle, or of anything else, which is returned unchanged.
        provider: A short name chooses its variant, or otherwise the portable variant. A list of
            ONNX Runtime's names chooses the portable variant. By default, the variant of the first
            provider that is available here is chosen (CUDA, WebGPU, OpenVINO, the CPU), otherwise
            the portable variant, otherwise any.

    Raises:
        PackageError: A bundle has no such variant.
    """
    folder = as_path("path", path)
    variants = _variants(folder)
    if not variants:
        return path
    if provider is None:
        wanted = [*_available_targets(), PORTABLE, *variants]
    elif isinstance(provider, str):
        wanted = [provider, PORTABLE]
    else:
        # ONNX Runtime's names are for portable packages.
        wanted = [PORTABLE]
    for name in wanted:
        if name in variants:
            return folder / variants[name]
    raise PackageError(
        f"{folder} has no variant for {shown(provider)}; it has {', '.join(variants)}. Compile one, and bundle it again"
    )


def _available_targets() -> list[str]:
    """The short names of the providers that are available here, the best first."""
    # This import loads ONNX Runtime.
    from qsample.ort.providers import PROVIDERS, available_providers, short_name

    here = available_providers()
    return [short_name(provider) for provider in PROVIDERS if provider in here]


def _variants(folder: Path) -> dict[str, str]:
    """The name of each variant's folder by the variant's name; {} if `folder` is not a bundle."""
    path = folder / MODEL_PACKAGE_NAME
    if not os.path.isfile(path) or os.path.isfile(folder / MANIFEST_NAME):
        return {}
    try:
        document = read_json(path, _MAX_BUNDLE_MANIFEST_BYTES)
        declared = document["components"]["decoder"]["variants"]
        folders = {
            name: variant["variant_directory"]
            for name, variant in declared.items()
            if "qsample" in variant["executor_info"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    for place in folders.values():
        if not isinstance(place, str) or "/" in place or problem_of_name(place) is not None:
            raise PackageError(
                f"{path} names the folder {shown(place)}; a variant is a folder of the bundle itself"
            )
    return folders


def _check_same_model(variants: dict[str, Package]) -> None:
    """Raise PackageError unless all packages have the same tokens."""
    first, *others = variants.values()
    for other in others:
        if _tokens(first) != _tokens(other):
            raise PackageError(
                f"{first.path} and {other.path} have other vocabularies, tokenizers or special tokens; a bundle holds "
                "variants of one model"
            )


def _tokens(package: Package) -> tuple[object, ...]:
    """Everything that variants of a model have in common about tokens."""
    manifest = package.manifest
    tokenizer = manifest.files.get("tokenizer.json")
    return manifest.interface.vocab_size, manifest.token_ids, tokenizer


def _check_target(path: Path, target: Path, overwrite: bool) -> None:
    """Raise PackageError if the file or folder at `path`, which is or was at `target`, must not be
    replaced."""
    check_replaceable(path, target, "bundle", is_bundle, _foreign_files, overwrite)


def _foreign_files(folder: Path) -> Iterator[str]:
    """Files that belong to no package of a bundle."""
    variants = _variants(folder).values()
    yield from sorted({entry.name for entry in folder.iterdir()} - {MODEL_PACKAGE_NAME, *variants})
    for name in variants:
        copied = signed_hashes(folder / name)
        for file in foreign_files(folder / name):
            if file not in copied or copied[file] != sha256_of(folder / name / file):
                yield f"{name}/{file}"


def _link(existing: Path, path: Path) -> None:
    """Give a file a second name. Copy it if the file system has no such links."""
    try:
        os.link(existing, path)
    except OSError:
        shutil.copyfile(existing, path)
