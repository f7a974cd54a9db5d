"""Fuses a graph into ONNX Runtime's own operators for a provider, and joins its matrix products.

Only this module uses transformers' private fusion passes; they also cover attention that a model writes out. Without
transformers, onnxscript's fusions of norms, activations and transposed products run: enough for a decode graph. Both
run onnxscript's optimizer. It takes a number for 0 within 1e-8 and for 1 within 1e-5 and drops additions and products
with it: a norm's eps, a scale close to 1, the factor below 1 of the sampler's draw. These numbers are hidden from it.

Query, key and value projections become one MatMul, gate and up another: fewer and longer kernels. The joint matrix is
put together when it is read, so that weights stay mapped from their files; ONNX Runtime's own fusion would read them.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from onnxscript import optimizer
from onnxscript.rewriter.ort_fusions.bias_gelu import fuse_bias_gelu
from onnxscript.rewriter.ort_fusions.erfgelu import fuse_erfgelu
from onnxscript.rewriter.ort_fusions.fused_matmul_rule_sets import fused_matmul_rule_sets
from onnxscript.rewriter.ort_fusions.gelu import fuse_gelu
from onnxscript.rewriter.ort_fusions.rms_normalization import fuse_rms_normalization
from onnxscript.rewriter.ort_fusions.skip_normalization import (
    fuse_skip_layer_normalization,
    fuse_skip_rms_normalization,
)

from qsample.contract.arrays import Array
from qsample.graph.edit import (
    all_initializers,
    constant,
    constant_value,
    drop_unread,
    initializer,
    insert,
    reshape_target,
)
from qsample.graph.operators import is_matmul_nbits, middle_zero_points
from qsample.graph.packed import Offsets, block_sums, offsets_of
from qsample.graph.rewriting import operators_first
from qsample.graph.weights import JoinedTensor

FUSION_PROVIDERS = ("cpu", "cuda")
_FUSIONS: Final[tuple[Callable[[ir.Model], Any], ...]] = (
    fuse_erfgelu,
    fuse_rms_normalization,
    fuse_skip_layer_normalization,
    fuse_skip_rms_normalization,
    fuse_gelu,
    fuse_bias_gelu,
)
# The tolerances of numbers in onnxscript's patterns, unless a pattern gives its tolerances.
_RELATIVE = 1e-5
_ABSOLUTE = 1e-8


def fuse_operators(model: ir.Model, provider: str) -> bool:
    """Fuse norms, skip-norms, rotary embeddings and projections; ValueError for providers not in FUSION_PROVIDERS."""
    if provider not in FUSION_PROVIDERS:
        raise ValueError(
            f"no fusions for provider {provider!r}; choose one of {', '.join(FUSION_PROVIDERS)}"
        )
    nodes = list(model.graph)
    with operators_first():
        fuse_rms_normalization(model)  # before its eps is hidden
        with _near_numbers_hidden(model):
            try:
                from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime
            except ImportError:
                fuse_without_transformers(model)
            else:
                fuse_for_onnxruntime(model, provider)
    return list(model.graph) != nodes


def fuse_without_transformers(model: ir.Model) -> None:
    """Fuse norms with their skips, activations, and products with transposed or scaled matrices, in place."""
    optimizer.fold_constants_ir(model, onnx_shape_inference=True)
    for fuse in _FUSIONS:
        fuse(model)
    fused_matmul_rule_sets().apply_to_model(model)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _merge_constants(model)
    common_passes.CommonSubexpressionEliminationPass()(model)


def fold_constants(model: ir.Model) -> None:
    """Compute what depends on constants alone, in place. A constant is stored once then, and in no graph inside."""
    with _near_numbers_hidden(model):
        optimizer.fold_constants_ir(model, onnx_shape_inference=True)
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        common_passes.LiftSubgraphInitializersToMainGraphPass()(model)
        _merge_constants(model)


def merge_equal_nodes(model: ir.Model) -> bool:
    """Keep one of several small constants that are equal, and of several nodes that compute the same."""
    merged = _merge_constants(model)
    return bool(common_passes.CommonSubexpressionEliminationPass()(model).modified) or merged


def _merge_constants(model: ir.Model) -> bool:
    """Keep one of several small constants that are equal. Constants that a branch returns stay: no reason to warn."""
    logger = logging.getLogger("onnx_ir.passes.common.initializer_deduplication")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return bool(common_passes.DeduplicateInitializersPass()(model).modified)
    finally:
        logger.setLevel(level)


@contextmanager
def _near_numbers_hidden(model: ir.Model) -> Iterator[None]:
    """While open, scalars that are almost 0 or 1 are inputs of the graph, so that no rewrite knows their numbers."""
    graph = model.graph
    hidden: dict[ir.Value, Array] = {}
    for value in all_initializers(graph):
        number = _near_number(value)
        if number is not None:
            stand_in = ir.Value(name=f"{value.name}_exact", shape=value.shape, type=value.type)
            value.replace_all_uses_with(stand_in)
            hidden[stand_in] = number
    graph.inputs.extend(hidden)
    try:
        yield
    finally:
        for stand_in, number in hidden.items():
            graph.inputs.remove(stand_in)
            stand_in.replace_all_uses_with(initializer(graph, str(stand_in.name), number))


def _near_number(value: ir.Value) -> Array | None:
    """The number of a scalar that the optimizer would take for 0 or 1; None for any other value."""
    if (
        value.dtype is None
        or not value.dtype.is_floating_point()
        or value.shape is None
        or len(value.shape) > 0
    ):
        return None
    number = constant(value)
    if number is None:
        return None
    near = (
        math.isclose(number, exact, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE) and number != exact
        for exact in (0, 1)
    )
    return number if any(near) else None


def replace_gemms(model: ir.Model) -> bool:
    """Turn Gemms by constant matrices into MatMul and Add: a MatMul keeps [B, S, N], but a Gemm needs flattened rows,
    and weight quantization reads only MatMuls.

    1. The Gemm neither scales nor transposes, its weight is an initializer, its input and output have recorded shapes,
       and the output is none of the graph.
    2. If a reshape flattens the states before it, the MatMul reads them unflattened, unless the addend is flattened.
    """
    modified = False
    for node in list(model.graph):
        if node.op_type == "Gemm" and _is_plain(node):
            ir.convenience.replace_all_uses_with(node.outputs[0], _matmul(node))
            modified = True
    return modified


def _is_plain(node: ir.Node) -> bool:
    attributes = node.attributes
    scaled = attributes.get_float("alpha", 1.0) != 1.0 or attributes.get_float("beta", 1.0) != 1.0
    transposed = attributes.get_int("transA", 0) != 0 or attributes.get_int("transB", 0) != 0
    weight = node.inputs[1]
    constant = weight is not None and weight.is_initializer()
    source = node.inputs[0]
    result = node.outputs[0]
    known = source is not None and source.shape is not None and result.shape is not None
    return constant and not scaled and not transposed and known and not result.is_graph_output()


def _matmul(node: ir.Node) -> ir.Value:
    """The result of `node`, [rows, N], from the states before a reshape flattened them, if one did."""
    source, weight, bias, *_ = [*node.inputs, None]
    result = node.outputs[0]
    assert node.graph is not None
    assert source is not None
    assert result.shape is not None
    flattening = source.producer()
    unflattened = (
        flattening.inputs[0] if flattening is not None and flattening.op_type == "Reshape" else None
    )
    # Other reshapes than a flattening end in another size than the matrix takes.
    is_vector = bias is None or (bias.shape is not None and len(bias.shape) <= 1)
    if (
        is_vector
        and unflattened is not None
        and unflattened.shape is not None
        and weight is not None
        and weight.shape
    ):
        source = unflattened if unflattened.shape[-1] == weight.shape[0] else source
    assert source.shape is not None
    shape = [*source.shape[:-1], result.shape[-1]]
    product = insert(node, "MatMul", [source, weight], shape)
    if bias is not None:
        product = insert(node, "Add", [product, bias], shape)
    if len(shape) == 2:
        return product
    assert isinstance(shape[-1], int)
    return insert(
        node, "Reshape", [product, reshape_target(node.graph, [-1, shape[-1]])], result.shape
    )


_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


class _Projection(NamedTuple):
    """A MatMul by a constant [K, N] or a MatMulNBits; projections of the same `kind` can be joined."""

    node: ir.Node
    output_size: int
    kind: Hashable
    operands: list[ir.TensorProtocol]
    offsets: Offsets | None = None


def join_projections(model: ir.Model) -> bool:
    """Join the projections that read the same value, in the graph and, with constants of the graph, in bodies of Scans.

    1. MatMuls by initializers [K, N] are joined if their dtype is one.
    2. MatMulNBits are joined if bits, block size, accuracy and dtype are; if any has zero points or offsets, all get
       them.
    3. MatMulNBits that read a value's columns in the same order (act-order) read the same Gather first.
    """
    graph = model.graph
    modified = _share_orders(model.graph)
    parts = (graph, *graph.subgraphs())
    inputs = [value for part in parts for value in part.inputs]
    for value in [*inputs, *(output for node in graph.all_nodes() for output in node.outputs)]:
        by_kind: defaultdict[Hashable, list[_Projection]] = defaultdict(list)
        for node, index in value.uses():
            if index == 0 and (projection := _projection(node)) is not None:
                by_kind[node.graph, projection.kind].append(projection)
        for siblings in by_kind.values():
            if len(siblings) > 1:
                _join(graph, value, siblings)
                modified = True
    return modified


def _share_orders(graph: ir.Graph) -> bool:
    """Let projections with the same order of a value's columns, as act-order makes it, read the same Gather."""
    modified = False
    first: defaultdict[Hashable, list[tuple[ir.Node, Array]]] = defaultdict(list)
    for node in list(graph):
        order = constant(node.inputs[1]) if node.op_type == "Gather" else None
        if (
            order is None
            or order.ndim != 1
            or not any(is_matmul_nbits(user) for user, _ in node.outputs[0].uses())
        ):
            continue
        kept = first[node.inputs[0], node.attributes.get_int("axis", 0)]
        same = next((other for other, indices in kept if np.array_equal(order, indices)), None)
        if same is None:
            kept.append((node, order))
            continue
        ir.convenience.replace_all_uses_with(node.outputs[0], same.outputs[0])
        _remove(graph, node)
        modified = True
    return modified


