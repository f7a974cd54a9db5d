"""Tensors of a graph under construction: Python's operators and a few functions add ONNX nodes.

    with building(graph):
        weights = exp((logits - maximum) * inverse)

A thin layer over onnxscript's `GraphBuilder`: it promotes constants and infers types and shapes. Numbers are promoted
to the type of the tensor next to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self, TypeAlias, TypeVar

import numpy as np
import onnx
import onnx.shape_inference
import onnx_ir as ir
from onnxscript import GraphBuilder

FLOAT, INT32, INT64, BOOL = (
    ir.DataType.FLOAT,
    ir.DataType.INT32,
    ir.DataType.INT64,
    ir.DataType.BOOL,
)

_END = 2**31 - 1  # of an axis of any size

Operand: TypeAlias = "Tensor | float"
Tensors: TypeAlias = "tuple[Tensor, ...]"
# What the functions of `branch` and `loop` return: tensors by name, by position, or a single one.
Structure = TypeVar("Structure", bound="Tensor | tuple[Tensor, ...] | TensorRecord")

_CONSTANT: Final = 20  # elements of an input whose values types and shapes may depend on, at most
_Known: TypeAlias = "tuple[ir.DataType, tuple[int | str | None, ...] | None, bytes | None]"  # dtype, sizes, a constant


class _Builder(GraphBuilder):
    """A builder that infers the types and shapes of equal nodes once. Without these methods, it does the same in four
    times the time."""

    def _partition_inputs_attributes(self, schema: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs  # `operator` has them apart

    def _infer_shapes(self, node: ir.Node) -> None:
        if any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
            return  # `branch` and `loop` say what their results are
        inputs = tuple(None if value is None else _known(value) for value in node.inputs)
        attributes = tuple(
            ir.serde.serialize_attribute(attribute).SerializeToString()
            for attribute in node.attributes.values()
        )
        inferred = _inferred(node.op_type, node.version or 0, inputs, attributes, len(node.outputs))
        for output, (dtype, sizes) in zip(node.outputs, inferred, strict=True):
            output.type, output.shape = (
                ir.TensorType(dtype),
                None if sizes is None else ir.Shape(sizes),
            )


def _known(value: ir.Value) -> _Known:
    """What inference knows of an input."""
    constant, shape = value.const_value, value.shape
    assert value.dtype is not None, value
    sizes = (
        None
        if shape is None
        else tuple(size if isinstance(size, int) else size.value for size in shape)
    )
    return (
        value.dtype,
        sizes,
        None if constant is None or constant.size > _CONSTANT else constant.tobytes(),
    )


@functools.lru_cache(maxsize=10_000)  # a sampler with everything has 2,500 nodes, of 700 kinds
def _inferred(
    op_type: str,
    opset: int,
    inputs: tuple[_Known | None, ...],
    attributes: tuple[bytes, ...],
    outputs: int,
) -> list[tuple[ir.DataType, tuple[int | str | None, ...] | None]]:
    """The dtype and the sizes of each output, by ONNX's inference for the operator."""
    names = ["" if known is None else f"input_{index}" for index, known in enumerate(inputs)]
    given = {name: known for name, known in zip(names, inputs, strict=True) if known is not None}
    types = {
        name: onnx.helper.make_tensor_type_proto(dtype, sizes)
        for name, (dtype, sizes, _) in given.items()
    }
    constants = {
        name: onnx.helper.make_tensor(
            name, dtype, [size for size in sizes if isinstance(size, int)], content, raw=True
        )
        for name, (dtype, sizes, content) in given.items()
        if content is not None and sizes is not None
    }
    results = [f"output_{index}" for index in range(outputs)]
    node = onnx.helper.make_node(op_type, names, results)
    node.attribute.extend(map(onnx.AttributeProto.FromString, attributes))
    schema = onnx.defs.get_schema(op_type, opset, "")
    found = onnx.shape_inference.infer_node_outputs(schema, node, types, constants)
    shapes = [ir.serde.deserialize_type_proto_for_shape(found[result]) for result in results]
    return [
        (
            ir.DataType(found[result].tensor_type.elem_type),
            None
            if shape is None
            else tuple(size if isinstance(size, int) else size.value for size in shape),
        )
        for result, shape in zip(results, shapes, strict=True)
    ]


