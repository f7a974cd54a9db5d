"""Edits of graphs: constants and nodes with their shapes and dtypes recorded, what a node reads, and named axes.

`insert`, `cast` and `put_behind` put nodes before or after existing nodes; onnx_ir.tape and onnxscript's GraphBuilder
make them only at the end of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.contract.arrays import Array


def initializer(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """The initializer `name` of `graph`, made from `array` unless it is there already."""
    if name not in graph.initializers:
        # ascontiguousarray gives a scalar an axis
        graph.register_initializer(
            constant_value(name, ir.tensor(np.asarray(array, order="C"), name=name))
        )
    return graph.initializers[name]


def lazy_initializer(
    name: str, shape: Iterable[int], dtype: ir.DataType, compute: Callable[[], Array]
) -> ir.Value:
    """An initializer to register; its numbers are computed whenever they are read, as by saving, and not kept."""

    def tensor() -> ir.TensorProtocol:
        return ir.Tensor(compute(), dtype=dtype, name=name)

    return constant_value(
        name, ir.LazyTensor(tensor, dtype=dtype, shape=ir.Shape(shape), name=name)
    )


def constant_value(name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """A value with the numbers, dtype and shape of `tensor`, for a graph to register."""
    shape, dtype = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
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
    """Put a node with an output of `shape` and `dtype` (by default the first input's) before `before`; return that."""
    output = _output(ir.node(op_type, inputs, attributes, domain=domain, name=name), shape, dtype)
    output.name = name
    assert before.graph is not None
    before.graph.insert_before(before, output.producer())  # type: ignore[arg-type]
    return output


def _output(node: ir.Node, shape: Iterable[Any] | None, dtype: ir.DataType | None) -> ir.Value:
    output, first = node.outputs[0], node.inputs[0]
    output.shape = None if shape is None else ir.Shape(list(shape))
    dtype = first.dtype if dtype is None and first is not None else dtype
    if dtype is not None:
        output.type = ir.TensorType(dtype)  # not the input's: a type can be changed in place
    return output


def cast(value: ir.Value, dtype: ir.DataType, before: ir.Node | None = None) -> ir.Value:
    """`value` as `dtype`, cast right after it is computed, or before `before`; `value` itself if it is that already."""
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
    """Let readers of `value` read a new node's output, right after it; return that. others: the node's further inputs.
    dtype: of the output, by default `value`'s; it has the shape of `value`."""
    node = ir.node(op_type, [value, *others], attributes, name=name)
    output = _output(node, value.shape, dtype)
    value.replace_all_uses_with(output, replace_graph_outputs=True)
    node.replace_input_with(0, value)
    _insert_behind(value, output)
    return output


def _insert_behind(value: ir.Value, output: ir.Value) -> None:
    """Put the node that computes `output` right after the node of `value`."""
    first, second = value.producer(), output.producer()
    assert first is not None
    assert second is not None
    assert first.graph is not None
    first.graph.insert_after(first, second)


def reshape(before: ir.Node, source: ir.Value, sizes: Sequence[int]) -> ir.Value:
    """`source` with its last axes as in `sizes`; these start with a 0 for each axis that is kept."""
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
    """The initializer of `graph` with the target shape `sizes`, shared by all reshapes to it."""
    return initializer(graph, "shape_" + "_".join(map(str, sizes)), np.array(sizes, dtype=np.int64))


def suffixed(node: ir.Node, suffix: str) -> str | None:
    """The name of a node that takes the place of `node`; None if that has no name, because names are unique."""
    return f"{node.name}_{suffix}" if node.name else None


def replace_node(old: ir.Node, new: Sequence[ir.Node]) -> None:
    """Put `new` in the place of `old`; the last one's output takes over the name, type, shape and uses of `old`'s."""
    output, replacement = old.outputs[0], new[-1].outputs[0]
    replacement.shape, replacement.type = output.shape, output.type
    assert old.graph is not None
    old.graph.insert_before(old, new)
    output.replace_all_uses_with(replacement, replace_graph_outputs=True)
    old.graph.remove(old, safe=True)
    replacement.name = output.name


def replace_outputs(old: ir.Node, new: ir.Node) -> None:
    """Let readers of `old`'s outputs read the outputs of `new`, and give these the names, types and shapes."""
    for marked, value in zip(old.outputs, new.outputs, strict=True):
        value.type, value.shape = marked.type, marked.shape
        name, marked.name = marked.name, f"{marked.name}_marker"
        value.name = name
        marked.replace_all_uses_with(value, replace_graph_outputs=True)


def drop_unread(graph: ir.Graph, values: Iterable[ir.Value | None]) -> None:
    """Take the initializers of `graph` that are among `values` away, unless something reads them."""
    for value in values:
        if value is not None and value.is_initializer() and not value.uses():
            graph.initializers.pop(str(value.name), None)


def constant(value: ir.Value | None) -> Array | None:
    """The numbers of a constant, None for a computed value."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


class Part(NamedTuple):
    """Indices start to stop, stop excluded, of the last axis of `source`."""

    source: ir.Value
    start: int
    stop: int


def part_of(value: ir.Value | None) -> Part | None:
    """The part that `value` is, if a Split or Slice of the last axis at constant indices cuts it."""
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
            start, stop, axis, *step = (
                int(number.item()) for number in numbers if number is not None
            )
            size = source.shape[last]
            if axis in (-1, last) and step in ([], [1]) and start >= 0 and isinstance(size, int):
                return Part(source, start, min(stop, size) if stop >= 0 else size + stop)
    return None


def reads(node: ir.Node) -> list[ir.Value]:
    """The values that a node reads: its inputs, and the values read by the graphs inside it (of an If or a Scan)."""
    values = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            values += [value for inner in attribute.as_graph() for value in reads(inner)]
    return values


def producer(value: ir.Value | None) -> ir.Node | None:
    """The node that computes `value`; None for inputs, constants and absent values."""
    return None if value is None else value.producer()


def with_loop_bodies(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of a graph, then the nodes in the bodies of its Scans: all that is computed for a token."""
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
    """The nodes outside `stop` that the values come from. reads: of each node, the values that count."""
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
    """A copy of `node` that reads and notes its values in `copies`; names get `suffix`."""
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
        new.name, new.type, new.shape = f"{old.name}_{suffix}", old.type, old.shape
        copies[old] = new
    return copy


def fix_axes(model: ir.Model, sizes: Mapping[str, int]) -> bool:
    """Give the named axes in `sizes` their size in every shape, in place. Returns whether any shape had such an axis.
    Sizes computed from several axes lose their recorded name: shape inference finds them again."""
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
