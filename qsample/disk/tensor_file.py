"""Tensors in a safetensors file (https://huggingface.co/docs/safetensors), without the library: written, and read as
arrays over the file's mapped memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from qsample.contract.arrays import DTYPES, Array

_NAMES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "int64": "I64"}
_LENGTH_BYTES: Final = 8  # of the header's length; it comes first
_LARGEST_HEADER: Final = 1 << 24
_ALIGNMENT: Final = 8


def map_tensors(path: Path) -> tuple[dict[str, str], dict[str, Array]]:
    """The metadata and the tensors of a file, in the order of its bytes; bfloat16 as uint16 of its bits. Raises OSError
    if it cannot be read; ValueError, KeyError, TypeError or AttributeError if it is damaged, or has other dtypes than
    `_NAMES` and float64."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _LARGEST_HEADER:
            raise ValueError("its header is too long")
        header: dict[str, Any] = json.loads(file.read(length))
        start, size = _LENGTH_BYTES + length, os.fstat(file.fileno()).st_size
        data = np.memmap(file, np.uint8, "r")
    metadata = header.pop("__metadata__", {})
    numpy = {name: DTYPES[dtype].numpy for dtype, name in _NAMES.items()} | {"F64": "float64"}
    tensors, expected = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        begin, end = entry["data_offsets"]
        if begin != expected or end < begin or start + end > size:
            raise ValueError("it is cut off")
        expected = end
        tensors[name] = data[start + begin : start + end].view(numpy[entry["dtype"]]).reshape(entry["shape"])
    if start + expected != size:
        raise ValueError("it is too long")
    return metadata, tensors


def write_tensors(file: BinaryIO, metadata: Mapping[str, str], tensors: Mapping[str, Array]) -> None:
    """Write contiguous tensors to an empty file, in their order; uint16 as the bits of bfloat16."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        dtype = "BF16" if array.dtype == np.uint16 else _NAMES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT)
    file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
    file.write(text)
    for array in tensors.values():
        file.write(memory_of(array))


def memory_of(array: Array) -> memoryview:
    """The bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
