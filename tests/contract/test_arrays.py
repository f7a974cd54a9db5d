"""Dtypes by the names of the contract, and zeros that take no memory until they are written to."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from qsample.contract.arrays import DTYPES, OF_ONNXRUNTIME, rounded, sparse_zeros
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


def test_floats_are_rounded_to_bfloat16_with_ties_to_even() -> None:
    """As ml_dtypes rounds them: neighbours of every number of bfloat16, halves between two among them."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        floats = (upper | np.uint32(lower)).view(np.float32)
        floats = floats[np.isfinite(floats)]
        with np.errstate(over="ignore"):
            expected = floats.astype(ml_dtypes.bfloat16).view(np.uint16)
        found = rounded(floats, "bfloat16")
        assert found.dtype == np.uint16
        assert np.array_equal(found, expected)
    assert rounded(1.5, "bfloat16") == 0x3FC0
    assert rounded([1.5, -0.0], "bfloat16").tolist() == [0x3FC0, 0x8000]


def test_other_dtypes_are_converted() -> None:
    bits = np.array([1, 0x3FC0], np.uint16)
    assert rounded(bits, "bfloat16").tolist() == bits.tolist(), "integers are bits already"
    half = rounded(np.arange(6.0).reshape(2, 3).T, "float16")
    assert (half.dtype, half.flags.c_contiguous, half.tolist()[0]) == (np.float16, True, [0, 3])
    assert rounded(2**40, "int64") == 2**40
    assert rounded([0, 2], "bool").tolist() == [False, True]


def test_zeros_that_no_system_has() -> None:
    with pytest.raises(
        MemoryError, match=r"a tensor \[4, 1152921504606846976\] takes .* GB, which"
    ):
        sparse_zeros((4, 1 << 60), np.float32)
