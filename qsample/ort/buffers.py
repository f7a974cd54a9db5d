"""The memory that graphs are bound to: `Buffer`.

`RetainedState` holds the state of every row, `SavedRows` copies of single rows, and `OutputRing`
the outputs of the newest steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from qsample.contract.arrays import DTYPES, Array, sparse_zeros
from qsample.contract.tensors import BATCH, TensorSpec, retained_name
from qsample.ort import small_graphs
from qsample.ort.options import session_options
from qsample.ort.providers import CPU, CUDA, WEBGPU, add_plugin

# The index of a row, of adjacent rows, or of columns of a row.
Index = int | slice | tuple[int, slice]

_PROVIDERS: Final = {"cpu": CPU, "cuda": CUDA, "webgpu": WEBGPU}
# The memory of these devices is a handle.
DEVICES_WITHOUT_ADDRESSES: Final = ("webgpu",)


@dataclass(frozen=True, slots=True)
class Buffer:
    """The memory of a tensor, or of some of its rows, that graphs are bound to by its address.

    This class is for the memory of a device, where small graphs copy rows. `HostBuffer` is NumPy's
    memory, and `Handle` has no address. NumPy has no bfloat16: such an array has the dtype uint16
    and the same bits.

    Attributes:
        owner: The value that keeps the memory alive.
        dtype: The dtype, by the contract's name.
        shape: The shape.
        address: The address of the first number, in bytes.
        device: "cpu", "cuda" (a further GPU: "cuda:1") or "webgpu".
    """

    owner: ort.OrtValue
    dtype: str
    shape: tuple[int, ...]
    address: int
    device: str

    @staticmethod
    def allocate(spec: TensorSpec, sizes: Mapping[str, int], device: str) -> Buffer:
        """Allocate zeros.

        On the CPU, the system hands the memory out when it is touched, so a cache uses no more
        memory than its tokens need.

        Args:
            spec: The tensor.
            sizes: The size of each of its named axes.
            device: The device.
        """
        shape = spec.shape(dict(sizes))
        dtype = DTYPES[spec.dtype]
        zeros = sparse_zeros(shape, dtype.numpy)
        if device == "cpu":
            owner = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(zeros, dtype.onnx)
            return HostBuffer(owner, spec.dtype, shape, owner.data_ptr(), device, zeros)
        if device in DEVICES_WITHOUT_ADDRESSES:
            return Buffer.of(zeros, device)
        owner = ort.OrtValue.ortvalue_from_shape_and_type(
            shape, dtype.onnx, *_kind_and_number(device)
        )
        owner.update_inplace(zeros)
        return Buffer(owner, spec.dtype, shape, owner.data_ptr(), device)

    @staticmethod
    def of(array: Array, device: str) -> Buffer:
        """A copy of `array` on `device`."""
        values = np.array(array, order="C")
        owner = ort.OrtValue.ortvalue_from_numpy(values, *_kind_and_number(device))
        dtype = values.dtype.name
        if device == "cpu":
            # `owner` uses the memory of the array.
            return HostBuffer(owner, dtype, values.shape, owner.data_ptr(), device, values)
        if device in DEVICES_WITHOUT_ADDRESSES:
            return Handle(owner, dtype, values.shape, 0, device)
        return Buffer(owner, dtype, values.shape, owner.data_ptr(), device)

    @property
    def itemsize(self) -> int:
        """The number of bytes of a number."""
        return DTYPES[self.dtype].itemsize

    def rows(self, start: int, count: int = 1) -> Buffer:
        """A number of rows from `start` on, over the same memory."""
        if start == 0 and count == self.shape[0]:
            return self
        step = math.prod(self.shape[1:]) * self.itemsize
        return self._view((count, *self.shape[1:]), self.address + start * step)

    def reshaped(self, *shape: int) -> Buffer:
        """The first numbers in another shape, over the same memory."""
        return self._view(shape, self.address)

    def _view(self, shape: tuple[int, ...], address: int) -> Buffer:
        # `dataclasses.replace` takes three times as long.
        return type(self)(self.owner, self.dtype, shape, address, self.device)

    def read(self) -> Array:
        """A copy of the values. A `Handle` copies the whole tensor that was allocated, even if it
        is some of its rows."""
        return np.array(_value_at(self).numpy())

    def write(self, array: Array) -> None:
        """Replace the values; on a device, all values of the whole tensor. The address stays."""
        self.owner.update_inplace(np.ascontiguousarray(array))

    def write_at(self, index: Index, values: Any) -> None:
        """Replace the values of some rows, or of some columns of a row. Nothing else is copied to
        the device."""
        part = self._part(index)
        if math.prod(part.shape) > 0:
            given = np.broadcast_to(np.asarray(values, DTYPES[self.dtype].numpy), part.shape)
            _value_at(part).update_inplace(np.ascontiguousarray(given))

    def _part(self, index: Index) -> Buffer:
        """The contiguous memory at an index."""
        row, columns = index if isinstance(index, tuple) else (index, None)
        rows = slice(row, row + 1) if isinstance(row, int) else row
        first, end, _ = rows.indices(self.shape[0])
        part = self.rows(first, max(end - first, 0))
        if columns is None:
            return part
        first, end, _ = columns.indices(self.shape[1])
        step = math.prod(self.shape[2:]) * self.itemsize
        return replace(
            part,
            shape=(1, max(end - first, 0), *self.shape[2:]),
            address=part.address + first * step,
        )

    def clear_row(self, row: int) -> None:
        """Write zeros over a row; on a device, from a buffer of zeros that stays there."""
        copy_on_device(_zeros(self.shape[1:], self.dtype, self.device), self.rows(row))

    def copy_row(
        self, source: int, target: int, index: Any = ..., *, of: Buffer | None = None
    ) -> None:
        """Copy a row over another row.

        Args:
            source: The row to copy.
            target: The row of this tensor that is replaced.
            index: A NumPy index of the row; the other values need not be copied.
            of: The tensor that has the row `source`; by default this tensor.
        """
        copy_on_device((of or self).rows(source), self.rows(target))

    def read_row(self, row: int) -> Array:
        """The values of a row, without the batch axis: the memory itself on the CPU, otherwise a
        copy."""
        plain = self._as_plain()
        copied = Buffer.of(np.zeros((1, *self.shape[1:]), plain.dtype), self.device)
        copy_on_device(plain.rows(row), copied)
        result: Array = copied.read()[0]
        return result.view(DTYPES[self.dtype].numpy)

    def write_columns(self, row: int, parts: Iterable[tuple[slice, Array]]) -> None:
        """Write arrays to columns of a row, along its second axis. The other columns may change."""
        whole = np.zeros((1, *self.shape[1:]), DTYPES[self.dtype].numpy)
        for columns, values in parts:
            whole[0][:, columns] = values
        self._write_row(row, whole)

    def _write_row(self, row: int, whole: Array) -> None:
        plain = self._as_plain()
        copy_on_device(Buffer.of(whole.view(plain.dtype), self.device), plain.rows(row))

    def _as_plain(self) -> Buffer:
        """The same memory with a dtype of the same size that NumPy has. A copy does not interpret
        the bits."""
        return replace(self, dtype="float16") if self.dtype == "bfloat16" else self

    def swap_rows(self, one: int, other: int, columns: tuple[int, int] | None = None) -> None:
        """Swap two rows on the CPU. columns: The numbers of columns of each row to swap, from the
        start of its second axis; by default all."""
        raise NotImplementedError(self.device)

    def bind_input(self, binding: ort.IOBinding, name: str) -> None:
        place = _kind_and_number(self.device)
        binding.bind_input(name, *place, DTYPES[self.dtype].onnx, self.shape, self.address)

    def bind_output(self, binding: ort.IOBinding, name: str) -> None:
        place = _kind_and_number(self.device)
        binding.bind_output(name, *place, DTYPES[self.dtype].onnx, self.shape, self.address)


@dataclass(frozen=True, slots=True)
class HostBuffer(Buffer):
    """Memory of the CPU.

    Attributes:
        values: An array over the memory.
    """

    values: Array = field(compare=False)

    def _view(self, shape: tuple[int, ...], address: int) -> Buffer:
        first = (address - self.address) // self.itemsize
        values = self.values.reshape(-1)[first : first + math.prod(shape)].reshape(shape)
        return HostBuffer(self.owner, self.dtype, shape, address, self.device, values)

    def read(self) -> Array:
        return self.values.copy()

    def write(self, array: Array) -> None:
        self.values[...] = array

    def write_at(self, index: Index, values: Any) -> None:
        self.values[index] = values

    def clear_row(self, row: int) -> None:
        self.values[row] = 0

    def copy_row(
        self, source: int, target: int, index: Any = ..., *, of: Buffer | None = None
    ) -> None:
        self.values[target][index] = (of or self).read_row(source)[index]

    def read_row(self, row: int) -> Array:
        result: Array = self.values[row]
        return result

    def write_columns(self, row: int, parts: Iterable[tuple[slice, Array]]) -> None:
        for columns, values in parts:
            self.values[row][:, columns] = values

    def swap_rows(self, one: int, other: int, columns: tuple[int, int] | None = None) -> None:
        values = self.values
        if columns is None:
            values[[one, other]] = values[[other, one]]
            return
        aside = values[other][:, : columns[1]].copy()
        values[other][:, : columns[0]] = values[one][:, : columns[0]]
        values[one][:, : columns[1]] = aside


class Handle(Buffer):
    """Memory of a device whose tensors have no addresses, such as WebGPU: tensors are bound whole.

    `address` counts from the start of `owner`. Some rows of a tensor are a part: on the device,
    `take` copies them to a separate tensor for a graph, and `put` copies them back.
    """

    @property
    def is_part(self) -> bool:
        """Whether this is only some rows of the tensor."""
        size: int = self.owner.tensor_size_in_bytes()
        return math.prod(self.shape) * self.itemsize != size

    def staged(self) -> ort.OrtValue:
        """A tensor of the part's shape."""
        return ort.OrtValue.ortvalue_from_shape_and_type(
            self.shape, DTYPES[self.dtype].onnx, self.device
        )

    def take(self, value: ort.OrtValue) -> ort.OrtValue:
        """Copy these rows of the tensor to `value`, and return it."""
        self._run(small_graphs.rows(DTYPES[self.dtype].onnx), self._numbers(), value)
        return value

    def put(self, value: ort.OrtValue) -> None:
        """Copy `value` to these rows of the tensor."""
        graph = small_graphs.rows_replaced(DTYPES[self.dtype].onnx)
        self._run(graph, self._numbers()[:, None], self.owner, new=value)

    def _run(self, graph: bytes, rows: Array, result: ort.OrtValue, **more: ort.OrtValue) -> None:
        session = _session(graph, self.device)
        binding = session.io_binding()
        binding.bind_cpu_input("rows", rows)
        for name, value in {"x": self.owner, **more}.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("y", result)
        session.run_with_iobinding(binding)

    def _numbers(self) -> Array:
        first = self.address // (math.prod(self.shape[1:]) * self.itemsize)
        return np.arange(first, first + self.shape[0])

    def read(self) -> Array:
        return _on_host(self.owner, self.dtype)

    def write_at(self, index: Index, values: Any) -> None:
        """Replace values by way of the host; for small tensors."""
        whole = self.read()
        whole[index] = values
        self.write(whole)

    def clear_row(self, row: int) -> None:
        self.write_columns(row, [])

    def copy_row(
        self, source: int, target: int, index: Any = ..., *, of: Buffer | None = None
    ) -> None:
        given = _part_of(of or self, source)
        _part_of(self, target).put(given.take(given.staged()))

    def read_row(self, row: int) -> Array:
        part = _part_of(self, row)
        whole: Array = _on_host(part.take(part.staged()), self.dtype)[0]
        return whole

    def _write_row(self, row: int, whole: Array) -> None:
        _part_of(self, row).put(ort.OrtValue.ortvalue_from_numpy(whole, self.device))

    def bind_input(self, binding: ort.IOBinding, name: str) -> None:
        assert not self.is_part
        binding.bind_ortvalue_input(name, self.owner)

    def bind_output(self, binding: ort.IOBinding, name: str) -> None:
        assert not self.is_part
        binding.bind_ortvalue_output(name, self.owner)


