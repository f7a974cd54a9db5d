"""Puts constants and nodes into graphs, with their shapes and dtypes recorded.

onnx_ir.tape, which builds nodes in rows too, records neither, and appends where these go before a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.graph.traversal import producer
from qsample.tensors import Array


def initializer(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """The initializer `name` of `graph`, made from `array` unless it is there already."""
    if name not in graph.initializers:
        tensor = ir.tensor(np.asarray(array, order="C"), name=name)  # ascontiguousarray gives a scalar an axis
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]


def lazy_initializer(name: str, shape: Iterable[int], dtype: ir.DataType, compute: Callable[[], Array]) -> ir.Value:
    """An initializer, for a graph to register, whose numbers are computed whenever they are read: when it is saved.

    compute: returns an array of `shape` and `dtype`; it is not kept.
    """
    fixed = ir.Shape(shape)

    def tensor() -> ir.TensorProtocol:
        return ir.Tensor(compute(), dtype=dtype, name=name)

    lazy = ir.LazyTensor(tensor, dtype=dtype, shape=fixed, name=name)
    return ir.Value(name=name, shape=fixed, type=ir.TensorType(dtype), const_value=lazy)


def insert(
    before: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    shape: Iterable[int | ir.SymbolicDim | None],
    attributes: dict[str, Any] | None = None,
    domain: str = "",
) -> ir.Value:
    """Put a node with one output of `shape`, and of the first input's dtype, before `before`; return that output."""
    node = ir.node(op_type, inputs, attributes, domain=domain)
    output = node.outputs[0]
    output.shape = ir.Shape(list(shape))
    if inputs[0] is not None and inputs[0].dtype is not None:
        output.type = ir.TensorType(inputs[0].dtype)  # of its own: a type can be changed in place
    assert before.graph is not None
    before.graph.insert_before(before, node)
    return output


def reshape(before: ir.Node, source: ir.Value, sizes: Sequence[int]) -> ir.Value:
    """`source` with its last axes as in `sizes`, which start with a 0 for each axis that is kept."""
    assert source.shape is not None
    assert before.graph is not None
    kept = list(source.shape)[: list(sizes).count(0)]
    return insert(before, "Reshape", [source, reshape_target(before.graph, sizes)], [*kept, *sizes[len(kept) :]])


def reshape_target(graph: ir.Graph, sizes: Sequence[int]) -> ir.Value:
    """The initializer of `graph` with the target shape `sizes`, shared by all reshapes to it."""
    return initializer(graph, "shape_" + "_".join(map(str, sizes)), np.array(sizes, dtype=np.int64))


def replace_node(old: ir.Node, new: Sequence[ir.Node]) -> None:
    """Put `new` where `old` is: the output of the last of them takes over name, type, shape and uses of its one."""
    output, replacement = old.outputs[0], new[-1].outputs[0]
    replacement.shape, replacement.type = output.shape, output.type
    assert old.graph is not None
    old.graph.insert_before(old, new)
    output.replace_all_uses_with(replacement, replace_graph_outputs=True)
    old.graph.remove(old, safe=True)
    replacement.name = output.name


def drop_unread(graph: ir.Graph, values: Iterable[ir.Value | None]) -> None:
    """Take the initializers of `graph` that are among `values` away, unless something reads them."""
    for value in values:
        if value is not None and value.is_initializer() and not value.uses():
            graph.initializers.pop(str(value.name), None)


def constant(value: ir.Value | None) -> Array | None:
    """The numbers of a constant, None for what is computed."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


class Part(NamedTuple):
    """Indices start to stop, stop excluded, of the last axis of `source`."""

    source: ir.Value
    start: int
    stop: int


def part_of(value: ir.Value | None) -> Part | None:
    """What `value` was cut from by a Split or Slice of the last axis at constant indices; None for anything else."""
    node = producer(value)
    source = node.inputs[0] if node is not None and node.inputs else None
    if value is None or node is None or source is None or source.shape is None:
        return None
    last = len(source.shape) - 1
    if node.op_type == "Split" and node.attributes.get_int("axis", 0) in (-1, last):
        sizes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
        if sizes is not None:
            index = node.outputs.index(value)
            return Part(source, int(sizes[:index].sum()), int(sizes[: index + 1].sum()))
    if node.op_type == "Slice":
        numbers = [constant(number) for number in node.inputs[1:]]
        if all(number is not None and number.size == 1 for number in numbers) and len(numbers) >= 3:
            start, stop, axis, *step = (int(number.item()) for number in numbers if number is not None)
            size = source.shape[last]
            if axis in (-1, last) and step in ([], [1]) and start >= 0 and isinstance(size, int):
                return Part(source, start, min(stop, size) if stop >= 0 else size + stop)
    return None
