"""Writes and reads safetensors files (https://huggingface.co/docs/safetensors) without the library.

The library maps a file, and a mapped file that another program cuts off would end the process. Here
tensors are read into memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np

from qsample.checks import is_integer
from qsample.contract.arrays import DTYPES, Array
from qsample.package.disk.untrusted import open_plain, parse_json

_DTYPE_NAMES: Final = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
}
# The length of the header comes first.
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 1 << 24
_ALIGNMENT_BYTES: Final = 8


def read_header(file: BinaryIO, largest: int = _MAX_HEADER_BYTES) -> tuple[dict[str, Any], int]:
    """Read the header of a file.

    Args:
        file: The file, at its start.
        largest: The largest size of the header in bytes.

    Returns:
        The header, and the place of the first number.

    Raises:
        ValueError: The header is damaged, nested deeply or too long.
    """
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > largest:
        raise ValueError("its header is too long")
    header = parse_json(file.read(length).decode("utf-8"))
    is_object = isinstance(header, dict)
    if not is_object or not all(isinstance(entry, dict) for entry in header.values()):
        raise ValueError("its header is not an object of objects")
    return header, _LENGTH_BYTES + length


class TensorInfo(NamedTuple):
    """A tensor in a file: NumPy's name of its dtype (bfloat16 is uint16 of its bits), and its
    shape."""

    dtype: str
    shape: tuple[int, ...]


class TensorFile:
    """A file, opened to be read; use it as a context.

    Attributes:
        metadata: The metadata of the header.
        tensors: The tensors by name, in the order of their bytes.
    """

    def __init__(self, path: Path, largest: int | None = None) -> None:
        """Read the header.

        Args:
            path: The path of the file.
            largest: The largest size of the file in bytes; None for any.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is damaged, too large or not a plain file, or has other dtypes than
                `_DTYPE_NAMES` and float64.
        """
        self._file = open_plain(path)
        try:
            self._read_header(largest)
        except BaseException as error:
            self._file.close()
            if isinstance(error, KeyError | TypeError | OverflowError):
                raise ValueError(f"its header is damaged: {error!r:.100}") from error
            raise

    def _read_header(self, largest: int | None) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if largest is not None and size > largest:
            raise ValueError(f"it has {size} bytes, and may have {largest}")
        header, start = read_header(self._file)
        self.metadata: dict[str, Any] = header.pop("__metadata__", {})
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, int] = {}
        numpy = {name: DTYPES[dtype].numpy for dtype, name in _DTYPE_NAMES.items()} | {
            "F64": "float64"
        }
        expected = start
        for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
            begin, end = entry["data_offsets"]
            if entry["dtype"] not in numpy:
                raise ValueError(
                    f"{name:.100} is {entry['dtype']!r:.20}; it may be {', '.join(numpy)}"
                )
            info = TensorInfo(numpy[entry["dtype"]], tuple(entry["shape"]))
            if not all(is_integer(number, 0) for number in (begin, end, *info.shape)):
                raise ValueError(f"its header is damaged: {name:.100} has sizes that are none")
            size_of_tensor = math.prod(info.shape) * np.dtype(info.dtype).itemsize
            if start + begin != expected or end - begin != size_of_tensor:
                raise ValueError(f"its header is damaged: {name:.100} is not where it should be")
            self.tensors[name] = info
            self._places[name] = expected
            expected = start + end
        if size != expected:
            raise ValueError("it is cut off" if size < expected else "it is too long")

    def read(self, name: str) -> Array:
        """Read a tensor into new memory. Raises OSError, and ValueError if the file was cut off
        meanwhile."""
        dtype, shape = self.tensors[name]
        self._file.seek(self._places[name])
        array = np.fromfile(self._file, dtype, math.prod(shape))
        if len(array) < math.prod(shape):
            raise ValueError("it is cut off")
        return array.reshape(shape)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def write_tensors(
    file: BinaryIO, metadata: Mapping[str, str], tensors: Mapping[str, Array]
) -> None:
    """Write contiguous tensors to an empty file in their order.

    Args:
        file: The file.
        metadata: The metadata of the header.
        tensors: The tensors by name; uint16 has the bits of bfloat16.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in tensors.items():
        begin = end
        end = begin + array.nbytes
        dtype = "BF16" if array.dtype == np.uint16 else _DTYPE_NAMES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT_BYTES)
    file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
    file.write(text)
    for array in tensors.values():
        file.write(memory_of(array))


def memory_of(array: Array) -> memoryview:
    """The bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