_builder: ContextVar[_Builder] = ContextVar("_builder")


@contextmanager
def building(graph: ir.Graph) -> Iterator[None]:
    """Let everything in this module add its nodes to `graph`."""
    token = _builder.set(_Builder(graph))
    try:
        yield
    finally:
        _builder.reset(token)


Binary: TypeAlias = "Callable[[Tensor, Operand], Tensor]"


def _binary(op_type: str) -> tuple[Binary, Binary]:
    """The method of an operator with two operands, and the same with the operands swapped."""
    return lambda self, other: op(op_type, self, other), lambda self, other: op(
        op_type, other, self
    )


class Tensor:
    """A value of the graph. Comparisons give bool tensors; `&`, `|` and `~` combine them."""

    __slots__ = ("value",)

    def __init__(self, value: ir.Value) -> None:
        self.value = value

    @property
    def dtype(self) -> ir.DataType | None:
        return self.value.dtype

    @property
    def shape(self) -> ir.Shape:
        """The sizes of the axes, as far as they are known."""
        assert self.value.shape is not None
        return self.value.shape

    __add__, __radd__ = _binary("Add")
    __sub__, __rsub__ = _binary("Sub")
    __mul__, __rmul__ = _binary("Mul")
    __truediv__, __rtruediv__ = _binary("Div")
    __lt__, __gt__ = _binary("Less")[0], _binary("Greater")[0]
    __le__, __ge__ = _binary("LessOrEqual")[0], _binary("GreaterOrEqual")[0]
    __and__, __or__ = _binary("And")[0], _binary("Or")[0]
    equals = _binary("Equal")[0]

    def __neg__(self) -> Tensor:
        return op("Neg", self)

    def __invert__(self) -> Tensor:
        return op("Not", self)

    def to(self, dtype: ir.DataType) -> Tensor:
        return self if self.dtype == dtype else op("Cast", self, to=dtype)

    def max(self, *axes: int, keep: bool = True) -> Tensor:
        return op("ReduceMax", self, list(axes or (-1,)), keepdims=int(keep))

    def min(self, *axes: int, keep: bool = True) -> Tensor:
        return op("ReduceMin", self, list(axes or (-1,)), keepdims=int(keep))

    def sum(self, *axes: int, keep: bool = True) -> Tensor:
        return op("ReduceSum", self, list(axes or (-1,)), keepdims=int(keep))

    def any(self) -> Tensor:
        """Whether any element of a bool tensor is true: a scalar. For conditions: CUDA has no such kernel."""
        return op("ReduceMax", self, keepdims=0)

    def all(self) -> Tensor:
        """Whether every element of a bool tensor is true: a scalar, as `any`."""
        return op("ReduceMin", self, keepdims=0)

    def argmax(self) -> Tensor:
        """Index of the largest along the last axis, the lowest of a tie: int64, the axis kept."""
        return op("ArgMax", self, axis=-1, keepdims=1)

    def cumsum(self, *, exclusive: bool = False) -> Tensor:
        """Running sums along the last axis, added up from the first to the last."""
        return op("CumSum", self, len(self.shape) - 1, exclusive=int(exclusive))

    def reshape(self, *sizes: int) -> Tensor:
        """0 keeps an axis, and a single -1 stands for the rest."""
        return op("Reshape", self, list(sizes))

    def unsqueeze(self, axis: int = -1) -> Tensor:
        return op("Unsqueeze", self, [axis])

    def squeeze(self, axis: int = -1) -> Tensor:
        return op("Squeeze", self, [axis])

    def columns(self, start: int, stop: int | Tensor) -> Tensor:
        """The slice [:, start:stop]. stop: a number, or int64, a scalar or [1]."""
        end = [stop] if isinstance(stop, int) else stop if len(stop.shape) == 1 else stop.reshape(1)
        return op("Slice", self, [start], end, [1])

    def last(self) -> Tensor:
        """The last element along the last axis, the axis kept."""
        return op("Slice", self, [-1], [_END], [-1])

    def gather(self, indices: Tensor, axis: int = 1) -> Tensor:
        """For each index along `axis` that element, in every other axis at the index's own place."""
        return op("GatherElements", self, indices, axis=axis)

    def rows(self, indices: Tensor) -> Tensor:
        """The rows `indices` [R] int64 along the first axis."""
        return op("Gather", self, indices, axis=0)

    def scatter(
        self, indices: Tensor, updates: Tensor, *, axis: int = 1, reduction: str = "none"
    ) -> Tensor:
        return op("ScatterElements", self, indices, updates, axis=axis, reduction=reduction)


