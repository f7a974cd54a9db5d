"""Dtypes by the names of the contract, and zeros that take no memory until they are written to."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from qsample.contract.arrays import DTYPES, OF_ONNXRUNTIME, sparse_zeros
from tests.helpers.memory import resident


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_dtypes_are_those_of_onnx_and_onnxruntime(name: str) -> None:
    dtype = DTYPES[name]
    theirs = onnx.helper.tensor_dtype_to_np_dtype(dtype.onnx)
    assert theirs == (ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name))
    assert dtype.itemsize == theirs.itemsize
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(2, dtype.numpy), dtype.onnx)
    assert value.data_type() == dtype.onnxruntime
    assert OF_ONNXRUNTIME[dtype.onnxruntime] is dtype


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 5), (0, 4), (3, 1 << 20)])
def test_zeros_can_be_written_to(shape: tuple[int, ...]) -> None:
    zeros = sparse_zeros(shape, np.float32)
    assert (zeros.shape, zeros.dtype, zeros.flags.c_contiguous) == (shape, np.float32, True)
    assert not zeros.any()
    zeros[...] = 1
    assert zeros.all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_zeros_take_memory_where_they_are_written_to() -> None:
    before = resident()
    zeros = sparse_zeros((64, 1 << 20), np.float32)  # 256 MiB
    zeros[:, 0] = 1
    assert resident() - before < 32 << 20
