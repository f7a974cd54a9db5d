"""Weights whose parts lie apart in files: a checkpoint often has each expert of a mixture on its own, the graph has all
of them in one tensor. Nothing has to be copied to put them together: a graph does that when it runs, with Concat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.graph.edit import constant, initializer

_JOINED: Final = "_joined"  # of the name of a Concat that `write_joined` made
_RESHAPED: Final = "_reshaped"  # of the Reshape behind it


class JoinedTensor(ir.LazyTensor):
    """Tensors of one dtype, one behind the other along `axis`, seen as of another shape with as many numbers. It is
    computed whenever it is read."""

    __slots__ = ("axis", "parts")

    def __init__(
        self, parts: Sequence[ir.TensorProtocol], axis: int, shape: Sequence[int], name: str | None = None
    ) -> None:
        super().__init__(self._computed, parts[0].dtype, ir.Shape(shape), name=name)
        self.parts, self.axis = tuple(parts), axis

    def _computed(self) -> ir.TensorProtocol:
        array = np.concatenate([part.numpy() for part in self.parts], self.axis)
        return ir.Tensor(array.reshape(self.shape.numpy()), dtype=self.dtype, name=self.name)


def parts_in_files(tensor: ir.TensorProtocol | None) -> Iterator[ir.ExternalTensor]:
    """`tensor`, or the parts of it, that lie in files."""
    if isinstance(tensor, ir.ExternalTensor):
        yield tensor
    elif isinstance(tensor, JoinedTensor):
        for part in tensor.parts:
            yield from parts_in_files(part)


def lies_in_files(tensor: ir.TensorProtocol | None) -> bool:
    """Whether all numbers of `tensor` lie in files."""
    if isinstance(tensor, JoinedTensor):
        return all(map(lies_in_files, tensor.parts))
    return isinstance(tensor, ir.ExternalTensor)


def in_turns(tensors: Sequence[ir.TensorProtocol], name: str) -> JoinedTensor | None:
    """Two tensors [E, N, K] as one [E, 2 * N, K] that has their rows in turns; or one [E, 2 * N, K] with its halves in
    turns. None where not all of it lies in files."""
    if not all(map(lies_in_files, tensors)):
        return None
    halves = tensors if len(tensors) == 2 else _halves(tensors[0])
    if halves is None:
        return None
    experts, rows, columns = halves[0].shape.numpy()
    apart = [_seen_as(half, (experts, rows, 1, columns)) for half in halves]
    return JoinedTensor(apart, 2, (experts, 2 * rows, columns), name)


def _halves(tensor: ir.TensorProtocol) -> Sequence[ir.TensorProtocol] | None:
    experts, both, columns = tensor.shape.numpy()
    shape = (experts, both // 2, columns)
    if isinstance(tensor, ir.ExternalTensor):
        parts = [_rows(tensor, number, both // 2 * columns, (1, *shape[1:])) for number in range(2 * experts)]
        return [JoinedTensor(parts[half::2], 0, shape, f"{tensor.name}_{half}") for half in range(2)]
    assert isinstance(tensor, JoinedTensor)
    fitting = tensor.axis == 1 and [part.shape.numpy() for part in tensor.parts] == [shape, shape]
    return tensor.parts if fitting else None


def _rows(tensor: ir.ExternalTensor, number: int, count: int, shape: Sequence[int]) -> ir.ExternalTensor:
    """The numbers of `tensor` from `number * count` on, `count` of them."""
    size = tensor.dtype.itemsize
    return _external(tensor, (tensor.offset or 0) + int(number * count * size), shape, f"{tensor.name}_{number}")


def _seen_as(tensor: ir.TensorProtocol, shape: Sequence[int]) -> ir.TensorProtocol:
    if isinstance(tensor, JoinedTensor):
        return JoinedTensor(tensor.parts, tensor.axis, shape, tensor.name)
    assert isinstance(tensor, ir.ExternalTensor)
    return _external(tensor, tensor.offset or 0, shape, tensor.name)


def _external(tensor: ir.ExternalTensor, offset: int, shape: Sequence[int], name: str | None) -> ir.ExternalTensor:
    length = int(math.prod(shape) * tensor.dtype.itemsize)
    return ir.ExternalTensor(
        tensor.location, offset, length, tensor.dtype, shape=ir.Shape(shape), name=str(name), base_dir=tensor.base_dir
    )


def write_joined(graph: ir.Graph, tensor: JoinedTensor, name: str) -> tuple[ir.Value, list[ir.Node]]:
    """The value `name` that holds `tensor`, and the nodes that compute it, which are not in `graph` yet; their
    initializers are."""
    nodes: list[ir.Node] = []
    inputs = []
    for number, part in enumerate(tensor.parts):
        part_name = f"{name}_{number}"
        if isinstance(part, JoinedTensor):
            value, inner = write_joined(graph, part, part_name)
            nodes += inner
        else:
            value = ir.Value(
                name=part_name, shape=ir.Shape(part.shape.numpy()), type=ir.TensorType(part.dtype), const_value=part
            )
            graph.register_initializer(value)
        inputs.append(value)
    nodes.append(ir.Node("", "Concat", inputs, [ir.AttrInt64("axis", tensor.axis)], name=f"{name}{_JOINED}"))
    if _joined_shape(tensor.parts, tensor.axis) != tensor.shape.numpy():
        nodes[-1].outputs[0].name = f"{name}{_JOINED}"
        sizes = initializer(graph, f"{name}_sizes", np.array(tensor.shape.numpy(), np.int64))
        nodes.append(ir.Node("", "Reshape", [nodes[-1].outputs[0], sizes], name=f"{name}{_RESHAPED}"))
    output = nodes[-1].outputs[0]
    output.name, output.shape, output.type = name, ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
    return output, nodes


def read_joined(graph: ir.Graph) -> bool:
    """The inverse of `write_joined`: an initializer in place of each chain of its nodes. Returns whether there was
    one."""
    joins = [node for node in graph if node.op_type == "Concat" and str(node.name).endswith(_JOINED)]
    modified = False
    for node in joins:  # a part comes before the whole
        parts = [tensor for value in node.inputs if (tensor := _const_value(value)) is not None]
        if len(parts) < len(node.inputs):
            continue
        axis, nodes = node.attributes.get_int("axis", 0), [node]
        shape = _joined_shape(parts, axis)
        users = [user for user, _ in node.outputs[0].uses()]
        if len(users) == 1 and str(users[0].name).endswith(_RESHAPED):
            sizes = constant(users[0].inputs[1])
            if sizes is not None and (sizes > 0).all():
                nodes.append(users[0])
                shape = tuple(sizes.tolist())
        _replace(graph, nodes, JoinedTensor(parts, axis, shape, nodes[-1].outputs[0].name))
        modified = True
    return modified


def _replace(graph: ir.Graph, nodes: list[ir.Node], tensor: JoinedTensor) -> None:
    """An initializer in place of what `nodes`, one behind the other, compute of constants."""
    output = nodes[-1].outputs[0]
    read = {value for node in nodes for value in node.inputs if value is not None and value.is_initializer()}
    value = ir.Value(
        name=output.name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    output.replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(nodes, safe=True)
    for one in read:
        if not one.uses():
            graph.initializers.pop(str(one.name), None)
    graph.register_initializer(value)


def _const_value(value: ir.Value | None) -> ir.TensorProtocol | None:
    return value.const_value if value is not None and value.is_initializer() else None


def _joined_shape(parts: Sequence[ir.TensorProtocol], axis: int) -> tuple[int, ...]:
    shapes = [part.shape.numpy() for part in parts]
    return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])
