"""A LoRA adapter in a folder that peft wrote → its checked matrices, as a package's graph takes
them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Final

import numpy as np

from qsample.checks import as_path
from qsample.contract.arrays import Array, rounded
from qsample.contract.interface import AdapterTarget, Interface, kind_of
from qsample.errors import QsampleError, UnsupportedModelError, shown
from qsample.request.huggingface.lora import ADVICE, CONFIG, WEIGHTS, Change, floats, read_changes
from qsample.request.refusals import NO_ADAPTERS

# The bytes of a file for its header, and for matrices that the package refuses by name.
_HEADER_BYTES: Final = 1 << 26
# The file of an adapter whose rank exceeds the package's largest rank by at most this factor is read,
# and the adapter is refused by its rank. A larger file is refused by its size.
_MAX_RANK_FACTOR: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter.

    Attributes:
        name: the name by which requests call it.
        path: the folder from which it was loaded.
        sha256: the hash of its matrices. It is equal for adapters that compute the same, under any
            names.
        matrices: path of a layer → A [r, in] and B [r, out], multiplied by the scale, in the
            package's dtype; bfloat16 as uint16 of its bits.
    """

    name: str
    path: Path
    sha256: str
    matrices: Mapping[str, tuple[Array, Array]]

    @property
    def ranks(self) -> dict[str, int]:
        """The largest rank for each kind of layers that the adapter changes
        (`AdapterTarget.kind`)."""
        ranks: dict[str, int] = {}
        for path, (a, _) in self.matrices.items():
            kind = kind_of(path)
            ranks[kind] = max(ranks.get(kind, 0), len(a))
        return ranks

    @property
    def nbytes(self) -> int:
        """The bytes of the matrices."""
        return sum(a.nbytes + b.nbytes for a, b in self.matrices.values())


def read_adapter(name: str, path: str | Path, interface: Interface) -> Adapter:
    """The adapter in the folder `path` for a package, under `name`. Raises the errors of
    `CausalLM.load_adapter`."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"the adapter's name is {shown(name)}; give a text that is not empty")
    if not isinstance(path, str | PathLike):
        raise ValueError(
            f"the path of adapter {shown(name)} is {shown(path)}; give the path of its folder"
        )
    folder = as_path("path", path)
    if not interface.adapters:
        raise ValueError(NO_ADAPTERS)
    for file in (CONFIG, WEIGHTS):
        if not os.path.isfile(folder / file):  # This is False for names that no file can have, too.
            raise QsampleError(
                f"no LoRA adapter in {folder}: it has no {file}; give a folder that has {CONFIG} and {WEIGHTS}"
            )
    targets = {target.path: target for target in interface.adapters}
    features = sum(target.in_features + target.out_features for target in interface.adapters)
    matrix_bytes = 4 * interface.features.max_lora_rank * features  # float32
    max_bytes = _HEADER_BYTES + _MAX_RANK_FACTOR * matrix_bytes
    matrices = {}
    for change in read_changes(folder / CONFIG, folder / WEIGHTS, max_bytes):
        target = targets.get(change.path)
        if target is None or change.base is not None:
            raise UnsupportedModelError(
                f"the adapter changes {change.path:.200}, and this package takes adapters of "
                f"{', '.join(interface.adapter_kinds)} in its {len(targets)} linear layers; {ADVICE}"
            )
        matrices[target.path] = _fitted(target, change, interface, folder)
    return Adapter(name, folder, _sha256(matrices), matrices)


def _fitted(
    target: AdapterTarget, change: Change, interface: Interface, folder: Path
) -> tuple[Array, Array]:
    """A [r, in] and B [r, out], multiplied by the scale, as the graph takes them."""
    a = change.a
    b = change.b
    path = folder / WEIGHTS
    assert a is not None
    assert b is not None
    rank = len(a)
    most = interface.features.max_lora_rank
    if rank > most:
        raise QsampleError(
            f"{folder / CONFIG}: the rank in {target.path} is {rank}, and this package was exported with "
            f"max_lora_rank={most}; export the model again with max_lora_rank={rank} (--max-lora-rank)"
        )
    wanted = [rank, target.in_features], [target.out_features, rank]
    if (list(a.shape), list(b.shape)) != wanted:
        raise QsampleError(
            f"{path}: the matrices of {target.path} are {list(a.shape)} and {list(b.shape)}, and must be {wanted[0]} "
            f"and {wanted[1]}; give an adapter of this very model, with its {CONFIG}"
        )
    with np.errstate(over="ignore", invalid="ignore"):  # `_stored` refuses infinite numbers.
        scaled_b = np.float32(change.scale) * floats(b).T
    return (
        _stored(floats(a), interface.dtype, target, path),
        _stored(scaled_b, interface.dtype, target, path),
    )


def _stored(matrix: Array, dtype: str, target: AdapterTarget, path: Path) -> Array:
    """A float32 matrix in the package's dtype. Raises QsampleError for numbers that are not finite
    there."""
    representable = matrix
    if dtype == "float16":
        with np.errstate(over="ignore"):
            representable = matrix.astype(np.float16).astype(np.float32)
    if not np.isfinite(representable).all():
        limits = f"within {dtype}" if np.isfinite(matrix).all() else "finite"
        raise QsampleError(
            f"{path}: a matrix of {target.path}, with its scale, has numbers that are not {limits}; give "
            "an adapter whose training did not fail"
        )
    return rounded(matrix, dtype)


def _sha256(matrices: Mapping[str, tuple[Array, Array]]) -> str:
    digest = hashlib.sha256()
    for path, pair in sorted(matrices.items()):
        digest.update(f"{path} {[(array.dtype.name, array.shape) for array in pair]}\n".encode())
        for array in pair:
            digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
