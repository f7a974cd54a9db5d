"""Weights in blocks as initializers, computed when the graph is saved; and the report of a graph's quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.compiler.quantize.methods import Levels, WeightQuantization, quantize_matrix
from qsample.contract.arrays import Array
from qsample.graph import gqa, moe
from qsample.graph.edit import constant_value
from qsample.graph.operators import is_contrib, is_matmul_nbits, pack_bits
from qsample.graph.packed import offsets_of, row_offsets_of
from qsample.graph.pieces import PIECE_ELEMENTS, Piece, PiecewiseTensor, read, readable

Shape = tuple[int, ...]
_REPORT: Final = "qsample.quantization"
_FLOATS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class QuantizedWeight:
    """A constant matrix, or the same matrix of each expert, in blocks, and the initializers that hold it.

    Attributes:
        tensor: the float weights.
        experts: how many matrices they are; None for a matrix without that axis.
        outputs_first: whether a matrix is [N, K], and not [K, N], with N outputs and K inputs.
        inputs: K.
        rows, columns: N, and K up to a multiple of the block size (by default the next), with zeros added.
    """

    def __init__(
        self,
        value: ir.Value,
        quantization: WeightQuantization,
        *,
        outputs_first: bool,
        rows: int | None = None,
        columns: int | None = None,
        levels: Levels | None = None,
    ) -> None:
        """value: the initializer of the float weights. levels: if they are known already."""
        assert value.const_value is not None
        self.tensor = value.const_value
        self.outputs_first = outputs_first
        self.quantization = quantization
        *experts, first, second = (int(size) for size in self.tensor.shape.numpy())
        self.experts = experts[0] if experts else None
        outputs, self.inputs = (first, second) if outputs_first else (second, first)
        size = quantization.block_size
        self.rows = outputs if rows is None else rows
        self.columns = -(-self.inputs // size) * size if columns is None else columns
        self._name = str(value.name)
        self._levels = levels
        self._initializers: dict[str, ir.Value] = {}
        self._scales: Array | None = None
        self._zeros: Array | None = None

    @property
    def row_blocks(self) -> int:
        """The blocks of a row."""
        return self.columns // self.quantization.block_size

    @property
    def block_bytes(self) -> int:
        """The bytes of the levels of a block."""
        return self.quantization.block_size * self.quantization.bits // 8

    @property
    def nbytes(self) -> int:
        """The bytes of the initializers."""
        return sum(
            value.const_value.nbytes
            for value in self._initializers.values()
            if value.const_value is not None
        )

    def operands(self, levels: Shape, scales: Shape, kind: str = "scales") -> list[ir.Value]:
        """Levels, uint8, scales, of the weights' dtype, and zero points if there are any, packed uint8: initializers in
        the shapes that an operator takes. kind: tells scales of one shape from those of another."""
        found = [
            self._initializer("blocks", levels, ir.DataType.UINT8, lambda: self.quantize().blocks),
            self._initializer(kind, scales, self.tensor.dtype, lambda: self._take_scales(kind)),
        ]
        if self.quantization.zero_points:
            row_bytes = -(-self.row_blocks * self.quantization.bits // 8)
            shape = (self.rows * row_bytes,)
            found.append(
                self._initializer("zero_points", shape, ir.DataType.UINT8, self._take_zeros)
            )
        return found

    def register(self, graph: ir.Graph) -> None:
        """Add the initializers to `graph` in a row, levels first, so that saving them quantizes the weight once."""
        for value in self._initializers.values():
            graph.register_initializer(value)

    def _initializer(
        self, kind: str, shape: Shape, dtype: ir.DataType, compute: Callable[[], Array]
    ) -> ir.Value:
        if kind not in self._initializers:
            name = f"{self._name}_{kind}"

            def whole() -> ir.TensorProtocol:
                return ir.Tensor(compute().reshape(shape), dtype=dtype, name=name)

            lazy = (
                PiecewiseTensor(whole, self._pieces, dtype, shape, name)
                if kind == "blocks" and self._levels is None
                else ir.LazyTensor(whole, dtype, ir.Shape(shape), name=name)
            )
            self._initializers[kind] = constant_value(name, lazy)
        return self._initializers[kind]

    def quantize(self) -> Levels:
        """Levels of the matrix, or of all experts' one after the other."""
        if self._levels is not None:
            return self._levels
        blocks = np.concatenate([piece() for piece in self._pieces()])
        assert self._scales is not None
        return Levels(blocks, self._scales, self._zeros)

    def _take_scales(self, kind: str) -> Array:
        """Scales for the initializer `kind`, of the levels computed last; kept until the last one has read them."""
        if self._levels is not None:
            return self._levels.scales
        scales = self.quantize().scales if self._scales is None else self._scales
        if kind == list(self._initializers)[-1]:
            self._scales = None
        return scales

    def _take_zeros(self) -> Array:
        """Zero points of the levels computed last, packed by row. They are read last, so that nothing is kept then."""
        zeros = self._levels.zeros if self._levels is not None else self._zeros
        if zeros is None:
            zeros = self.quantize().zeros
        self._scales = self._zeros = None
        assert zeros is not None
        return pack_bits(zeros.reshape(self.rows, self.row_blocks), self.quantization.bits)

    def _pieces(self) -> Iterator[Piece]:
        """Computes blocks [rows, row_blocks, block_bytes] of some rows each, and notes their scales."""
        rows = (1 if self.experts is None else self.experts) * self.rows
        self._scales = np.empty((rows, self.row_blocks), self.tensor.dtype.numpy())
        self._zeros = (
            np.empty((rows, self.row_blocks), np.uint8) if self.quantization.zero_points else None
        )
        source = readable(self.tensor)
        at_once = max(1, PIECE_ELEMENTS // self.columns)
        for expert in range(1 if self.experts is None else self.experts):
            for start in range(0, self.rows, at_once):
                place = expert * self.rows + start
                stop = min(start + at_once, self.rows)
                yield partial(
                    self._quantize_rows,
                    source,
                    expert,
                    slice(start, stop),
                    place,
                    self._scales,
                    self._zeros,
                )

    def _quantize_rows(
        self,
        source: ir.TensorProtocol,
        expert: int,
        rows: slice,
        place: int,
        scales: Array,
        zeros: Array | None,
    ) -> Array:
        """The blocks of some rows of an (expert's) matrix, the rows from `place` on of `scales` and `zeros`."""
        first = () if self.experts is None else (slice(expert, expert + 1),)
        index = (rows, slice(None)) if self.outputs_first else (slice(None), rows)
        numbers = read(source, *first, *index)
        matrix = numbers if self.experts is None else numbers[0]
        matrix = matrix.T if self.outputs_first else matrix
        inputs, outputs = matrix.shape
        count = rows.stop - rows.start
        if (inputs, outputs) != (self.columns, count):
            matrix = np.pad(matrix, ((0, self.columns - inputs), (0, count - outputs)))
        levels = quantize_matrix(matrix, self.quantization)
        scales[place : place + count] = levels.scales.reshape(count, -1)
        if zeros is not None and levels.zeros is not None:
            zeros[place : place + count] = levels.zeros.reshape(count, -1)
        return levels.blocks.reshape(count, self.row_blocks, -1)


def added_up(weights: Iterable[QuantizedWeight]) -> tuple[int, int]:
    """The bytes of `weights` before and after."""
    before = after = 0
    for weight in weights:
        before = before + weight.tensor.nbytes
        after = after + weight.nbytes
    return before, after


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The quantized weights of a graph, and the weights that stayed float.

    Attributes:
        matrices: the number of quantized matrices, without experts.
        bytes_before, bytes_after: the bytes of all quantized weights.
        experts: the number of experts, in all layers.
        expert_block_size: the weights of an expert that share a scale: the options', or the nearest that QMoE takes.
        float_bytes: the bytes of the parameters that are still float; scales and tables of angles do not count.
        block_sizes: the weights of `matrices` that share a scale: the options', or smaller sizes of fewer bytes.
        bits: the name of each matrix, as `bits.names_of` has it → its entry in a table, such as "int4:32".
    """

    matrices: int
    bytes_before: int
    bytes_after: int
    experts: int = 0
    expert_block_size: int | None = None
    float_bytes: int = 0
    block_sizes: tuple[int, ...] = ()
    bits: Mapping[str, str] = field(default_factory=dict)


def quantization_report(model: ir.Model) -> QuantizationReport | None:
    """The report of the weights of `model` since it was loaded; None if they were not quantized."""
    report: QuantizationReport | None = model.meta.get(_REPORT)
    return report


def report_quantization(model: ir.Model, report: QuantizationReport) -> None:
    """Keep `report` with `model`, not in its file."""
    model.meta[_REPORT] = report


def float_bytes(model: ir.Model) -> int:
    """The bytes of the float constants of `model`, without scales of quantized weights and tables of angles."""
    others = {value for node in model.graph.all_nodes() for value in _scales_and_tables(node)}
    total = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in _FLOATS and value not in others:
            total += tensor.nbytes
    return total


def _scales_and_tables(node: ir.Node) -> list[ir.Value | None]:
    if is_matmul_nbits(node):
        found = offsets_of(node)
        return [node.inputs[2], *([] if found is None else [found.offsets])]
    if node.op_type == "GatherBlockQuantized":
        return [node.inputs[2], row_offsets_of(node)]
    if is_contrib(node, moe.QUANTIZED_OP_TYPE):
        return [
            node.inputs[moe.QuantizedSlot.FC1_SCALES],
            node.inputs[moe.QuantizedSlot.FC2_SCALES],
        ]
    if node.op_type == gqa.OP_TYPE:
        return list(node.inputs[gqa.Slot.COS_CACHE : gqa.Slot.POSITION_IDS])
    return list(node.inputs[2:4]) if node.op_type == "RotaryEmbedding" else []
