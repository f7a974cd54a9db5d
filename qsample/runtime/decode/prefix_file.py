"""A prefix on disk: the keys, values and recurrent states after the first tokens of a prompt, in a
safetensors file (https://huggingface.co/docs/safetensors).

The file has a tensor for each cache state of `Interface.cache_states`, without the batch axis: keys
and values [H, n, D] of the tokens from `start` on, other states after the last token. `tokens`
[start + n] int64 has all tokens from the first, as identities (`ImagePrompt`): token ids, and in files
of the second format also the identities of image tokens. The metadata name the package, the kernels,
the sizes of the pieces in which the tokens were read, and the adapter, if there was one. Only if these
are the same, a prefix gives the tokens that reading the prompt gives.

A file is read into memory and verified there.
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
from qsample.errors import PackageError
from qsample.ort.session import Sessions
from qsample.package.disk.scratch import ScratchFolder
from qsample.package.disk.space import check_free, full_disk_named
from qsample.package.disk.tensor_file import TensorFile, memory_of, write_tensors
from qsample.package.package import Package
from qsample.runtime.decode.prefixes import Pieces

TOKENS: Final = "tokens"
_TEXT_FORMAT: Final = "qsample.prefix.1"
_IMAGE_FORMAT: Final = "qsample.prefix.2"
_MAX_TOKENS: Final = 1 << 24
_SHA256_KEY: Final = "sha256"
_ADAPTER_KEY: Final = "adapter"
# The keys of the signature, each with the cause of a difference for an error message.
_SIGNATURE_KEYS: Final = {
    "package": "another package",
    "execution_provider": "another execution provider",
    "onnxruntime": "another version of ONNX Runtime",
    "pieces": "other pieces of a prompt",
    "kernels": "a processor that rounds otherwise",
}
_REMEDY: Final = "save it again with `qsample prefix`"
_MAX_HASH_THREADS: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPart:
    """The states of the tokens [start, stop) of a prompt.

    Attributes:
        start: the first token.
        stop: the token after the last.
        states: keys and values by name, [H, stop - start or more, D]; recurrent states, after the last
            token.
    """

    start: int
    stop: int
    states: Mapping[str, Array]


def signature_of(package: Package, sessions: Sessions) -> dict[str, str]:
    """The metadata that a prefix file must have in common with a loaded package."""
    files = sorted((name, entry.sha256) for name, entry in package.manifest.files.items())
    pieces = Pieces.of(sessions)
    return {
        "package": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        "execution_provider": sessions.decoder.get_providers()[0],
        "onnxruntime": ort.__version__,
        "pieces": f"{pieces.size} {pieces.late}",
        # The kernels of another processor compute other last bits.
        "kernels": "" if sessions.rounding is None else sessions.rounding.digest,
    }


@dataclass(frozen=True, slots=True, eq=False)
class PrefixFile:
    """A prefix file in memory. The numbers stay, whatever becomes of the file.

    Attributes:
        path: the path of the file.
        tokens: [end] int64, the identities of all tokens from the first.
        start: the first token whose keys and values the file has; 0 for a file with all of them.
        states: the states by name: keys and values [H, end - start, D], and recurrent states after
            `end` tokens; empty if only the header was read.
        sha256: the sha256 of the numbers, as the header says.
        adapter: the sha256 of the adapter; "" for none.
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
        """Read a file and verify it.

        Args:
            path: the path of the file.
            signature: the signature of the package, see `signature_of`.
            interface: the interface of the package.
            with_states: whether the states are read; otherwise only the header is read and verified.

        Raises:
            PackageError: If the file is missing, damaged, or of another package.
        """
        try:
            with TensorFile(path) as file:
                header = cls._of(path, file, signature, interface)
                if not with_states:
                    return header
                states = {name: file.read(name) for name in file.tensors if name != TOKENS}
        except (OSError, MemoryError) as error:
            raise PackageError(
                f"cannot read the prefix {path}: {getattr(error, 'strerror', '') or error}"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PackageError(
                f"{path} is damaged, or not a prefix ({error!s:.200}); {_REMEDY}"
            ) from error
        if _sha256([header.tokens, *states.values()]) != header.sha256:
            raise PackageError(
                f"{path} is damaged: its sha256 is not that of its header; {_REMEDY}"
            )
        return replace(header, states=states)

    @classmethod
    def _of(
        cls, path: Path, file: TensorFile, signature: Mapping[str, str], interface: Interface
    ) -> PrefixFile:
        """A file without its states. Raises PackageError or ValueError."""
        metadata = file.metadata
        dtype, shape = file.tensors[TOKENS]
        start = int(metadata["start"])
        sha256 = str(metadata[_SHA256_KEY])
        adapter = str(metadata.get(_ADAPTER_KEY, ""))
        if metadata["format"] not in (_TEXT_FORMAT, _IMAGE_FORMAT):
            raise ValueError(f"its format is {metadata['format']!r:.40}")
        if len(shape) != 1 or dtype != "int64" or not 0 <= start < shape[0] <= _MAX_TOKENS:
            raise ValueError("its tokens are not numbers from its start on")
        for key, cause in _SIGNATURE_KEYS.items():
            if metadata.get(key) != signature[key]:
                raise PackageError(
                    f"{path} was saved with {cause} ({key} {metadata.get(key)!s:.60}, here "
                    f"{signature[key]:.60}), so it may give other tokens; {_REMEDY}"
                )
        sizes = {CAPACITY: shape[0] - start, BATCH: 1}
        expected = {
            spec.name: (DTYPES[spec.dtype].numpy, tuple(spec.shape(sizes))[1:])
            for spec in interface.cache_states
        }
        states = {name: entry for name, entry in file.tensors.items() if name != TOKENS}
        if states != expected:
            raise PackageError(
                f"{path} is damaged: its tensors are not the states of this package; {_REMEDY}"
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
    """Write a whole prefix file, in place of a file of that name.

    Args:
        path: the path of the file, in a folder that exists.
        signature: the signature of the package, see `signature_of`.
        tokens: see `PrefixFile`, like the other arguments.

    Raises:
        PackageError: If the disk is full, or the folder cannot be written to.
    """
    arrays = {TOKENS: np.ascontiguousarray(tokens, np.int64)}
    for name, array in states.items():
        arrays[name] = np.ascontiguousarray(array)
    has_images = tokens.min() < 0
    metadata = {
        "format": _IMAGE_FORMAT if has_images else _TEXT_FORMAT,
        **signature,
        "start": str(start),
        _SHA256_KEY: _sha256(list(arrays.values())),
    }
    if adapter:
        metadata[_ADAPTER_KEY] = adapter
    size = sum(array.nbytes for array in arrays.values())
    try:
        # A folder that is gone is not made again: its owner chose who may read it.
        with (
            ScratchFolder(path.parent) as scratch,
            full_disk_named(path.parent, size, "the prefix"),
        ):
            check_free(path.parent, size, "the prefix")
            written = scratch.new / path.name
            # Only the owner may read it: it has private texts.
            descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                write_tensors(file, metadata, arrays)
                file.flush()
                os.fsync(file.fileno())
            written.replace(path)
    except OSError as error:
        raise PackageError(
            f"cannot write {path}: {error if error.strerror is None else error.strerror}; choose another path"
        ) from error


def _sha256(arrays: list[Array]) -> str:
    """The sha256 of the sha256 of each array in order. hashlib lets other threads run meanwhile."""
    workers = min(max(os.cpu_count() or 0, 1), _MAX_HASH_THREADS)
    with ThreadPoolExecutor(max_workers=workers) as threads:
        digests = threads.map(lambda array: hashlib.sha256(memory_of(array)).digest(), arrays)
        return hashlib.sha256(b"".join(digests)).hexdigest()
