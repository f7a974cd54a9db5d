"""The memory that graphs are bound to: `Buffer`; `RetainedState`, the state of every row; `SavedRows`, copies of it;
`OutputRing`, what the newest steps returned."""

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

Index = int | slice | tuple[int, slice]  # a row, adjacent rows, columns of a row

_PROVIDERS: Final = {"cpu": CPU, "cuda": CUDA, "webgpu": WEBGPU}
WITHOUT_ADDRESSES: Final = ("webgpu",)  # devices whose memory is a handle


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of a tensor, or of some rows of it, that graphs are bound to by its address. This class is a device's
    memory: small graphs copy rows there. `HostBuffer` is NumPy's, `Handle` has no address. An array of bfloat16,
    missing in NumPy, has uint16 of the same bits. `owner` keeps the memory alive; `dtype` is the contract's name;
    `address` is the first number's, in bytes; `device` is "cpu", "cuda" (a further GPU: "cuda:1") or "webgpu"."""

    owner: ort.OrtValue
    dtype: str
    shape: tuple[int, ...]
    address: int
    device: str

    @staticmethod
    def allocate(spec: TensorSpec, sizes: Mapping[str, int], device: str) -> Buffer:
        """Zeros for `spec`; `sizes` gives each of its named axes. On the CPU, the system hands the memory out as it is
        touched: a cache uses no more than the tokens in it need."""
        shape, dtype = spec.shape(dict(sizes)), DTYPES[spec.dtype]
        zeros = sparse_zeros(shape, dtype.numpy)
        if device == "cpu":
            owner = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(zeros, dtype.onnx)
            return HostBuffer(owner, spec.dtype, shape, owner.data_ptr(), device, zeros)
        if device in WITHOUT_ADDRESSES:
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
        owner, dtype = (
            ort.OrtValue.ortvalue_from_numpy(values, *_kind_and_number(device)),
            values.dtype.name,
        )
        if device == "cpu":  # `owner` is over the array's memory
            return HostBuffer(owner, dtype, values.shape, owner.data_ptr(), device, values)
        if device in WITHOUT_ADDRESSES:
            return Handle(owner, dtype, values.shape, 0, device)
        return Buffer(owner, dtype, values.shape, owner.data_ptr(), device)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return DTYPES[self.dtype].itemsize

    def rows(self, start: int, count: int = 1) -> Buffer:
        """`count` rows from `start` on, over the same memory."""
        if not start and count == self.shape[0]:
            return self
        step = math.prod(self.shape[1:]) * self.itemsize
        return self._view((count, *self.shape[1:]), self.address + start * step)

    def reshaped(self, *shape: int) -> Buffer:
        """Its first numbers in another shape, over the same memory."""
        return self._view(shape, self.address)

    def _view(self, shape: tuple[int, ...], address: int) -> Buffer:
        return type(self)(
            self.owner, self.dtype, shape, address, self.device
        )  # `replace` takes three times as long

    def read(self) -> Array:
        """A copy of the values; of a `Handle`, of the whole tensor that was allocated, whichever rows these are."""
        return np.array(_value_at(self).numpy())

    def write(self, array: Array) -> None:
        """Replace the values, of the whole tensor on a device; the address stays."""
        self.owner.update_inplace(np.ascontiguousarray(array))

    def write_at(self, index: Index, values: Any) -> None:
        """Replace the values of some rows, or of some columns of a row. Nothing else is copied to the device."""
        part = self._part(index)
        if math.prod(part.shape):
            given = np.broadcast_to(np.asarray(values, DTYPES[self.dtype].numpy), part.shape)
            _value_at(part).update_inplace(np.ascontiguousarray(given))

    def _part(self, index: Index) -> Buffer:
        """The contiguous memory at an index."""
        row, columns = index if isinstance(index, tuple) else (index, None)
        first, end, _ = (slice(row, row + 1) if isinstance(row, int) else row).indices(
            self.shape[0]
        )
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
        """Write row `source` of the tensor `of`, by default this one, over row `target`. index: a NumPy index of the
        row; nothing else has to be copied."""
        copy_on_device((of or self).rows(source), self.rows(target))

    def read_row(self, row: int) -> Array:
        """The values of a row, of the shape without the batch axis: on the CPU its memory itself, otherwise a copy."""
        plain = self._as_plain()
        copied = Buffer.of(np.zeros((1, *self.shape[1:]), plain.dtype), self.device)
        copy_on_device(plain.rows(row), copied)
        result: Array = copied.read()[0]
        return result.view(DTYPES[self.dtype].numpy)

    def write_columns(self, row: int, parts: Iterable[tuple[slice, Array]]) -> None:
        """Write arrays to columns of a row, along its second axis: `parts`. The other columns may become anything."""
        whole = np.zeros((1, *self.shape[1:]), DTYPES[self.dtype].numpy)
        for columns, values in parts:
            whole[0][:, columns] = values
        self._write_row(row, whole)

    def _write_row(self, row: int, whole: Array) -> None:
        plain = self._as_plain()
        copy_on_device(Buffer.of(whole.view(plain.dtype), self.device), plain.rows(row))

    def _as_plain(self) -> Buffer:
        """The same memory, in a dtype of the same size that NumPy has: a copy does not look at the bits."""
        return replace(self, dtype="float16") if self.dtype == "bfloat16" else self

    def swap_rows(self, one: int, other: int, columns: tuple[int, int] | None = None) -> None:
        """Swap two rows, on the CPU. columns: how many of each, from the start of its second axis; by default all."""
        raise NotImplementedError(self.device)

    def bind_input(self, binding: ort.IOBinding, name: str) -> None:
        place = _kind_and_number(self.device)
        binding.bind_input(name, *place, DTYPES[self.dtype].onnx, self.shape, self.address)

    def bind_output(self, binding: ort.IOBinding, name: str) -> None:
        place = _kind_and_number(self.device)
        binding.bind_output(name, *place, DTYPES[self.dtype].onnx, self.shape, self.address)


