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
from typing import Any, Final, TypeAlias

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
    condition: Tensor, then: Callable[[], Tensors], otherwise: Callable[[], Tensors]
) -> Tensors:
    """`then()` if `condition` (scalar bool) holds, else `otherwise()`: an `If` that computes only that side."""
    sides = [_subgraph(name, function) for name, function in (("then", then), ("else", otherwise))]
    attributes = {"then_branch": sides[0], "else_branch": sides[1]}
    results = operator("If", condition, outputs=len(sides[0].outputs), **attributes)
    for result, *ends in zip(results, *(side.outputs for side in sides), strict=True):
        result.value.type, result.value.shape = ends[0].type, _common_shape(ends)
    return results


def loop(
    most: int, condition: Tensor, states: Tensors, step: Callable[..., tuple[Tensor, Tensors]]
) -> Tensors:
    """Repeat `step` while `condition` (scalar bool) holds, at most `most` times, or not at all: a `Loop`. `step` gets
    the number of the repetition (scalar int64) and the states, and gives the next condition and states."""
    number = ir.Value(name="number", type=ir.TensorType(INT64), shape=ir.Shape([]))
    given = ir.Value(name="condition", type=ir.TensorType(BOOL), shape=ir.Shape([]))
    inner = [ir.Value(type=state.value.type, shape=state.value.shape) for state in states]

    def body() -> Tensors:
        again, changed = step(Tensor(number), *(Tensor(value) for value in inner))
        return (again, *changed)

    graph = _subgraph("loop", body, [number, given, *inner])
    results = operator("Loop", most, condition, *states, body=graph, outputs=len(states))
    for result, state in zip(results, states, strict=True):
        result.value.type, result.value.shape = state.value.type, state.value.shape
    return results


def _subgraph(
    name: str, function: Callable[[], Tensors], inputs: Sequence[ir.Value] = ()
) -> ir.Graph:
    """The nodes that `function` adds as a separate graph; a result from outside passes through an Identity."""
    parent = _builder.get()
    graph = ir.Graph(
        list(inputs), [], nodes=[], opset_imports=dict(parent.graph.opset_imports), name=name
    )
    token = _builder.set(_Builder(graph, parent=parent))
    try:
        for result in function():
            producer = result.value.producer()
            own = (
                producer is not None
                and producer.graph is graph
                and result.value not in graph.outputs
            )
            graph.outputs.append(result.value if own else op("Identity", result).value)
    finally:
        _builder.reset(token)
    return graph


def _common_shape(values: Sequence[ir.Value]) -> ir.Shape | None:
    """The shape of all: an axis in which they differ has no size."""
    shapes = [value.shape for value in values]
    if (
        any(shape is None for shape in shapes)
        or len({len(shape) for shape in shapes if shape is not None}) != 1
    ):
        return None
    sizes = zip(*(list(shape) for shape in shapes if shape is not None), strict=True)
    return ir.Shape([axis[0] if len(set(axis)) == 1 else None for axis in sizes])
