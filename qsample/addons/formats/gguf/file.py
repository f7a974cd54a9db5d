"""The header of a GGUF file: its metadata, and where its tensors lie
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

The file is a stranger's: each length, count and offset is compared with the size of the file before
anything is made of it. The tensors stay in the file, mapped. Only NumPy is imported, so that a file
is refused before the libraries of models are loaded.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsample.checks import is_integer
from qsample.contract.arrays import Array
from qsample.errors import QsampleError, UnsupportedModelError, shown
from qsample.package.disk.untrusted import open_plain

SUFFIX: Final = ".gguf"
# The first bytes of every file.
_MAGIC: Final = b"GGUF"
_READ_VERSIONS: Final = (2, 3)
_PART: Final = re.compile(r".+-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)
# Bytes, as many as safetensors allows. Vocabularies of 262,144 tokens take a tenth of it.
_MAX_HEADER_BYTES: Final = 100 << 20
# The values in all arrays together. Vocabularies of 262,144 tokens have a third of them.
_MAX_ARRAY_VALUES: Final = 1 << 22
# The limit for the keys of metadata, and for the tensors.
_MAX_NAMES: Final = 1 << 16
_MAX_RANK: Final = 4
_DEFAULT_ALIGNMENT: Final = 32  # bytes
_MAX_ALIGNMENT: Final = 1 << 20  # bytes
_TOKENS_KEY: Final = "tokenizer.ggml.tokens"
_SPECIAL_ID_KEY: Final = re.compile(r"tokenizer\.ggml\.\w+_token_ids?")


class ValueType(IntEnum):
    """The types of metadata (gguf_metadata_value_type)."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# The types of single values, as struct and NumPy write them.
_SCALARS: Final[Mapping[int, str]] = {
    ValueType.UINT8: "<B",
    ValueType.INT8: "<b",
    ValueType.UINT16: "<H",
    ValueType.INT16: "<h",
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<B",
    ValueType.UINT64: "<Q",
    ValueType.INT64: "<q",
    ValueType.FLOAT64: "<d",
}
# What a file is, and what to give instead, by its general.architecture or general.type.
_PROJECTOR: Final = "a projector of images or audio; give the file of the language model, beside it"
_OTHER_KINDS: Final = {
    "clip": _PROJECTOR,
    "mmproj": _PROJECTOR,
    "adapter": "a LoRA adapter; give the model's file, and merge an adapter in PEFT's format (adapter=)",
    "controlvector": "a control vector; give a model's file",
    "imatrix": "an importance matrix; give a model's file",
}


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of tensors.

    Attributes:
        name: ggml's name.
        size: the number of weights in a block.
        length: the bytes of a block.
    """

    name: str
    size: int
    length: int


# The types that are read, by ggml's numbers (ggml_type in ggml.h).
TENSOR_TYPES: Final = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
}
# The names of the types that are not read, for messages.
_UNREAD_TYPES: Final = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    41: "Q1_0",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        name: llama.cpp's name.
        type: the name of one of `TENSOR_TYPES`.
        shape: the sizes in torch's order.
        offset: the first byte in the file.
        length: the number of bytes.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file as its header describes it.

    Attributes:
        path: the path, without links.
        metadata: numbers, bools, strings and lists of these, by key. A float32 is the shortest
            decimal that rounds to it.
        tensors: the tensors by name, in the order of the header.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name, such as "qwen3"."""
        return str(self.metadata["general.architecture"])

    def value(self, name: str, default: Any = None) -> Any:
        """A value of metadata that belongs to the architecture, such as "block_count"."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def special_ids(self, key: str) -> list[int]:
        """The ids of special tokens of a key such as "eos_token_id" or "eos_token_ids": those that
        a token has. Converters write 0xffffffff, or the number of tokens, for "none"."""
        stated = self.metadata.get(f"tokenizer.ggml.{key}")
        return [number for number in _as_list(stated) if self._is_id(number)]

    def strange_ids(self) -> list[tuple[str, int]]:
        """The keys and ids of special tokens that no token has."""
        found: list[tuple[str, int]] = []
        for key, stated in self.metadata.items():
            if _SPECIAL_ID_KEY.fullmatch(key) is not None:
                ids = [number for number in _as_list(stated) if is_integer(number)]
                found += [(key, number) for number in ids if not self._is_id(number)]
        return found

    @property
    def token_count(self) -> int:
        """The number of tokens; 0 for a file without a vocabulary."""
        return len(_as_list(self.metadata.get(_TOKENS_KEY, [])))

    def _is_id(self, number: Any) -> bool:
        most = self.token_count - 1 if self.token_count > 0 else math.inf
        return is_integer(number, 0, most)

    def raw(self, tensor: GgufTensor) -> Array:
        """[rows, bytes of a row] uint8, mapped. A row is the last axis of the tensor."""
        rows = math.prod(tensor.shape[:-1])
        shape = (rows, tensor.length // rows)
        return np.memmap(self.path, np.uint8, "c", tensor.offset, shape).view(np.ndarray)


def _as_list(value: Any) -> list[Any]:
    """A list of metadata; a single value as a list of it."""
    return value if isinstance(value, list) else [value]


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that begins as GGUF does, whatever its name."""
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def is_part(name: str) -> bool:
    """Whether a file's name says that it holds a part of a model."""
    return _PART.fullmatch(name) is not None


