"""Tensors of a graph under construction: Python's operators and a few functions add ONNX nodes.

    with building(graph):
        weights = exp((logits - maximum) * inverse)

This is a thin layer over onnxscript's `GraphBuilder`, which makes constants of numbers, in the type
of the tensor next to them, and infers types and shapes.
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

FLOAT: Final = ir.DataType.FLOAT
DOUBLE: Final = ir.DataType.DOUBLE
INT32: Final = ir.DataType.INT32
INT64: Final = ir.DataType.INT64
BOOL: Final = ir.DataType.BOOL

# The end of a slice up to the last element of an axis of any size.
SLICE_END: Final = 2**31 - 1

Operand: TypeAlias = "Tensor | float"
Tensors: TypeAlias = "tuple[Tensor, ...]"
# The results of a side of `branch` or a step of `loop`: one tensor, a tuple, or a record.
Structure = TypeVar("Structure", bound="Tensor | tuple[Tensor, ...] | TensorRecord")

# Types and shapes may depend on the numbers of constants up to this size.
_MAX_CONSTANT_ELEMENTS: Final = 20
# A sampler with all features has 2,500 nodes, which are of 700 kinds.
_MAX_CACHED_INFERENCES: Final = 10_000
_Sizes: TypeAlias = tuple[int | str | None, ...]


@dataclass(frozen=True, slots=True)
class _ValueInfo:
    """The facts about a value from which ONNX infers types and shapes.

    Attributes:
        dtype: the type of the elements.
        sizes: the size of each axis, its name, or None if it has neither; None for an unknown rank.
        content: the bytes of a small constant; None for other values.
    """

    dtype: ir.DataType
    sizes: _Sizes | None
    content: bytes | None = None


class _Builder(GraphBuilder):
    """A builder that infers types and shapes once for all equal nodes.

    The methods of onnxscript that it replaces do the same in four times the time.
    """

    def _partition_inputs_attributes(self, schema: Any, args: Any, kwargs: Any) -> Any:
        # `operator` has separated them.
        return args, kwargs

    def _infer_shapes(self, node: ir.Node) -> None:
        if any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
            # `branch` and `loop` set the types and shapes of their results.
            return
        inputs = tuple(None if value is None else _value_info(value) for value in node.inputs)
        attributes = tuple(
            ir.serde.serialize_attribute(attribute).SerializeToString()
            for attribute in node.attributes.values()
        )
        inferred = _inferred(node.op_type, node.version or 0, inputs, attributes, len(node.outputs))
        for output, info in zip(node.outputs, inferred, strict=True):
            output.type = ir.TensorType(info.dtype)
            output.shape = None if info.sizes is None else ir.Shape(info.sizes)


def _value_info(value: ir.Value) -> _ValueInfo:
    assert value.dtype is not None, value
    constant = value.const_value
    is_small = constant is not None and constant.size <= _MAX_CONSTANT_ELEMENTS
    content = constant.tobytes() if constant is not None and is_small else None
    return _ValueInfo(value.dtype, _sizes(value.shape), content)


def _sizes(shape: ir.Shape | None) -> _Sizes | None:
    if shape is None:
        return None
    return tuple(size if isinstance(size, int) else size.value for size in shape)


@functools.lru_cache(maxsize=_MAX_CACHED_INFERENCES)
def _inferred(
    op_type: str,
    opset: int,
    inputs: tuple[_ValueInfo | None, ...],
    attributes: tuple[bytes, ...],
    output_count: int,
) -> list[_ValueInfo]:
    """Infer the types and shapes of a node's outputs, as ONNX defines them for the operator.

    Args:
        op_type: the operator, of ONNX's own domain.
        opset: the version of the operator set.
        inputs: the inputs; None for an absent input.
        attributes: the attributes, serialized.
        output_count: the number of outputs.
    """
    input_names: list[str] = []
    types: dict[str, onnx.TypeProto] = {}
    constants: dict[str, onnx.TensorProto] = {}
    for index, info in enumerate(inputs):
        name = "" if info is None else f"input_{index}"
        input_names.append(name)
        if info is None:
            continue
        types[name] = onnx.helper.make_tensor_type_proto(info.dtype, info.sizes)
        if info.content is not None and info.sizes is not None:
            sizes = [size for size in info.sizes if isinstance(size, int)]
            constants[name] = onnx.helper.make_tensor(
                name, info.dtype, sizes, info.content, raw=True
            )
    output_names = [f"output_{index}" for index in range(output_count)]
    node = onnx.helper.make_node(op_type, input_names, output_names)
    node.attribute.extend(map(onnx.AttributeProto.FromString, attributes))
    schema = onnx.defs.get_schema(op_type, opset, "")
    inferred = onnx.shape_inference.infer_node_outputs(schema, node, types, constants)
    outputs: list[_ValueInfo] = []
    for name in output_names:
        dtype = ir.DataType(inferred[name].tensor_type.elem_type)
        shape = ir.serde.deserialize_type_proto_for_shape(inferred[name])
        outputs.append(_ValueInfo(dtype, _sizes(shape)))
    return outputs


_builder: ContextVar[_Builder] = ContextVar("_builder")


@contextmanager
def building(graph: ir.Graph) -> Iterator[None]:
    """A context in which the functions and operators of this module add nodes to `graph`."""
    token = _builder.set(_Builder(graph))
    try:
        yield
    finally:
        _builder.reset(token)


_BinaryMethod: TypeAlias = "Callable[[Tensor, Operand], Tensor]"


def _binary(op_type: str) -> _BinaryMethod:
    """The method for an operator with two operands."""
    return lambda self, other: op(op_type, self, other)


def _swapped(op_type: str) -> _BinaryMethod:
    """The same with the operands swapped."""
    return lambda self, other: op(op_type, other, self)


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
        """The known sizes of the axes, or their names."""
        assert self.value.shape is not None
        return self.value.shape

    __add__ = _binary("Add")
    __radd__ = _swapped("Add")
    __sub__ = _binary("Sub")
    __rsub__ = _swapped("Sub")
    __mul__ = _binary("Mul")
    __rmul__ = _swapped("Mul")
    __truediv__ = _binary("Div")
    __rtruediv__ = _swapped("Div")
    __lt__ = _binary("Less")
    __gt__ = _binary("Greater")
    __le__ = _binary("LessOrEqual")
    __ge__ = _binary("GreaterOrEqual")
    __and__ = _binary("And")
    __or__ = _binary("Or")
    equals = _binary("Equal")

    def __neg__(self) -> Tensor:
        return op("Neg", self)

    def masked_by(self, mask: Tensor) -> Tensor:
        """The sum with a mask, such as the result of a branch: it has the shape of this tensor.

        ONNX Runtime changes a tensor in place only if it knows that the result has the same shape,
        and ONNX does not infer the shape of a branch.

        Args:
            mask: a tensor of the same dtype that broadcasts to the shape of this one.
        """
        masked = self + mask
        masked.value.shape = self.value.shape
        return masked

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
        """Whether any element of a bool tensor is true: a scalar.

        It is for conditions, which are computed on the host: CUDA has no such kernel.
        """
        return op("ReduceMax", self, keepdims=0)

    def all(self) -> Tensor:
        """Whether every element of a bool tensor is true: a scalar, for conditions like `any`."""
        return op("ReduceMin", self, keepdims=0)

    def argmax(self) -> Tensor:
        """The index of the largest element along the last axis, which is kept: int64.

        Of equal elements, it is the lowest index.
        """
        return op("ArgMax", self, axis=-1, keepdims=1)

    def cumsum(self, *, exclusive: bool = False) -> Tensor:
        """Running sums along the last axis, from the first to the last element."""
        return op("CumSum", self, len(self.shape) - 1, exclusive=int(exclusive))

    def reshape(self, *sizes: int) -> Tensor:
        """The tensor with other axes. A size of 0 keeps an axis; a single -1 is inferred."""
        return op("Reshape", self, list(sizes))

    def unsqueeze(self, axis: int = -1) -> Tensor:
        return op("Unsqueeze", self, [axis])

    def squeeze(self, axis: int = -1) -> Tensor:
        return op("Squeeze", self, [axis])

    def columns(self, start: int, stop: int | Tensor) -> Tensor:
        """The slice [:, start:stop].

        Args:
            start: the first column.
            stop: the column after the last, a number or an int64 tensor, scalar or [1].
        """
        end: list[int] | Tensor
        if isinstance(stop, int):
            end = [stop]
        elif len(stop.shape) == 1:
            end = stop
        else:
            end = stop.reshape(1)
        return op("Slice", self, [start], end, [1])

    def last(self) -> Tensor:
        """The last element along the last axis, which is kept."""
        return op("Slice", self, [-1], [SLICE_END], [-1])

    def gather(self, indices: Tensor, axis: int = 1) -> Tensor:
        """The elements at `indices` along `axis`, at the place of the index in all other axes."""
        return op("GatherElements", self, indices, axis=axis)

    def rows(self, indices: Tensor) -> Tensor:
        """The rows at `indices`, [R] int64, along the first axis."""
        return op("Gather", self, indices, axis=0)

    def with_rows(self, indices: Tensor, updates: Tensor) -> Tensor:
        """The tensor, [B, n], with `updates`, [R, m], in the first m columns of its rows at
        `indices`, [R] int64."""
        width = axis_size(updates, 1)
        places = indices.unsqueeze()
        if width > 1:
            places = op("Expand", places, [1, width])
        return self.scatter(places, updates, axis=0)

    def scatter(
        self, indices: Tensor, updates: Tensor, *, axis: int = 1, reduction: str = "none"
    ) -> Tensor:
        """The tensor with `updates` at `indices` along `axis`; reduction: as in ScatterElements."""
        return op("ScatterElements", self, indices, updates, axis=axis, reduction=reduction)


@dataclass(frozen=True)
class TensorRecord:
    """Base of frozen dataclasses whose fields are tensors, records, or None for absent tensors.

    The sides of a `branch` and the steps of a `loop` return such records, so that their results
    have names.
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

    def rows(self, indices: Tensor) -> Self:
        """A record of the rows at `indices`, [R] int64, of each tensor."""
        return self.filled(iter([tensor.rows(indices) for tensor in self.tensors()]))

    def with_rows(self, indices: Tensor, updates: Self) -> Self:
        """A record with the rows of `updates` in the place of the rows at `indices`, [R] int64.

        Each tensor has two axes.
        """
        pairs = zip(self.tensors(), updates.tensors(), strict=True)
        return self.filled(iter([old.with_rows(indices, new) for old, new in pairs]))

    def where(self, condition: Tensor, otherwise: Self) -> Self:
        """A record with `where(condition, tensor, other)` for each pair of tensors."""
        pairs = zip(self.tensors(), otherwise.tensors(), strict=True)
        return self.filled(iter([where(condition, yes, no) for yes, no in pairs]))