def _projection(node: ir.Node) -> _Projection | None:
    operands = [
        value.const_value
        for value in node.inputs[1:]
        if value is not None and value.is_initializer()
    ]
    tensors = [tensor for tensor in operands if tensor is not None]
    if len(tensors) != len(node.inputs) - 1:
        return None
    if node.op_type == "MatMul" and len(tensors[0].shape) == 2 and tensors[0].dtype in _FLOATS:
        inputs, outputs = tensors[0].shape.numpy()
        return _Projection(
            node, int(outputs), (node.op_type, int(inputs), tensors[0].dtype), tensors
        )
    if is_matmul_nbits(node) and len(tensors) in (2, 3):  # with a zero point or without
        offsets = offsets_of(node)
        sizes = tuple(
            node.attributes.get_int(name, 0)
            for name in ("K", "bits", "block_size", "accuracy_level")
        )
        outputs = node.attributes.get_int("N", 0)
        return _Projection(
            node, outputs, (node.op_type, *sizes, tensors[1].dtype), tensors, offsets
        )
    return None


def _join(graph: ir.Graph, value: ir.Value, siblings: list[_Projection]) -> None:
    """Put one product in place of several. `graph` holds the constants; the nodes may be in a body."""
    one = siblings[0].node
    assert isinstance(one.graph, ir.Graph)
    name = f"{one.name}_joint"
    sizes = [sibling.output_size for sibling in siblings]
    quantized = is_matmul_nbits(one)
    operands = (_quantized_operands if quantized else _weight)(graph, name, siblings)
    attributes = {key: attribute for key, attribute in one.attributes.items() if key != "N"}
    joint = ir.Node(
        one.domain, one.op_type, [value, *operands], list(attributes.values()), name=name
    )
    if quantized:
        joint.attributes["N"] = ir.AttrInt64("N", sum(sizes))
    split_sizes = initializer(graph, f"{name}_sizes", np.array(sizes, np.int64))
    split = ir.Node(
        "",
        "Split",
        [joint.outputs[0], split_sizes],
        [ir.AttrInt64("axis", -1)],
        num_outputs=len(sizes),
        name=f"{name}_split",
    )
    output = joint.outputs[0]
    output.name = name
    output.type = one.outputs[0].type
    output.shape = None if value.shape is None else ir.Shape([*value.shape[:-1], sum(sizes)])
    nodes = {sibling.node for sibling in siblings}
    first = next(node for node in one.graph if node in nodes)  # `value` is computed by then
    one.graph.insert_before(first, [joint, split])
    if any(sibling.offsets is not None for sibling in siblings):
        sums = block_sums(joint, value, one.attributes.get_int("block_size", 0))
        offsets = _joined(
            graph, f"{name}_offsets", [_offsets(sibling) for sibling in siblings], axis=1
        )
        product = insert(joint, "MatMul", [sums, offsets], output.shape)
        split.replace_input_with(0, insert(split, "Add", [output, product], output.shape))
    for sibling, part in zip(siblings, split.outputs, strict=True):
        found = sibling.offsets
        old = (sibling.node if found is None else found.total).outputs[0]
        part.type = old.type
        part.shape = old.shape
        old.replace_all_uses_with(part, replace_graph_outputs=True)
        for node in (
            (sibling.node,) if found is None else (found.total, found.product, sibling.node)
        ):
            _remove(graph, node)
        part.name = old.name


