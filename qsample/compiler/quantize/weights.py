"""Quantizes weights to blocks of 4 or 8 bits.

Every constant matrix that a MatMul multiplies by becomes the operand of a MatMulNBits, and embedding tables become the
operand of a GatherBlockQuantized; a tied table is quantized once and both read it. The numbers come from ONNX Runtime's
own quantizer, one matrix at a time and only when the graph is saved: weights may stay mapped from their files, and no
more than one of them is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.compiler.quantize.calibration import Wanted
from qsample.compiler.quantize.precision import WIDE_BITS, head_products, sensitive_products
from qsample.compiler.quantize.report import (
    QuantizationReport,
    float_bytes,
    quantization_report,
    report_quantization,
)
from qsample.compiler.quantize.rounding import Levels, NewestResult, WeightQuantization, quantize_matrix
from qsample.contract import INPUT_IDS, LENGTHS
from qsample.graph import moe
from qsample.graph.edit import drop_unread, initializer, lazy_initializer, replace_node, with_loop_bodies
from qsample.graph.evaluate import inputs_of
from qsample.graph.operators import (
    BLOCK_SIZES,
    CONTRIB_DOMAIN,
    INT8_ACTIVATIONS,
    MATMUL_NBITS,
    is_matmul_nbits,
    pack_bits,
)
from qsample.tensors import Array

Calibrate = Callable[[ir.Model, Sequence[Wanted]], Mapping[ir.Value, Levels]]
"""The levels of matrices of a model, for the inputs that they meet."""


def quantize_weights(
    model: ir.Model, quantization: WeightQuantization, *, pads: bool = False, calibrate: Calibrate | None = None
) -> bool:
    """Quantize the weights of `model`, in place. pads: the device's MatMulNBits takes a last block that is not full.

    1. A weight is a constant matrix of floats that a MatMul or a Gemm multiplies by or a Gather looks rows up in, in
       the graph or in the body of a Scan.
    2. Its blocks are those asked for, or the largest smaller ones that divide its input size. Where none does, the last
       block of each row is filled up with zeros, or it stays as it is: without `pads`, and where rows are looked up.
    3. Those that score experts stay as they are: a thousandth of a mixture's weights, and what they round off decides
       which experts run. So do tables that are looked up by position, sines say.
    4. `precision` says which have 8 bits of a mixed quantization.
    5. The numbers are computed when the model is saved; before, by `calibrate`, those of the matrices in the graph
       itself, but for the head and what is looked rows up in.

    Returns whether there was one; `quantization_report` has the figures.
    """
    quantized: dict[ir.Value, _QuantizedMatrix] = {}
    newest = NewestResult()
    experts = quantization_report(model) or QuantizationReport(0, 0, 0)
    before, after = experts.bytes_before, experts.bytes_after
    found = _ways(model.graph, quantization, pads)
    levels = {} if calibrate is None else calibrate(model, _to_calibrate(model.graph, found))
    for node, (matrix, way) in found.items():
        blocks = quantized.setdefault(matrix.value, _QuantizedMatrix(matrix, way, newest, levels.get(matrix.value)))
        if blocks.matrix.transposed == matrix.transposed:
            (_gather if node.op_type == "Gather" else _matmul)(model.graph, node, blocks)
    for blocks in quantized.values():
        blocks.register(model.graph)
        before, after = before + blocks.matrix.tensor.nbytes, after + blocks.nbytes
    drop_unread(model.graph, quantized)
    model.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
    report = replace(
        experts,
        matrices=len(quantized),
        wide_matrices=sum(blocks.quantization.bits > quantization.bits for blocks in quantized.values()),
        block_sizes=tuple(sorted({blocks.quantization.block_size for blocks in quantized.values()})),
        bytes_before=before,
        bytes_after=after,
        float_bytes=float_bytes(model),
    )
    report_quantization(model, report)
    return bool(quantized)


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
    """A matrix as N rows of K / block_size blocks, the last filled up, and the initializers that hold it."""

    def __init__(
        self, matrix: _Matrix, quantization: WeightQuantization, newest: NewestResult, levels: Levels | None = None
    ) -> None:
        """levels: where they are known already."""
        self.matrix, self._levels = matrix, levels
        self.quantization = quantization
        self.output_size, self.input_size = matrix.output_size, matrix.input_size
        self.block_count = -(-self.input_size // quantization.block_size)
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

    def quantize(self) -> Levels:
        if self._levels is not None:
            return self._levels
        weight = self.matrix.tensor.numpy()
        weight = weight.T if self.matrix.transposed else weight
        missing = self.block_count * self.quantization.block_size - self.input_size
        return quantize_matrix(np.pad(weight, ((0, missing), (0, 0))) if missing else weight, self.quantization)

    def register(self, graph: ir.Graph) -> None:
        """Put the initializers in a row, so that saving them quantizes the matrix once."""
        for value in self._initializers.values():
            graph.register_initializer(value)

    def _initializer(self, kind: str, index: int, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
        """index: 0 for blocks, 1 for scales, 2 for zero points."""

        def part() -> Array:
            array = self._newest.of(self.quantize)[index]
            if kind == "zero_points":
                array = pack_bits(array, self.quantization.bits)
            return array.reshape(shape)

        if kind not in self._initializers:
            self._initializers[kind] = lazy_initializer(f"{self.matrix.value.name}_{kind}", shape, dtype, part)
        return self._initializers[kind]


def _ways(
    graph: ir.Graph, quantization: WeightQuantization, pads: bool
) -> dict[ir.Node, tuple[_Matrix, WeightQuantization]]:
    """What is quantized: the nodes, their matrix and how, the same for all nodes of one matrix."""
    kept, found = moe.routers(graph), {}
    for node in with_loop_bodies(graph):
        matrix = matrix_of(node)
        stays = matrix is None or node in kept or looks_up_positions(node)
        way = None if stays or matrix is None else _fitting(quantization, matrix, pads)
        if matrix is not None and way is not None:
            found[node] = matrix, way
    if not quantization.mixed:
        return found
    wide = sensitive_products(graph, [node for node in found if node.op_type != "Gather"])
    values = {found[node][0].value for node in wide}
    return {
        node: (matrix, replace(way, bits=WIDE_BITS) if matrix.value in values else way)
        for node, (matrix, way) in found.items()
    }


def looks_up_positions(node: ir.Node) -> bool:
    """Whether the rows that `node` looks up are told by where a token stands, and not by its id."""
    if node.op_type != "Gather" or node.inputs[1] is None:
        return False
    told_by = inputs_of([node.inputs[1]])
    return LENGTHS.name in told_by and INPUT_IDS.name not in told_by


def _to_calibrate(graph: ir.Graph, found: Mapping[ir.Node, tuple[_Matrix, WeightQuantization]]) -> list[Wanted]:
    others = {matrix.value for node, (matrix, _) in found.items() if node.op_type == "Gather"}
    products = [node for node in found if node.op_type != "Gather" and node.graph is graph]
    others |= {found[node][0].value for node in head_products(graph, products)}
    wanted = {found[node][0].value: node for node in reversed(products)}  # the first of those that share a matrix
    return [
        Wanted(value, node, found[node][0].transposed, found[node][1])
        for value, node in reversed(wanted.items())
        if value not in others and found[node][0].input_size % found[node][1].block_size == 0  # no blocks filled up
    ]


def _fitting(quantization: WeightQuantization, matrix: _Matrix, pads: bool) -> WeightQuantization | None:
    """`quantization` in the blocks that `matrix` gets; None where it stays float."""
    inputs = matrix.input_size
    sizes = [size for size in BLOCK_SIZES if size <= min(quantization.block_size, inputs)]
    dividing = [size for size in sizes if inputs % size == 0]
    if not dividing and pads and not any(user.op_type == "Gather" for user in matrix.value.consumers()):
        dividing = sizes
    return replace(quantization, block_size=max(dividing)) if dividing else None


def matrix_of(node: ir.Node) -> _Matrix | None:
    """The constant matrix that a node multiplies by or looks rows up in."""
    if node.op_type == "MatMul":
        return _constant(node.inputs[1], transposed=False)
    if node.op_type == "FusedMatMul" and _is_plain(node):
        return _constant(node.inputs[1], transposed=node.attributes.get_int("transB", 0) == 1)
    if node.op_type == "Gemm" and _is_plain(node) and node.attributes.get_float("beta", 1.0) == 1.0:
        return _constant(node.inputs[1], transposed=node.attributes.get_int("transB", 0) == 1)
    if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
        return _constant(node.inputs[0], transposed=True)
    return None


def _is_plain(node: ir.Node) -> bool:
    """Whether a FusedMatMul or a Gemm does nothing to its operands but transpose the second, if that."""
    others = (node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB"))
    return node.attributes.get_float("alpha", 1.0) == 1.0 and not any(bool(other) for other in others)


def _constant(value: ir.Value | None, *, transposed: bool) -> _Matrix | None:
    if value is None or value.const_value is None or not value.is_initializer():
        return None
    tensor = value.const_value
    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
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
    new = [_node(MATMUL_NBITS, node, inputs, attributes)]
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        new.append(ir.Node("", "Add", [new[-1].outputs[0], node.inputs[2]], name=f"{node.name}_bias"))
    replace_node(node, new)


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
    replace_node(node, [lookup, ir.Node("", "Reshape", [lookup.outputs[0], rows], name=f"{node.name}_rows")])


def _node(op_type: str, old: ir.Node, inputs: list[ir.Value | None], attributes: dict[str, int]) -> ir.Node:
    while inputs[-1] is None:
        inputs.pop()
    return ir.node(op_type, inputs, attributes, domain=CONTRIB_DOMAIN, name=f"{old.name}_quantized")