def op(op_type: str, *inputs: Any, **attributes: Any) -> Tensor:
    """Add a node with a single output. Inputs are tensors, numbers, lists of numbers or arrays."""
    (result,) = operator(op_type, *inputs, outputs=1, **attributes)
    return result


def operator(op_type: str, *inputs: Any, outputs: int, **attributes: Any) -> Tensors:
    """Add a node with several outputs."""
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
    """Add a constant. Equal constants are merged when the graph is finished."""
    builder = _builder.get()
    name = f"constant_{len(builder.root.graph.initializers)}"
    return Tensor(builder.initializer(ir.tensor(array, name=name), name, qualify=False))


def exp(x: Tensor) -> Tensor:
    """The exponential of each element."""
    return op("Exp", x)


def log_of_column(x: Tensor) -> Tensor:
    """The natural logarithm of a column, [B, 1].

    It is a reduction, because ONNX Runtime's Log rounds an element by its place in the tensor.
    """
    return op("ReduceLogSum", x, [-1])


def absolute(x: Tensor) -> Tensor:
    """The absolute value of each element."""
    return op("Abs", x)


def maximum(x: Tensor, y: Operand) -> Tensor:
    """The larger number, element by element."""
    return op("Max", x, y)


def minimum(x: Tensor, y: Operand) -> Tensor:
    """The smaller number, element by element."""
    return op("Min", x, y)