def _weight(graph: ir.Graph, name: str, siblings: list[_Projection]) -> list[ir.Value]:
    return [_joined(graph, f"{name}_weight", [sibling.operands[0] for sibling in siblings], axis=1)]


def _quantized_operands(graph: ir.Graph, name: str, siblings: list[_Projection]) -> list[ir.Value]:
    """Blocks, scales and, if any of them has these, zero points: a row of the joint matrix is a row of a part."""
    joined = [
        _joined(graph, f"{name}_{kind}", [sibling.operands[index] for sibling in siblings], axis=0)
        for index, kind in enumerate(("blocks", "scales"))
    ]
    if any(len(sibling.operands) == 3 for sibling in siblings):
        parts = [
            sibling.operands[2] if len(sibling.operands) == 3 else _zero_points(sibling)
            for sibling in siblings
        ]
        joined.append(_joined(graph, f"{name}_zero_points", parts, axis=0))
    return joined


def _zero_points(sibling: _Projection) -> ir.TensorProtocol:
    """Those of a projection that has none."""
    bits = sibling.node.attributes.get_int("bits", 4)
    blocks = int(sibling.operands[0].shape.numpy()[1])
    return ir.Tensor(middle_zero_points(sibling.output_size, blocks, bits))


def _offsets(sibling: _Projection) -> ir.TensorProtocol:
    """[blocks, N]: its offsets, or zeros."""
    if sibling.offsets is not None and (tensor := sibling.offsets.offsets.const_value) is not None:
        return tensor
    blocks = int(sibling.operands[0].shape.numpy()[1])
    return ir.Tensor(np.zeros((blocks, sibling.output_size), sibling.operands[1].dtype.numpy()))


def _joined(graph: ir.Graph, name: str, parts: list[ir.TensorProtocol], axis: int) -> ir.Value:
    shape = list(parts[0].shape.numpy())
    shape[axis] = sum(part.shape.numpy()[axis] for part in parts)
    joined = constant_value(name, JoinedTensor(parts, axis, shape, name))
    graph.register_initializer(joined)
    return joined


def _remove(graph: ir.Graph, node: ir.Node) -> None:
    """Take `node` out of its graph, and the constants of `graph` that it alone reads."""
    read = list(node.inputs)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    drop_unread(graph, read)
