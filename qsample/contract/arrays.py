"""Arrays on the host: the contract's dtypes in NumPy and ONNX Runtime, and zeros that take no
memory yet.

This module needs only NumPy and the standard library: the runtime and the exporters read the same
table.
"""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
# NumPy asks for huge pages from this size on.
_MIN_MAPPED_BYTES: Final = 1 << 22


class Dtype(NamedTuple):
    """A dtype of the contract.

    Attributes:
        onnx: The number of TensorProto.DataType.
        onnxruntime: The type of a session's input or output.
        numpy: The name of NumPy's dtype; for bfloat16, which NumPy lacks, an integer of the same
            bits.
    """

    onnx: int
    onnxruntime: str
    numpy: str

    @property
    def itemsize(self) -> int:
        """The number of bytes of an element."""
        return np.dtype(self.numpy).itemsize


DTYPES: Final = {
    "float32": Dtype(1, "tensor(float)", "float32"),
    "uint8": Dtype(2, "tensor(uint8)", "uint8"),
    "int8": Dtype(3, "tensor(int8)", "int8"),
    "int32": Dtype(6, "tensor(int32)", "int32"),
    "int64": Dtype(7, "tensor(int64)", "int64"),
    "bool": Dtype(9, "tensor(bool)", "bool"),
    "float16": Dtype(10, "tensor(float16)", "float16"),
    "bfloat16": Dtype(16, "tensor(bfloat16)", "uint16"),
}
OF_ONNXRUNTIME: Final = {dtype.onnxruntime: dtype for dtype in DTYPES.values()}


def rounded(numbers: Any, dtype: str) -> Array:
    """Convert numbers to a dtype of the contract. Floats become the bits of bfloat16, with ties to
    even."""
    array = np.asarray(numbers)
    if dtype != "bfloat16" or array.dtype.kind != "f":
        return np.ascontiguousarray(array, DTYPES[dtype].numpy)
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (nearest >> np.uint32(16)).astype(np.uint16)


def sparse_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Zeros that the system hands out in small pages when they are touched.

    NumPy asks for huge pages. A short prompt touches a few positions of every head, so most of a
    long cache would be zeroed for it, and it would wait until the system has gathered the pages,
    which took up to a second for a row.
    """
    count = math.prod(shape)
    size = count * np.dtype(dtype).itemsize
    # Windows has no such mappings.
    if size < _MIN_MAPPED_BYTES or sys.platform == "win32":
        return np.zeros(shape, dtype)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"a tensor {list(shape)} takes {size / 1e9:.1f} GB, which this system does not have; take fewer rows or "
            "slots, or fewer tokens a row (ctx_len, or max_new_tokens)"
        ) from error
    if sys.platform == "linux":
        # Linux may choose huge pages by itself.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)
