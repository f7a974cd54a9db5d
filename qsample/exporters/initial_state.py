"""An `Interface` enters; `initial_state.onnx` leaves: seeds and a capacity in, the starting value of every state out.

Every state starts as zeros but the noise. For the CPU, on purpose: CUDA has no kernel for Philox's BitwiseXor, and a
row's noise is a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.contract import BATCH, CAPACITY, CAPACITY_INPUT, NOISE_STREAMS, SEED, VOCAB, TensorSpec
from qsample.graph.operators import OPSET
from qsample.interface import Interface
from qsample.sampler.philox import noise_buffer
from qsample.sampler.tensor import Tensor, building, op, size

_IR_VERSION = 10

Sizes = Mapping[str, Tensor | list[int]]


def build_initial_state(interface: Interface) -> ir.Model:
    """`initial_state.onnx`.

    Inputs: `seed` int64 [B], any value; `capacity` int64 scalar, T >= 1. Outputs: every retained state, under its name.
    """
    seed, capacity = _input(SEED), _input(CAPACITY_INPUT)
    graph = ir.Graph([seed, capacity], [], nodes=[], opset_imports={"": OPSET}, name="initial_state")
    with building(graph):
        rows, length = size(Tensor(seed), 0), Tensor(capacity).reshape(1)
        sizes: Sizes = {BATCH: rows, CAPACITY: length, VOCAB: [interface.vocab_size]}
        for spec in interface.initial_state.outputs:
            stream = NOISE_STREAMS.get(spec.name)
            start = _zeros(spec, sizes) if stream is None else noise_buffer(Tensor(seed), Tensor(capacity), stream)
            value = start.value
            value.name = spec.name
            value.dtype = _dtype(spec)
            value.shape = ir.Shape([interface.vocab_size if axis == VOCAB else axis for axis in spec.axes])
            graph.outputs.append(value)
    model = ir.Model(graph, ir_version=_IR_VERSION, producer_name="qsample")
    common_passes.ClearMetadataAndDocStringPass()(model)  # the builder's scopes
    return model


def _zeros(spec: TensorSpec, sizes: Sizes) -> Tensor:
    shape = op("Concat", *(sizes[axis] if isinstance(axis, str) else [axis] for axis in spec.axes), axis=0)
    # ConstantOfShape lacks bfloat16 on some execution providers; Cast has it.
    dtype = np.dtype("float32" if spec.dtype == "bfloat16" else spec.dtype)
    return op("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, dtype=dtype))).to(_dtype(spec))


def _input(spec: TensorSpec) -> ir.Value:
    return ir.Value(name=spec.name, shape=ir.Shape(spec.axes), type=ir.TensorType(_dtype(spec)))


def _dtype(spec: TensorSpec) -> ir.DataType:
    return ir.DataType.FLOAT if spec.dtype == "float32" else ir.DataType[spec.dtype.upper()]