def _part_of(buffer: Buffer, row: int) -> Handle:
    part = buffer.rows(row)
    assert isinstance(part, Handle)
    return part


def _on_host(value: ort.OrtValue, dtype: str) -> Array:
    copied = np.empty(value.shape(), DTYPES[dtype].numpy)
    ort.copy_tensors([value], [ort.OrtValue.ortvalue_from_numpy(copied)])
    return copied


class RetainedState:
    """The state of every row between calls.

    Most states are updated in place: a graph writes a state's next value to the buffer that it
    read. A state that takes turns has two buffers: a graph reads one `side` and writes the other,
    and `flip` swaps them after a run, so that the newest values can be copied while the next run
    writes. A run over some rows may also write all states in place; then nothing is swapped.
    """

    def __init__(
        self, specs: Mapping[TensorSpec, str], sizes: Mapping[str, int], *, turns: Collection[str]
    ) -> None:
        """Allocate zeros.

        Args:
            specs: Each state and its device.
            sizes: The sizes of the named axes.
            turns: The names of the states with two buffers.
        """
        first = {spec.name: Buffer.allocate(spec, sizes, device) for spec, device in specs.items()}
        second = dict(first)
        for spec, device in specs.items():
            if spec.name in turns:
                second[spec.name] = Buffer.allocate(spec, sizes, device)
        self._sides = [first, second]
        self._turns = list(turns)
        self._retained = [spec.name for spec in specs if not spec.read_only]
        self.side = 0

    def __getitem__(self, name: str) -> Buffer:
        """The current value of a state."""
        return self._sides[self.side][name]

    def inputs(self, rows: range | None = None, *, side: int | None = None) -> dict[str, Buffer]:
        """The values of all states by name. rows: All rows by default. side: The current side by
        default."""
        buffers = self._sides[self.side if side is None else side]
        return dict(buffers) if rows is None else rows_of(buffers, rows)

    def outputs(self, rows: range | None = None) -> dict[str, Buffer]:
        """The memory of all states' next values by the names of outputs. rows: Some rows, which are
        updated in place; by default all."""
        side = self._sides[1 - self.side if rows is None else self.side]
        buffers = {retained_name(name): side[name] for name in self._retained}
        return buffers if rows is None else rows_of(buffers, rows)

    def flip(self, written: range | None = None) -> None:
        """Make the newest values the current values.

        Args:
            written: The rows that the run wrote; by default all. The host copies the values of the
                other rows.
        """
        if written is not None:
            now = self._sides[self.side]
            then = self._sides[1 - self.side]
            for rows in (slice(written.start), slice(written.stop, None)):
                for name in self._turns:
                    then[name].write_at(rows, now[name].read()[rows])
        self.side = 1 - self.side