def check_whole(name: str, parts: Any = None) -> None:
    """Raise UnsupportedModelError for a file that holds a part of a model.

    Args:
        name: the file.
        parts: the number of parts that its metadata state; None: judge by its name.
    """
    if parts is None:
        match = _PART.fullmatch(name)
        parts = 1 if match is None else int(match[1])
    if parts not in (0, 1):
        raise UnsupportedModelError(
            f"{name} is one of {parts!s:.20} parts of a model; join them: `llama-gguf-split --merge` with the first "
            "part and a name for the whole"
        )


def read_gguf(path: Path) -> GgufFile:
    """Read a header.

    Raises:
        QsampleError: if the header is damaged.
        UnsupportedModelError: for a file that holds no whole language model, or a type of tensors
            that is not read.
    """
    check_whole(str(path))
    real = path.resolve()  # ONNX Runtime opens no links, and the hub's cache consists of links
    try:
        with open_plain(real) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _HeaderReader(data, path)
            return GgufFile(real, header.metadata, header.tensors)
    except (ValueError, OSError) as error:
        raise QsampleError(
            f"{path} is no GGUF file that can be read: {error}; download it again"
        ) from error


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    """An entry of the header's list of tensors.

    Attributes:
        name: llama.cpp's name.
        shape: the sizes in torch's order.
        type_number: ggml's number of the type.
        offset: the first byte, counted from the start of the data.
    """

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


