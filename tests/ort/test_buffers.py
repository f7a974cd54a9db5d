"""Buffers, row views, states in place and states that take turns."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from qsample.contract.arrays import DTYPES
from qsample.contract.tensors import BATCH, CAPACITY, SAMPLER_STATES, TensorSpec
from qsample.ort import buffers
from qsample.ort.buffers import (
    Buffer,
    Handle,
    RetainedState,
    SavedRows,
    copy_on_device,
    run_on_device,
)
from qsample.ort.small_graphs import columns_behind
from qsample.runtime import CausalLM
from tests.helpers.fake_package import fake_interface

SIZES = fake_interface().sizes | {BATCH: 3, CAPACITY: 12}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int64", "bool"])
def test_every_dtype_of_the_contract_has_memory(dtype: str) -> None:
    buffer = Buffer.allocate(TensorSpec("x", dtype, (BATCH, CAPACITY), ""), SIZES, "cpu")
    assert (buffer.shape, buffer.dtype, buffer.address) == ((3, 12), dtype, buffer.owner.data_ptr())
    width = {"float16": 2, "bfloat16": 2, "int64": 8, "bool": 1}.get(dtype, 4)
    assert buffer.owner.tensor_size_in_bytes() == 36 * width
    assert [buffer.rows(i).address - buffer.address for i in range(3)] == [
        0,
        12 * width,
        24 * width,
    ]
    assert (buffer.rows(2).shape, buffer.rows(1, 2).shape) == ((1, 12), (2, 12))


def as_device(buffer: Buffer) -> Buffer:
    """The same memory, used as a device's."""
    return Buffer(buffer.owner, buffer.dtype, buffer.shape, buffer.address, buffer.device)


def as_handle(buffer: Buffer) -> Buffer:
    """The same memory, used as a device's that has no addresses."""
    return Handle(buffer.owner, buffer.dtype, buffer.shape, 0, buffer.device)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime copies from devices alone."""
    monkeypatch.setattr(buffers, "_on_host", lambda value, dtype: value.numpy().copy())


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("kind", [lambda buffer: buffer, as_device, as_handle])
def test_every_kind_of_memory_is_the_same_to_its_rows(kind: Callable[[Buffer], Buffer]) -> None:
    buffer = kind(
        Buffer.allocate(TensorSpec("x", "float32", (BATCH, 2, CAPACITY), ""), SIZES, "cpu")
    )
    wanted = np.random.default_rng(0).normal(size=(3, 2, 12)).astype(np.float32)
    buffer.write(wanted)
    buffer.copy_row(2, 0)
    buffer.clear_row(2)
    wanted[0], wanted[2] = wanted[2], 0
    np.testing.assert_array_equal(buffer.read(), wanted)
    np.testing.assert_array_equal(buffer.read_row(1), wanted[1])
    for index, values in ((1, 5.0), (slice(0, 2), 7.0), ((2, slice(1, 2)), wanted[0, 0])):
        buffer.write_at(index, values)
        wanted[index] = values
    np.testing.assert_array_equal(buffer.read(), wanted)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("kind", [lambda buffer: buffer, as_device, as_handle])
@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
def test_rows_are_written_and_read_in_columns(dtype: str, kind: Callable[[Buffer], Buffer]) -> None:
    if (dtype, kind) == ("bfloat16", as_handle):
        pytest.skip("no device without addresses has bfloat16")
    numpy = DTYPES[dtype].numpy
    buffer = kind(
        Buffer.allocate(TensorSpec("x", dtype, (BATCH, 2, CAPACITY, 4), ""), SIZES, "cpu")
    )
    first, rest = (np.arange(2 * n * 4).reshape(2, n, 4).astype(numpy) for n in (5, 4))
    buffer.write_columns(1, [(slice(5, 9), rest), (slice(0, 5), first)])
    row = buffer.read_row(1)
    assert (row.dtype, row.shape) == (numpy, (2, 12, 4))
    np.testing.assert_array_equal(row[:, :9], np.concatenate([first, rest], axis=1))
    assert not buffer.read_row(0).any()
    assert not buffer.read_row(2).any()


def test_of_copies() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    buffer = Buffer.of(array, "cpu")
    array[:] = 0
    assert buffer.read().tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64", "bool"])
@pytest.mark.parametrize(
    ("index", "shape"),
    [
        (1, (12,)),
        (2, ()),
        (slice(None), (3, 12)),
        (slice(1, 3), (2, 12)),
        (slice(2), ()),
        ((0, slice(7)), (7,)),
        ((2, slice(5, 12)), (7,)),
        ((1, slice(0)), (0,)),
        (slice(0), (0, 12)),
    ],
)
def test_a_part_is_written_where_the_memory_is(
    dtype: str, index: Any, shape: tuple[int, ...]
) -> None:
    """As on a device, here on the CPU: NumPy's index says where."""
    spec, generator = TensorSpec("x", dtype, (BATCH, CAPACITY), ""), np.random.default_rng(0)
    buffer = Buffer.allocate(spec, SIZES, "cpu")
    before = generator.integers(0, 2, (3, 12)).astype(dtype)
    buffer.write(before)
    values = 1 - generator.integers(0, 2, shape)
    as_device(buffer).write_at(index, values)
    before[index] = values
    assert buffer.read().tolist() == before.tolist()