class SavedRows:
    """Copies of single rows of some states, in numbered places."""

    def __init__(
        self,
        state: RetainedState,
        specs: Mapping[TensorSpec, str],
        sizes: Mapping[str, int],
        places: int,
    ) -> None:
        """Allocate the places.

        Args:
            state: The current state of the rows.
            specs: Each state that is copied, and its device.
            sizes: The sizes of the named axes.
            places: The number of places.
        """
        self._state = state
        self._saved: dict[str, Buffer] = {}
        if places > 0:
            for spec, device in specs.items():
                self._saved[spec.name] = Buffer.allocate(spec, {**sizes, BATCH: places}, device)
        # The number of bytes of a place.
        self.nbytes = 0
        for spec in specs:
            values = math.prod(spec.shape({**sizes, BATCH: 1}))
            self.nbytes += values * DTYPES[spec.dtype].itemsize

    def save(self, row: int, place: int) -> None:
        """Write the current values of a row to a place."""
        states = self._state.inputs()
        for name, saved in self._saved.items():
            saved.copy_row(row, place, of=states[name])

    def read(self, place: int) -> dict[str, Array]:
        """A copy of the values of a place, by name."""
        return {name: saved.read_row(place).copy() for name, saved in self._saved.items()}

    def restore(self, place: int, row: int) -> None:
        """Write the values of a place over the current values of a row."""
        states = self._state.inputs()
        for name, saved in self._saved.items():
            states[name].copy_row(place, row, of=saved)


