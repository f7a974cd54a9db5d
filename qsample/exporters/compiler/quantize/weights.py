"""Quantizes weights to blocks of 4 or 8 bits.

Every constant matrix that a MatMul multiplies by becomes the operand of a MatMulNBits, and embedding tables become the
operand of a GatherBlockQuantized; a tied table is quantized once and both read it. The numbers come from ONNX Runtime's
own quantizer, one matrix at a time and only when the graph is saved: weights may stay mapped from their files, and no
more than one of them is in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.exporters.graph.edit import initializer, lazy_initializer
from qsample.exporters.graph.nbits import BLOCK_SIZES, INT8_ACTIVATIONS, OP_TYPE, is_matmul_nbits, pack_bits
from qsample.exporters.graph.opset import CONTRIB_DOMAIN
from qsample.exporters.graph.traversal import with_loop_bodies
from qsample.tensors import Array

BITS: Final = {"int4": 4, "int8": 8}
METHODS: Final = ("rtn", "k_quant", "hqq")
_REPORT: Final = "qsample.quantization"


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """bits: 4 or 8. block_size: weights of one row that share a scale, one of BLOCK_SIZES. method: one of METHODS:
    "rtn" rounds to the nearest symmetric level; "k_quant" searches each block's scale and offset, as llama.cpp does:
    in NumPy, so slower, and closer; "hqq" solves for the offset that few large errors weigh least on (half-quadratic
    quantization, https://mobiusml.github.io/hqq_blog), in torch."""

    bits: int
    block_size: int = 32
    method: str = "rtn"

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size is {self.block_size}; choose one of {', '.join(map(str, BLOCK_SIZES))}")
        if self.method not in METHODS:
            raise ValueError(f"quantization method is {self.method!r}; choose one of {', '.join(METHODS)}")


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """How many matrices were quantized, and the bytes of all of them before and after."""

    matrices: int
    bytes_before: int
    bytes_after: int


def quantize_weights(model: ir.Model, quantization: WeightQuantization) -> bool:
    """Quantize the weights of `model`, in place.

    1. A weight is a constant matrix of floats that a MatMul multiplies by or a Gather looks rows up in, in the graph or
       in the body of a Scan.
    2. Its input size is a multiple of the block size; others stay as they are.
    3. The numbers are computed when the model is saved.

    Returns whether there was one; `quantization_report` has the figures.
    """
    quantized: dict[ir.Value, _QuantizedMatrix] = {}
    newest = _NewestResult()
    before = after = 0
    for node in with_loop_bodies(model.graph):
        matrix = matrix_of(node)
        if matrix is None or matrix.input_size % quantization.block_size:
            continue
        blocks = quantized.setdefault(matrix.value, _QuantizedMatrix(matrix, quantization, newest))
        if blocks.matrix.transposed == matrix.transposed:
            (_gather if node.op_type == "Gather" else _matmul)(model.graph, node, blocks)
    for value, blocks in quantized.items():
        blocks.register(model.graph)
        before, after = before + blocks.matrix.tensor.nbytes, after + blocks.nbytes
        if not value.uses() and value.name is not None:
            model.graph.initializers.pop(value.name, None)
    model.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
    report_quantization(model, QuantizationReport(len(quantized), before, after))
    return bool(quantized)


def quantization_report(model: ir.Model) -> QuantizationReport | None:
    """What quantization did to the weights of `model` since it was loaded; None where it was not asked for."""
    report: QuantizationReport | None = model.meta.get(_REPORT)
    return report


def report_quantization(model: ir.Model, report: QuantizationReport) -> None:
    """Keep `report` with `model`, not in its file."""
    model.meta[_REPORT] = report


def round_activations(model: ir.Model) -> bool:
    """Let every MatMulNBits that `model` holds round its activations as those of `quantize_weights` do; in place.

    Weights that a checkpoint brought quantized are multiplied by in float32 until then. Returns whether there were any.
    """
    nodes = [node for node in model.graph.all_nodes() if is_matmul_nbits(node)]
    for node in nodes:
        node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", INT8_ACTIVATIONS)
    return bool(nodes)


class _Matrix(NamedTuple):
    """A constant of the graph: [N, K] (`transposed`) or [K, N], with K the input size and N the output size."""

    value: ir.Value
    tensor: ir.TensorProtocol
    transposed: bool

    @property
    def input_size(self) -> int:
        return int(self.tensor.shape.numpy()[1 if self.transposed else 0])

    @property
    def output_size(self) -> int:
        return int(self.tensor.shape.numpy()[0 if self.transposed else 1])


class _QuantizedMatrix:
    """A matrix as N rows of K / block_size blocks, and the initializers that hold it."""

    def __init__(self, matrix: _Matrix, quantization: WeightQuantization, newest: _NewestResult) -> None:
        self.matrix = matrix
        self.quantization = quantization
        self.output_size, self.input_size = matrix.output_size, matrix.input_size
        self.block_count = self.input_size // quantization.block_size
        self._newest = newest
        self._initializers: dict[str, ir.Value] = {}

    @property
    def nbytes(self) -> int:
        return sum(value.const_value.nbytes for value in self._initializers.values() if value.const_value is not None)

    @property
    def blocks(self) -> ir.Value:
        """uint8 [N, K / block_size, block_size * bits / 8]."""
        size = self.quantization.block_size * self.quantization.bits // 8
        return self._initializer("blocks", 0, (self.output_size, self.block_count, size), ir.DataType.UINT8)

    def scales(self, *, by_block: bool) -> ir.Value:
        """[N * K / block_size], dtype of the weight; by_block: [N, K / block_size, 1]."""
        count = self.output_size * self.block_count
        shape = (self.output_size, self.block_count, 1) if by_block else (count,)
        return self._initializer("block_scales" if by_block else "scales", 1, shape, self.matrix.tensor.dtype)

    def zero_points(self, *, by_block: bool) -> ir.Value | None:
        """uint8, for MatMulNBits in bits like the blocks; by_block: one byte each, [N, K / block_size, 1].

        None for levels that are symmetric around the middle one.
        """
        if self.quantization.method == "rtn":
            return None
        row_bytes = -(-self.block_count * self.quantization.bits // 8)
        shape = (self.output_size, self.block_count, 1) if by_block else (self.output_size * row_bytes,)
        return self._initializer("block_zero_points" if by_block else "zero_points", 2, shape, ir.DataType.UINT8)

    def register(self, graph: ir.Graph) -> None:
        """Put the initializers in a row, so that saving them quantizes the matrix once."""
        for value in self._initializers.values():
            graph.register_initializer(value)

    def _initializer(self, kind: str, index: int, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
        """index: 0 for blocks, 1 for scales, 2 for zero points."""

        def part() -> Array:
            array = self._newest.of(self)[index]
            if kind == "zero_points":
                array = pack_bits(array, self.quantization.bits)
            return array.reshape(shape)

        if kind not in self._initializers:
            self._initializers[kind] = lazy_initializer(f"{self.matrix.value.name}_{kind}", shape, dtype, part)
        return self._initializers[kind]


class _NewestResult:
    """Blocks, scales and zero points of the matrix that was quantized last; those of one are saved in a row."""

    def __init__(self) -> None:
        self._matrix: _QuantizedMatrix | None = None
        self._result: tuple[Array, Array, Array] | None = None

    def of(self, matrix: _QuantizedMatrix) -> tuple[Array, Array, Array]:
        if self._result is None or self._matrix is not matrix:
            self._result = None  # before the next is in memory
            weight = matrix.matrix.tensor.numpy()
            self._result = _quantize(weight.T if matrix.matrix.transposed else weight, matrix.quantization)
            self._matrix = matrix
        return self._result


def _quantize(weight: Array, quantization: WeightQuantization) -> tuple[Array, Array, Array]:
    """weight: [K, N]. Returns blocks, scales, zero points."""
    if quantization.method == "k_quant":
        return _k_quant(weight, quantization)
    if quantization.method == "hqq":
        return _hqq(weight, quantization)
    with _quiet_import():
        from onnxruntime.quantization.matmul_nbits_quantizer import (
            DefaultWeightOnlyQuantConfig,
            DefaultWeightOnlyQuantizer,
        )

    config = DefaultWeightOnlyQuantConfig(block_size=quantization.block_size, is_symmetric=True, bits=quantization.bits)
    kind = weight.dtype if weight.dtype in (np.float32, np.float16) else np.float32
    blocks, scales, zero_points = DefaultWeightOnlyQuantizer(config).qbits_block_quant(
        np.ascontiguousarray(weight, dtype=kind)
    )
    return blocks, scales, zero_points


@contextmanager
def _quiet_import() -> Iterator[None]:
    """ONNX Runtime's quantizers set the root logger to INFO when imported, which is not theirs to decide."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def _k_quant(weight: Array, quantization: WeightQuantization) -> tuple[Array, Array, Array]:
    with _quiet_import():
        from onnxruntime.quantization.neural_compressor.weight_only import quant_tensor_k_quant_cpu

    bits, size = quantization.bits, quantization.block_size
    count, output_size = weight.shape[0] // size, weight.shape[1]
    levels, scales, zero_points = quant_tensor_k_quant_cpu(np.ascontiguousarray(weight.T), bits, size)
    blocks = pack_bits(levels.astype(np.uint8).reshape(output_size * count, size), bits)
    return blocks, scales.astype(weight.dtype), zero_points.astype(np.uint8).reshape(output_size, count)


def _hqq(weight: Array, quantization: WeightQuantization) -> tuple[Array, Array, Array]:
    """The library's scales and offsets, the offsets rounded: MatMulNBits multiplies by levels with fractional ones some
    300 times slower."""
    import torch

    with _quiet_import():
        from onnxruntime.quantization.matmul_nbits_quantizer import HQQWeightOnlyQuantConfig, HQQWeightOnlyQuantizer

    bits, size = quantization.bits, quantization.block_size
    largest, (input_size, output_size) = 2**bits - 1, weight.shape
    rows = np.array(weight.T, dtype=np.float32, order="C")
    quantizer = HQQWeightOnlyQuantizer(HQQWeightOnlyQuantConfig(size, bits))
    _, all_scales, offsets = quantizer.quantize_internal(torch.from_numpy(rows), bits=bits, group_size=size)
    shape = (output_size, input_size // size, 1)
    scales, zero_points = all_scales.numpy().reshape(shape), np.round(offsets.numpy().reshape(shape))
    blocks = rows.reshape(output_size, -1, size)

    # A zero point is a level itself, so the levels of a block of one sign have to reach down, or up, to 0.
    low, high = np.minimum(blocks.min(-1, keepdims=True), 0), np.maximum(blocks.max(-1, keepdims=True), 0)
    outside = (zero_points < 0) | (zero_points > largest)
    scales = np.where(outside, np.maximum(high - low, np.finfo(np.float32).tiny) / largest, scales)
    zero_points = np.where(outside, np.round(-low / scales), zero_points)
    levels = np.clip(np.round(blocks / scales + zero_points), 0, largest).astype(np.uint8)
    packed = pack_bits(levels.reshape(-1, size), bits)
    return packed, scales.astype(weight.dtype), zero_points.astype(np.uint8).reshape(output_size, -1)


def matrix_of(node: ir.Node) -> _Matrix | None:
    """The constant matrix that a node multiplies by or looks rows up in."""
    if node.op_type == "MatMul":
        return _constant(node.inputs[1], transposed=False)
    if node.op_type == "FusedMatMul" and _is_plain(node):
        return _constant(node.inputs[1], transposed=node.attributes.get_int("transB", 0) == 1)
    if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
        return _constant(node.inputs[0], transposed=True)
    return None


def _is_plain(node: ir.Node) -> bool:
    """Whether a FusedMatMul does nothing but transpose its second operand, if that."""
    others = (node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB"))
    return node.attributes.get_float("alpha", 1.0) == 1.0 and not any(bool(other) for other in others)


def _constant(value: ir.Value | None, *, transposed: bool) -> _Matrix | None:
    if value is None or value.const_value is None or not value.is_initializer():
        return None
    tensor = value.const_value
    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    return _Matrix(value, tensor, transposed) if len(tensor.shape) == 2 and tensor.dtype in floats else None


def _matmul(graph: ir.Graph, node: ir.Node, weight: _QuantizedMatrix) -> None:
    inputs = [node.inputs[0], weight.blocks, weight.scales(by_block=False), weight.zero_points(by_block=False)]
    attributes = {
        "K": weight.input_size,
        "N": weight.output_size,
        "bits": weight.quantization.bits,
        "block_size": weight.quantization.block_size,
        "accuracy_level": INT8_ACTIVATIONS,
    }
    _replace(node, [_node(OP_TYPE, node, inputs, attributes)])


def _gather(graph: ir.Graph, node: ir.Node, table: _QuantizedMatrix) -> None:
    """The lookup reads the blocks that MatMulNBits reads: a table [N, blocks, block size], of which it takes rows."""
    inputs = [table.blocks, node.inputs[1], table.scales(by_block=True), table.zero_points(by_block=True)]
    attributes = {
        "bits": table.quantization.bits,
        "block_size": table.quantization.block_size,
        "gather_axis": 0,
        "quantize_axis": 2,
    }
    lookup = _node("GatherBlockQuantized", node, inputs, attributes)
    rank = len(node.inputs[1].shape)  # type: ignore[union-attr,arg-type]
    rows = initializer(graph, f"{node.name}_rows", np.array([0] * rank + [table.input_size], np.int64))
    _replace(node, [lookup, ir.Node("", "Reshape", [lookup.outputs[0], rows], name=f"{node.name}_rows")])


def _node(op_type: str, old: ir.Node, inputs: list[ir.Value | None], attributes: dict[str, int]) -> ir.Node:
    while inputs[-1] is None:
        inputs.pop()
    return ir.node(op_type, inputs, attributes, domain=CONTRIB_DOMAIN, name=f"{old.name}_quantized")


def _replace(old: ir.Node, new: list[ir.Node]) -> None:
    """Put `new` where `old` is; the output of the last of them takes over name, shape and uses."""
    output, replacement = old.outputs[0], new[-1].outputs[0]
    replacement.shape, replacement.type = output.shape, output.type
    assert old.graph is not None
    old.graph.insert_before(old, new)
    output.replace_all_uses_with(replacement, replace_graph_outputs=True)
    old.graph.remove(old, safe=True)
    replacement.name = output.name
