"""The kinds of products and attentions in an ONNX file, for `ort.rounding`; without the package onnx. A kind is what
decides on an operator's kernel: its attributes, the dtypes and shapes of its weights. Many layers share few kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from qsample.contract.arrays import DTYPES
from qsample.disk.protobuf import fields
from qsample.ort.small_graphs import integer

EXPERTS: Final = ("MoE", "QMoE")
QUERY_SEQLENS: Final = 16  # the slot of GroupQueryAttention's input
TOKENS: Final = 12  # of a row in a small attention
ONNX_TYPES: Final = {name: dtype.onnx for name, dtype in DTYPES.items()}
_NAMES: Final = {number: name for name, number in ONNX_TYPES.items()}
_FLOATS: Final = ("float32", "float16")
# MLAS shares the outputs of a product among threads in multiples of _ALIGNED: a small product keeps the remainder.
_ALIGNED: Final = 16
_HIDDEN: Final = 256  # units of small experts
_GIVEN: Final = 64  # inputs of products with an adapter, whose sizes the graph does not tell
_MOST_INPUTS: Final = 1 << 18
_MOST_KINDS: Final = 100
_ROTARY: Final = (
    7,
    8,
)  # the slots of GroupQueryAttention's tables that have a row for each position
# Numbers of the fields of onnx.proto.
_MODEL_GRAPH: Final = 7
_GRAPH_NODE, _GRAPH_CONSTANT, _GRAPH_INPUT = 1, 5, 11
_OF_NODE: Final = (1, 2, 4, 5)  # inputs, outputs, the operator, attributes
_ATTRIBUTE_GRAPH: Final = 6
_WITH_GRAPHS: Final = ("If", "Loop", "Scan")
_FOLDED: Final = ("Cast", "Transpose")


class Product(NamedTuple):
    """A kind of product, by an operator of ONNX or com.microsoft. `dtype` is the activations'; dtypes have the
    contract's names. `shapes` and `dtypes` are the other operands', with few outputs and experts; a missing operand has
    shape (). `attributes` are AttributeProtos. `cast`: weights are stored in float16. `given`: they are an input of the
    graph."""

    operator: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    attributes: tuple[bytes, ...] = ()
    cast: bool = False
    given: bool = False

    @property
    def inputs(self) -> int:
        """How many numbers a row has."""
        numbers, weights = dict(map(integer_of, self.attributes)), self.shapes[0]
        if self.operator in EXPERTS:
            return weights[2] * 8 // numbers.get("expert_weight_bits", 8)
        return numbers.get("K") or weights[1 if numbers.get("transB") else 0]

    def __str__(self) -> str:
        numbers = dict(map(integer_of, self.attributes))
        bits = numbers.get("bits", numbers.get("expert_weight_bits"))
        kind = self.dtype if bits is None else f"{bits} bits, blocks of {numbers.get('block_size')}"
        return f"{self.operator} ({kind})"


class Attention(NamedTuple):
    """A kind of GroupQueryAttention. `attributes` are AttributeProtos; `past` is the number of key-value heads and the
    head size; `dtype` is the cache's; `packed`: queries, keys and values are one input; `constants`: slot, shape and
    dtype of inputs that never change."""

    attributes: tuple[bytes, ...]
    past: tuple[int, int]
    dtype: str
    packed: bool
    constants: tuple[tuple[int, tuple[int, ...], str], ...]


def read_kernels(data: Any, columns: int) -> frozenset[Product | Attention]:
    """The kinds of products with weights, and of attentions to several tokens of a row, in an ONNX file and its inner
    graphs. data: bytes of the file, or a map of it. columns: products with more outputs become small products of about
    this number. Raises ValueError, IndexError or KeyError if it is no ONNX file, or none of a model."""
    found = set[Product | Attention]()
    for graph in _parts(_message(data, range(len(data))), _MODEL_GRAPH):
        for kernel in _Graph(data, graph, columns).kernels():
            found.add(kernel)
            if len(found) > _MOST_KINDS:
                raise ValueError(f"it has more than {_MOST_KINDS} kinds of products")
    return frozenset(found)


_Message = dict[int, list[int | range]]
"""Number of a field → its contents: integers, or the places of the rest."""


def _message(data: Any, part: range) -> _Message:
    found: _Message = {}
    for number, content in fields(data, part.start, part.stop):
        found.setdefault(number, []).append(content)
    return found


def _parts(message: _Message, number: int) -> list[range]:
    return [content for content in message.get(number, ()) if isinstance(content, range)]


def _integers(message: _Message, number: int) -> list[int]:
    return [content for content in message.get(number, ()) if isinstance(content, int)]


@dataclass(frozen=True, slots=True)
class _Operand:
    """A value that never changes, or an input of the graph. dims: 0 = free. cast: from another dtype."""

    dims: tuple[int, ...]
    dtype: str
    cast: bool = False
    given: bool = False


_COMPUTED: Final = _Operand((), "", given=True)
_Known = list[_Operand | None]
"""What is known of each input of a node; None = it is absent."""


class _Graph:
    """Finds the products of a GraphProto. outer: the values of the graph around it."""

    def __init__(
        self, data: Any, content: range, columns: int, outer: Mapping[str, _Operand] | None = None
    ) -> None:
        self._data, self._columns = data, columns
        self._known = dict(outer or {})
        graph = _message(data, content)
        self._nodes = _parts(graph, _GRAPH_NODE)
        self._known |= map(self._constant, _parts(graph, _GRAPH_CONSTANT))
        for name, operand in map(self._input, _parts(graph, _GRAPH_INPUT)):
            self._known.setdefault(name, operand)

    def kernels(self) -> Iterator[Product | Attention]:
        for part in self._nodes:
            inner = _message(self._data, part)
            inputs, outputs, operators, attributes = (_parts(inner, number) for number in _OF_NODE)
            operator = self._text(operators[0]) if operators else ""
            if operator in _FOLDED or operator in _READERS:
                names = map(self._text, inputs)
                known = [self._known.get(name, _COMPUTED) if name else None for name in names]
                encoded = tuple(self._data[one.start : one.stop] for one in attributes)
                if operator in _READERS:
                    kernel = _READERS[operator](operator, known, encoded, self._columns)
                    if kernel is not None:
                        yield kernel
                elif known[0] is not None and not known[0].given:
                    self._known[self._text(outputs[0])] = _folded(operator, known[0], encoded)
            elif operator in _WITH_GRAPHS:
                for graph in self._inside(attributes, _ATTRIBUTE_GRAPH):
                    yield from _Graph(self._data, graph, self._columns, self._known).kernels()

    def _constant(self, part: range) -> tuple[str, _Operand]:
        """TensorProto { dims, data_type, name }."""
        tensor = _message(self._data, part)
        dtype = [0, *_integers(tensor, 2)][-1]
        return self._name(tensor, 8), _Operand(tuple(_integers(tensor, 1)), _NAMES.get(dtype, ""))

    def _input(self, part: range) -> tuple[str, _Operand]:
        """ValueInfoProto { name, type { tensor_type { elem_type, shape { dim { dim_value } } } } }."""
        dtype, dims = "", list[int]()
        for tensor_type in self._inside([part], 2, 1):
            kinds = _integers(_message(self._data, tensor_type), 1)
            dtype = _NAMES.get(kinds[0], "") if kinds else ""
            for dim in self._inside([tensor_type], 2, 1):
                dims.append([*_integers(_message(self._data, dim), 1), 0][0])
        return self._name(_message(self._data, part), 1), _Operand(tuple(dims), dtype, given=True)

    def _inside(self, parts: list[range], *numbers: int) -> list[range]:
        """The messages that a path of field numbers leads to."""
        for number in numbers:
            parts = [
                inner for part in parts for inner in _parts(_message(self._data, part), number)
            ]
        return parts

    def _name(self, message: _Message, number: int) -> str:
        return "".join(map(self._text, _parts(message, number)[-1:]))

    def _text(self, part: range) -> str:
        text: bytes = self._data[part.start : part.stop]
        return text.decode("utf-8", "surrogateescape")


def _folded(operator: str, constant: _Operand, attributes: tuple[bytes, ...]) -> _Operand:
    """The result of a Cast or Transpose of weights; ONNX Runtime computes it when it opens a graph."""
    if operator == "Transpose":
        return replace(constant, dims=constant.dims[::-1])
    return _Operand(
        constant.dims, _NAMES.get(dict(map(integer_of, attributes)).get("to", 0), ""), cast=True
    )


def _block_product(
    operator: str, known: _Known, attributes: tuple[bytes, ...], columns: int
) -> Product:
    """MatMulNBits: weights [N, blocks, bytes], scales, zero points, order of inputs (left out), bias."""
    numbers = dict(map(integer_of, attributes))
    bits, size, outputs = numbers["bits"], numbers["block_size"], _fewer(numbers["N"], columns)
    blocks = -(-_checked(numbers["K"]) // max(size, 1))
    scales, zeros, bias = (known[place] if len(known) > place else None for place in (2, 3, 5))
    dtype = "float16" if scales is not None and scales.dtype == "float16" else "float32"
    kind = "" if zeros is None else zeros.dtype
    per_row = -(-blocks * bits // 8) if kind == "uint8" else blocks
    shapes = [
        (outputs, blocks, size * bits // 8),
        (outputs * blocks,),
        (outputs * per_row,) if zeros else (),
    ]
    shapes += [(), (outputs,)] if bias is not None else []
    others = (one for one in attributes if integer_of(one)[0] != "N")
    kept = tuple(sorted((*others, integer("N", outputs))))
    return Product(
        operator, dtype, tuple(shapes), ("uint8", dtype, kind, "", dtype)[: len(shapes)], kept
    )


def _float_product(
    operator: str, known: _Known, attributes: tuple[bytes, ...], columns: int
) -> Product | None:
    """MatMul, FusedMatMul and Gemm with a matrix of floats that never changes, or that is an input."""
    rows, weights = known[0], known[1] if len(known) > 1 else None
    if (
        rows is None
        or weights is None
        or not rows.given
        or len(weights.dims) != 2
        or weights.dtype not in _FLOATS
    ):
        return None
    transposed = dict(map(integer_of, attributes)).get("transB", 0)
    sizes = (_GIVEN, _GIVEN) if weights.given else weights.dims
    inputs, outputs = sizes[::-1] if transposed else sizes
    few = _fewer(outputs, columns)
    shape = (few, _checked(inputs)) if transposed else (_checked(inputs), few)
    kept = tuple(sorted(attributes))
    return Product(
        operator,
        weights.dtype,
        (shape,),
        (weights.dtype,),
        kept,
        cast=weights.cast,
        given=weights.given,
    )


def _experts(
    operator: str, known: _Known, attributes: tuple[bytes, ...], columns: int
) -> Product | None:
    """MoE and QMoE with two experts of few hidden units; None for layouts that no exporter here writes. columns: not
    for them."""
    numbers = dict(map(integer_of, attributes))
    quantized, bits = operator == "QMoE", numbers.get("expert_weight_bits", 0)
    inner, last = (
        ((2, 3, 4, 11), 5) if quantized else ((2, 3), 4)
    )  # operands of the first product; the second matrix
    operands = [one if one is not None and not one.given else None for one in known]
    first, second, scales = (
        operands[place] if len(operands) > place else None for place in (2, last, 3)
    )
    if (
        first is None
        or second is None
        or (quantized and (not numbers.get("block_size") or bits not in (4, 8)))
    ):
        return None
    dtype = first.dtype if not quantized else "float32" if scales is None else scales.dtype
    pack = 8 // bits if quantized else 1
    _checked(first.dims[2] * pack)
    hidden = second.dims[2] * pack
    few = min(hidden, _HIDDEN)
    shapes: list[tuple[int, ...]] = []
    for place, operand in enumerate(operands[2:], 2):
        if operand is None:
            shapes.append(())
        elif place in inner:
            shapes.append((2, operand.dims[1] * few // hidden, *operand.dims[2:]))
        else:
            shapes.append(
                (2, operand.dims[1], *(-(-dim * few // hidden) for dim in operand.dims[2:]))
            )
    dtypes = tuple("" if operand is None else operand.dtype for operand in operands[2:])
    return Product(operator, dtype, tuple(shapes), dtypes, tuple(sorted(attributes)))


def _attention(
    operator: str, known: _Known, attributes: tuple[bytes, ...], columns: int
) -> Attention | None:
    """GroupQueryAttention with `query_seqlens` over a whole cache: only packages with guesses have it."""
    slides = dict(map(integer_of, attributes)).get("sliding_window_cache", 0)
    if slides or len(known) <= QUERY_SEQLENS or (past := known[3]) is None or len(past.dims) != 4:
        return None
    others = [
        (slot, one)
        for slot, one in enumerate(known[:QUERY_SEQLENS])
        if one is not None and slot > 6
    ]
    if any(one.given for _, one in others):
        return None
    constants = tuple(
        (slot, (TOKENS, *one.dims[1:]) if slot in _ROTARY else one.dims, one.dtype)
        for slot, one in others
    )
    numbers = dict(map(integer_of, attributes))
    packed = 8 // (numbers.get("kv_cache_bit_width") or 8)  # numbers of the cache in a byte
    kept, sizes = tuple(sorted(attributes)), (past.dims[1], past.dims[3] * packed)
    return Attention(kept, sizes, past.dtype, known[1] is None, constants)


_READERS: Final = {
    "GroupQueryAttention": _attention,
    "MatMulNBits": _block_product,
    **dict.fromkeys(("MatMul", "FusedMatMul", "Gemm"), _float_product),
    **dict.fromkeys(EXPERTS, _experts),
}


def _fewer(outputs: int, columns: int) -> int:
    return outputs if outputs <= columns + _ALIGNED else columns + outputs % _ALIGNED


def _checked(inputs: int) -> int:
    if not 0 < inputs <= _MOST_INPUTS:
        raise ValueError(f"it has a product with {inputs} inputs")
    return inputs


def integer_of(attribute: bytes) -> tuple[str, int]:
    """The name and the integer of an AttributeProto; 0 if it has none."""
    message = _message(attribute, range(len(attribute)))
    name = [
        attribute[part.start : part.stop].decode("utf-8", "replace") for part in _parts(message, 1)
    ]
    return "".join(name[-1:]), [0, *_integers(message, 3)][-1]
