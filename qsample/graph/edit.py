"""Edits of graphs: constants and nodes with shapes and dtypes, the values a node reads, named axes.

`insert`, `cast` and `put_behind` put nodes before or after existing nodes; onnx_ir.tape and
onnxscript's GraphBuilder only add nodes at the end of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.contract.arrays import Array


def initializer(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """The initializer `name` of `graph`, made from `array` if the graph does not have it."""
    if name not in graph.initializers:
        # np.ascontiguousarray would give a scalar an axis.
        tensor = ir.tensor(np.asarray(array, order="C"), name=name)
        graph.register_initializer(constant_value(name, tensor))
    return graph.initializers[name]


def lazy_initializer(
    name: str, shape: Iterable[int], dtype: ir.DataType, compute: Callable[[], Array]
) -> ir.Value:
    """An initializer to register, whose numbers are computed at each read and not stored."""

    def tensor() -> ir.TensorProtocol:
        return ir.Tensor(compute(), dtype=dtype, name=name)

    return constant_value(
        name, ir.LazyTensor(tensor, dtype=dtype, shape=ir.Shape(shape), name=name)
    )


def constant_value(name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """An initializer to register, with the numbers, dtype and shape of `tensor`."""
    shape = ir.Shape(tensor.shape.numpy())
    dtype = ir.TensorType(tensor.dtype)
    return ir.Value(name=name, shape=shape, type=dtype, const_value=tensor)


def insert(
    before: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    shape: Iterable[int | str | ir.SymbolicDim | None] | None,
    attributes: dict[str, Any] | None = None,
    domain: str = "",
    dtype: ir.DataType | None = None,
    name: str | None = None,
) -> ir.Value:
    """Put a node with one output before another node.

    Args:
        before: the node in front of which it is put.
        op_type: the operator.
        inputs: the inputs; None for an absent input.
        shape: the shape of the output; None if it is unknown.
        attributes: the attributes.
        domain: the domain of the operator.
        dtype: the dtype of the output, by default that of the first input.
        name: the name of the node and of the output.

    Returns:
        The output.
    """
    output = _output(ir.node(op_type, inputs, attributes, domain=domain, name=name), shape, dtype)
    output.name = name
    assert before.graph is not None
    before.graph.insert_before(before, output.producer())  # type: ignore[arg-type]
    return output


def _output(node: ir.Node, shape: Iterable[Any] | None, dtype: ir.DataType | None) -> ir.Value:
    output = node.outputs[0]
    output.shape = None if shape is None else ir.Shape(list(shape))
    first = node.inputs[0]
    if dtype is None and first is not None:
        dtype = first.dtype
    if dtype is not None:
        # A type is not shared with the input, because it can be changed in place.
        output.type = ir.TensorType(dtype)
    return output


def cast(value: ir.Value, dtype: ir.DataType, before: ir.Node | None = None) -> ir.Value:
    """`value` as `dtype`; `value` itself if it has that dtype.

    The cast stands right after the node of `value`, or before the node `before`.
    """
    if value.dtype == dtype:
        return value
    if before is not None:
        return insert(before, "Cast", [value], value.shape, {"to": dtype}, dtype=dtype)
    output = _output(ir.node("Cast", [value], {"to": dtype}), value.shape, dtype)
    _insert_behind(value, output)
    return output


def put_behind(
    value: ir.Value,
    op_type: str,
    others: Sequence[ir.Value] = (),
    attributes: dict[str, Any] | None = None,
    *,
    dtype: ir.DataType | None = None,
    name: str | None = None,
) -> ir.Value:
    """Put a node right behind `value`, and let all readers of `value` read its output.

    Args:
        value: the first input of the node; the output has its shape.
        op_type: the operator.
        others: the further inputs.
        attributes: the attributes.
        dtype: the dtype of the output, by default that of `value`.
        name: the name of the node.

    Returns:
        The output.
    """
    node = ir.node(op_type, [value, *others], attributes, name=name)
    output = _output(node, value.shape, dtype)
    value.replace_all_uses_with(output, replace_graph_outputs=True)
    node.replace_input_with(0, value)
    _insert_behind(value, output)
    return output


def _insert_behind(value: ir.Value, output: ir.Value) -> None:
    """Put the node that computes `output` right after the node of `value`, or first in the graph whose input it is."""
    first = value.producer()
    second = output.producer()
    graph = value.graph
    assert second is not None
    assert graph is not None
    if first is None:
        graph.insert_before(graph[0], second)
    else:
        graph.insert_after(first, second)


def reshape(before: ir.Node, source: ir.Value, sizes: Sequence[int]) -> ir.Value:
    """`source` with other last axes. sizes: a 0 for each axis that stays, then the new axes."""
    assert source.shape is not None
    assert before.graph is not None
    kept = list(source.shape)[: list(sizes).count(0)]
    return insert(
        before,
        "Reshape",
        [source, reshape_target(before.graph, sizes)],
        [*kept, *sizes[len(kept) :]],
    )


def reshape_target(graph: ir.Graph, sizes: Sequence[int]) -> ir.Value:
    """The initializer of `graph` with the target shape `sizes`, which all such reshapes share."""
    return initializer(graph, "shape_" + "_".join(map(str, sizes)), np.array(sizes, dtype=np.int64))


def suffixed(node: ir.Node, suffix: str) -> str | None:
    """The name of a node that replaces `node`; None if that has no name, because names are
    unique."""
    return f"{node.name}_{suffix}" if node.name not in (None, "") else None


def replace_node(old: ir.Node, new: Sequence[ir.Node]) -> None:
    """Replace `old` by the nodes `new`.

    The output of the last node gets the name, type, shape and uses of the output of `old`.
    """
    output = old.outputs[0]
    replacement = new[-1].outputs[0]
    replacement.shape = output.shape
    replacement.type = output.type
    assert old.graph is not None
    old.graph.insert_before(old, new)
    output.replace_all_uses_with(replacement, replace_graph_outputs=True)
    old.graph.remove(old, safe=True)
    replacement.name = output.name


def replace_outputs(old: ir.Node, new: ir.Node) -> None:
    """Let readers of the outputs of `old` read those of `new`, with the same names, types and
    shapes."""
    for output, replacement in zip(old.outputs, new.outputs, strict=True):
        replacement.type = output.type
        replacement.shape = output.shape
        name = output.name
        output.name = f"{name}_marker"
        replacement.name = name
        output.replace_all_uses_with(replacement, replace_graph_outputs=True)


def drop_unread(graph: ir.Graph, values: Iterable[ir.Value | None]) -> None:
    """Remove the initializers of `graph` that are among `values` and that nothing reads."""
    for value in values:
        if value is not None and value.is_initializer() and not value.uses():
            graph.initializers.pop(str(value.name), None)


def constant(value: ir.Value | None) -> Array | None:
    """The numbers of a constant; None for a computed value."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


