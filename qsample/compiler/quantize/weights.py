"""Quantizes weights to blocks of 2, 4 or 8 bits.

Constant matrices in a MatMul become operands of a MatMulNBits, embedding tables of a GatherBlockQuantized; a tied table
is quantized once for both. The numbers are computed only when the graph is saved, some rows at a time, and weights
stay mapped from their files.

The bits of each matrix come from a table (`bits.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.compiler.quantize.bits import PLAIN, BitsTable, names_of
from qsample.compiler.quantize.blocks import (
    QuantizationReport,
    QuantizedWeight,
    added_up,
    float_bytes,
    quantization_report,
    report_quantization,
)
from qsample.compiler.quantize.methods import Levels, WeightQuantization
from qsample.compiler.quantize.walk import Wanted
from qsample.contract.tensors import BLOCK_SIZES, INPUT_IDS, LENGTHS
from qsample.errors import CompileError
from qsample.graph import moe
from qsample.graph.edit import (
    drop_unread,
    initializer,
    replace_node,
    reshape_target,
    suffixed,
    with_loop_bodies,
)
from qsample.graph.evaluate import inputs_of
from qsample.graph.operators import (
    CONTRIB_DOMAIN,
    FLOAT32_ACTIVATIONS,
    INT8_ACTIVATIONS,
    MATMUL_NBITS,
    is_matmul_nbits,
)
from qsample.graph.packed import offsets_of

_KERNELS_OF_2_BITS: Final = (
    32,
    64,
    128,
)  # the block sizes that MatMulNBits multiplies by activations in 8 bits

Calibrate = Callable[[ir.Model, Sequence[Wanted]], Mapping[ir.Value, Levels]]
"""The levels of matrices of a model, for the inputs that they meet."""


def quantize_weights(
    model: ir.Model,
    quantization: WeightQuantization,
    table: BitsTable = PLAIN,
    *,
    pads: bool = False,
    calibrate: Calibrate | None = None,
) -> bool:
    """Quantize the weights of `model`, in place. Returns whether there was one; `quantization_report` has the figures.

    1. A weight is a constant matrix of floats that a MatMul or a Gemm multiplies by or a Gather looks rows up in, in
       the graph or in the body of a Scan.
    2. Its blocks have the size of the options or a smaller one: that of the fewest bytes, with the last block of each
       row filled up with zeros. If a product reads it and not `pads` (the device's MatMulNBits takes no such block),
       only sizes that divide its inputs count, and without one it stays as it is.
    3. Matrices that score experts stay as they are: a thousandth of a mixture's weights, and their rounding would
       decide which experts run. So do tables that are looked up by position, sines say, and offsets of packed weights.
    4. `table` has the bits of each matrix, by `bits.names_of`. Matrices without blocks of a size that the kernels of 2
       bits take have 4. Matrices of which rows are looked up have no zero points: kernels read these in different ways.
    5. The numbers are computed when the model is saved; before, by `calibrate`, for the matrices in the graph itself,
       except for the head and lookup tables.
    """
    graph = model.graph
    quantized: dict[ir.Value, QuantizedWeight] = {}
    names = names_of(
        graph, [node for node in with_loop_bodies(graph) if matrix_of(node) is not None]
    )
    found = _ways(graph, names, quantization, table, pads)
    levels = {} if calibrate is None else calibrate(model, _to_calibrate(graph, found))
    for node, (matrix, way) in found.items():
        known = levels.get(matrix.value)
        new = QuantizedWeight(matrix.value, way, outputs_first=matrix.transposed, levels=known)
        weight = quantized.setdefault(matrix.value, new)
        if weight.outputs_first == matrix.transposed:
            (_lookup if node.op_type == "Gather" else _product)(graph, node, weight)
    for weight in quantized.values():
        weight.register(graph)
    drop_unread(graph, quantized)
    model.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
    experts = quantization_report(model) or QuantizationReport(0, 0, 0)
    before, after = added_up(quantized.values())
    report = replace(
        experts,
        matrices=len(quantized),
        bits={names[node]: f"int{way.bits}:{way.block_size}" for node, (_, way) in found.items()},
        block_sizes=tuple(
            sorted({weight.quantization.block_size for weight in quantized.values()})
        ),
        bytes_before=experts.bytes_before + before,
        bytes_after=experts.bytes_after + after,
        float_bytes=float_bytes(model),
    )
    report_quantization(model, report)
    return bool(quantized)


_ACCURACY: Final = "accuracy_level"


def round_activations(model: ir.Model) -> bool:
    """Let every MatMulNBits round its activations as `quantize_weights` asks, in place: weights that a checkpoint
    brought quantized are multiplied by in float32 until then. Returns whether there were any."""
    nodes = [node for node in model.graph.all_nodes() if is_matmul_nbits(node)]
    for node in nodes:
        node.attributes[_ACCURACY] = ir.AttrInt64(_ACCURACY, INT8_ACTIVATIONS)
    return bool(nodes)


def keep_activations(model: ir.Model) -> bool:
    """Let products with quantized weights take float32 activations, in place: results depend less on the kernel."""
    nodes = [
        node
        for node in model.graph.all_nodes()
        if _ACCURACY in node.attributes or is_matmul_nbits(node)
    ]
    for node in nodes:
        node.attributes[_ACCURACY] = ir.AttrInt64(_ACCURACY, FLOAT32_ACTIVATIONS)
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


def _ways(
    graph: ir.Graph,
    names: Mapping[ir.Node, str],
    quantization: WeightQuantization,
    table: BitsTable,
    pads: bool,
) -> dict[ir.Node, tuple[_Matrix, WeightQuantization]]:
    """The nodes to quantize, with their matrix and its quantization, the same for all nodes of a matrix: a table that
    is also the head's has the head's."""
    kept = moe.routers(graph) | offset_products(graph)
    found = {}
    products_first = sorted(names, key=lambda node: node.op_type == "Gather")
    ways: dict[ir.Value, WeightQuantization | None] = {}
    for node in products_first:
        matrix = matrix_of(node)
        if matrix is None or node in kept or looks_up_positions(node):
            continue
        asked = ways.setdefault(matrix.value, table.way(names[node], quantization))
        way = None if asked is None else _fitting(asked, matrix, pads)
        if way is not None:
            found[node] = matrix, way
    return {node: found[node] for node in names if node in found}


def offset_products(graph: ir.Graph) -> set[ir.Node]:
    """The products by offsets of packed weights."""
    return {
        found.product for node in with_loop_bodies(graph) if (found := offsets_of(node)) is not None
    }


def looks_up_positions(node: ir.Node) -> bool:
    """Whether `node` looks rows up by the position of a token, and not by its id."""
    if node.op_type != "Gather" or node.inputs[1] is None:
        return False
    told_by = inputs_of([node.inputs[1]])
    return LENGTHS.name in told_by and INPUT_IDS.name not in told_by


def _to_calibrate(
    graph: ir.Graph, found: Mapping[ir.Node, tuple[_Matrix, WeightQuantization]]
) -> list[Wanted]:
    products = [node for node in found if node.op_type != "Gather" and node.graph is graph]
    wanted = {
        found[node][0].value: node for node in reversed(products)
    }  # the first of the nodes that share a matrix
    return [
        Wanted(value, node, found[node][0].transposed, found[node][1])
        for value, node in reversed(wanted.items())
    ]


def _fitting(
    quantization: WeightQuantization, matrix: _Matrix, pads: bool
) -> WeightQuantization | None:
    """`quantization` in the blocks that `matrix` gets; None if it stays float."""
    inputs = matrix.input_size
    known = _KERNELS_OF_2_BITS if quantization.bits == 2 else BLOCK_SIZES
    pads = pads or all(user.op_type == "Gather" for user in matrix.value.consumers())
    sizes = [size for size in known if size <= min(quantization.block_size, inputs)]
    by_bytes = {
        _row_bytes(inputs, size, quantization.bits): size
        for size in sizes
        if pads or inputs % size == 0
    }
    if not by_bytes and quantization.bits == 2:
        return _fitting(replace(quantization, bits=4), matrix, pads)
    looked_up = any(user.op_type == "Gather" for user in matrix.value.consumers())
    zero_points = quantization.zero_points and quantization.bits == 4 and not looked_up
    return (
        replace(quantization, block_size=by_bytes[min(by_bytes)], zero_points=zero_points)
        if by_bytes
        else None
    )


def _row_bytes(inputs: int, block_size: int, bits: int) -> int:
    """Of a row in memory: ONNX Runtime adds a float32 sum to the scale of each block."""
    return -(-inputs // block_size) * (block_size * bits // 8 + 8)


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
    return node.attributes.get_float("alpha", 1.0) == 1.0 and not any(
        other != 0 for other in others
    )


def _constant(value: ir.Value | None, *, transposed: bool) -> _Matrix | None:
    if value is None or value.const_value is None or not value.is_initializer():
        return None
    tensor = value.const_value
    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return (
        _Matrix(value, tensor, transposed)
        if len(tensor.shape) == 2 and tensor.dtype in floats
        else None
    )


def _product(graph: ir.Graph, node: ir.Node, weight: QuantizedWeight) -> None:
    rows = weight.rows
    blocks = weight.row_blocks
    operands = weight.operands((rows, blocks, weight.block_bytes), (rows * blocks,))
    attributes = {
        "K": weight.inputs,
        "N": rows,
        "bits": weight.quantization.bits,
        "block_size": weight.quantization.block_size,
        _ACCURACY: INT8_ACTIVATIONS,
    }
    new = [_node(MATMUL_NBITS, node, [node.inputs[0], *operands], attributes)]
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        new.append(
            ir.Node("", "Add", [new[-1].outputs[0], node.inputs[2]], name=suffixed(node, "bias"))
        )
    replace_node(node, new)


def _lookup(graph: ir.Graph, node: ir.Node, table: QuantizedWeight) -> None:
    """The lookup reads the blocks that MatMulNBits reads: a table [N, blocks, block size], of which it takes rows."""
    rows = table.rows
    blocks = table.row_blocks
    levels, scales = table.operands(
        (rows, blocks, table.block_bytes), (rows, blocks, 1), "block_scales"
    )
    attributes = {
        "bits": table.quantization.bits,
        "block_size": table.quantization.block_size,
        "gather_axis": 0,
        "quantize_axis": 2,
    }
    lookup = _node("GatherBlockQuantized", node, [levels, node.inputs[1], scales], attributes)
    rank = len(node.inputs[1].shape)  # type: ignore[union-attr,arg-type]
    sizes = reshape_target(graph, [0] * rank + [table.columns])
    new = [lookup, ir.Node("", "Reshape", [lookup.outputs[0], sizes], name=suffixed(node, "rows"))]
    if table.columns > table.inputs:
        bounds = [
            initializer(graph, f"{name}_{at}", np.array([at]))
            for name, at in (("start", 0), ("end", table.inputs), ("axis", rank))
        ]
        new.append(
            ir.Node("", "Slice", [new[-1].outputs[0], *bounds], name=suffixed(node, "columns"))
        )
    replace_node(node, new)


def _node(
    op_type: str, old: ir.Node, inputs: list[ir.Value | None], attributes: dict[str, int]
) -> ir.Node:
    return ir.node(
        op_type, inputs, attributes, domain=CONTRIB_DOMAIN, name=suffixed(old, "quantized")
    )


def check_quantized(model: ir.Model, quantization: WeightQuantization) -> None:
    """Raise CompileError if neither a matrix nor an expert of `model` was quantized."""
    report = quantization_report(model)
    if report is not None and (report.matrices > 0 or report.experts > 0):
        return
    kept = offset_products(model.graph)
    nodes = [node for node in with_loop_bodies(model.graph) if node not in kept]
    sizes = {matrix.input_size for node in nodes if (matrix := matrix_of(node)) is not None}
    if sizes:
        smallest = f"{BLOCK_SIZES[0]}, the smallest block"
        why = f"none of their input sizes ({', '.join(map(str, sorted(sizes)))}) is a multiple of {smallest}"
    else:
        why = "it multiplies by no constant matrix of float32, float16 or bfloat16"
        if any(is_matmul_nbits(node) for node in nodes):
            why += " besides matrices that the checkpoint brought quantized; these stay as they are"
    raise CompileError(
        f"{quantization.bits}-bit weights were asked for and no matrix of the model can be quantized: {why}; "
        "leave weights out"
    )
