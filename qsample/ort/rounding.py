"""The numbers of rows that the products of a package round alike, measured on this processor.

On many processors, ONNX Runtime multiplies a single row, or the last of an odd number of rows, with kernels that add up
in another order than those for more rows. That depends on the processor, on the kind of the product (bits, blocks, zero
points, weights packed in advance) and on ONNX Runtime's version; docs/devices.md has a table. So when a package is
opened, a small product of each of its kinds is computed over several numbers of rows, which takes milliseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from qsample.disk.protobuf import fields
from qsample.errors import PackageError
from qsample.ort.options import most_shares, session_options
from qsample.ort.providers import CPU, open_session
from qsample.ort.small_graphs import CONTRIB_DOMAIN, integer, model, node, tensor
from qsample.tensors import DTYPES, Array

_COUNTS: Final = (*range(1, 10), 13, 16, 37)
_ROWS: Final = 40
# Outputs of a small product, for each thread. With fewer, MLAS cuts the inputs otherwise, too; and it shares them among
# threads in multiples of _ALIGNED, so that the last columns are as many as those of the whole product.
_COLUMNS: Final = 128
_ALIGNED: Final = 16
_HIDDEN: Final = 256  # units of small experts
_PERIOD: Final = 65537  # random numbers, of which larger tensors repeat them
_GIVEN: Final = 64  # inputs of products with an adapter, whose sizes the graph does not tell
_MOST_INPUTS: Final = 1 << 18
_MOST_KINDS: Final = 100
_EXPERTS: Final = ("MoE", "QMoE")
_CONTRIB: Final = ("FusedMatMul", "MatMulNBits", *_EXPERTS)
_FLOATS: Final = ("float32", "float16")
# Numbers of the fields of onnx.proto.
_MODEL_GRAPH: Final = 7
_GRAPH_NODE, _GRAPH_CONSTANT, _GRAPH_INPUT = 1, 5, 11
_ATTRIBUTE_GRAPH: Final = 6
_ONNX_TYPES: Final = {name: dtype.onnx for name, dtype in DTYPES.items()} | {"uint8": 2}
_NAMES: Final = {number: name for name, number in _ONNX_TYPES.items()}


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Numbers of rows that round alike: at least `least`, and multiples of `multiple`."""

    least: int = 1
    multiple: int = 1

    @property
    def any(self) -> bool:
        """Whether every number of rows does."""
        return self.least == self.multiple == 1

    def cover(self, rows: int) -> int:
        """The least of these numbers that is at least `rows`."""
        return -(-max(rows, self.least) // self.multiple) * self.multiple

    def __and__(self, other: RowCounts) -> RowCounts:
        return RowCounts(max(self.least, other.least), max(self.multiple, other.multiple))


ANY_ROWS: Final = RowCounts()
# Found in this order: 1 and 2 are powers of two, so the larger is a multiple of the other.
_CANDIDATES: Final = (ANY_ROWS, RowCounts(2), RowCounts(2, 2))


class Rounding(NamedTuple):
    """How the products of a package round here.

    Attributes:
        products: the numbers of rows for those with the model's own weights.
        adapters: for those with the matrices of LoRA adapters.
        experts: for the rows of each expert.
        unknown: descriptions of products for which no such numbers were found.
        digest: hexadecimal; another processor whose kernels round otherwise has another.
    """

    products: RowCounts = ANY_ROWS
    adapters: RowCounts = ANY_ROWS
    experts: RowCounts = ANY_ROWS
    unknown: tuple[str, ...] = ()
    digest: str = ""

    def described(self) -> str:
        """In a line."""
        parts = [
            f"{name}: {'any number of rows' if counts.any else f'{counts.least} rows and more' + even}"
            for name, counts in (("products", self.products), ("experts", self.experts), ("adapters", self.adapters))
            for even in ["" if counts.multiple == 1 else ", in even numbers"]
            if name == "products" or not counts.any
        ]
        parts += [f"no number of rows: {', '.join(self.unknown)}"] if self.unknown else []
        return "; ".join(parts)


class Product(NamedTuple):
    """A kind of product.

    Attributes:
        operator: of ONNX or com.microsoft.
        dtype: of activations, by the contract's names.
        shapes: of its operands but the activations, with few outputs and experts: () = it lacks the operand.
        dtypes: of these operands.
        attributes: AttributeProtos.
        cast: its weights are stored in float16.
        given: its weights are an input of the graph.
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
        """How many numbers a row has."""
        numbers, weights = dict(map(_integer, self.attributes)), self.shapes[0]
        if self.operator in _EXPERTS:
            return weights[2] * 8 // numbers.get("expert_weight_bits", 8)
        return numbers.get("K") or weights[1 if numbers.get("transB") else 0]

    def __str__(self) -> str:
        numbers = dict(map(_integer, self.attributes))
        bits = numbers.get("bits", numbers.get("expert_weight_bits"))
        kind = self.dtype if bits is None else f"{bits} bits, blocks of {numbers.get('block_size')}"
        return f"{self.operator} ({kind})"


def measured(path: Path, threads: int | None = None, config: Mapping[str, str] | None = None) -> Rounding:
    """How the products of a graph round here, on the CPU.

    Args:
        path: of the graph.
        threads, config: of the sessions, as in `session_options`.

    Raises PackageError if the file is no ONNX graph.
    """
    try:
        products = frozenset(read_products(path.read_bytes(), _COLUMNS * most_shares(threads)))
    except (OSError, ValueError, IndexError) as error:
        raise PackageError(f"{path} is not an ONNX file: {error}; export the package again") from error
    return _measured(products, threads, tuple(sorted((config or {}).items())))


@cache
def _measured(products: frozenset[Product], threads: int | None, config: tuple[tuple[str, str], ...]) -> Rounding:
    ordered = sorted(products)
    graph, feeds = _small_graph(ordered)
    session = open_session(graph, session_options(dict(config), intra_op_num_threads=threads), (CPU,))

    def run(start: int, stop: int) -> list[Array]:
        fed = {name: array[start:stop] if len(array) == _ROWS else array for name, array in feeds.items()}
        result: list[Array] = session.run(None, fed)
        return result

    whole = run(0, _ROWS)
    alike = [set(_COUNTS) for _ in ordered]
    for count in _COUNTS:
        for start in (0, 1):
            part = run(start, start + count)
            for counts, one, all_rows in zip(alike, part, whole[: len(alike)], strict=False):
                if not np.array_equal(one, all_rows[start : start + count]):
                    counts.discard(count)
    found, unknown = dict.fromkeys(("products", "adapters", "experts"), ANY_ROWS), []
    for product, counts in zip(ordered, alike, strict=True):
        chosen = next((one for one in _CANDIDATES if {n for n in _COUNTS if one.cover(n) == n} <= counts), None)
        if chosen is None:
            unknown.append(str(product))
        else:
            found[_group(product)] &= chosen
    digest = hashlib.sha256(b"".join(array.tobytes() for array in whole)).hexdigest()
    return Rounding(**found, unknown=tuple(unknown), digest=digest[:16])


def _group(product: Product) -> str:
    return "experts" if product.operator in _EXPERTS else "adapters" if product.given else "products"


def _small_graph(products: Iterable[Product]) -> tuple[bytes, dict[str, Array]]:
    """A graph with an output for each product, and at the end one for each other kernel that rounds by the processor;
    and its inputs."""
    random = np.random.default_rng(0)
    nodes, constants, feeds, outputs = list[bytes](), list[bytes](), dict[str, Array](), dict[str, int]()

    levels = random.integers(0, 256, _PERIOD, np.uint8)
    normal = random.normal(0, 0.02, _PERIOD).astype(np.float32)

    def numbers(shape: tuple[int, ...], dtype: str) -> Array:
        return np.resize(levels, shape) if dtype == "uint8" else np.resize(normal, shape).astype(dtype)

    for index, product in enumerate(products):
        # The rows of products with as many inputs are the same.
        names = [f"rows_{product.inputs}_{product.dtype}"]
        if names[0] not in feeds:
            feeds[names[0]] = 50 * numbers((_ROWS, product.inputs), product.dtype)
        if product.operator in _EXPERTS:
            names.append("choice")
            feeds["choice"] = np.eye(2, dtype=product.dtype)[[0] * _ROWS]
        for place, (shape, dtype) in enumerate(zip(product.shapes, product.dtypes, strict=True)):
            name = f"operand_{index}_{place}" if shape else ""
            if product.given:
                name = f"given_{len(shape)}"
                feeds[name] = numbers(shape, product.dtype)
            elif shape:
                stored = "float16" if product.cast else dtype
                constants.append(tensor(name, numbers(shape, stored), _ONNX_TYPES[stored]))
            if product.cast:
                nodes.append(node("Cast", [name], f"{name}_cast", to=_ONNX_TYPES[product.dtype]))
                name = f"{name}_cast"
            names.append(name)
        domain = CONTRIB_DOMAIN if product.operator in _CONTRIB else b""
        nodes.append(node(product.operator, names, f"result_{index}", domain=domain, given=product.attributes))
        outputs[f"result_{index}"] = _ONNX_TYPES[product.dtype]
    feeds["logits"] = 100 * numbers((_ROWS, 500), "float32")
    nodes.append(node("Softmax", ["logits"], "weights"))
    outputs["weights"] = _ONNX_TYPES["float32"]
    types = {name: _ONNX_TYPES[str(array.dtype)] for name, array in feeds.items()}
    return model(nodes, types, outputs, constants), feeds


def read_products(data: bytes, columns: int) -> Iterator[Product]:
    """The kinds of products with weights in an ONNX file, those in graphs inside it included.

    Args:
        data: of the file.
        columns: products with more outputs become small products of about so many.

    Raises ValueError or IndexError if it is no ONNX file.
    """
    for number, content in fields(data, 0, len(data)):
        if number == _MODEL_GRAPH and isinstance(content, range):
            yield from _Graph(data, content, columns).products()


@dataclass(frozen=True, slots=True)
class _Operand:
    """A value that never changes, or an input of the graph, of which dims is (). cast: from another dtype."""

    dims: tuple[int, ...]
    dtype: str
    cast: bool = False


_Known = list[_Operand | None]
"""What is known of each input of a node; None = it is computed."""


class _Graph:
    """Finds the products of a GraphProto. outer: the values of the graph around it."""

    def __init__(self, data: bytes, content: range, columns: int, outer: Mapping[str, _Operand] | None = None) -> None:
        self._data, self._columns = data, columns
        self._known = dict(outer or {})
        self._nodes = []
        for number, part in self._fields(content):
            if number == _GRAPH_NODE:
                self._nodes.append(part)
            elif number == _GRAPH_CONSTANT:
                name, operand = self._constant(part)
                self._known[name] = operand
            elif number == _GRAPH_INPUT:
                self._known.setdefault(*self._input(part))

    def products(self) -> Iterator[Product]:
        for part in self._nodes:
            inputs, outputs, attributes, operator = list[str](), list[str](), list[range](), ""
            for number, inner in self._fields(part):
                if number in (1, 2):
                    (inputs if number == 1 else outputs).append(self._text(inner))
                elif number == 4:
                    operator = self._text(inner)
                elif number == 5:
                    attributes.append(inner)
            known = [self._known.get(name) for name in inputs]
            encoded = tuple(self._data[one.start : one.stop] for one in attributes)
            if operator in ("Cast", "Transpose") and known[0] is not None and known[0].dims and outputs:
                dims, to = known[0].dims, dict(map(_integer, encoded)).get("to", 0)
                made = _Operand(dims[::-1], known[0].dtype, known[0].cast) if operator == "Transpose" else None
                self._known[outputs[0]] = made or _Operand(dims, _NAMES.get(to, ""), cast=True)
            elif operator in _READERS:
                product = _READERS[operator](operator, known, encoded, self._columns)
                if product is not None:
                    yield product
            for attribute in attributes:
                for number, inner in self._fields(attribute):
                    if number == _ATTRIBUTE_GRAPH:
                        yield from _Graph(self._data, inner, self._columns, self._known).products()

    def _constant(self, part: range) -> tuple[str, _Operand]:
        dims, name, dtype = list[int](), "", 0
        for number, inner in fields(self._data, part.start, part.stop):
            if number == 1:
                dims += [inner] if isinstance(inner, int) else []
            elif number == 2 and isinstance(inner, int):
                dtype = inner
            elif number == 8 and isinstance(inner, range):
                name = self._text(inner)
        return name, _Operand(tuple(dims), _NAMES.get(dtype, ""))

    def _input(self, part: range) -> tuple[str, _Operand]:
        """ValueInfoProto { name, type { tensor_type { elem_type } } }."""
        name, types = "", list[range]()
        for number, inner in self._fields(part):
            if number == 1:
                name = self._text(inner)
            elif number == 2:
                types += [inner for key, inner in self._fields(inner) if key == 1]
        kinds = [value for one in types for key, value in fields(self._data, one.start, one.stop) if key == 1]
        dtype = next((_NAMES.get(kind, "") for kind in kinds if isinstance(kind, int)), "")
        return name, _Operand((), dtype)

    def _fields(self, part: range) -> Iterator[tuple[int, range]]:
        for number, inner in fields(self._data, part.start, part.stop):
            if isinstance(inner, range):
                yield number, inner

    def _text(self, part: range) -> str:
        return self._data[part.start : part.stop].decode("utf-8", "surrogateescape")


def _block_product(operator: str, known: _Known, attributes: tuple[bytes, ...], columns: int) -> Product:
    """MatMulNBits: weights [N, blocks, bytes], scales, zero points, order of inputs (left out), bias."""
    numbers = dict(map(_integer, attributes))
    bits, size, outputs = numbers["bits"], numbers["block_size"], _fewer(numbers["N"], columns)
    blocks = -(-_checked(numbers["K"]) // max(size, 1))
    scales, zeros, bias = (known[place] if len(known) > place else None for place in (2, 3, 5))
    dtype = "float16" if scales is not None and scales.dtype == "float16" else "float32"
    kind = "" if zeros is None else zeros.dtype
    per_row = -(-blocks * bits // 8) if kind == "uint8" else blocks
    shapes = [(outputs, blocks, size * bits // 8), (outputs * blocks,), (outputs * per_row,) if zeros else ()]
    shapes += [(), (outputs,)] if bias is not None else []
    others = (one for one in attributes if _integer(one)[0] != "N")
    kept = tuple(sorted((*others, integer("N", outputs))))
    return Product(operator, dtype, tuple(shapes), ("uint8", dtype, kind, "", dtype)[: len(shapes)], kept)


def _float_product(operator: str, known: _Known, attributes: tuple[bytes, ...], columns: int) -> Product | None:
    """MatMul, FusedMatMul and Gemm with a matrix of floats that never changes, or that is an input."""
    weights = known[1] if len(known) > 1 else None
    if known[0] is not None or weights is None or len(weights.dims) not in (0, 2) or weights.dtype not in _FLOATS:
        return None
    given, transposed = not weights.dims, dict(map(_integer, attributes)).get("transB", 0)
    sizes = weights.dims or (_GIVEN, _GIVEN)
    inputs, outputs = sizes[::-1] if transposed else sizes
    few = _fewer(outputs, columns)
    shape = (few, _checked(inputs)) if transposed else (_checked(inputs), few)
    kept = tuple(sorted(attributes))
    return Product(operator, weights.dtype, (shape,), (weights.dtype,), kept, cast=weights.cast, given=given)


def _experts(operator: str, known: _Known, attributes: tuple[bytes, ...], columns: int) -> Product | None:
    """MoE and QMoE with two experts of few hidden units; None for layouts that no exporter here writes. columns: not
    for them."""
    numbers = dict(map(_integer, attributes))
    quantized, bits = operator == "QMoE", numbers.get("expert_weight_bits", 0)
    inner, last = ((2, 3, 4, 11), 5) if quantized else ((2, 3), 4)  # operands of the first product; the second matrix
    operands = [one if one is not None and one.dims else None for one in known]
    first, second, scales = (operands[place] if len(operands) > place else None for place in (2, last, 3))
    if first is None or second is None or (quantized and (not numbers.get("block_size") or bits not in (4, 8))):
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
            shapes.append((2, operand.dims[1], *(-(-dim * few // hidden) for dim in operand.dims[2:])))
    dtypes = tuple("" if operand is None else operand.dtype for operand in operands[2:])
    return Product(operator, dtype, tuple(shapes), dtypes, tuple(sorted(attributes)))


_READERS: Final = {
    "MatMulNBits": _block_product,
    **dict.fromkeys(("MatMul", "FusedMatMul", "Gemm"), _float_product),
    **dict.fromkeys(_EXPERTS, _experts),
}


def _fewer(outputs: int, columns: int) -> int:
    return outputs if outputs <= columns + _ALIGNED else columns + outputs % _ALIGNED


def _checked(inputs: int) -> int:
    if not 0 < inputs <= _MOST_INPUTS:
        raise ValueError(f"it has a product with {inputs} inputs")
    return inputs


def _integer(attribute: bytes) -> tuple[str, int]:
    """The name and the integer of an AttributeProto; 0 if it has none."""
    name, number = "", 0
    for key, content in fields(attribute, 0, len(attribute)):
        if key == 1 and isinstance(content, range):
            name = attribute[content.start : content.stop].decode("utf-8", "replace")
        elif key == 3 and isinstance(content, int):
            number = content
    return name, number