@dataclass(frozen=True, slots=True)
class HostBuffer(Buffer):
    """Memory of the CPU. values: that memory, of `shape`."""

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
    """Memory of a device that hands out tensors without addresses, such as WebGPU's: they are bound whole. `address`
    counts from the start of `owner`. Some rows are a part: for a graph, `take` copies them to a separate tensor and
    `put` back, on the device."""

    @property
    def is_part(self) -> bool:
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
        """Through the host, for small tensors."""
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
    """The state of every row between calls. In place, a graph writes a state's next value into the buffer that it read.
    A state that takes turns has two buffers: a graph reads one `side` and writes the other, and `flip` swaps them after
    a run, so that the newest values can be copied while the next run writes. Or a run over some rows writes them in
    place, and nothing is swapped."""

    def __init__(
        self, specs: Mapping[TensorSpec, str], sizes: Mapping[str, int], *, turns: Collection[str]
    ) -> None:
        """Allocate zeros. specs: each state and its device. turns: names of the states with two buffers."""
        first = {spec.name: Buffer.allocate(spec, sizes, device) for spec, device in specs.items()}
        second = {
            spec.name: Buffer.allocate(spec, sizes, device)
            if spec.name in turns
            else first[spec.name]
            for spec, device in specs.items()
        }
        self._sides = [first, second]
        self._turns = list(turns)
        self._retained = [spec.name for spec in specs if not spec.read_only]
        self.side = 0

    def __getitem__(self, name: str) -> Buffer:
        """The current value of a state."""
        return self._sides[self.side][name]

    def inputs(self, rows: range | None = None, *, side: int | None = None) -> dict[str, Buffer]:
        """State name → its value, now or on a given side: all rows, or some of them."""
        buffers = self._sides[self.side if side is None else side]
        return dict(buffers) if rows is None else rows_of(buffers, rows)

    def outputs(self, rows: range | None = None) -> dict[str, Buffer]:
        """Output name → the memory of its state's next value: all rows, or, in place, some of them."""
        side = self._sides[1 - self.side if rows is None else self.side]
        buffers = {retained_name(name): side[name] for name in self._retained}
        return buffers if rows is None else rows_of(buffers, rows)

    def flip(self, written: range | None = None) -> None:
        """Make the newest values, of all rows or of `written`, the current values. The host has to read the memory to
        keep the values of the other rows."""
        now, then = self._sides[self.side], self._sides[1 - self.side]
        others = [] if written is None else [slice(written.start), slice(written.stop, None)]
        for rows in others:
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
        """state: holds the rows. specs: each of these states and its device."""
        self._state = state
        self._saved = {
            spec.name: Buffer.allocate(spec, {**sizes, BATCH: places}, device)
            for spec, device in specs.items()
            if places
        }
        # Bytes of a place.
        self.nbytes = sum(
            math.prod(spec.shape({**sizes, BATCH: 1})) * DTYPES[spec.dtype].itemsize
            for spec in specs
        )

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
    """The outputs of the newest steps, in places that take turns. A step is known by its number: it writes the place of
    that number, while the outputs of the `steps` steps before it wait to be read, together."""

    def __init__(
        self, specs: Iterable[TensorSpec], sizes: Mapping[str, int], device: str, steps: int
    ) -> None:
        """Allocate zeros. steps: most steps that are read together. With the states that take turns, a place has to be
        bound to one of their two sides, so the number of places is even."""
        self.steps = steps
        self._places = [
            {spec.name: Buffer.allocate(spec, sizes, device) for spec in specs}
            for _ in range(steps + 1 + (steps + 1) % 2)
        ]
        self._joined: dict[str, Buffer] = {}  # made when several steps are first read from a device

    def __len__(self) -> int:
        """The number of places."""
        return len(self._places)

    def place(self, step: int) -> int:
        """The number of a step's place."""
        return step % len(self._places)

    def of(self, step: int) -> dict[str, Buffer]:
        """Output name → the memory that a step writes."""
        return self._places[self.place(step)]

    def swap_rows(self, one: int, other: int) -> None:
        for buffers in self._places:
            for buffer in buffers.values():
                buffer.swap_rows(one, other)

    def read(self, steps: range, name: str, rows: range) -> Array:
        """A copy of an output of some steps, [steps, rows, ...]. From a device it is a single copy for any number:
        a graph puts them next to each other there."""
        given = [self.of(step)[name] for step in steps]
        if given[0].device not in WITHOUT_ADDRESSES:
            given, rows = [buffer.rows(rows.start, len(rows)) for buffer in given], range(len(rows))
        in_host = [buffer.values for buffer in given if isinstance(buffer, HostBuffer)]
        if in_host:
            return np.stack(in_host)
        values = given[0].read() if len(given) == 1 else self._read_together(name, given)
        result: Array = values.reshape(-1, *given[0].shape)[: len(given), rows.start : rows.stop]
        return result

    def _read_together(self, name: str, given: list[Buffer]) -> Array:
        given = given + given[-1:] * (
            self.steps - len(given)
        )  # the same graph and memory for any number
        own = self.of(0)[name]
        if name not in self._joined:
            zeros = np.zeros((self.steps * own.shape[0], *own.shape[1:]), DTYPES[own.dtype].numpy)
            self._joined[name] = Buffer.of(zeros, own.device)
        joined = self._joined[name].reshaped(self.steps * given[0].shape[0], *own.shape[1:])
        inputs = {f"x{index}": buffer for index, buffer in enumerate(given)}
        run_on_device(
            small_graphs.concatenated(DTYPES[own.dtype].onnx, len(given)), inputs, {"y": joined}
        )
        return joined.read()


