"""Tensors of a safetensors file as arrays over its mapped memory, without the library.

The format is https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsample.contract.arrays import DTYPES, Array

NAMES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "int64": "I64"}
LENGTH_BYTES: Final = 8  # of the header's length, which comes first
_LARGEST_HEADER: Final = 1 << 24


def map_tensors(path: Path) -> tuple[dict[str, str], dict[str, Array]]:
    """The metadata and the tensors of a file, in the order of its bytes; bfloat16 as uint16 of its bits.

    Raises:
        OSError: If the file cannot be read.
        ValueError, KeyError, TypeError, AttributeError: If it is damaged, or has other dtypes than `NAMES` and float64.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > _LARGEST_HEADER:
            raise ValueError("its header is too long")
        header: dict[str, Any] = json.loads(file.read(length))
        start, size = LENGTH_BYTES + length, os.fstat(file.fileno()).st_size
        data = np.memmap(file, np.uint8, "r")
    metadata = header.pop("__metadata__", {})
    numpy = {name: DTYPES[dtype].numpy for dtype, name in NAMES.items()} | {"F64": "float64"}
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