class Part(NamedTuple):
    """The indices from start to stop, excluding stop, along the last axis of `source`."""

    source: ir.Value
    start: int
    stop: int


def part_of(value: ir.Value | None) -> Part | None:
    """The part of another value that `value` is, if a Split or a Slice of the last axis makes it.

    None if the indices are computed, or for any other value.
    """
    node = producer(value)
    if value is None or node is None or not node.inputs:
        return None
    source = node.inputs[0]
    if source is None or source.shape is None:
        return None
    if node.op_type == "Split":
        return _part_of_split(node, source, value)
    if node.op_type == "Slice":
        return _part_of_slice(node, source)
    return None


def _part_of_split(node: ir.Node, source: ir.Value, value: ir.Value) -> Part | None:
    assert source.shape is not None
    last = len(source.shape) - 1
    sizes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if sizes is None or node.attributes.get_int("axis", 0) not in (-1, last):
        return None
    index = node.outputs.index(value)
    return Part(source, int(sizes[:index].sum()), int(sizes[: index + 1].sum()))


def _part_of_slice(node: ir.Node, source: ir.Value) -> Part | None:
    assert source.shape is not None
    last = len(source.shape) - 1
    numbers: list[int] = []
    for number in map(constant, node.inputs[1:]):
        if number is None or number.size != 1:
            return None
        numbers.append(int(number.item()))
    if len(numbers) < 3:
        return None
    start, stop, axis, *step = numbers
    size = source.shape[last]
    if axis not in (-1, last) or step not in ([], [1]) or start < 0 or not isinstance(size, int):
        return None
    return Part(source, start, min(stop, size) if stop >= 0 else size + stop)