def _kind_and_number(device: str) -> tuple[str, int]:
    """ONNX Runtime's names of a device: "cuda:1" is ("cuda", 1)."""
    kind, _, number = device.partition(":")
    return kind, int(number or 0)


def copy_on_device(source: Buffer, target: Buffer) -> None:
    """Copy memory to memory of its dtype and shape, maybe of another device of the kind, not through the host: a graph
    of an Identity does it."""
    assert (source.dtype, source.shape) == (target.dtype, target.shape)
    if source.device in WITHOUT_ADDRESSES:
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
    """Run a small graph over buffers of a single device, to its end."""
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
    options = session_options(intra_op_num_threads=1)  # a node that copies needs no threads
    if device in WITHOUT_ADDRESSES:
        add_plugin(options, _PROVIDERS[device], {"enableInt64": "1"})
        return ort.InferenceSession(graph, options)
    kind, number = _kind_and_number(device)
    chosen = [{"device_id": str(number)}] if number else None
    return ort.InferenceSession(
        graph, options, providers=[_PROVIDERS[kind]], provider_options=chosen
    )


def _value_at(buffer: Buffer) -> ort.OrtValue:
    """A value over the buffer's memory, in the middle of its owner's: a binding creates it. Its session serves every
    dtype, because the graph does not run."""
    graph = small_graphs.identity(DTYPES["float32"].onnx)
    binding = _session(graph, buffer.device).io_binding()
    buffer.bind_output(binding, "y")
    (value,) = binding.get_outputs()
    return value


def rows_of(buffers: Mapping[str, Buffer], rows: range) -> dict[str, Buffer]:
    """Those rows of each buffer, over the same memory."""
    return {name: buffer.rows(rows.start, len(rows)) for name, buffer in buffers.items()}
