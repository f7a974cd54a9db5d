"""A decode graph enters; the same graph with projections of one input as one matrix leaves, their output split again.

Query, key and value become one MatMul, gate and up another: fewer kernels, longer ones. The packed matrix is put
together when it is read, so that weights stay mapped from their files.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

_FLOATS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


class _Projection(NamedTuple):
    """A MatMul by the constant `weight`, [K, N]."""

    node: ir.Node
    weight: ir.TensorProtocol


def pack_projections(model: ir.Model) -> bool:
    """Pack the MatMuls of `model`'s graph that read one value, in place. Returns whether there were any."""
    graph, modified = model.graph, False
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    for value in values:
        siblings = _siblings(value, graph)
        if len(siblings) > 1 and len({(s.weight.shape[0], s.weight.dtype) for s in siblings}) == 1:
            _pack(graph, value, siblings)
            modified = True
    return modified


def _siblings(value: ir.Value, graph: ir.Graph) -> list[_Projection]:
    found = []
    for node, place in value.uses():
        weight = node.inputs[1] if node.op_type == "MatMul" and node.graph is graph and place == 0 else None
        if weight is None or not weight.is_initializer() or weight.const_value is None:
            continue
        if len(weight.const_value.shape) == 2 and weight.const_value.dtype in _FLOATS:
            found.append(_Projection(node, weight.const_value))
    return found


def _pack(graph: ir.Graph, value: ir.Value, siblings: list[_Projection]) -> None:
    name = f"{siblings[0].node.name}_packed"
    sizes = [int(sibling.weight.shape.numpy()[1]) for sibling in siblings]
    parts = [sibling.weight for sibling in siblings]
    shape = ir.Shape((int(parts[0].shape.numpy()[0]), sum(sizes)))

    def packed() -> ir.TensorProtocol:
        return ir.Tensor(np.concatenate([part.numpy() for part in parts], axis=1), name=f"{name}_weight")

    weight = _initializer(graph, ir.LazyTensor(packed, dtype=parts[0].dtype, shape=shape, name=f"{name}_weight"))
    split_sizes = _initializer(graph, ir.Tensor(np.array(sizes, np.int64), name=f"{name}_sizes"))
    matmul = ir.Node("", "MatMul", [value, weight], name=name)
    split = ir.Node(
        "",
        "Split",
        [matmul.outputs[0], split_sizes],
        [ir.AttrInt64("axis", -1)],
        num_outputs=len(sizes),
        name=f"{name}_split",
    )
    output = matmul.outputs[0]
    output.name, output.type = name, siblings[0].node.outputs[0].type
    output.shape = None if value.shape is None else ir.Shape([*value.shape[:-1], sum(sizes)])
    nodes = {sibling.node for sibling in siblings}
    first = next(node for node in graph if node in nodes)  # `value` is computed by then
    graph.insert_before(first, [matmul, split])
    for sibling, part in zip(siblings, split.outputs, strict=True):
        old = sibling.node.outputs[0]
        own = sibling.node.inputs[1]
        part.type, part.shape = old.type, old.shape
        old.replace_all_uses_with(part, replace_graph_outputs=True)
        graph.remove(sibling.node, safe=True)
        part.name = old.name
        if own is not None and own.name is not None and not own.uses():
            graph.initializers.pop(own.name, None)


def _initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    value = ir.Value(
        name=tensor.name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value
