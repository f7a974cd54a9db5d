"""Tensor specs and sizes enter; the memory that graphs are bound to leaves: `Buffer`s and the `RetainedState`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from qsample.contract import CAPACITY_INPUT, SEED, TensorSpec, retained_name

Array = npt.NDArray[Any]

# ONNX's TensorProto.DataType and the bytes of an element. NumPy has no bfloat16, so buffers carry ONNX's number.
_ELEMENTS: Final = {
    "float32": (1, 4),
    "int8": (3, 1),
    "int32": (6, 4),
    "int64": (7, 8),
    "bool": (9, 1),
    "float16": (10, 2),
    "bfloat16": (16, 2),
}


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
        """Uninitialised memory for `spec`; `sizes` gives each of its named axes."""
        shape = spec.shape(dict(sizes))
        owner = ort.OrtValue.ortvalue_from_shape_and_type(shape, _ELEMENTS[spec.dtype][0], device)
        return cls(owner, spec.dtype, shape, owner.data_ptr(), device)

    @classmethod
    def of(cls, array: Array, device: str) -> Buffer:
        """A copy of `array` on `device`."""
        owner = ort.OrtValue.ortvalue_from_numpy(np.array(array, order="C"), device)
        return cls(owner, array.dtype.name, array.shape, owner.data_ptr(), device)

    def row(self, index: int) -> Buffer:
        """Row `index` alone, as a batch of one over the same memory."""
        shape = (1, *self.shape[1:])
        step = math.prod(shape) * _ELEMENTS[self.dtype][1]
        return Buffer(self.owner, self.dtype, shape, self.address + index * step, self.device)

    def read(self) -> Array:
        """A copy of the whole tensor."""
        return np.array(self.owner.numpy())

    def write(self, array: Array) -> None:
        """Replace the whole tensor's values; the address stays."""
        self.owner.update_inplace(np.ascontiguousarray(array))

    def bind_input(self, binding: ort.IOBinding, name: str) -> None:
        binding.bind_input(name, self.device, 0, _ELEMENTS[self.dtype][0], self.shape, self.address)

    def bind_output(self, binding: ort.IOBinding, name: str) -> None:
        binding.bind_output(name, self.device, 0, _ELEMENTS[self.dtype][0], self.shape, self.address)


class RetainedState:
    """The state of every row between calls.

    In place, a graph writes a state's next value into the buffer that it read. Otherwise two sets of buffers take
    turns: `inputs` are the current values, `outputs` where the next ones go, and `flip` swaps them after a run. Rows
    are always written in place: swapping one row would leave the others behind.
    """

    def __init__(self, specs: Mapping[TensorSpec, str], sizes: Mapping[str, int], *, in_place: bool) -> None:
        """specs: each state and the device it lives on. sizes: of every named axis of the states."""
        first = {spec.name: Buffer.allocate(spec, sizes, device) for spec, device in specs.items()}
        self._sides = [first, first]
        if not in_place:
            self._sides[1] = {
                spec.name: first[spec.name] if spec.read_only else Buffer.allocate(spec, sizes, device)
                for spec, device in specs.items()
            }
        self._retained = [spec.name for spec in specs if not spec.read_only]
        self._in_place = in_place
        self.side = 0

    def start(self, initial_state: ort.InferenceSession, seeds: Iterable[int], capacity: int) -> None:
        """Give every row the starting state of its seed."""
        binding = initial_state.io_binding()
        binding.bind_cpu_input(SEED.name, np.array(list(seeds), dtype=np.int64))
        binding.bind_cpu_input(CAPACITY_INPUT.name, np.array(capacity, dtype=np.int64))
        for name, buffer in self.inputs().items():
            buffer.bind_output(binding, name)
        initial_state.run_with_iobinding(binding)

    def inputs(self, row: int | None = None) -> dict[str, Buffer]:
        """State name → its current value: of all rows, or of one."""
        return _rows(self._sides[self.side], row)

    def outputs(self, row: int | None = None) -> dict[str, Buffer]:
        """Output name → where the next value of its state goes: of all rows, or of one (then in place)."""
        side = self._sides[1 - self.side if row is None else self.side]
        return _rows({retained_name(name): side[name] for name in self._retained}, row)

    def flip(self) -> None:
        """Make the values that were just written the current ones."""
        if not self._in_place:
            self.side = 1 - self.side

    def read(self, name: str) -> Array:
        """A copy of the current value of a state, every row of it."""
        return self._sides[self.side][name].read()


def _rows(buffers: Mapping[str, Buffer], row: int | None) -> dict[str, Buffer]:
    return {name: buffer if row is None else buffer.row(row) for name, buffer in buffers.items()}