class _HeaderReader:
    """Reads a whole file from its start. Raises ValueError where the file contradicts itself.

    Attributes:
        metadata: as in `GgufFile`.
        tensors: as in `GgufFile`.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        """path: the file's name, for messages."""
        self._data = data
        self._path = path
        self._position = 0
        self._end = min(len(data), _MAX_HEADER_BYTES)
        self._array_values_left = _MAX_ARRAY_VALUES
        self._check_version()
        tensor_count, key_count = self._numbers("<QQ")
        for count, what in ((tensor_count, "tensors"), (key_count, "keys of metadata")):
            if count > _MAX_NAMES:
                raise ValueError(f"it says that it has {count} {what}; {_MAX_NAMES} are the most")
        self.metadata = self._read_metadata(key_count)
        _check_kind(path, self.metadata)
        entries = self._read_entries(tensor_count)
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        placed = self._place(entries, alignment)
        self.tensors = {entry.name: placed[entry.name] for entry in entries}

    def _check_version(self) -> None:
        magic, version = self._numbers("<4sI")
        if magic != _MAGIC:
            raise ValueError(f"it begins with {magic!r}, not with {_MAGIC!r}")
        if version in _READ_VERSIONS:
            return
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        problem = f"is of version {version}"
        if swapped in (1, *_READ_VERSIONS):
            problem = "is big-endian, for other processors"
        raise UnsupportedModelError(
            f"{self._path} {problem}; little-endian files of versions 2 and 3 are read: convert the model again, with "
            "llama.cpp's convert_hf_to_gguf.py of today"
        )

    def _read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._text("a key")
            if key in metadata:
                raise ValueError(f"its metadata has {shown(key)} twice")
            (value_type,) = self._numbers("<I")
            metadata[key] = self._value(value_type, shown(key))
        return metadata

    def _read_entries(self, count: int) -> list[_TensorEntry]:
        entries: list[_TensorEntry] = []
        names: set[str] = set()
        for _ in range(count):
            name = self._text("the name of a tensor")
            (rank,) = self._numbers("<I")
            if name in names:
                raise ValueError(f"it has the tensor {shown(name)} twice")
            if not 1 <= rank <= _MAX_RANK:
                raise ValueError(f"it has the tensor {shown(name)} of {rank} axes")
            *sizes, type_number, offset = self._numbers(f"<{rank}QIQ")
            names.add(name)
            entries.append(_TensorEntry(name, tuple(reversed(sizes)), type_number, offset))
        return entries

    def _place(self, entries: list[_TensorEntry], alignment: Any) -> dict[str, GgufTensor]:
        """The tensors with their places in the file, by name."""
        if not is_integer(alignment, 8, _MAX_ALIGNMENT) or alignment & (alignment - 1) != 0:
            raise ValueError(
                f"general.alignment is {shown(alignment)}; it must be a power of two from 8 to 2^20"
            )
        start = -(-self._position // alignment) * alignment
        end_of_last = 0
        placed: dict[str, GgufTensor] = {}
        for entry in sorted(entries, key=lambda entry: entry.offset):
            name = shown(entry.name)
            tensor_type = self._tensor_type(entry)
            count = math.prod(entry.shape)
            length = count // tensor_type.size * tensor_type.length
            if count == 0 or entry.shape[-1] % tensor_type.size != 0:
                raise ValueError(
                    f"the tensor {name} of type {tensor_type.name} has the shape {list(entry.shape)}"
                )
            if start + entry.offset + length > len(self._data):
                raise ValueError(
                    f"it has {len(self._data)} bytes, and the tensor {name} lies behind its end"
                )
            if entry.offset < end_of_last or entry.offset % alignment != 0:
                raise ValueError(
                    f"the tensor {name} lies within another one, or between two places"
                )
            end_of_last = entry.offset + length
            placed[entry.name] = GgufTensor(
                entry.name, tensor_type.name, entry.shape, start + entry.offset, length
            )
        return placed

    def _tensor_type(self, entry: _TensorEntry) -> TensorType:
        found = TENSOR_TYPES.get(entry.type_number)
        if found is None:
            type_name = _UNREAD_TYPES.get(entry.type_number, entry.type_number)
            read_names = ", ".join(known.name for known in TENSOR_TYPES.values())
            raise UnsupportedModelError(
                f"{self._path}: the tensor {shown(entry.name)} is of type {type_name}; the types {read_names} can be "
                "read: take a file of one of these"
            )
        return found

    def _numbers(self, struct_format: str) -> tuple[Any, ...]:
        begin = self._advance(struct.calcsize(struct_format), "its header")
        return struct.unpack_from(struct_format, self._data, begin)

    def _text(self, what: str) -> str:
        """The next string. what: its meaning, for messages."""
        begin = self._position + 8
        length = int.from_bytes(self._data[self._position : begin], "little")
        self._advance(8 + length, what)
        try:
            return self._data[begin : self._position].decode()
        except UnicodeDecodeError:
            raise ValueError(f"{what} is not UTF-8, at byte {begin}") from None

    def _value(self, value_type: int, key: str) -> Any:
        """The next value of metadata. key: its key, for messages."""
        if value_type == ValueType.STRING:
            return self._text(key)
        if value_type == ValueType.ARRAY:
            return self._array(key)
        value = self._scalars(value_type, 1, key)[0]
        if value_type == ValueType.FLOAT32:
            return float(str(np.float32(value)))
        return value

    def _array(self, key: str) -> list[Any]:
        value_type, count = self._numbers("<IQ")
        self._array_values_left -= count
        if self._array_values_left < 0:
            raise ValueError(
                f"its metadata has more than {_MAX_ARRAY_VALUES} values, {count} of them in {key}"
            )
        if value_type == ValueType.STRING:
            return [self._text(key) for _ in range(count)]
        return self._scalars(value_type, count, key)

    def _scalars(self, value_type: int, count: int, key: str) -> list[Any]:
        scalar_format = _SCALARS.get(value_type)
        if scalar_format is None:
            raise ValueError(f"{key} has a value of type {value_type}, or arrays in an array")
        begin = self._advance(count * struct.calcsize(scalar_format), key)
        values: list[Any] = np.frombuffer(
            self._data[begin : self._position], scalar_format
        ).tolist()
        if value_type == ValueType.BOOL:
            if not set(values) <= {0, 1}:
                raise ValueError(f"{key} has a truth value that is neither 0 nor 1")
            return [value == 1 for value in values]
        return values

    def _advance(self, length: int, what: str) -> int:
        """Skip `length` bytes, and return the position of the first. what: their meaning, for
        messages."""
        begin = self._position
        self._position += length
        if self._position > self._end:
            limit = f"{_MAX_HEADER_BYTES >> 20} MiB of header"
            if self._end == len(self._data):
                limit = "the end of the file"
            raise ValueError(f"{what} ends behind {limit}")
        return begin


def _check_kind(path: Path, metadata: dict[str, Any]) -> None:
    """Raise an error for a file that is not a language model, or a part of one."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(f"general.architecture is {shown(architecture)}; it must be a name")
    for name in (str(metadata.get("general.type")), architecture):
        if name in _OTHER_KINDS:
            raise UnsupportedModelError(f"{path} is {_OTHER_KINDS[name]}")
    check_whole(str(path), metadata.get("split.count", 1))