def reads(node: ir.Node) -> list[ir.Value]:
    """The values that a node reads: its inputs, and those that graphs inside it (If, Scan) read."""
    values = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            values += [value for inner in attribute.as_graph() for value in reads(inner)]
    return values


def producer(value: ir.Value | None) -> ir.Node | None:
    """The node that computes `value`; None for inputs, constants and absent values."""
    return None if value is None else value.producer()


def with_loop_bodies(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of a graph, then those in the bodies of its Scans: all computations for a token."""
    bodies = [node.attributes["body"].as_graph() for node in graph if node.op_type == "Scan"]
    return [*graph, *(node for body in bodies for node in body)]


def all_initializers(graph: ir.Graph) -> list[ir.Value]:
    """The constants of a graph and of the graphs inside it."""
    return [value for part in (graph, *graph.subgraphs()) for value in part.initializers.values()]


def ancestors(
    values: Iterable[ir.Value | None],
    stop: Collection[ir.Node] = frozenset(),
    reads: Callable[[ir.Node], Iterable[ir.Value | None]] = reads,
) -> set[ir.Node]:
    """The nodes from which the values are computed.

    Args:
        values: the values.
        stop: nodes at which the walk ends; they are not among the results.
        reads: returns the values of a node that the walk follows.
    """
    reached: set[ir.Node] = set()
    waiting = [value.producer() for value in values if value is not None]
    while waiting:
        node = waiting.pop()
        if node is None or node in stop or node in reached:
            continue
        reached.add(node)
        waiting += [value.producer() for value in reads(node) if value is not None]
    return reached


def copy_node(node: ir.Node, copies: dict[ir.Value, ir.Value], suffix: str) -> ir.Node:
    """A copy of `node`, whose names get a suffix.

    Args:
        node: the node.
        copies: the copies of other values, which the copy reads; its outputs are added.
        suffix: the suffix.
    """
    inputs = [value if value is None else copies.get(value, value) for value in node.inputs]
    copy = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        list(node.attributes.values()),
        num_outputs=len(node.outputs),
        version=node.version,
        name=f"{node.name}_{suffix}",
    )
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        new.name = f"{old.name}_{suffix}"
        new.type = old.type
        new.shape = old.shape
        copies[old] = new
    return copy


def fix_axes(model: ir.Model, sizes: Mapping[str, int]) -> bool:
    """Give the named axes in `sizes` their size in every shape, in place.

    Sizes that are computed from several axes lose their name; shape inference finds them again.
    Returns whether any shape had such an axis.
    """
    modified = False
    for value in _values(model):
        if value.shape is None:
            continue
        dims = [_fixed(dim, sizes) for dim in value.shape]
        if list(value.shape) != dims:
            value.shape = ir.Shape(dims)
            modified = True
    return modified


def _values(model: ir.Model) -> list[ir.Value]:
    return [
        *model.graph.inputs,
        *(output for node in model.graph.all_nodes() for output in node.outputs),
    ]


def _fixed(dim: int | ir.SymbolicDim, sizes: Mapping[str, int]) -> int | ir.SymbolicDim:
    name = getattr(dim, "value", None)
    return sizes.get(name, dim) if isinstance(name, str) else dim
