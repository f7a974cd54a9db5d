"""The header of a GGUF file: its metadata, and where its tensors lie
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

The file is a stranger's: each length, count and offset is compared with its size before anything is made of it. The
tensors stay in the file, mapped. Needs NumPy only, so that a file is refused before the libraries of models are loaded.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from qsample.checkpoints.source import MAGIC, check_whole
from qsample.checks import is_integer
from qsample.contract.arrays import Array
from qsample.disk.untrusted import open_plain
from qsample.errors import QsampleError, UnsupportedModelError, shown

_LARGEST_HEADER: Final = (
    100 << 20
)  # bytes, as of safetensors; vocabularies of 262,144 tokens take a tenth
_MOST_VALUES: Final = 1 << 22  # in all arrays; the same vocabularies have a third
_MOST_NAMES: Final = 1 << 16  # of metadata, and of tensors
_LARGEST_RANK: Final = 4
_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<B",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_OTHER_KINDS: Final = {  # general.architecture or general.type
    "clip": "a projector of images or audio; give the file of the language model, beside it",
    "mmproj": "a projector of images or audio; give the file of the language model, beside it",
    "adapter": "a LoRA adapter; give the model's file, and merge an adapter in PEFT's format (adapter=)",
    "controlvector": "a control vector; give a model's file",
    "imatrix": "an importance matrix; give a model's file",
}


class Kind(NamedTuple):
    """A type of tensors. size, length: a block has `size` weights in `length` bytes."""

    name: str
    size: int
    length: int


KINDS: Final = {  # by ggml's numbers (ggml_type in ggml.h)
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    20: Kind("IQ4_NL", 32, 18),
    23: Kind("IQ4_XS", 256, 136),
    30: Kind("BF16", 1, 2),
    35: Kind("TQ2_0", 256, 66),
    39: Kind("MXFP4", 32, 17),
    40: Kind("NVFP4", 64, 36),
}
_NOT_READ: Final = dict(
    zip(
        (9, 15, 16, 17, 18, 19, 21, 22, 24, 25, 26, 27, 28, 29, 34, 41),
        "Q8_1 Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ3_S IQ2_S I8 I16 I32 I64 F64 IQ1_M TQ1_0 Q1_0".split(),  # noqa: SIM905
        strict=True,
    )
)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file. type: a name of `KINDS`. shape: as torch has it. offset, length: bytes in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file by its header.

    Attributes:
        path: without links.
        metadata: numbers, bools, strings and lists of these, by key. A float32 is the shortest decimal that means it.
        tensors: by name, in the order of the header.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name, such as "qwen3"."""
        return str(self.metadata["general.architecture"])

    def value(self, name: str, default: Any = None) -> Any:
        """The metadata of the architecture, such as "block_count"."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def raw(self, tensor: GgufTensor) -> Array:
        """[rows, bytes of a row] uint8, mapped: the last axis of `tensor` is a row."""
        rows = math.prod(tensor.shape[:-1])
        return np.memmap(
            self.path, np.uint8, "c", tensor.offset, (rows, tensor.length // rows)
        ).view(np.ndarray)


def read_gguf(path: Path) -> GgufFile:
    """Read a header. Raises QsampleError if it is damaged, UnsupportedModelError for a file that holds no whole
    language model, or a type of tensors that is not read."""
    check_whole(str(path))
    real = path.resolve()  # ONNX Runtime opens no links, and the hub's cache consists of links
    try:
        with open_plain(real) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return GgufFile(real, *_Header(data).read(path))
    except (ValueError, OSError) as error:
        raise QsampleError(
            f"{path} is no GGUF file that can be read: {error}; download it again"
        ) from error


class _Header:
    """Reads `data`, a whole file, from its start; raises ValueError where they do not fit."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0
        self.end = min(len(data), _LARGEST_HEADER)
        self.left = _MOST_VALUES

    def read(self, path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        magic, version = self.numbers("<4sI")
        if magic != MAGIC:
            raise ValueError(f"it begins with {magic!r}, not with {MAGIC!r}")
        if version not in (2, 3):
            big = int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3)
            problem = "is big-endian, for other processors" if big else f"is of version {version}"
            raise UnsupportedModelError(
                f"{path} {problem}; little-endian files of versions 2 and 3 are read: convert the model again, with "
                "llama.cpp's convert_hf_to_gguf.py of today"
            )
        tensors, entries = self.numbers("<QQ")
        for count, what in ((tensors, "tensors"), (entries, "keys of metadata")):
            if count > _MOST_NAMES:
                raise ValueError(f"it says that it has {count} {what}; {_MOST_NAMES} are the most")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self.text("a key")
            if key in metadata:
                raise ValueError(f"its metadata has {shown(key)} twice")
            (kind,) = self.numbers("<I")
            metadata[key] = self.value(kind, shown(key))
        _check_kind(path, metadata)
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name = self.text("the name of a tensor")
            (rank,) = self.numbers("<I")
            if name in found or not 1 <= rank <= _LARGEST_RANK:
                raise ValueError(
                    f"it has the tensor {shown(name)} {'twice' if name in found else f'of {rank} axes'}"
                )
            *sizes, number, offset = self.numbers(f"<{rank}QIQ")
            found[name] = tuple(sizes[::-1]), number, offset
        return metadata, dict(self.places(path, found, metadata.get("general.alignment", 32)))

    def places(
        self, path: Path, found: dict[str, tuple[tuple[int, ...], int, int]], alignment: Any
    ) -> Iterator[tuple[str, GgufTensor]]:
        """Every tensor with its place. found: shape, type and offset by name."""
        if not is_integer(alignment, 8, 1 << 20) or alignment & (alignment - 1):
            raise ValueError(
                f"general.alignment is {shown(alignment)}; it must be a power of two from 8 to 2^20"
            )
        start = -(-self.at // alignment) * alignment
        free = 0
        places: dict[str, GgufTensor] = {}
        for name, (shape, number, offset) in sorted(found.items(), key=lambda item: item[1][2]):
            kind = KINDS.get(number)
            if kind is None:
                raise UnsupportedModelError(
                    f"{path}: the tensor {shown(name)} is of type {_NOT_READ.get(number, number)}; the types "
                    f"{', '.join(known.name for known in KINDS.values())} can be read: take a file of one of these"
                )
            count = math.prod(shape)
            length = count // kind.size * kind.length
            if not count or shape[-1] % kind.size:
                raise ValueError(
                    f"the tensor {shown(name)} of type {kind.name} has the shape {list(shape)}"
                )
            if start + offset + length > len(self.data):
                raise ValueError(
                    f"it has {len(self.data)} bytes, and the tensor {shown(name)} lies behind its end"
                )
            if offset < free or offset % alignment:
                raise ValueError(
                    f"the tensor {shown(name)} lies within another one, or between two places"
                )
            free = offset + length
            places[name] = GgufTensor(name, kind.name, shape, start + offset, length)
        return ((name, places[name]) for name in found)

    def numbers(self, form: str) -> tuple[Any, ...]:
        begin = self.pass_over(struct.calcsize(form), "")
        return struct.unpack_from(form, self.data, begin)

    def text(self, what: str) -> str:
        begin = self.at + 8
        length = int.from_bytes(self.data[self.at : begin], "little")
        self.pass_over(8 + length, what)
        try:
            return self.data[begin : self.at].decode()
        except UnicodeDecodeError:
            raise ValueError(f"{what} is not UTF-8, at byte {begin}") from None

    def value(self, kind: int, key: str) -> Any:
        """A value of metadata. key: for messages."""
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            kind, count = self.numbers("<IQ")
            self.left -= count
            if self.left < 0:
                raise ValueError(
                    f"its metadata has more than {_MOST_VALUES} values, {count} of them in {key}"
                )
            if kind == _STRING:
                return [self.text(key) for _ in range(count)]
            return self.scalars(kind, count, key)
        value = self.scalars(kind, 1, key)[0]
        return float(str(np.float32(value))) if kind == _FLOAT else value

    def scalars(self, kind: int, count: int, key: str) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"{key} has a value of type {kind}, or arrays in an array")
        begin = self.pass_over(count * struct.calcsize(_SCALARS[kind]), key)
        values: list[Any] = np.frombuffer(self.data[begin : self.at], _SCALARS[kind]).tolist()
        if kind == _BOOL:
            if not set(values) <= {0, 1}:
                raise ValueError(f"{key} has a truth value that is neither 0 nor 1")
            values = [value == 1 for value in values]
        return values

    def pass_over(self, length: int, what: str) -> int:
        """Go on behind `length` bytes, and return where they begin."""
        begin, self.at = self.at, self.at + length
        if self.at > self.end:
            place = f"{what or 'its header'} ends behind "
            limit = (
                "the end of the file"
                if self.end == len(self.data)
                else f"{_LARGEST_HEADER >> 20} MiB of header"
            )
            raise ValueError(place + limit)
        return begin


def _check_kind(path: Path, metadata: dict[str, Any]) -> None:
    """Raise an error for a file that is no language model, or a part of one."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(f"general.architecture is {shown(architecture)}; it must be a name")
    for name in (str(metadata.get("general.type")), architecture):
        if name in _OTHER_KINDS:
            raise UnsupportedModelError(f"{path} is {_OTHER_KINDS[name]}")
    check_whole(str(path), metadata.get("split.count", 1))
