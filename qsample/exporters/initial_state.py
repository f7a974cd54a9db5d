"""An `Interface` enters; `initial_state.onnx` leaves: seeds and a capacity in, the starting value of every state out.

Every state starts as zeros but `noise`: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC'11) in counter mode. Built node by node, not traced, because the capacity is a value that sets shapes. For the CPU,
on purpose: CUDA has no kernel for BitwiseXor, and a row's noise is a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from onnxscript import GraphBuilder, OpBuilder

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

Words = Sequence[ir.Value | int]
Sizes = Mapping[str, ir.Value | list[int]]


def build_initial_state(interface: Interface) -> ir.Model:
    """`initial_state.onnx`.

    Inputs: `seed` int64 [B], any value; `capacity` int64 scalar, T >= 1. Outputs: every retained state, under its name.
    """
    seed, capacity = _input(SEED), _input(CAPACITY_INPUT)
    graph = ir.Graph([seed, capacity], [], nodes=[], opset_imports={"": OPSET}, name="initial_state")
    op = GraphBuilder(graph).op
    sizes = {BATCH: op.Shape(seed), CAPACITY: op.Unsqueeze(capacity, [0]), VOCAB: [interface.vocab_size]}
    for spec in interface.initial_state.outputs:
        value = _noise(op, seed, capacity, sizes) if spec.name == NOISE.name else _zeros(op, spec, sizes)
        value.name = spec.name
        value.dtype = _dtype(spec)
        value.shape = ir.Shape([interface.vocab_size if axis == VOCAB else axis for axis in spec.axes])
        graph.outputs.append(value)
    model = ir.Model(graph, ir_version=_IR_VERSION, producer_name="qsample")
    common_passes.ClearMetadataAndDocStringPass()(model)  # the builder's scopes
    return model


def philox(op: OpBuilder, counter: Words, key: Words) -> Words:
    """Philox4x32-10: four counter words and two key words in, four random words out.

    All are int64 tensors, or plain numbers, with values in [0, 2**32) that broadcast together. Signed 64-bit arithmetic
    is what every execution provider has, and no product here leaves it.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for round_ in range(_ROUNDS):
        if round_ > 0:
            k0 = op.Mod(op.Add(k0, _WEYL_INCREMENTS[0]), 2**32)
            k1 = op.Mod(op.Add(k1, _WEYL_INCREMENTS[1]), 2**32)
        high0, low0 = _multiply(op, c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(op, c2, _MULTIPLIERS[1])
        c0, c2 = op.BitwiseXor(op.BitwiseXor(high1, c1), k0), op.BitwiseXor(op.BitwiseXor(high0, c3), k1)
        c1, c3 = low1, low0
    return [c0, c1, c2, c3]


def _multiply(op: OpBuilder, word: ir.Value | int, multiplier: int) -> tuple[ir.Value, ir.Value]:
    """The high and low 32 bits of the 64-bit product, by halves of the multiplier so that nothing exceeds 2**49."""
    upper = op.Mul(word, multiplier >> 16)
    lower = op.Mul(word, multiplier & 0xFFFF)
    high = op.Div(op.Add(upper, op.Div(lower, 2**16)), 2**16)
    shifted = op.Mul(op.Mod(upper, 2**16), 2**16)
    return high, op.Mod(op.Add(shifted, lower), 2**32)


def _noise(op: OpBuilder, seed: ir.Value, capacity: ir.Value, sizes: Sizes) -> ir.Value:
    """u[t] = (word t mod 4 of counter (t div 4, 0, 0, 0) >> 8) * 2**-24 under key (seed mod 2**32, seed div 2**32)."""
    low = op.Mod(seed, 2**32)
    high = op.Mod(op.Div(op.Sub(seed, low), 2**32), 2**32)
    key = [op.Unsqueeze(half, [-1]) for half in (low, high)]

    blocks = op.Div(op.Add(capacity, _WORDS - 1), _WORDS)
    words = philox(op, [op.Range(0, blocks, 1), 0, 0, 0], key)
    stacked = op.Concat(*(op.Unsqueeze(word, [-1]) for word in words), axis=-1)
    flat = op.Reshape(stacked, op.Concat(sizes[BATCH], [-1], axis=0))
    bits = op.Slice(op.Div(flat, 2**8), [0], sizes[CAPACITY], [1])
    uniforms: ir.Value = op.Mul(op.Cast(bits, to=ir.DataType.FLOAT), PHILOX_UNIFORM_SCALE)
    return uniforms


def _zeros(op: OpBuilder, spec: TensorSpec, sizes: Sizes) -> ir.Value:
    shape = op.Concat(*(sizes[axis] if isinstance(axis, str) else [axis] for axis in spec.axes), axis=0)
    # ConstantOfShape lacks bfloat16 on some execution providers; Cast has it.
    is_bfloat16 = spec.dtype == "bfloat16"
    dtype = np.dtype("float32" if is_bfloat16 else spec.dtype)
    zeros: ir.Value = op.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, dtype=dtype)))
    return op.Cast(zeros, to=ir.DataType.BFLOAT16) if is_bfloat16 else zeros


def _input(spec: TensorSpec) -> ir.Value:
    return ir.Value(name=spec.name, shape=ir.Shape(spec.axes), type=ir.TensorType(_dtype(spec)))


def _dtype(spec: TensorSpec) -> ir.DataType:
    return ir.DataType.FLOAT if spec.dtype == "float32" else ir.DataType[spec.dtype.upper()]