class OutputRing:
    """The outputs of the newest steps, in places that take turns.

    A step writes the place of its number, while the outputs of up to `steps` earlier steps wait to
    be read together.
    """

    def __init__(
        self, specs: Iterable[TensorSpec], sizes: Mapping[str, int], device: str, steps: int
    ) -> None:
        """Allocate zeros.

        Args:
            specs: The outputs.
            sizes: The sizes of the named axes.
            device: The device of the outputs.
            steps: The largest number of steps that are read together.
        """
        self.steps = steps
        # A place is bound together with one of the two sides of the states that take turns, so the
        # number of places is even.
        places = steps + 1 + (steps + 1) % 2
        self._places = [
            {spec.name: Buffer.allocate(spec, sizes, device) for spec in specs}
            for _ in range(places)
        ]
        # The memory of joined outputs is allocated when several steps are first read from a device.
        self._joined: dict[str, Buffer] = {}

    def __len__(self) -> int:
        """The number of places."""
        return len(self._places)

    def place(self, step: int) -> int:
        """The number of a step's place."""
        return step % len(self._places)

    def of(self, step: int) -> dict[str, Buffer]:
        """The memory that a step writes, by the names of outputs."""
        return self._places[self.place(step)]

    def swap_rows(self, one: int, other: int) -> None:
        """Swap two rows of every place."""
        for buffers in self._places:
            for buffer in buffers.values():
                buffer.swap_rows(one, other)

    def read(self, steps: range, name: str, rows: range) -> Array:
        """A copy of an output of some steps, [steps, rows, ...].

        A device needs a single copy for any number of steps, because a graph joins the outputs
        there.
        """
        outputs = [self.of(step)[name] for step in steps]
        if outputs[0].device not in DEVICES_WITHOUT_ADDRESSES:
            outputs = [output.rows(rows.start, len(rows)) for output in outputs]
            rows = range(len(rows))
        in_host = [output.values for output in outputs if isinstance(output, HostBuffer)]
        if in_host:
            return np.stack(in_host)
        if len(outputs) == 1:
            values = outputs[0].read()
        else:
            values = self._read_joined(name, outputs)
        by_step = values.reshape(-1, *outputs[0].shape)
        result: Array = by_step[: len(outputs), rows.start : rows.stop]
        return result

    def _read_joined(self, name: str, outputs: list[Buffer]) -> Array:
        # With padding, one graph and one memory serve any number of steps.
        padding = outputs[-1:] * (self.steps - len(outputs))
        outputs = outputs + padding
        own = self.of(0)[name]
        if name not in self._joined:
            zeros = np.zeros((self.steps * own.shape[0], *own.shape[1:]), DTYPES[own.dtype].numpy)
            self._joined[name] = Buffer.of(zeros, own.device)
        joined = self._joined[name].reshaped(self.steps * outputs[0].shape[0], *own.shape[1:])
        inputs = {f"x{index}": output for index, output in enumerate(outputs)}
        graph = small_graphs.concatenated(DTYPES[own.dtype].onnx, len(outputs))
        run_on_device(graph, inputs, {"y": joined})
        return joined.read()


