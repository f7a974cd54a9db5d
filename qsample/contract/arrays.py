"""Arrays on the host: the contract's dtypes in NumPy and ONNX Runtime, and zeros that take no memory yet. NumPy and the
standard library only: the runtime and the exporters read the same table."""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_OWN_MAPPING_FROM: Final = 1 << 22  # bytes; from here on NumPy asks for huge pages


class Dtype(NamedTuple):
    """A dtype of the contract. onnx: the number of TensorProto.DataType. onnxruntime: the type of a session's input or
    output. numpy: the type of its elements; for bfloat16, missing in NumPy, an integer of the same bits."""

    onnx: int
    onnxruntime: str
    numpy: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
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
    """`numbers` in a dtype of the contract; floats become bits of bfloat16, ties to even."""
    array = np.asarray(numbers)
    if dtype != "bfloat16" or array.dtype.kind != "f":
        return np.ascontiguousarray(array, DTYPES[dtype].numpy)
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (nearest >> np.uint32(16)).astype(np.uint16)


def sparse_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Zeros that the system hands out in small pages, as they are touched. NumPy asks for huge pages. A short prompt
    touches a few positions of every head, so it would have most of a long cache zeroed, and wait for the system to
    gather the pages: up to a second a row was measured."""
    count = math.prod(shape)
    size = count * np.dtype(dtype).itemsize
    if size < _OWN_MAPPING_FROM or sys.platform == "win32":  # Windows maps no memory like this
        return np.zeros(shape, dtype)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"a tensor {list(shape)} takes {size / 1e9:.1f} GB, which this system does not have; take fewer rows or "
            "slots, or fewer tokens a row (ctx_len, or max_new_tokens)"
        ) from error
    if sys.platform == "linux":  # where huge pages may be given unasked
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)
