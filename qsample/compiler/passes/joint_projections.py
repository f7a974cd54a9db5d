"""Joins projections of one value: one matrix product whose result is split.

Query, key and value become one MatMul, gate and up another: fewer kernels, longer ones. Quantized weights, the operands
of MatMulNBits, are joined as they are. The joint matrix is put together when it is read, so that weights stay mapped
from their files; ONNX Runtime's own fusion would read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.graph.edit import constant, drop_unread, initializer, lazy_initializer
from qsample.graph.operators import is_matmul_nbits, middle_zero_points
from qsample.tensors import Array

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


class _Projection(NamedTuple):
    """A MatMul by a constant [K, N] or a MatMulNBits. kind: those of one can be joined. operands: its constants."""

    node: ir.Node
    output_size: int
    kind: Hashable
    operands: list[ir.TensorProtocol]


def join_projections(model: ir.Model) -> bool:
    """Join the projections that read one value, in place: in `model`'s graph, and within the body of a Scan, whose
    weights are constants of `model`'s graph. Returns whether there were any.

    1. MatMuls by initializers [K, N] are joined if their dtype is one.
    2. MatMulNBits are joined if bits, block size, accuracy and dtype are; a MatMulNBits without zero points gets them
       if another has them.
    3. MatMulNBits that read a value's columns in one order (act-order) read the same Gather first.
    """
    graph, modified = model.graph, _share_orders(model.graph)
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
    """Let projections with one order of one value's columns, as act-order makes it, read the same Gather."""
    modified = False
    first: defaultdict[Hashable, list[tuple[ir.Node, Array]]] = defaultdict(list)
    for node in list(graph):
        order = constant(node.inputs[1]) if node.op_type == "Gather" else None
        if order is None or order.ndim != 1 or not any(is_matmul_nbits(user) for user, _ in node.outputs[0].uses()):
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
    operands = [value.const_value for value in node.inputs[1:] if value is not None and value.is_initializer()]
    tensors = [tensor for tensor in operands if tensor is not None]
    if len(tensors) != len(node.inputs) - 1:
        return None
    if node.op_type == "MatMul" and len(tensors[0].shape) == 2 and tensors[0].dtype in _FLOATS:
        inputs, outputs = tensors[0].shape.numpy()
        return _Projection(node, int(outputs), (node.op_type, int(inputs), tensors[0].dtype), tensors)
    if is_matmul_nbits(node) and len(tensors) in (2, 3):  # with a zero point or without
        sizes = tuple(node.attributes.get_int(name, 0) for name in ("K", "bits", "block_size", "accuracy_level"))
        outputs = node.attributes.get_int("N", 0)
        return _Projection(node, outputs, (node.op_type, *sizes, tensors[1].dtype), tensors)
    return None


def _join(graph: ir.Graph, value: ir.Value, siblings: list[_Projection]) -> None:
    """graph: of the constants; the nodes may be those of a body."""
    one = siblings[0].node
    assert isinstance(one.graph, ir.Graph)
    name = f"{one.name}_joint"
    sizes = [sibling.output_size for sibling in siblings]
    quantized = is_matmul_nbits(one)
    operands = (_quantized_operands if quantized else _weight)(graph, name, siblings)
    attributes = {key: attribute for key, attribute in one.attributes.items() if key != "N"}
    joint = ir.Node(one.domain, one.op_type, [value, *operands], list(attributes.values()), name=name)
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
    output.name, output.type = name, one.outputs[0].type
    output.shape = None if value.shape is None else ir.Shape([*value.shape[:-1], sum(sizes)])
    nodes = {sibling.node for sibling in siblings}
    first = next(node for node in one.graph if node in nodes)  # `value` is computed by then
    one.graph.insert_before(first, [joint, split])
    for sibling, part in zip(siblings, split.outputs, strict=True):
        old = sibling.node.outputs[0]
        part.type, part.shape = old.type, old.shape
        old.replace_all_uses_with(part, replace_graph_outputs=True)
        _remove(graph, sibling.node)
        part.name = old.name


def _weight(graph: ir.Graph, name: str, siblings: list[_Projection]) -> list[ir.Value]:
    return [_joined(graph, f"{name}_weight", [sibling.operands[0] for sibling in siblings], axis=1)]


def _quantized_operands(graph: ir.Graph, name: str, siblings: list[_Projection]) -> list[ir.Value]:
    """Blocks, scales and, where one of them has any, zero points: a row of the joint matrix is one of a part's."""
    joined = [
        _joined(graph, f"{name}_{kind}", [sibling.operands[index] for sibling in siblings], axis=0)
        for index, kind in enumerate(("blocks", "scales"))
    ]
    if any(len(sibling.operands) == 3 for sibling in siblings):
        parts = [sibling.operands[2] if len(sibling.operands) == 3 else _zero_points(sibling) for sibling in siblings]
        joined.append(_joined(graph, f"{name}_zero_points", parts, axis=0))
    return joined


def _zero_points(sibling: _Projection) -> ir.TensorProtocol:
    """Those of a projection that has none."""
    bits, blocks = sibling.node.attributes.get_int("bits", 4), int(sibling.operands[0].shape.numpy()[1])
    return ir.Tensor(middle_zero_points(sibling.output_size, blocks, bits))


def _joined(graph: ir.Graph, name: str, parts: list[ir.TensorProtocol], axis: int) -> ir.Value:
    def join() -> Array:
        return np.concatenate([part.numpy() for part in parts], axis=axis)

    shape = list(parts[0].shape.numpy())
    shape[axis] = sum(part.shape.numpy()[axis] for part in parts)
    joined = lazy_initializer(name, shape, parts[0].dtype, join)
    graph.register_initializer(joined)
    return joined


def _remove(graph: ir.Graph, node: ir.Node) -> None:
    """Take `node` out of its graph, and its constants, those of `graph`, that nothing else reads."""
    read = list(node.inputs)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    drop_unread(graph, read)
