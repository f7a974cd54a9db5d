"""Reads the kinds of products and attentions from an ONNX file, for `ort.rounding`, without the
package onnx.

A kind is everything that decides on an operator's kernel: its attributes, and the dtypes and shapes
of its weights. Many layers share few kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from qsample.contract.arrays import DTYPES
from qsample.ort.small_graphs import integer
from qsample.package.disk.protobuf import fields

EXPERT_OPERATORS: Final = ("MoE", "QMoE")
QUERY_SEQLENS_SLOT: Final = 16
# The number of tokens of a row in a small attention.
ATTENTION_TOKENS: Final = 12
ONNX_TYPES: Final = {name: dtype.onnx for name, dtype in DTYPES.items()}
_DTYPE_NAMES: Final = {number: name for name, number in ONNX_TYPES.items()}
_FLOAT_DTYPES: Final = ("float32", "float16")
# MLAS divides the outputs of a product among threads in multiples of this number, so a small
# product keeps the remainder.
_OUTPUT_ALIGNMENT: Final = 16
_HIDDEN_UNITS_OF_SMALL_EXPERTS: Final = 256
# The graph does not say the sizes of a product with the matrices of LoRA adapters.
_ADAPTER_MATRIX_SIZE: Final = 64
_MAX_PRODUCT_INPUTS: Final = 1 << 18
_MAX_KINDS: Final = 100

# The inputs of GroupQueryAttention by slot. The rotary tables have a row for each position.
_PAST_KEY_SLOT: Final = 3
_FIRST_OPTIONAL_SLOT: Final = 7
_ROTARY_SLOTS: Final = (7, 8)

# The numbers of the fields of onnx.proto.
_MODEL_GRAPH: Final = 7
_GRAPH_NODE: Final = 1
_GRAPH_INITIALIZER: Final = 5
_GRAPH_INPUT: Final = 11
_NODE_INPUT: Final = 1
_NODE_OUTPUT: Final = 2
_NODE_OPERATOR: Final = 4
_NODE_ATTRIBUTE: Final = 5
_ATTRIBUTE_NAME: Final = 1
_ATTRIBUTE_INTEGER: Final = 3
_ATTRIBUTE_GRAPH: Final = 6
_TENSOR_DIMS: Final = 1
_TENSOR_DATA_TYPE: Final = 2
_TENSOR_NAME: Final = 8
_VALUE_NAME: Final = 1
_VALUE_TENSOR_TYPE: Final = (2, 1)  # ValueInfoProto.type.tensor_type
_TENSOR_TYPE_ELEMENT: Final = 1
_TENSOR_TYPE_DIM: Final = (2, 1)  # TypeProto.Tensor.shape.dim
_DIM_VALUE: Final = 1

_OPERATORS_WITH_GRAPHS: Final = ("If", "Loop", "Scan")
# ONNX Runtime computes these when it opens a graph, if their input is a constant.
_FOLDED_OPERATORS: Final = ("Cast", "Transpose", "GatherBlockQuantized")


class Product(NamedTuple):
    """A kind of product, by an operator of ONNX or com.microsoft.

    Attributes:
        operator: The name of the operator.
        dtype: The dtype of the activations, by the contract's name.
        shapes: The shapes of the other operands, with few outputs and experts; () for a missing
            operand.
        dtypes: The dtypes of these operands.
        attributes: AttributeProtos.
        cast: Whether the weights are stored in float16 and cast.
        given: Whether the weights are an input of the graph.
    """

    operator: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    attributes: tuple[bytes, ...] = ()
    cast: bool = False
    given: bool = False

    @property
    def inputs(self) -> int:
        """The number of activations in a row."""
        numbers = integers_of(self.attributes)
        weights = self.shapes[0]
        if self.operator in EXPERT_OPERATORS:
            return weights[2] * 8 // numbers.get("expert_weight_bits", 8)
        if numbers.get("K") is not None:
            return numbers["K"]
        return weights[1] if numbers.get("transB", 0) != 0 else weights[0]

    def __str__(self) -> str:
        numbers = integers_of(self.attributes)
        bits = numbers.get("bits", numbers.get("expert_weight_bits"))
        kind = self.dtype if bits is None else f"{bits} bits, blocks of {numbers.get('block_size')}"
        return f"{self.operator} ({kind})"


class Constant(NamedTuple):
    """An input of an attention that never changes: its slot, its shape and the name of its
    dtype."""

    slot: int
    shape: tuple[int, ...]
    dtype: str


class Attention(NamedTuple):
    """A kind of GroupQueryAttention.

    Attributes:
        attributes: AttributeProtos.
        heads: The number of key-value heads.
        head_size: The number of values of a head.
        dtype: The dtype of the cache, by the contract's name.
        packed: Whether queries, keys and values are one input.
        constants: The inputs that never change.
    """

    attributes: tuple[bytes, ...]
    heads: int
    head_size: int
    dtype: str
    packed: bool
    constants: tuple[Constant, ...]


Kernel = Product | Attention


def read_kernels(data: Any, columns: int) -> frozenset[Kernel]:
    """Find the products with weights, and the attentions to several tokens of a row, in an ONNX
    file.

    Args:
        data: The bytes of the file, or a map of it.
        columns: The number of outputs, about, to which wider products are cut.

    Returns:
        Their kinds, those in inner graphs included.

    Raises:
        ValueError, IndexError or KeyError: The file is not ONNX, or not a graph of a model.
    """
    kernels = set[Kernel]()
    for graph in _parts(_message(data, range(len(data))), _MODEL_GRAPH):
        for kernel in _Graph(data, graph, columns).kernels():
            kernels.add(kernel)
            if len(kernels) > _MAX_KINDS:
                raise ValueError(f"it has more than {_MAX_KINDS} kinds of products")
    return frozenset(kernels)


# The contents of a message by the number of the field: integers, or the places of anything else.
_Message = dict[int, list[int | range]]


def _message(data: Any, part: range) -> _Message:
    message: _Message = {}
    for number, content in fields(data, part.start, part.stop):
        message.setdefault(number, []).append(content)
    return message


def _parts(message: _Message, number: int) -> list[range]:
    return [content for content in message.get(number, ()) if isinstance(content, range)]


def _integers(message: _Message, number: int) -> list[int]:
    return [content for content in message.get(number, ()) if isinstance(content, int)]


def _last_integer(message: _Message, number: int) -> int:
    """The value of an integer field that may come several times; 0 if it is absent."""
    integers = _integers(message, number)
    return integers[-1] if integers else 0


@dataclass(frozen=True, slots=True)
class _Operand:
    """An operand of a node.

    Attributes:
        dims: The sizes of its axes; 0 for a free axis.
        dtype: The contract's name of its dtype; "" if unknown.
        cast: Whether it was cast from another dtype.
        given: Whether it is an input of the graph or computed in a run; otherwise it is a constant.
    """

    dims: tuple[int, ...]
    dtype: str
    cast: bool = False
    given: bool = False


_COMPUTED_OPERAND: Final = _Operand((), "", given=True)


@dataclass(frozen=True, slots=True)
class _Node:
    """A node whose kernel may depend on the processor.

    Attributes:
        operator: The name of its operator.
        operands: Its inputs; None for an absent input.
        attributes: AttributeProtos.
    """

    operator: str
    operands: Sequence[_Operand | None]
    attributes: tuple[bytes, ...]

    @property
    def numbers(self) -> dict[str, int]:
        """The attributes that are integers."""
        return integers_of(self.attributes)

    def operand(self, slot: int) -> _Operand | None:
        """The operand in a slot; None if it is absent."""
        return self.operands[slot] if slot < len(self.operands) else None

    def constant(self, slot: int) -> _Operand | None:
        """The operand in a slot if it is a constant, otherwise None."""
        operand = self.operand(slot)
        return None if operand is None or operand.given else operand


class _Graph:
    """Finds the kernels of a GraphProto."""

    def __init__(
        self, data: Any, content: range, columns: int, outer: Mapping[str, _Operand] | None = None
    ) -> None:
        """outer: The values of the graph around this graph."""
        self._data = data
        self._columns = columns
        self._operands = dict(outer or {})
        graph = _message(data, content)
        self._nodes = _parts(graph, _GRAPH_NODE)
        for part in _parts(graph, _GRAPH_INITIALIZER):
            name, operand = self._initializer(part)
            self._operands[name] = operand
        for part in _parts(graph, _GRAPH_INPUT):
            name, operand = self._input(part)
            self._operands.setdefault(name, operand)

    def kernels(self) -> Iterator[Kernel]:
        """Read the nodes in order."""
        for part in self._nodes:
            message = _message(self._data, part)
            operator = self._text(_parts(message, _NODE_OPERATOR)[:1])
            if operator in _READERS:
                kernel = _READERS[operator](self._node(operator, message), self._columns)
                if kernel is not None:
                    yield kernel
            elif operator in _FOLDED_OPERATORS:
                self._fold(self._node(operator, message), message)
            elif operator in _OPERATORS_WITH_GRAPHS:
                attributes = _parts(message, _NODE_ATTRIBUTE)
                for graph in self._inside(attributes, _ATTRIBUTE_GRAPH):
                    yield from _Graph(self._data, graph, self._columns, self._operands).kernels()

    def _node(self, operator: str, message: _Message) -> _Node:
        operands = list[_Operand | None]()
        for part in _parts(message, _NODE_INPUT):
            name = self._text([part])
            operands.append(self._operands.get(name, _COMPUTED_OPERAND) if name else None)
        attributes = [
            self._data[part.start : part.stop] for part in _parts(message, _NODE_ATTRIBUTE)
        ]
        return _Node(operator, operands, tuple(attributes))

    def _fold(self, node: _Node, message: _Message) -> None:
        """Note the result of a node that ONNX Runtime computes when it opens the graph."""
        constant = node.constant(0)
        if constant is None:
            return
        if node.operator == "Transpose":
            result = replace(constant, dims=constant.dims[::-1])
        elif node.operator == "GatherBlockQuantized":
            scales = node.constant(2)
            if node.constant(1) is None or scales is None:
                return  # It looks rows up in a run.
            # All experts of a layer: the levels of a row are side by side.
            *outer, row_bytes = constant.dims
            bits = node.numbers.get("bits", 4)
            row = row_bytes * 8 // bits if bits > 0 else 0
            result = _Operand((*outer, row), scales.dtype)
        else:
            dtype = _DTYPE_NAMES.get(node.numbers.get("to", 0), "")
            result = _Operand(constant.dims, dtype, cast=True)
        self._operands[self._text(_parts(message, _NODE_OUTPUT)[:1])] = result

    def _initializer(self, part: range) -> tuple[str, _Operand]:
        """The name and the operand of a TensorProto."""
        tensor = _message(self._data, part)
        dtype = _DTYPE_NAMES.get(_last_integer(tensor, _TENSOR_DATA_TYPE), "")
        dims = tuple(_integers(tensor, _TENSOR_DIMS))
        return self._text(_parts(tensor, _TENSOR_NAME)[-1:]), _Operand(dims, dtype)

    def _input(self, part: range) -> tuple[str, _Operand]:
        """The name and the operand of a ValueInfoProto."""
        dtype = ""
        dims = list[int]()
        for tensor_type in self._inside([part], *_VALUE_TENSOR_TYPE):
            elements = _integers(_message(self._data, tensor_type), _TENSOR_TYPE_ELEMENT)
            dtype = _DTYPE_NAMES.get(elements[0], "") if elements else ""
            for dim in self._inside([tensor_type], *_TENSOR_TYPE_DIM):
                sizes = _integers(_message(self._data, dim), _DIM_VALUE)
                dims.append(sizes[0] if sizes else 0)
        name = self._text(_parts(_message(self._data, part), _VALUE_NAME)[-1:])
        return name, _Operand(tuple(dims), dtype, given=True)

    def _inside(self, parts: list[range], *numbers: int) -> list[range]:
        """The messages that a path of field numbers leads to."""
        for number in numbers:
            messages = [_message(self._data, part) for part in parts]
            parts = [inner for message in messages for inner in _parts(message, number)]
        return parts

    def _text(self, parts: Sequence[range]) -> str:
        """The text at the only place, "" if there is none."""
        if not parts:
            return ""
        text: bytes = self._data[parts[0].start : parts[0].stop]
        return text.decode("utf-8", "surrogateescape")


def _block_product(node: _Node, columns: int) -> Product:
    """Read MatMulNBits: weights [N, blocks, bytes], scales, zero points, order of inputs (left
    out), bias."""
    numbers = node.numbers
    bits = numbers["bits"]
    block_size = numbers["block_size"]
    outputs = _fewer_outputs(numbers["N"], columns)
    blocks = -(-_checked_inputs(numbers["K"]) // max(block_size, 1))
    scales = node.operand(2)
    zeros = node.operand(3)
    bias = node.operand(5)
    dtype = "float16" if scales is not None and scales.dtype == "float16" else "float32"
    shapes: list[tuple[int, ...]] = [(outputs, blocks, block_size * bits // 8), (outputs * blocks,)]
    dtypes = ["uint8", dtype]
    if zeros is None:
        shapes.append(())
        dtypes.append("")
    else:
        # Zero points are packed, unless they have the dtype of the scales.
        zeros_per_output = -(-blocks * bits // 8) if zeros.dtype == "uint8" else blocks
        shapes.append((outputs * zeros_per_output,))
        dtypes.append(zeros.dtype)
    if bias is not None:
        shapes += [(), (outputs,)]
        dtypes += ["", dtype]
    attributes = [one for one in node.attributes if _integer_of(one)[0] != "N"]
    attributes.append(integer("N", outputs))
    return Product(node.operator, dtype, tuple(shapes), tuple(dtypes), tuple(sorted(attributes)))


def _float_product(node: _Node, columns: int) -> Product | None:
    """Read MatMul, FusedMatMul or Gemm if the matrix holds floats, and is a constant or an input of
    the graph."""
    rows = node.operand(0)
    weights = node.operand(1)
    if rows is None or weights is None or not rows.given:
        return None
    if len(weights.dims) != 2 or weights.dtype not in _FLOAT_DTYPES:
        return None
    transposed = node.numbers.get("transB", 0) != 0
    sizes = (_ADAPTER_MATRIX_SIZE, _ADAPTER_MATRIX_SIZE) if weights.given else weights.dims
    inputs, outputs = sizes[::-1] if transposed else sizes
    few_outputs = _fewer_outputs(outputs, columns)
    _checked_inputs(inputs)
    shape = (few_outputs, inputs) if transposed else (inputs, few_outputs)
    return Product(
        node.operator,
        weights.dtype,
        (shape,),
        (weights.dtype,),
        tuple(sorted(node.attributes)),
        cast=weights.cast,
        given=weights.given,
    )


def _experts(node: _Node, columns: int) -> Product | None:
    """Read MoE or QMoE, cut to two experts with few hidden units; None for layouts that no exporter
    of qsample writes. columns: Not used: the outputs are not cut."""
    numbers = node.numbers
    quantized = node.operator == "QMoE"
    bits = numbers.get("expert_weight_bits", 0)
    # The slots of the first product's operands have the hidden units as outputs.
    first_product_slots = (2, 3, 4, 11) if quantized else (2, 3)
    second_matrix_slot = 5 if quantized else 4
    first = node.constant(2)
    second = node.constant(second_matrix_slot)
    if first is None or second is None:
        return None
    if quantized and (numbers.get("block_size", 0) == 0 or bits not in (4, 8)):
        return None
    if quantized:
        scales = node.constant(3)
        dtype = "float32" if scales is None else scales.dtype
        numbers_per_byte = 8 // bits
    else:
        dtype = first.dtype
        numbers_per_byte = 1
    _checked_inputs(first.dims[2] * numbers_per_byte)
    hidden = second.dims[2] * numbers_per_byte
    few_hidden = min(hidden, _HIDDEN_UNITS_OF_SMALL_EXPERTS)
    shapes = list[tuple[int, ...]]()
    dtypes = list[str]()
    for slot in range(2, len(node.operands)):
        operand = node.constant(slot)
        if operand is None:
            shapes.append(())
            dtypes.append("")
            continue
        if slot in first_product_slots:
            few = (operand.dims[1] * few_hidden // hidden, *operand.dims[2:])
        else:
            few = (operand.dims[1], *(-(-dim * few_hidden // hidden) for dim in operand.dims[2:]))
        shapes.append((2, *few))
        dtypes.append(operand.dtype)
    attributes = tuple(sorted(node.attributes))
    return Product(node.operator, dtype, tuple(shapes), tuple(dtypes), attributes)


def _attention(node: _Node, columns: int) -> Attention | None:
    """Read GroupQueryAttention with `query_seqlens` over a whole cache: only packages with guesses
    have it. columns: Not used."""
    numbers = node.numbers
    past = node.operand(_PAST_KEY_SLOT)
    if numbers.get("sliding_window_cache", 0) != 0 or len(node.operands) <= QUERY_SEQLENS_SLOT:
        return None
    if past is None or len(past.dims) != 4:
        return None
    constants = list[Constant]()
    for slot in range(_FIRST_OPTIONAL_SLOT, QUERY_SEQLENS_SLOT):
        operand = node.operand(slot)
        if operand is None:
            continue
        if operand.given:
            return None
        shape = operand.dims
        if slot in _ROTARY_SLOTS:
            shape = (ATTENTION_TOKENS, *operand.dims[1:])
        constants.append(Constant(slot, shape, operand.dtype))
    bit_width = numbers.get("kv_cache_bit_width", 0)
    numbers_per_byte = 1 if bit_width == 0 else 8 // bit_width
    return Attention(
        tuple(sorted(node.attributes)),
        heads=past.dims[1],
        head_size=past.dims[3] * numbers_per_byte,
        dtype=past.dtype,
        packed=node.operand(1) is None,
        constants=tuple(constants),
    )


_READERS: Final = {
    "GroupQueryAttention": _attention,
    "MatMulNBits": _block_product,
    **dict.fromkeys(("MatMul", "FusedMatMul", "Gemm"), _float_product),
    **dict.fromkeys(EXPERT_OPERATORS, _experts),
}


def _fewer_outputs(outputs: int, columns: int) -> int:
    if outputs <= columns + _OUTPUT_ALIGNMENT:
        return outputs
    return columns + outputs % _OUTPUT_ALIGNMENT


def _checked_inputs(inputs: int) -> int:
    if not 0 < inputs <= _MAX_PRODUCT_INPUTS:
        raise ValueError(f"it has a product with {inputs} inputs")
    return inputs


def integers_of(attributes: Sequence[bytes]) -> dict[str, int]:
    """The integers of AttributeProtos by name; 0 for an attribute of another type."""
    return dict(map(_integer_of, attributes))


def _integer_of(attribute: bytes) -> tuple[str, int]:
    message = _message(attribute, range(len(attribute)))
    name = ""
    for part in _parts(message, _ATTRIBUTE_NAME)[-1:]:
        name = attribute[part.start : part.stop].decode("utf-8", "replace")
    return name, _last_integer(message, _ATTRIBUTE_INTEGER)