@dataclass(frozen=True)
class TensorRecord:
    """Base of frozen dataclasses whose fields are tensors, further records, or None for what a graph does not have.

    The sides of a `branch` and the steps of a `loop` return such records, so that results have names.
    """

    def tensors(self) -> Tensors:
        """The tensors in the order of the fields."""
        found: list[Tensor] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                found.extend(_flat(value))
        return tuple(found)

    def filled(self, tensors: Iterator[Tensor]) -> Self:
        """A record with the next of `tensors` in the place of each tensor."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values[field.name] = None if value is None else _filled(value, tensors)
        return replace(self, **values)

    def where(self, condition: Tensor, otherwise: Self) -> Self:
        """A record of `where(condition, …, …)` for each tensor here and the same in `otherwise`."""
        pairs = zip(self.tensors(), otherwise.tensors(), strict=True)
        return self.filled(iter([where(condition, yes, no) for yes, no in pairs]))


def op(op_type: str, *inputs: Any, **attributes: Any) -> Tensor:
    """A node with a single output. Inputs: tensors, numbers, lists of numbers, arrays."""
    (result,) = operator(op_type, *inputs, outputs=1, **attributes)
    return result


def operator(op_type: str, *inputs: Any, outputs: int, **attributes: Any) -> Tensors:
    """A node with several outputs."""
    builder = _builder.get()
    given = [_operand(value) for value in inputs]
    result = builder.call_op(
        op_type, given, attributes, version=builder.op.version, outputs=outputs
    )
    values = [result] if isinstance(result, ir.Value) else result
    return tuple(Tensor(value) for value in values)


def _operand(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.value
    return constant(value).value if isinstance(value, np.ndarray) else value


def constant(array: np.ndarray[Any, Any]) -> Tensor:
    """A constant; equal constants are merged when the graph is finished."""
    builder = _builder.get()
    name = f"constant_{len(builder.root.graph.initializers)}"
    return Tensor(builder.initializer(ir.tensor(array, name=name), name, qualify=False))


def exp(x: Tensor) -> Tensor:
    """E ** x."""
    return op("Exp", x)


def log(x: Tensor) -> Tensor:
    """The natural logarithm of a column, [B, 1]; ONNX Runtime's Log rounds an element by its place in the tensor, its
    reductions do not."""
    return op("ReduceLogSum", x, [-1])


def absolute(x: Tensor) -> Tensor:
    """|x|."""
    return op("Abs", x)


def maximum(x: Tensor, y: Operand) -> Tensor:
    """The larger number, element by element."""
    return op("Max", x, y)


def minimum(x: Tensor, y: Operand) -> Tensor:
    """The smaller number, element by element."""
    return op("Min", x, y)


def where(condition: Tensor, yes: Operand, no: Operand) -> Tensor:
    """For few elements: over a vocabulary, ONNX Runtime's kernel takes ten times as long as a product with 0 or 1."""
    return op("Where", condition, yes, no)


def concat(*parts: Tensor) -> Tensor:
    """Along the second axis."""
    return op("Concat", *parts, axis=1)