@pytest.mark.parametrize("count", [1, 4, 12])
def test_the_columns_behind_a_position(count: int) -> None:
    rows = np.random.default_rng(0).integers(0, 99, (3, 12), dtype=np.int32)
    last = np.array([[0], [5], [11]], np.int32)
    inputs = {
        "x": rows,
        "row": last,
        "column": np.arange(1 - count, 1, dtype=np.int32)[None],
        "zero": np.zeros(1, np.int32),
    }
    gathered = Buffer.of(np.zeros((3, count), np.int32), "cpu")
    run_on_device(
        columns_behind(),
        {name: Buffer.of(value, "cpu") for name, value in inputs.items()},
        {"y": gathered},
    )
    for row, position, got in zip(rows, last[:, 0], gathered.read(), strict=True):
        wanted = row[max(0, position - count + 1) : position + 1].tolist()
        assert got.tolist() == [row[0]] * (count - len(wanted)) + wanted


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int32", "int64"])
def test_a_copy_where_the_memory_is(dtype: str) -> None:
    """What copies rows on a device, here on the CPU: every bit of one row, and no other row."""
    buffer = Buffer.allocate(TensorSpec("x", dtype, (BATCH, 5, CAPACITY), ""), SIZES, "cpu")
    size = buffer.owner.tensor_size_in_bytes()
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(buffer.address)).reshape(
        3, -1
    )
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.shape)
    before = memory.copy()
    copy_on_device(buffer.rows(2), buffer.rows(0))
    assert (memory == before[[2, 1, 2]]).all()


@pytest.mark.parametrize("side", [0, 1])
def test_rows_are_copied_on_the_side_that_is_current(side: int, model: CausalLM) -> None:
    made = state(model, turns=("lengths", "past_key_values.0.key"))
    for _ in range(side):
        made.flip()
    name = "past_key_values.0.key"
    made[name].write_at(slice(None), np.arange(3)[:, None, None, None])
    made[name].copy_row(2, 1, (slice(None), slice(4)))
    assert made[name].read()[:, 0, :, 0].tolist() == [[0] * 12, [2] * 4 + [1] * 8, [2] * 12]
    assert not made.inputs(side=1 - side)[name].read().any()
    made[name].copy_row(0, 2)
    assert made[name].read()[:, 0, :, 0].tolist() == [[0] * 12, [2] * 4 + [1] * 8, [0] * 12]


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_are_saved_and_restored(dtype: str, side: int) -> None:
    """Every bit of one row of every state, on the side that is current, and no other row."""
    specs = {TensorSpec(name, dtype, (BATCH, 5), ""): "cpu" for name in ("in_place", "in_turns")}
    made = RetainedState(specs, SIZES, turns=("in_turns",))
    for _ in range(side):
        made.flip()
    width = 4 if dtype == "float32" else 2
    memory = [
        np.ctypeslib.as_array((ctypes.c_uint8 * (15 * width)).from_address(buffer.address)).reshape(
            3, -1
        )
        for buffer in made.inputs().values()
    ]
    for one in memory:
        one[:] = np.random.default_rng(0).integers(0, 256, one.shape)
    before = [one.copy() for one in memory]
    saved = SavedRows(made, specs, SIZES, 2)
    assert saved.nbytes == 2 * 5 * width
    saved.save(2, 0)
    saved.save(1, 1)
    for one in memory:
        one[1:] = 0
    saved.restore(0, 0)
    saved.restore(1, 2)
    for one, was in zip(memory, before, strict=True):
        assert (one[[0, 2]] == was[[2, 1]]).all()
        assert not one[1].any()
    saved.save(0, 1)
    saved.restore(1, 2)
    assert (memory[0][2] == before[0][2]).all()


def state(model: CausalLM, *, turns: Sequence[str]) -> RetainedState:
    specs = dict.fromkeys((*SAMPLER_STATES, *model.interface.cache_states), "cpu")
    return RetainedState(specs, SIZES, turns=turns)


def test_the_starting_state_is_zeros(model: CausalLM) -> None:
    made = state(model, turns=("lengths",))
    for spec in (*SAMPLER_STATES, *model.interface.cache_states):
        value = made[spec.name].read()
        assert value.shape == spec.shape(SIZES)
        assert (value == 0).all()


def test_a_state_in_place_has_one_buffer_and_one_that_takes_turns_has_two(model: CausalLM) -> None:
    for turns in ((), ("lengths",), ("lengths", "tokens")):
        made = state(model, turns=turns)
        assert "noise_RetainedState" not in made.outputs()
        before = {name: made.inputs()[name].address for name in ("lengths", "tokens")}
        written = {name: made.outputs()[f"{name}_RetainedState"].address for name in before}
        assert {name for name in before if before[name] != written[name]} == set(turns)
        made.flip()
        assert {name: made.inputs()[name].address for name in before} == written
        made["lengths"].write_at(slice(None), 0)
        made["lengths"].write_at(1, 9)
        assert made["lengths"].read().tolist() == [0, 9, 0]
        made.flip()
        assert {name: made.inputs()[name].address for name in before} == before
        assert made.inputs(side=1)["lengths"].read()[1] == 9
        assert made["lengths"].read()[1] == (0 if turns else 9)


def test_some_rows_are_written_where_they_are_read(model: CausalLM) -> None:
    made = state(model, turns=["past_key_values.0.key"])
    rows = range(1, 3)
    key = made.inputs(rows)["past_key_values.0.key"]
    assert key == made.outputs(rows)["present.0.key"]
    assert key.shape[0] == 2
    assert key.address - made.inputs()["past_key_values.0.key"].address == 4 * math.prod(
        key.shape[1:]
    )


def test_writing_a_part() -> None:
    buffer = Buffer.of(np.zeros((2, 3), dtype=np.int32), "cpu")
    address = buffer.address
    buffer.write_at((1, slice(2)), [4, 5])
    buffer.write_at(0, 7)
    assert buffer.read().tolist() == [[7, 7, 7], [4, 5, 0]]
    assert buffer.address == buffer.owner.data_ptr() == address
    assert buffer.reshaped(3, 1).shape == (3, 1)