def _kind_and_number(device: str) -> tuple[str, int]:
    """ONNX Runtime's name and number of a device: "cuda:1" is ("cuda", 1)."""
    kind, _, number = device.partition(":")
    return kind, int(number or 0)


def copy_on_device(source: Buffer, target: Buffer) -> None:
    """Copy memory to memory of the same dtype and shape, on the same device or another device of
    the same kind. A graph with an Identity copies it without the host."""
    assert (source.dtype, source.shape) == (target.dtype, target.shape)
    if source.device in DEVICES_WITHOUT_ADDRESSES:
        ort.copy_tensors([source.owner], [target.owner])
    else:
        _run_small(
            small_graphs.identity(DTYPES[source.dtype].onnx),
            source.device,
            {"x": source},
            {"y": target},
        )


def run_on_device(
    graph: bytes, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]
) -> None:
    """Run a small graph over buffers of a single device, and wait for its end."""
    (device,) = {buffer.device for buffer in (*inputs.values(), *outputs.values())}
    _run_small(graph, device, inputs, outputs)


def _run_small(
    graph: bytes, device: str, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]
) -> None:
    session = _session(graph, device)
    binding = session.io_binding()
    for name, buffer in inputs.items():
        buffer.bind_input(binding, name)
    for name, buffer in outputs.items():
        buffer.bind_output(binding, name)
    session.run_with_iobinding(binding)


@cache
def _zeros(shape: tuple[int, ...], dtype: str, device: str) -> Buffer:
    """A row of zeros."""
    return Buffer.of(np.zeros((1, *shape), DTYPES[dtype].numpy), device)


@cache
def _session(graph: bytes, device: str) -> ort.InferenceSession:
    # A node that copies needs no further threads.
    options = session_options(intra_op_num_threads=1)
    if device in DEVICES_WITHOUT_ADDRESSES:
        add_plugin(options, _PROVIDERS[device], {"enableInt64": "1"})
        return ort.InferenceSession(graph, options)
    kind, number = _kind_and_number(device)
    chosen = [{"device_id": str(number)}] if number != 0 else None
    return ort.InferenceSession(
        graph, options, providers=[_PROVIDERS[kind]], provider_options=chosen
    )


def _value_at(buffer: Buffer) -> ort.OrtValue:
    """A value over the memory of a buffer, which may lie within its owner's memory: a binding
    creates it. One session serves every dtype, because the graph does not run."""
    graph = small_graphs.identity(DTYPES["float32"].onnx)
    binding = _session(graph, buffer.device).io_binding()
    buffer.bind_output(binding, "y")
    (value,) = binding.get_outputs()
    return value


def rows_of(buffers: Mapping[str, Buffer], rows: range) -> dict[str, Buffer]:
    """Some rows of each buffer, over the same memory."""
    return {name: buffer.rows(rows.start, len(rows)) for name, buffer in buffers.items()}