def top(values: Tensor, count: int, *, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The `count` largest (or smallest) along the last axis, in order, and their int64 indices; of ties the lowest."""
    found, indices = operator(
        "TopK", values, [count], axis=-1, largest=int(largest), sorted=1, outputs=2
    )
    return found, indices


def constants(like: Tensor, value: float) -> Tensor:
    """`value` in the shape of `like`."""
    flags = like if like.dtype == BOOL else like.equals(like)
    return where(flags, value, value)


def indices(count: int, dtype: str = "int64") -> Tensor:
    """0, 1, … count - 1: [count]."""
    return constant(np.arange(count, dtype=dtype))


def axis_size(tensor: Tensor, axis: int) -> int:
    """The size of an axis that is known when the graph is built."""
    found = tensor.shape[axis]
    assert isinstance(found, int)
    return found


def size(tensor: Tensor, axis: int) -> Tensor:
    """The size of an axis: [1] int64."""
    return op("Shape", tensor, start=axis, end=axis + 1)


def branch(
    condition: Tensor, then: Callable[[], Structure], otherwise: Callable[[], Structure]
) -> Structure:
    """`then()` if `condition` (scalar bool) holds, else `otherwise()`: an `If` that computes only that side.

    Both functions return the same structure: a tensor, a tuple of tensors or a `TensorRecord`. So does `branch`.
    """
    then_graph, structure = _subgraph("then", then)
    else_graph, _ = _subgraph("else", otherwise)
    results = operator(
        "If",
        condition,
        outputs=len(then_graph.outputs),
        then_branch=then_graph,
        else_branch=else_graph,
    )
    for result, first, second in zip(results, then_graph.outputs, else_graph.outputs, strict=True):
        result.value.type = first.type
        result.value.shape = _common_shape(first, second)
    return _filled(structure, iter(results))


def loop(
    most: int,
    condition: Tensor,
    states: Structure,
    step: Callable[[Tensor, Structure], tuple[Tensor, Structure]],
) -> Structure:
    """Repeat `step` while `condition` (scalar bool) holds, at most `most` times, or not at all: a `Loop`.

    Args:
        most: the largest number of repetitions.
        condition: whether the first repetition runs.
        states: the states before it, a structure as for `branch`.
        step: takes the number of the repetition (scalar int64) and the states, and returns the next condition and the
            next states.

    Returns:
        The states after the last repetition.
    """
    number = ir.Value(name="number", type=ir.TensorType(INT64), shape=ir.Shape([]))
    given = ir.Value(name="condition", type=ir.TensorType(BOOL), shape=ir.Shape([]))
    before = _flat(states)
    inner = [ir.Value(type=state.value.type, shape=state.value.shape) for state in before]

    def body() -> Tensors:
        inner_states = _filled(states, iter([Tensor(value) for value in inner]))
        again, changed = step(Tensor(number), inner_states)
        return (again, *_flat(changed))

    graph, _ = _subgraph("loop", body, [number, given, *inner])
    results = operator("Loop", most, condition, *before, body=graph, outputs=len(before))
    for result, state in zip(results, before, strict=True):
        result.value.type = state.value.type
        result.value.shape = state.value.shape
    return _filled(states, iter(results))


def _flat(structure: Tensor | Tensors | TensorRecord) -> Tensors:
    """The tensors of a structure, in order."""
    if isinstance(structure, Tensor):
        return (structure,)
    if isinstance(structure, TensorRecord):
        return structure.tensors()
    return structure


def _filled(structure: Structure, tensors: Iterator[Tensor]) -> Structure:
    """A structure of the same kind with the next of `tensors` in its places."""
    filled: Any
    if isinstance(structure, Tensor):
        filled = next(tensors)
    elif isinstance(structure, TensorRecord):
        filled = structure.filled(tensors)
    else:
        filled = tuple(next(tensors) for _ in structure)
    result: Structure = filled
    return result


def _subgraph(
    name: str, function: Callable[[], Structure], inputs: Sequence[ir.Value] = ()
) -> tuple[ir.Graph, Structure]:
    """The nodes that `function` adds as a separate graph, and the structure that it returns.

    The graph's outputs are the structure's tensors. A tensor from outside passes through an Identity, and so does one
    that is an output already.
    """
    parent = _builder.get()
    graph = ir.Graph(
        list(inputs), [], nodes=[], opset_imports=dict(parent.graph.opset_imports), name=name
    )
    token = _builder.set(_Builder(graph, parent=parent))
    try:
        structure = function()
        for tensor in _flat(structure):
            value = tensor.value
            producer = value.producer()
            is_inside = producer is not None and producer.graph is graph
            if not is_inside or value in graph.outputs:
                value = op("Identity", tensor).value
            graph.outputs.append(value)
    finally:
        _builder.reset(token)
    return graph, structure


def _common_shape(first: ir.Value, second: ir.Value) -> ir.Shape | None:
    """The shape of two values: an axis in which they differ has no size. None if their ranks differ."""
    if first.shape is None or second.shape is None or len(first.shape) != len(second.shape):
        return None
    sizes = zip(first.shape, second.shape, strict=True)
    return ir.Shape([one if one == other else None for one, other in sizes])
