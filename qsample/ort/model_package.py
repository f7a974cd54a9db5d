"""ONNX Runtime's model packages: the `manifest.json` of a package, and bundles of the variants of a model.

ONNX Runtime 1.32 opens both with `onnxruntime.ModelPackage` (microsoft/onnxruntime#27786). A bundle is a folder with a
`manifest.json` and a folder for each target's qsample package; equal files are one file on the disk. Each package stays
whole, and its hashes are verified when it is loaded: ONNX Runtime verifies nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from qsample.disk.replace import check_replaceable, put_in_place
from qsample.disk.scratch import scratch_for
from qsample.disk.untrusted import problem_of_name, read_json
from qsample.errors import PackageError, shown
from qsample.package.manifest import MANIFEST_NAME, MODEL_PACKAGE_NAME, model_package
from qsample.package.package import Package, foreign_files, read_package
from qsample.package.signature import SIGNATURE_NAME

PORTABLE: Final = "portable"
_LARGEST: Final = 1 << 20
# The first that is available here is loaded.


def bundle(
    out: str | Path, packages: Sequence[str | Path], *, overwrite: bool = False
) -> list[str]:
    """Put packages of a model into a bundle at the folder `out`, and return the names of the variants.

    `packages` are folders of packages with the same tokenizer and vocabulary, each for another target; a portable
    package is the variant "portable". `overwrite` replaces a bundle that is already there. Raises PackageError if a
    package is damaged, two are for one target, they are not of one model, or `out` cannot be written.
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
    target = Path(os.path.realpath(out))
    _check_target(target, target, overwrite)
    size = sum(
        entry.bytes for package in variants.values() for entry in package.manifest.files.values()
    )
    with scratch_for(target, size, "the bundle") as scratch:
        first: dict[str, Path] = {}  # sha256 → the file
        for name, package in variants.items():
            folder = scratch.new / name
            signature = [SIGNATURE_NAME] if (package.path / SIGNATURE_NAME).is_file() else []
            for file in (MANIFEST_NAME, *signature, *package.manifest.files):
                made = folder / file
                made.parent.mkdir(parents=True, exist_ok=True)
                entry = package.manifest.files.get(file)
                if entry is not None and entry.sha256 in first:
                    _link(first[entry.sha256], made)
                else:
                    shutil.copyfile(package.path / file, made)
                if entry is not None:
                    first.setdefault(entry.sha256, made)
            read_package(folder)  # what was copied is what was read
        text = (
            json.dumps(
                model_package({name: package.manifest for name, package in variants.items()}),
                indent=2,
            )
            + "\n"
        )
        (scratch.new / MODEL_PACKAGE_NAME).write_text(text, encoding="utf-8")
        put_in_place(scratch, target, lambda path: _check_target(path, target, overwrite))
    return list(variants)


def variant_name(package: Package) -> str:
    """The name of a package in a bundle: its provider, or "portable"."""
    compilation = package.manifest.compilation
    return PORTABLE if compilation is None else compilation.provider


def is_bundle(path: str | Path) -> bool:
    """Whether a folder is a bundle."""
    return bool(_variants(Path(path)))


def variants_in(path: str | Path) -> dict[str, Path]:
    """The folder of each variant of a bundle, by name; {} if `path` is no bundle."""
    return {name: Path(path) / place for name, place in _variants(Path(path)).items()}


def package_in(path: str | Path, provider: str | Sequence[str] | None = None) -> str | Path:
    """The folder of the package to load: a bundle's variant, or `path` itself if it is no bundle. A short name as
    `provider` chooses its variant, or else the portable one, as a list of ONNX Runtime's names does. By default, the
    variant of the first provider that is available here counts: CUDA, WebGPU, OpenVINO, the CPU; or else the portable
    one, or any. Raises PackageError if a bundle has no such variant."""
    folder = Path(path)
    variants = _variants(folder)
    if not variants:
        return path
    if isinstance(provider, str):
        wanted = [provider, PORTABLE]
    elif provider is not None:
        wanted = [PORTABLE]  # the names of ONNX Runtime's providers are for portable packages
    else:
        from qsample.ort.providers import (
            PROVIDERS,
            available_providers,
            short_name,
        )  # which load ONNX Runtime

        here = available_providers()
        wanted = [short_name(provider) for provider in PROVIDERS if provider in here] + [
            PORTABLE,
            *variants,
        ]
    for name in wanted:
        if name in variants:
            return folder / variants[name]
    raise PackageError(
        f"{folder} has no variant for {shown(provider)}; it has {', '.join(variants)}. Compile one, and bundle it again"
    )


def _variants(folder: Path) -> dict[str, str]:
    """Variant → its folder's name; {} if `folder` is not a bundle."""
    path = folder / MODEL_PACKAGE_NAME
    if not os.path.isfile(path) or os.path.isfile(folder / MANIFEST_NAME):
        return {}
    try:
        declared = read_json(path, _LARGEST)["components"]["decoder"]["variants"]
        found = {name: variant["variant_directory"] for name, variant in declared.items()}
        ours = {
            name: place
            for name, place in found.items()
            if "qsample" in declared[name]["executor_info"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    for place in ours.values():
        if not isinstance(place, str) or "/" in place or problem_of_name(place):
            raise PackageError(
                f"{path} names the folder {shown(place)}; a variant is a folder of the bundle itself"
            )
    return ours


def _check_same_model(variants: dict[str, Package]) -> None:
    (first, *others) = variants.values()
    for other in others:
        mine, its = first.manifest, other.manifest
        if (mine.interface.vocab_size, mine.token_ids) != (
            its.interface.vocab_size,
            its.token_ids,
        ) or (mine.files.get("tokenizer.json") != its.files.get("tokenizer.json")):
            raise PackageError(
                f"{first.path} and {other.path} have other vocabularies, tokenizers or special tokens; a bundle holds "
                "variants of one model"
            )


def _check_target(path: Path, target: Path, overwrite: bool) -> None:
    """Raise PackageError if the file or folder at `path`, now or formerly `target`, must not be replaced."""
    check_replaceable(path, target, "bundle", is_bundle, _foreign_files, overwrite)


def _foreign_files(folder: Path) -> Iterator[str]:
    """Files that belong to no package of a bundle."""
    variants = _variants(folder).values()
    yield from sorted({entry.name for entry in folder.iterdir()} - {MODEL_PACKAGE_NAME, *variants})
    for name in variants:
        yield from (f"{name}/{file}" for file in foreign_files(folder / name))


def _link(existing: Path, path: Path) -> None:
    """Give a file a second name; a copy, if the file system has no such links."""
    try:
        os.link(existing, path)
    except OSError:
        shutil.copyfile(existing, path)
