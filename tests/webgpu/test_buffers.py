"""Memory without addresses: parts of tensors, copies on the device, graphs over some rows."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.contract.tensors import BATCH, CAPACITY, TensorSpec
from qsample.ort.buffers import Buffer, Handle, copy_on_device

SIZES = {BATCH: 3, CAPACITY: 8}


def filled(dtype: str, *more: int) -> tuple[Handle, np.ndarray]:
    buffer = Buffer.allocate(
        TensorSpec("x", dtype, (BATCH, 2, CAPACITY, *more), ""), SIZES, "webgpu"
    )
    assert isinstance(buffer, Handle)
    assert not buffer.read().any()
    values = np.arange(np.prod(buffer.shape)).reshape(buffer.shape).astype(dtype)
    buffer.write(values)
    return buffer, values


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64", "bool"])
def test_rows_are_copied_on_the_device(dtype: str) -> None:
    buffer, values = filled(dtype)
    part = buffer.rows(1, 2)
    assert isinstance(part, Handle)
    assert (part.is_part, buffer.is_part, buffer.rows(0, 3).is_part) == (True, False, False)
    taken = part.take(part.staged())
    for row in (1, 2):
        np.testing.assert_array_equal(buffer.read_row(row), values[row])
    buffer.write(np.zeros_like(values))
    part.put(taken)
    np.testing.assert_array_equal(
        buffer.read(), np.where(np.arange(3)[:, None, None] == 0, 0, values)
    )


def test_rows_are_written_copied_and_cleared() -> None:
    buffer, values = filled("float32", 4)
    buffer.copy_row(2, 0)
    buffer.clear_row(2)
    np.testing.assert_array_equal(
        buffer.read(), np.stack([values[2], values[1], np.zeros_like(values[0])])
    )
    buffer.write_columns(2, [(slice(2, 5), values[1][:, :3])])
    np.testing.assert_array_equal(buffer.read_row(2)[:, 2:5], values[1][:, :3])
    small, _ = filled("int32")
    small.write_at((1, slice(0, 1)), 9)
    assert (small.read()[1] == 9).any(axis=-1).tolist() == [True, False]
    other, _ = filled("float32", 4)
    copy_on_device(buffer, other)
    np.testing.assert_array_equal(other.read(), buffer.read())
