"""A prefix on disk: the keys, values and recurrent states after the first tokens of a prompt, in a safetensors file.

The file has a tensor for each cache state of `Interface.cache_states`, without the batch axis: keys and values
[H, n, D] of the tokens from `start` on, other states after the last token. `tokens` [start + n] int64 has all tokens
from the first, as identities (`ImagePrompt`): token ids, and in files of the second format those of image tokens. Its
metadata name the package, the kernels, the sizes of the pieces in which the tokens were read, and the adapter, if there
was one: only if these are the same, a prefix gives the tokens that reading the prompt gives.

The format is https://huggingface.co/docs/safetensors; a file is read into memory and verified there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort

from qsample.contract.arrays import DTYPES, Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import BATCH, CAPACITY
from qsample.disk.scratch import ScratchFolder
from qsample.disk.space import check_free, full_disk_named
from qsample.disk.tensor_file import TensorFile, memory_of, write_tensors
from qsample.errors import PackageError
from qsample.ort.session import Sessions
from qsample.package.package import Package
from qsample.runtime.decode.prefixes import Pieces

TOKENS: Final = "tokens"
_FORMATS: Final = ("qsample.prefix.1", "qsample.prefix.2")  # of text, and with images
_MOST_TOKENS: Final = 1 << 24
_SHA256: Final = "sha256"
_ADAPTER: Final = "adapter"
# Metadata key → its meaning in an error message.
_SIGNATURE: Final = {
    "package": "another package",
    "execution_provider": "another execution provider",
    "onnxruntime": "another version of ONNX Runtime",
    "pieces": "other pieces of a prompt",
    "kernels": "a processor that rounds otherwise",
}
_AGAIN: Final = "save it again with `qsample prefix`"


def signature_of(package: Package, sessions: Sessions) -> dict[str, str]:
    """The metadata that a prefix file must have in common with a loaded package."""
    files = sorted((name, entry.sha256) for name, entry in package.manifest.files.items())
    pieces = Pieces.of(sessions)
    return {
        "package": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        "execution_provider": sessions.decoder.get_providers()[0],
        "onnxruntime": ort.__version__,
        "pieces": f"{pieces.size} {pieces.late}",
        # Another processor's kernels would have computed other last bits.
        "kernels": "" if sessions.rounding is None else sessions.rounding.digest,
    }


@dataclass(frozen=True, slots=True, eq=False)
class PrefixFile:
    """A prefix file, in memory: whatever becomes of the file, the numbers stay.

    tokens: [end] int64 identities, all from the first. start: the first token whose keys and values the file has; 0 if
    it is whole. states: by name: keys and values [H, end - start, D], recurrent states after `end` tokens. sha256: of
    the numbers, as the header says. adapter: the sha256 of their adapter; "" for none.
    """

    path: Path
    tokens: Array
    start: int
    states: Mapping[str, Array]
    sha256: str
    adapter: str = ""

    @classmethod
    def open(
        cls,
        path: Path,
        signature: Mapping[str, str],
        interface: Interface,
        *,
        with_states: bool = True,
    ) -> PrefixFile:
        """Read a file for the package with this signature and interface, and verify it; without its states, only the
        header is looked at. Raises PackageError if the file is missing, damaged, or of another package."""
        try:
            with TensorFile(path) as file:
                found = cls._of(path, file, signature, interface)
                if not with_states:
                    return found
                states = {name: file.read(name) for name in file.tensors if name != TOKENS}
        except (OSError, MemoryError) as error:
            raise PackageError(
                f"cannot read the prefix {path}: {getattr(error, 'strerror', '') or error}"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PackageError(
                f"{path} is damaged, or not a prefix ({error!s:.200}); {_AGAIN}"
            ) from error
        if _sha256([found.tokens, *states.values()]) != found.sha256:
            raise PackageError(f"{path} is damaged: its sha256 is not that of its header; {_AGAIN}")
        return replace(found, states=states)

    @classmethod
    def _of(
        cls, path: Path, file: TensorFile, signature: Mapping[str, str], interface: Interface
    ) -> PrefixFile:
        """A file without its states."""
        metadata, (dtype, shape) = file.metadata, file.tensors[TOKENS]
        start, sha256, adapter = (
            int(metadata["start"]),
            str(metadata[_SHA256]),
            str(metadata.get(_ADAPTER, "")),
        )
        if metadata["format"] not in _FORMATS:
            raise ValueError(f"its format is {metadata['format']!r:.40}")
        if len(shape) != 1 or dtype != "int64" or not 0 <= start < shape[0] <= _MOST_TOKENS:
            raise ValueError("its tokens are not numbers from its start on")
        for name, what in _SIGNATURE.items():
            if metadata.get(name) != signature[name]:
                raise PackageError(
                    f"{path} was saved with {what} ({name} {metadata.get(name)!s:.60}, here {signature[name]:.60}), so "
                    f"it may give other tokens; {_AGAIN}"
                )
        expected = {
            spec.name: (
                DTYPES[spec.dtype].numpy,
                tuple(spec.shape({CAPACITY: shape[0] - start, BATCH: 1}))[1:],
            )
            for spec in interface.cache_states
        }
        if {name: entry for name, entry in file.tensors.items() if name != TOKENS} != expected:
            raise PackageError(
                f"{path} is damaged: its tensors are not the states of this package; {_AGAIN}"
            )
        return cls(path, file.read(TOKENS), start, {}, sha256, adapter)


def write_prefix(
    path: Path,
    signature: Mapping[str, str],
    tokens: Array,
    states: Mapping[str, Array],
    start: int = 0,
    adapter: str = "",
) -> None:
    """Write a prefix file, all of it at once; see `PrefixFile`. It replaces a file of that name, in a folder that
    exists. Raises PackageError if the disk is full, or the folder cannot be written to."""
    arrays = {TOKENS: np.ascontiguousarray(tokens, np.int64)}
    arrays |= {name: np.ascontiguousarray(array) for name, array in states.items()}
    name = _FORMATS[1 if tokens.min() < 0 else 0]
    metadata = {
        "format": name,
        **signature,
        "start": str(start),
        _SHA256: _sha256(list(arrays.values())),
    }
    if adapter:
        metadata[_ADAPTER] = adapter
    size = sum(array.nbytes for array in arrays.values())
    try:
        # The folder is not made if it has gone: its owner chose who may read it.
        with (
            ScratchFolder(path.parent) as scratch,
            full_disk_named(path.parent, size, "the prefix"),
        ):
            check_free(path.parent, size, "the prefix")
            made = scratch.new / path.name
            with open(
                os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:  # it has private texts
                write_tensors(file, metadata, arrays)
                file.flush()
                os.fsync(file.fileno())
            made.replace(path)
    except OSError as error:
        raise PackageError(
            f"cannot write {path}: {error.strerror or error}; choose another path"
        ) from error


def _sha256(arrays: list[Array]) -> str:
    """The sha256 of the sha256 of each array in order; hashlib lets other threads run meanwhile."""
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 8)) as threads:
        digests = threads.map(lambda array: hashlib.sha256(memory_of(array)).digest(), arrays)
        return hashlib.sha256(b"".join(digests)).hexdigest()