def where(condition: Tensor, yes: Operand, no: Operand) -> Tensor:
    """`yes` or `no`, by the condition of each element. For few elements only.

    Over a vocabulary, ONNX Runtime's kernel takes ten times as long as a product with 0 or 1.
    """
    return op("Where", condition, yes, no)


def concat(*parts: Tensor) -> Tensor:
    """The parts one after the other along the second axis."""
    return op("Concat", *parts, axis=1)


def top(values: Tensor, count: int, *, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The largest or smallest elements along the last axis, in order.

    Args:
        values: the elements.
        count: how many of them are wanted.
        largest: whether the largest are wanted, or the smallest.

    Returns:
        The elements, and their indices, int64; of equal elements, the lowest indices.
    """
    selected, indices = operator(
        "TopK", values, [count], axis=-1, largest=int(largest), sorted=1, outputs=2
    )
    return selected, indices


def constants(like: Tensor, value: float) -> Tensor:
    """A tensor of one value in the shape of `like`."""
    flags = like if like.dtype == BOOL else like.equals(like)
    return where(flags, value, value)


def indices(count: int, dtype: str = "int64") -> Tensor:
    """The numbers 0, 1, … count - 1 as a constant: [count]."""
    return constant(np.arange(count, dtype=dtype))


def axis_size(tensor: Tensor, axis: int) -> int:
    """The size of an axis, which has to be known when the graph is built."""
    known = tensor.shape[axis]
    assert isinstance(known, int)
    return known


def size(tensor: Tensor, axis: int) -> Tensor:
    """The size of an axis, computed in the graph: [1] int64."""
    return op("Shape", tensor, start=axis, end=axis + 1)


def branch(
    condition: Tensor, then: Callable[[], Structure], otherwise: Callable[[], Structure]
) -> Structure:
    """An `If`: `then()` if `condition`, a scalar bool, holds, else `otherwise()`.

    Only one side is computed. Both functions return the same structure, a tensor, a tuple of
    tensors or a `TensorRecord`, and so does `branch`.
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


def if_any(
    rows: Tensor, then: Callable[[], Structure], otherwise: Callable[[], Structure]
) -> Structure:
    """An `If`: `then()` if the list `rows`, [n] int64, has an entry, else `otherwise()`.

    Its condition is a shape, which the host knows.
    """
    return branch(op("Squeeze", size(rows, 0)) > 0, then, otherwise)


def loop(
    most: int,
    condition: Tensor,
    states: Structure,
    step: Callable[[Tensor, Structure], tuple[Tensor, Structure]],
) -> Structure:
    """A `Loop`: repeats `step` while a condition holds.

    Args:
        most: the largest number of repetitions.
        condition: a scalar bool, whether the first repetition runs.
        states: the states before the first repetition, a structure as for `branch`.
        step: takes the number of the repetition, a scalar int64, and the states; returns the next
            condition and the next states.

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
    """Collect the nodes that `function` adds in a separate graph.

    The outputs of the graph are the tensors of the structure that `function` returns. A tensor from
    outside the graph passes through an Identity, as does a tensor that is an output already.

    Returns:
        The graph and the structure.
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
    """The shape of both values, without sizes where they differ; None if their ranks differ."""
    if first.shape is None or second.shape is None or len(first.shape) != len(second.shape):
        return None
    sizes = zip(first.shape, second.shape, strict=True)
    return ir.Shape([one if one == other else None for one, other in sizes])
