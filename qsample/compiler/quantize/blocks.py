"""Weights in blocks as initializers of a graph, computed when the graph is saved; and the report of a graph's
quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.compiler.quantize.methods import Levels, WeightQuantization, quantize_matrix
from qsample.graph import gqa, moe
from qsample.graph.edit import lazy_initializer
from qsample.graph.operators import is_contrib, is_matmul_nbits, pack_bits
from qsample.tensors import Array

Shape = tuple[int, ...]
_REPORT: Final = "qsample.quantization"
_FLOATS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class NewestResult:
    """The levels that were computed last: those of a weight are several initializers, saved in a row."""

    def __init__(self) -> None:
        self._compute: Callable[[], Levels] | None = None
        self._result: Levels | None = None

    def of(self, compute: Callable[[], Levels]) -> Levels:
        if self._result is None or self._compute != compute:
            self._result = None  # before the next is in memory
            self._result = compute()
            self._compute = compute
        return self._result


class QuantizedWeight:
    """A constant matrix, or the same matrix of each expert, in blocks, and the initializers that hold it.

    Attributes:
        tensor: the float weights.
        quantization: how they are quantized.
        experts: how many matrices they are; None for a matrix without that axis.
        outputs_first: whether a matrix is [N, K], and not [K, N], with N outputs and K inputs.
        inputs: K.
        rows, columns: N and K with zeros added; `columns` is a multiple of the block size.
    """

    def __init__(
        self,
        value: ir.Value,
        quantization: WeightQuantization,
        newest: NewestResult,
        *,
        outputs_first: bool,
        rows: int | None = None,
        columns: int | None = None,
        levels: Levels | None = None,
    ) -> None:
        """
        Args:
            value: the initializer of the float weights.
            newest: shared by all weights of a graph.
            rows, columns: see above; by default, columns are added up to a whole block.
            levels: if they are known already.
        """
        assert value.const_value is not None
        self.tensor, self.quantization, self.outputs_first = value.const_value, quantization, outputs_first
        *experts, first, second = (int(size) for size in self.tensor.shape.numpy())
        self.experts = experts[0] if experts else None
        outputs, self.inputs = (first, second) if outputs_first else (second, first)
        size = quantization.block_size
        self.rows, self.columns = rows or outputs, columns or -(-self.inputs // size) * size
        self._name, self._newest, self._levels = str(value.name), newest, levels
        self._initializers: dict[str, ir.Value] = {}

    @property
    def row_blocks(self) -> int:
        """The blocks of a row."""
        return self.columns // self.quantization.block_size

    @property
    def block_bytes(self) -> int:
        """The bytes of the levels of a block."""
        return self.quantization.block_size * self.quantization.bits // 8

    @property
    def packed_zero_points(self) -> int:
        """The bytes of a row's zero points in as many bits as levels."""
        return -(-self.row_blocks * self.quantization.bits // 8)

    @property
    def nbytes(self) -> int:
        """The bytes of the initializers."""
        return sum(value.const_value.nbytes for value in self._initializers.values() if value.const_value is not None)

    def operands(self, levels: Shape, scales: Shape, zero_points: Shape | None = None) -> list[ir.Value | None]:
        """The initializers that an operator reads, in the shapes that it takes.

        Args:
            levels: the shape of the levels, uint8.
            scales: of the scales, in the dtype of the weights.
            zero_points: of the zero points, uint8, in as many bits as levels; None = a byte each, like the scales.

        Returns:
            Levels, scales and zero points; None for the last if levels are symmetric around the middle level.
        """
        prefix = "" if zero_points is not None else "block_"
        found: list[ir.Value | None] = [
            self._initializer("blocks", levels, ir.DataType.UINT8, lambda parts: parts[0]),
            self._initializer(f"{prefix}scales", scales, self.tensor.dtype, lambda parts: parts[1]),
        ]
        if self.quantization.symmetric:
            return [*found, None]

        def zeros(parts: Levels) -> Array:
            if zero_points is None:
                return parts[2]
            return pack_bits(parts[2].reshape(-1, self.row_blocks), self.quantization.bits)

        return [*found, self._initializer(f"{prefix}zero_points", zero_points or scales, ir.DataType.UINT8, zeros)]

    def register(self, graph: ir.Graph) -> None:
        """Add the initializers to `graph` in a row, so that saving them quantizes the weight once."""
        for value in self._initializers.values():
            graph.register_initializer(value)

    def _initializer(self, kind: str, shape: Shape, dtype: ir.DataType, part: Callable[[Levels], Array]) -> ir.Value:
        if kind not in self._initializers:
            self._initializers[kind] = lazy_initializer(
                f"{self._name}_{kind}", shape, dtype, lambda: part(self._newest.of(self.quantize)).reshape(shape)
            )
        return self._initializers[kind]

    def quantize(self) -> Levels:
        """Blocks, scales and zero points of the matrix, or of each expert's along a first axis."""
        if self._levels is not None:
            return self._levels
        numbers = self.tensor.numpy()
        if self.experts is None:
            return self._quantize_one(numbers)
        whole: list[Array] = []
        for expert, matrix in enumerate(numbers):
            parts = self._quantize_one(matrix)
            whole = whole or [np.empty((self.experts, *part.shape), part.dtype) for part in parts]
            for array, part in zip(whole, parts, strict=True):
                array[expert] = part
        return whole[0], whole[1], whole[2]

    def _quantize_one(self, matrix: Array) -> Levels:
        matrix = matrix.T if self.outputs_first else matrix
        inputs, outputs = matrix.shape
        if (inputs, outputs) != (self.columns, self.rows):
            matrix = np.pad(matrix, ((0, self.columns - inputs), (0, self.rows - outputs)))
        return quantize_matrix(matrix, self.quantization)


def added_up(weights: Iterable[QuantizedWeight]) -> tuple[int, int]:
    """The bytes of `weights` before and after."""
    before = after = 0
    for weight in weights:
        before, after = before + weight.tensor.nbytes, after + weight.nbytes
    return before, after


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The quantized weights of a graph, and those that stayed float.

    Attributes:
        matrices: how many, without those of experts.
        bytes_before, bytes_after: of all quantized weights.
        experts: how many, in all layers.
        expert_block_size: weights of an expert that share a scale, if experts were quantized: the block size of the
            options, or the nearest that the operator takes.
        float_bytes: of the parameters that are still float; scales and tables of angles do not count.
        block_sizes: weights of `matrices` that share a scale: the block size of the options, or smaller sizes that
            divide the inputs.
        wide_matrices: of `matrices`, those that a mixed quantization holds in 8 bits.
    """

    matrices: int
    bytes_before: int
    bytes_after: int
    experts: int = 0
    expert_block_size: int | None = None
    float_bytes: int = 0
    block_sizes: tuple[int, ...] = ()
    wide_matrices: int = 0


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
    if is_matmul_nbits(node) or node.op_type == "GatherBlockQuantized":
        return [node.inputs[2]]
    if is_contrib(node, moe.QUANTIZED_OP_TYPE):
        return [node.inputs[moe.QuantizedSlot.FC1_SCALES], node.inputs[moe.QuantizedSlot.FC2_SCALES]]
    if node.op_type == gqa.OP_TYPE:
        return list(node.inputs[gqa.Slot.COS_CACHE : gqa.Slot.POSITION_IDS])
    return list(node.inputs[2:4]) if node.op_type == "RotaryEmbedding" else []
