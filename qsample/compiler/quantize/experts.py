"""Quantizes the experts of a mixture: MoE becomes QMoE.

Experts that no MoE takes, because of their gate, are looked up by GatherBlockQuantized: the weights of each row's
expert are made float again, and multiplied by as before.

Levels are computed when the graph is saved, one expert after another; those of one matrix of all experts of a layer are
in memory then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from qsample.compiler.quantize.report import QuantizationReport, report_quantization
from qsample.compiler.quantize.rounding import Levels, NewestResult, WeightQuantization, quantize_matrix
from qsample.graph import moe
from qsample.graph.edit import drop_unread, initializer, lazy_initializer, replace_node
from qsample.graph.moe import QuantizedSlot, Slot
from qsample.graph.operators import BLOCK_SIZES, CONTRIB_DOMAIN, INT8_ACTIVATIONS, is_contrib, pack_bits
from qsample.tensors import Array


def quantize_experts(
    model: ir.Model, quantization: WeightQuantization, block_sizes: Collection[int] = BLOCK_SIZES
) -> bool:
    """Quantize the experts of `model`, in place.

    block_sizes: those that the device's QMoE takes. Of them the largest is taken that divides the inputs and is at most
    `quantization.block_size`, or else the smallest that divides them; where it does not divide the hidden units, zeros
    are added to them, which changes no result. Experts whose inputs none divides stay float.

    Returns whether there were any; `quantization_report` has the figures.
    """
    graph, newest = model.graph, NewestResult()
    matrices: dict[ir.Value, _ExpertMatrices] = {}
    experts: dict[ir.Value | None, int] = {}  # what chooses them → how many
    for node in list(graph):
        if is_contrib(node, moe.OP_TYPE):
            choice = node.inputs[Slot.ROUTER]
            found = _quantize_mixture(graph, node, quantization, block_sizes, newest)
        elif moe.gather_of_weights(node) is not None:
            choice = node.inputs[1]
            found = _quantize_lookup(graph, node, quantization, newest)
        else:
            continue
        matrices |= found
        for blocks in found.values():
            experts[choice] = blocks.experts
    drop_unread(graph, matrices)
    if not matrices:
        return False
    model.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
    all_of_them = matrices.values()
    report = QuantizationReport(
        matrices=0,
        bytes_before=sum(blocks.tensor.nbytes for blocks in all_of_them),
        bytes_after=sum(blocks.nbytes for blocks in all_of_them),
        experts=sum(experts.values()),
        expert_block_size=max(blocks.quantization.block_size for blocks in all_of_them),
    )
    report_quantization(model, report)
    return True


class _ExpertMatrices:
    """One matrix [N, K] an expert as N rows of blocks, and the initializers that hold them.

    value: [E, N, K], or [E, K, N] where `transposed`. rows, columns: N and K with zeros added.
    """

    def __init__(
        self,
        graph: ir.Graph,
        value: ir.Value,
        quantization: WeightQuantization,
        newest: NewestResult,
        *,
        transposed: bool = False,
        rows: int | None = None,
        columns: int | None = None,
    ) -> None:
        assert value.const_value is not None
        self.tensor, self.quantization = value.const_value, quantization
        self._graph, self._name, self._newest, self._transposed = graph, value.name, newest, transposed
        self.experts, *sizes = (int(size) for size in self.tensor.shape.numpy())
        outputs, inputs = reversed(sizes) if transposed else sizes
        self.rows, self.columns = rows or outputs, columns or inputs
        self.nbytes = 0

    @property
    def row_blocks(self) -> int:
        return self.columns // self.quantization.block_size

    def packed(self, *, by_block: bool) -> ir.Value:
        """uint8 [E, N, K * bits / 8]; by_block: [E, N * K / block size, block size * bits / 8]."""
        size = self.columns * self.quantization.bits // 8
        shape = (self.rows * self.row_blocks, size // self.row_blocks) if by_block else (self.rows, size)
        return self._initializer("packed", 0, shape, ir.DataType.UINT8)

    def scales(self, *, by_block: bool) -> ir.Value:
        """[E, N, K / block size], dtype of the weights; by_block: [E, N * K / block size, 1]."""
        shape = (self.rows * self.row_blocks, 1) if by_block else (self.rows, self.row_blocks)
        return self._initializer("scales", 1, shape, self.tensor.dtype)

    def zero_points(self, *, by_block: bool) -> ir.Value | None:
        """uint8 [E, N, K / block size], packed along the last axis; by_block: one byte each, [E, N * K / block size,
        1]. None for levels that are symmetric around the middle one."""
        if self.quantization.method == "rtn":
            return None
        packed = -(-self.row_blocks * self.quantization.bits // 8)
        shape = (self.rows * self.row_blocks, 1) if by_block else (self.rows, packed)
        return self._initializer("zero_points", 2, shape, ir.DataType.UINT8)

    def quantize(self) -> Levels:
        """[E, N, K * bits / 8], [E, N, K / block size] and the same, unpacked: levels, scales and zero points."""
        weights = self.tensor.numpy()
        size = self.columns * self.quantization.bits // 8
        levels = np.empty((self.experts, self.rows, size), np.uint8)
        scales = np.empty((self.experts, self.rows, self.row_blocks), weights.dtype)
        zero_points = np.empty(scales.shape, np.uint8)
        for expert in range(self.experts):
            matrix = weights[expert].T if self._transposed else weights[expert]
            rows, columns = matrix.shape
            matrix = np.pad(matrix, ((0, self.rows - rows), (0, self.columns - columns)))
            parts = quantize_matrix(matrix.T, self.quantization)
            levels[expert] = parts[0].reshape(levels[expert].shape)
            scales[expert] = parts[1].reshape(scales[expert].shape)
            if self.quantization.method != "rtn":
                zero_points[expert] = parts[2].reshape(scales[expert].shape)
        return levels, scales, zero_points

    def _initializer(self, kind: str, index: int, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
        """index: 0 for levels, 1 for scales, 2 for zero points. Those of one matrix are registered in a row, so that
        saving them quantizes it once."""
        full = (self.experts, *shape)

        def part() -> Array:
            array = self._newest.of(self.quantize)[index]
            if index == 2 and shape != (self.rows * self.row_blocks, 1):
                array = pack_bits(array.reshape(-1, self.row_blocks), self.quantization.bits)
            return array.reshape(full)

        value = lazy_initializer(f"{self._name}_{kind}", full, dtype, part)
        if value.name not in self._graph.initializers:
            self._graph.register_initializer(value)
            assert value.const_value is not None
            self.nbytes += value.const_value.nbytes
        return self._graph.initializers[str(value.name)]


def _quantize_mixture(
    graph: ir.Graph,
    node: ir.Node,
    quantization: WeightQuantization,
    block_sizes: Collection[int],
    newest: NewestResult,
) -> dict[ir.Value, _ExpertMatrices]:
    """Turn an MoE into a QMoE. Returns its weights with what became of them; nothing where it has to stay."""
    inputs = [*node.inputs, *[None] * (len(Slot) - len(node.inputs))]
    fc1, fc2, bias = inputs[Slot.FC1], inputs[Slot.FC2], inputs[Slot.FC1_BIAS]
    if fc1 is None or fc2 is None or fc1.const_value is None or fc2.const_value is None:
        return {}
    _, hidden, size = (int(dim) for dim in fc2.const_value.shape.numpy())
    chosen = _block_size(hidden, size, quantization, block_sizes)
    if chosen is None:
        return {}
    way = replace(quantization, block_size=chosen)
    # One block a row would be read as a row of another layout, where zero points are packed.
    blocks = max(-(-size // chosen), 2 if _packs_zero_points(way) else 1)
    padded = blocks * chosen
    first = _ExpertMatrices(graph, fc1, way, newest, rows=2 * padded)
    second = _ExpertMatrices(graph, fc2, way, newest, columns=padded)
    listed: dict[QuantizedSlot, ir.Value | None] = {
        QuantizedSlot.INPUT: inputs[Slot.INPUT],
        QuantizedSlot.ROUTER: inputs[Slot.ROUTER],
        QuantizedSlot.FC1: first.packed(by_block=False),
        QuantizedSlot.FC1_SCALES: first.scales(by_block=False),
        QuantizedSlot.FC1_ZERO_POINTS: first.zero_points(by_block=False),
        QuantizedSlot.FC1_BIAS: bias if bias is None or padded == size else _padded_bias(graph, bias, 2 * padded),
        QuantizedSlot.FC2: second.packed(by_block=False),
        QuantizedSlot.FC2_SCALES: second.scales(by_block=False),
        QuantizedSlot.FC2_ZERO_POINTS: second.zero_points(by_block=False),
        QuantizedSlot.FC2_BIAS: inputs[Slot.FC2_BIAS],
    }
    attributes = {
        "expert_weight_bits": way.bits,
        "block_size": way.block_size,
        "accuracy_level": INT8_ACTIVATIONS,
        "weights_prepacked": 0,
    }
    new = ir.node(
        moe.QUANTIZED_OP_TYPE,
        _by_slot(listed),
        attributes,
        domain=CONTRIB_DOMAIN,
        name=f"{node.name}_quantized",
    )
    new.attributes.update(node.attributes)
    replace_node(node, [new])
    return {fc1: first, fc2: second}


def _by_slot(listed: Mapping[QuantizedSlot, ir.Value | None]) -> list[ir.Value | None]:
    last = max(slot for slot, value in listed.items() if value is not None)
    inputs: list[ir.Value | None] = [None] * (last + 1)
    for slot, value in listed.items():
        if value is not None:
            inputs[slot] = value
    return inputs


def _packs_zero_points(quantization: WeightQuantization) -> bool:
    return quantization.method != "rtn" and quantization.bits < 8


def _block_size(hidden: int, size: int, quantization: WeightQuantization, block_sizes: Collection[int]) -> int | None:
    """One that divides both, if there is one, else one that divides `hidden`; the nearest to what is asked for, smaller
    ones first."""
    asked = quantization.block_size
    least = 2 if _packs_zero_points(quantization) else 1  # blocks a row
    nearest = sorted(block_sizes, key=lambda block: (block > asked, abs(block - asked)))
    fitting = [block for block in nearest if hidden % block == 0 and hidden >= least * block]
    both = [block for block in fitting if size % block == 0 and size >= least * block and block <= asked]
    return next(iter([*both, *fitting]), None)


def _padded_bias(graph: ir.Graph, bias: ir.Value, columns: int) -> ir.Value:
    """The constant [E, N] with zeros behind each row, up to `columns`."""
    tensor = bias.const_value
    assert tensor is not None
    assert bias.dtype is not None
    experts, own = (int(dim) for dim in tensor.shape.numpy())
    name = f"{bias.name}_padded"
    if name not in graph.initializers:
        graph.register_initializer(
            lazy_initializer(
                name, (experts, columns), bias.dtype, lambda: np.pad(tensor.numpy(), ((0, 0), (0, columns - own)))
            )
        )
    return graph.initializers[name]


def _quantize_lookup(
    graph: ir.Graph, node: ir.Node, quantization: WeightQuantization, newest: NewestResult
) -> dict[ir.Value, _ExpertMatrices]:
    """Turn a lookup of experts' matrices into one of their levels; as `_quantize_mixture`."""
    weights = moe.gather_of_weights(node)
    if weights is None:
        return {}
    assert weights.const_value is not None
    # The inputs are what a MatMul sums over: the last axis of its first operand, the first of its second.
    transposed = any(user.op_type == "MatMul" and index == 1 for user, index in node.outputs[0].uses())
    inputs = int(weights.const_value.shape.numpy()[1 if transposed else 2])
    nearest = [block for block in BLOCK_SIZES if block <= quantization.block_size and inputs % block == 0]
    if not nearest:
        return {}
    way = replace(quantization, block_size=max(nearest))
    matrices = _ExpertMatrices(graph, weights, way, newest, transposed=transposed)
    operands = [matrices.packed(by_block=True), node.inputs[1], matrices.scales(by_block=True)]
    zero_points = matrices.zero_points(by_block=True)
    attributes = {"bits": way.bits, "block_size": way.block_size, "gather_axis": 0, "quantize_axis": 2}
    lookup = ir.node(
        "GatherBlockQuantized",
        [*operands, *([] if zero_points is None else [zero_points])],
        attributes,
        domain=CONTRIB_DOMAIN,
        name=f"{node.name}_quantized",
    )
    rank = len(node.inputs[1].shape)  # type: ignore[union-attr,arg-type]
    sizes = initializer(
        graph, f"{node.name}_matrices", np.array([0] * rank + [matrices.rows, matrices.columns], np.int64)
    )
    new = [lookup, ir.Node("", "Reshape", [lookup.outputs[0], sizes], name=f"{node.name}_matrices")]
    if transposed:
        order = [*range(rank), rank + 1, rank]
        new.append(ir.node("Transpose", [new[-1].outputs[0]], {"perm": order}, name=f"{node.name}_transposed"))
    replace_node(node, new)
    return {weights: matrices}
