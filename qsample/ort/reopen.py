"""What a pickled model is: the path of its package, which is opened again, and what has to be found there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from qsample.errors import PackageError
from qsample.package import Package, read_package

Model = TypeVar("Model")


def fingerprint(package: Package) -> str:
    """sha256 of everything that a package says of itself, the hashes of its files included."""
    return hashlib.sha256(package.manifest.to_json().encode()).hexdigest()


def reopen(
    load: Callable[..., Model], path: Path, wanted: str, arguments: Mapping[str, Any], state: Mapping[str, Any]
) -> Model:
    """`load` the package at `path`, with the arguments that it was loaded with before, and set attributes.

    Raises PackageError unless it is there and its fingerprint is the wanted one.
    """
    try:
        package = read_package(path, verify=False)
    except PackageError as error:
        raise PackageError(
            f"a pickled model is opened again from its package, {path}, which cannot be read here: {error}"
        ) from error
    if fingerprint(package) != wanted:
        raise PackageError(
            f"{path} is another package than when this model was pickled; put that one back, or load this one and "
            "pickle it"
        )
    model = load(path, **arguments)
    for name, value in state.items():
        setattr(model, name, value)
    return model
