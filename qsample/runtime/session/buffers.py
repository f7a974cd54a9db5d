"""The memory that graphs are bound to: `Buffer`, and `RetainedState`, what every row keeps between calls."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from qsample.contract import TensorSpec, retained_name
from qsample.tensors import DTYPES, Array, sparse_zeros

_PROVIDERS: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of one tensor, or some rows of it, that graphs are bound to by its address.

    owner: keeps the memory alive. dtype: the contract's name. device: "cpu" or "cuda".
    """

    owner: ort.OrtValue
    dtype: str
    shape: tuple[int, ...]
    address: int
    device: str

    @classmethod
    def allocate(cls, spec: TensorSpec, sizes: Mapping[str, int], device: str) -> Buffer:
        """Zeros for `spec`; `sizes` gives each of its named axes. On the CPU, the system hands the memory out as it is
        touched: a cache takes what was written to it."""
        shape = spec.shape(dict(sizes))
        dtype = DTYPES[spec.dtype]
        zeros = sparse_zeros(shape, dtype.numpy)
        owner = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(zeros, dtype.onnx) if device == "cpu" else None
        if owner is None:
            owner = ort.OrtValue.ortvalue_from_shape_and_type(shape, dtype.onnx, device)
            owner.update_inplace(zeros)
        return cls(owner, spec.dtype, shape, owner.data_ptr(), device)

    @classmethod
    def of(cls, array: Array, device: str) -> Buffer:
        """A copy of `array` on `device`."""
        owner = ort.OrtValue.ortvalue_from_numpy(np.array(array, order="C"), device)
        return cls(owner, array.dtype.name, array.shape, owner.data_ptr(), device)

    def rows(self, start: int, count: int = 1) -> Buffer:
        """Rows from `start` on, as a batch of `count` over the same memory."""
        step = math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize
        return replace(self, shape=(count, *self.shape[1:]), address=self.address + start * step)

    def reshaped(self, *shape: int) -> Buffer:
        """As many of its first numbers as `shape` holds, over the same memory."""
        return replace(self, shape=shape)

    def read(self) -> Array:
        """A copy of the whole tensor."""
        return np.array(self.owner.numpy())

    def write(self, array: Array) -> None:
        """Replace the whole tensor's values; the address stays."""
        self.owner.update_inplace(np.ascontiguousarray(array))

    def write_at(self, index: Any, values: Any) -> None:
        """Replace the values at a NumPy index of the whole tensor. Off the CPU, the tensor goes back and forth."""
        whole = self.owner.numpy()  # on the CPU this is the memory itself
        whole[index] = values
        if self.device != "cpu":
            self.write(whole)

    def copy_row(self, source: int, target: int, index: Any = ...) -> None:
        """Write row `source` over row `target`, at least what is at a NumPy index of the row."""
        if self.device == "cpu" and self.dtype != "bfloat16":  # which NumPy does not have
            whole = self.owner.numpy()
            whole[target][index] = whole[source][index]
        else:
            copy_on_device(self.rows(source), self.rows(target))

    def bind_input(self, binding: ort.IOBinding, name: str) -> None:
        binding.bind_input(name, self.device, 0, DTYPES[self.dtype].onnx, self.shape, self.address)

    def bind_output(self, binding: ort.IOBinding, name: str) -> None:
        binding.bind_output(name, self.device, 0, DTYPES[self.dtype].onnx, self.shape, self.address)


class RetainedState:
    """The state of every row between calls.

    In place, a graph writes a state's next value into the buffer that it read. A state that takes turns has two
    buffers: a graph reads one `side` and writes the other, and `flip` swaps them after a run, so that what was written
    last can be copied while the next run writes. Some rows alone are always written in place: swapping them would leave
    the others behind.
    """

    def __init__(self, specs: Mapping[TensorSpec, str], sizes: Mapping[str, int], *, turns: Collection[str]) -> None:
        """Every state is zeros. specs: each state and the device it lives on. sizes: of every named axis of the states.
        turns: names of the states with two buffers."""
        first = {spec.name: Buffer.allocate(spec, sizes, device) for spec, device in specs.items()}
        second = {
            spec.name: Buffer.allocate(spec, sizes, device) if spec.name in turns else first[spec.name]
            for spec, device in specs.items()
        }
        self._sides = [first, second]
        self._retained = [spec.name for spec in specs if not spec.read_only]
        self.side = 0

    def inputs(self, rows: range | None = None) -> dict[str, Buffer]:
        """State name → its current value: of all rows, or of some."""
        return _rows(self._sides[self.side], rows)

    def outputs(self, rows: range | None = None) -> dict[str, Buffer]:
        """Output name → where the next value of its state goes: of all rows, or of some (then in place)."""
        side = self._sides[1 - self.side if rows is None else self.side]
        return _rows({retained_name(name): side[name] for name in self._retained}, rows)

    def flip(self) -> None:
        """Make the values that were just written the current ones."""
        self.side = 1 - self.side

    def read(self, name: str, side: int | None = None) -> Array:
        """A copy of a state, every row of it: its current value, or that of a given side."""
        return self._sides[self.side if side is None else side][name].read()

    def write_at(self, name: str, index: Any, values: Any) -> None:
        """Replace the current values of a state at a NumPy index."""
        self._sides[self.side][name].write_at(index, values)

    def copy_row(self, name: str, source: int, target: int, index: Any = ...) -> None:
        """Write the current values of a row over those of another; see `Buffer.copy_row`."""
        self._sides[self.side][name].copy_row(source, target, index)


def copy_on_device(source: Buffer, target: Buffer) -> None:
    """Copy memory of one dtype and shape where it is, without a way over the host: a graph of one Identity does it."""
    assert (source.dtype, source.shape, source.device) == (target.dtype, target.shape, target.device)
    session = _identity(DTYPES[source.dtype].onnx, source.device)
    binding = session.io_binding()
    source.bind_input(binding, "x")
    target.bind_output(binding, "y")
    session.run_with_iobinding(binding)


@cache
def _identity(onnx_type: int, device: str) -> ort.InferenceSession:
    """Y = Identity(x). Written by hand, as onnx is not there at run time; the fields are those of onnx.proto."""
    value = [_field(2, _field(1, _field(1, onnx_type)))]  # type { tensor_type { elem_type } }
    node = [_field(1, b"x"), _field(2, b"y"), _field(4, b"Identity")]
    graph = [
        _field(1, *node),
        _field(2, b"copy"),
        _field(11, _field(1, b"x"), *value),
        _field(12, _field(1, b"y"), *value),
    ]
    model = b"".join([_field(1, 10), _field(7, *graph), _field(8, _field(2, 20))])
    return ort.InferenceSession(model, providers=[_PROVIDERS[device]])


def _field(number: int, *content: int | bytes) -> bytes:
    """A field of a protobuf message: a small number, or bytes that follow their length (below 128)."""
    if isinstance(content[0], int):
        return bytes([number << 3, content[0]])
    body = b"".join(part for part in content if isinstance(part, bytes))
    return bytes([number << 3 | 2, len(body)]) + body


def _rows(buffers: Mapping[str, Buffer], rows: range | None) -> dict[str, Buffer]:
    if rows is None:
        return dict(buffers)
    return {name: buffer.rows(rows.start, len(rows)) for name, buffer in buffers.items()}
