"""An `Interface` enters; `initial_state.onnx` leaves: seeds and a capacity in, the starting value of every state out.

Every state starts as zeros but `noise`: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC'11) in counter mode. Built node by node, not traced, because the capacity is a value that sets shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from qsample.contract import (
    BATCH,
    CAPACITY,
    CAPACITY_INPUT,
    NOISE,
    PHILOX_UNIFORM_SCALE,
    SEED,
    VOCAB,
    Interface,
    TensorSpec,
)
from qsample.exporters.graph.opset import OPSET

_IR_VERSION = 10
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_WORDS = 4  # that one counter gives

Words = Sequence[ir.Value]


class Builder:
    """Appends nodes to a graph; Python ints become scalar int64 constants, each stored once."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._constants: dict[int, ir.Value] = {}

    def op(self, op_type: str, *inputs: ir.Value | int, **attributes: Any) -> ir.Value:
        values = [self.constant(value) if isinstance(value, int) else value for value in inputs]
        return self.tape.op(op_type, values, attributes=attributes or None)

    def constant(self, value: int) -> ir.Value:
        if value not in self._constants:
            self._constants[value] = self.array(np.array(value, dtype=np.int64), f"int64_{len(self._constants)}")
        return self._constants[value]

    def array(self, array: np.ndarray, name: str) -> ir.Value:
        return self.tape.initializer(ir.tensor(array, name=name))

    def modulo_2_32(self, value: ir.Value) -> ir.Value:
        return self.op("Mod", value, 2**32)


def build_initial_state(interface: Interface) -> ir.Model:
    """`initial_state.onnx`.

    Inputs: `seed` int64 [B], any value; `capacity` int64 scalar, T >= 1. Outputs: every retained state, under its name.
    """
    builder = Builder()
    seed, capacity = _input(SEED), _input(CAPACITY_INPUT)
    axis0 = builder.array(np.zeros(1, dtype=np.int64), "axis0")
    sizes = {BATCH: builder.op("Shape", seed), CAPACITY: builder.op("Unsqueeze", capacity, axis0)}
    sizes[VOCAB] = builder.array(np.array([interface.vocab_size], dtype=np.int64), "vocab_size")

    outputs = []
    for spec in interface.initial_state.outputs:
        is_noise = spec.name == NOISE.name
        value = _noise(builder, seed, capacity, sizes) if is_noise else _zeros(builder, spec, sizes)
        value.name = spec.name
        value.dtype = _dtype(spec)
        value.shape = ir.Shape([interface.vocab_size if axis == VOCAB else axis for axis in spec.axes])
        outputs.append(value)
    graph = ir.Graph(
        [seed, capacity],
        outputs,
        nodes=builder.tape.nodes,
        initializers=builder.tape.initializers,
        opset_imports={"": OPSET},
        name="initial_state",
    )
    return ir.Model(graph, ir_version=_IR_VERSION, producer_name="qsample")


def philox(builder: Builder, counter: Words, key: Words) -> list[ir.Value]:
    """Philox4x32-10: four counter words and two key words in, four random words out.

    All are int64 tensors with values in [0, 2**32) that broadcast together. Signed 64-bit arithmetic is what every
    execution provider has, and no product here leaves it.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_ in range(_ROUNDS):
        if round_ > 0:
            k0 = builder.modulo_2_32(builder.op("Add", k0, _WEYL_INCREMENTS[0]))
            k1 = builder.modulo_2_32(builder.op("Add", k1, _WEYL_INCREMENTS[1]))
        high0, low0 = _multiply(builder, c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(builder, c2, _MULTIPLIERS[1])
        xor = builder.op("BitwiseXor", builder.op("BitwiseXor", high1, c1), k0)
        c2 = builder.op("BitwiseXor", builder.op("BitwiseXor", high0, c3), k1)
        c0, c1, c3 = xor, low1, low0
    return [c0, c1, c2, c3]


def _multiply(builder: Builder, word: ir.Value, multiplier: int) -> tuple[ir.Value, ir.Value]:
    """The high and low 32 bits of the 64-bit product, by halves of the multiplier so that nothing exceeds 2**49."""
    upper = builder.op("Mul", word, multiplier >> 16)
    lower = builder.op("Mul", word, multiplier & 0xFFFF)
    high = builder.op("Div", builder.op("Add", upper, builder.op("Div", lower, 2**16)), 2**16)
    shifted = builder.op("Mul", builder.op("Mod", upper, 2**16), 2**16)
    return high, builder.modulo_2_32(builder.op("Add", shifted, lower))


def _noise(builder: Builder, seed: ir.Value, capacity: ir.Value, sizes: dict[str, ir.Value]) -> ir.Value:
    """u[t] = (word t mod 4 of counter (t div 4, 0, 0, 0) >> 8) * 2**-24 under key (seed mod 2**32, seed div 2**32)."""
    last_axis = builder.array(np.array([-1], dtype=np.int64), "last_axis")
    low = builder.modulo_2_32(seed)
    high = builder.modulo_2_32(builder.op("Div", builder.op("Sub", seed, low), 2**32))
    key = [builder.op("Unsqueeze", half, last_axis) for half in (low, high)]

    blocks = builder.op("Div", builder.op("Add", capacity, _WORDS - 1), _WORDS)
    zero = builder.constant(0)
    words = philox(builder, [builder.op("Range", 0, blocks, 1), zero, zero, zero], key)
    stacked = builder.op("Concat", *(builder.op("Unsqueeze", word, last_axis) for word in words), axis=-1)
    flat = builder.op("Reshape", stacked, builder.op("Concat", sizes[BATCH], last_axis, axis=0))
    axis1 = builder.array(np.array([1], dtype=np.int64), "axis1")
    start = builder.array(np.array([0], dtype=np.int64), "start")
    bits = builder.op("Slice", builder.op("Div", flat, 2**8), start, sizes[CAPACITY], axis1)
    scale = builder.array(np.array(PHILOX_UNIFORM_SCALE, dtype=np.float32), "scale")
    return builder.op("Mul", builder.op("Cast", bits, to=ir.DataType.FLOAT), scale)


def _zeros(builder: Builder, spec: TensorSpec, sizes: dict[str, ir.Value]) -> ir.Value:
    parts = [
        sizes[axis]
        if isinstance(axis, str)
        else builder.array(np.array([axis], dtype=np.int64), f"{spec.name}_axis{place}")
        for place, axis in enumerate(spec.axes)
    ]
    shape = builder.op("Concat", *parts, axis=0)
    # ConstantOfShape lacks bfloat16 on some execution providers; Cast has it.
    is_bfloat16 = spec.dtype == "bfloat16"
    dtype = np.dtype("float32" if is_bfloat16 else spec.dtype)
    zeros = builder.op("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, dtype=dtype)))
    return builder.op("Cast", zeros, to=ir.DataType.BFLOAT16) if is_bfloat16 else zeros


def _input(spec: TensorSpec) -> ir.Value:
    return ir.Value(name=spec.name, shape=ir.Shape(spec.axes), type=ir.TensorType(_dtype(spec)))


def _dtype(spec: TensorSpec) -> ir.DataType:
    return ir.DataType.FLOAT if spec.dtype == "float32" else ir.DataType[spec.dtype.upper()]
