"""Measures which numbers of rows the products of a package round alike on this processor.

On many processors, ONNX Runtime multiplies a single row, or the last of an odd number of rows, with
kernels that add up in another order than the kernels for more rows. That depends on the processor,
on the kind of the product (bits, blocks, zero points, weights packed in advance) and on the version
of ONNX Runtime; docs/devices.md has a table. So when a package is opened, a small product of each
of its kinds is computed over several numbers of rows, which takes milliseconds.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import onnxruntime as ort

from qsample.contract.arrays import Array
from qsample.errors import PackageError
from qsample.ort.kernels import (
    ATTENTION_TOKENS,
    EXPERT_OPERATORS,
    ONNX_TYPES,
    QUERY_SEQLENS_SLOT,
    Attention,
    Kernel,
    Product,
    integers_of,
    read_kernels,
)
from qsample.ort.options import most_shares, session_options
from qsample.ort.providers import CPU, open_session
from qsample.ort.small_graphs import CONTRIB_DOMAIN, model, node, tensor

_MEASURED_ROW_COUNTS: Final = (*range(1, 10), 13, 16, 37)
_MAX_ROWS: Final = 40
# With fewer outputs of a small product for each thread, MLAS divides the inputs otherwise.
_OUTPUTS_PER_THREAD: Final = 128
# Larger tensors repeat this many random numbers.
_RANDOM_NUMBERS: Final = 65537
# The number of further columns depends on the number of threads.
_DIGEST_COLUMNS: Final = 16
# Numbers of tokens that a small attention reads at once.
_ATTENTION_STEPS: Final = ((3, 1, 5, 2, 1), (1, 8, 3))
_CONTRIB_OPERATORS: Final = ("FusedMatMul", "MatMulNBits", *EXPERT_OPERATORS)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Numbers of rows that round alike: the multiples of `multiple` that are at least `least`."""

    least: int = 1
    multiple: int = 1

    @property
    def any(self) -> bool:
        """Whether every number of rows is among them."""
        return self.least == self.multiple == 1

    def cover(self, rows: int) -> int:
        """The least of these numbers that is at least `rows`."""
        return -(-max(rows, self.least) // self.multiple) * self.multiple

    def __and__(self, other: RowCounts) -> RowCounts:
        return RowCounts(max(self.least, other.least), max(self.multiple, other.multiple))


ANY_ROWS: Final = RowCounts()
_SEVERAL_ROWS: Final = RowCounts(2)
_EVEN_ROWS: Final = RowCounts(2, 2)
# The first that holds is taken. Each is a part of the one before it.
_CANDIDATES: Final = (ANY_ROWS, _SEVERAL_ROWS, _EVEN_ROWS)
_DESCRIPTIONS: Final = {
    ANY_ROWS: "every number of rows rounds alike",
    _SEVERAL_ROWS: "one row rounds otherwise than several, so a step computes two",
    _EVEN_ROWS: "the last of an odd number of rows rounds otherwise, so a step computes an even number",
}


class Rounding(NamedTuple):
    """How the products of a package round here.

    Attributes:
        products: The numbers of rows that products with the model's weights round alike.
        adapters: The same of products with the matrices of LoRA adapters.
        experts: The same of the rows of each expert.
        attention: Whether several tokens of a row round as one by one, in graphs whose attention
            gets the tokens of each row (`query_seqlens`), as in packages with guesses.
        unknown: Descriptions of the products for which no such numbers were found, or that could
            not be measured.
        digest: A hexadecimal digest of the results; a processor whose kernels round otherwise has
            another.
    """

    products: RowCounts = ANY_ROWS
    adapters: RowCounts = ANY_ROWS
    experts: RowCounts = ANY_ROWS
    attention: bool = True
    unknown: tuple[str, ...] = ()
    digest: str = ""

    @property
    def is_uniform(self) -> bool:
        """Whether products and experts round every number of rows alike, so that a graph need not
        pad its rows."""
        return self.products.any and self.experts.any

    def described(self) -> str:
        """In words, such as "products: one row rounds otherwise than several, so a step computes
        two"."""
        parts = [f"products: {_DESCRIPTIONS[self.products]}"]
        if not self.experts.any:
            parts.append(f"experts: {_DESCRIPTIONS[self.experts]}")
        if not self.adapters.any:
            parts.append(f"adapters: {_DESCRIPTIONS[self.adapters]}")
        if not self.attention:
            parts.append(
                "attention: one token rounds otherwise than several, so nothing is guessed"
            )
        return "; ".join([*parts, *self.unknown])


def measured(
    path: Path, threads: int | None = None, config: Mapping[str, str] | None = None
) -> Rounding:
    """Measure how the products of a graph round here, on the CPU.

    Args:
        path: The file of the graph.
        threads: The number of threads of its session, as for `session_options`.
        config: The configuration of its session, as for `session_options`.

    Raises:
        PackageError: The file is not an ONNX graph.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            kernels = read_kernels(data, _OUTPUTS_PER_THREAD * most_shares(threads))
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise PackageError(
            f"{path} is not an ONNX file: {error}; export the package again"
        ) from error
    try:
        return _measured(kernels, threads, tuple(sorted((config or {}).items())))
    except Exception as error:  # ONNX Runtime's exceptions have no other common base.
        # Exporters of qsample write no such products. An even number of rows suits every known
        # kernel.
        unknown = f"its products cannot be measured ({error!s:.200})"
        return Rounding(_EVEN_ROWS, _EVEN_ROWS, _EVEN_ROWS, unknown=(unknown,))


@cache
def _measured(
    kernels: frozenset[Kernel], threads: int | None, config: tuple[tuple[str, str], ...]
) -> Rounding:
    options = session_options(dict(config), intra_op_num_threads=threads)
    products = sorted(kernel for kernel in kernels if isinstance(kernel, Product))
    attentions = [kernel for kernel in kernels if isinstance(kernel, Attention)]
    outputs = _Outputs.of(products, options)
    products_counts = adapters_counts = experts_counts = ANY_ROWS
    unknown = list[str]()
    for product, alike in zip(products, outputs.alike, strict=True):
        counts = _row_counts(alike)
        if counts is None:
            unknown.append(f"{product} rounds otherwise for every number of rows")
        elif product.operator in EXPERT_OPERATORS:
            experts_counts &= counts
        elif product.given:
            adapters_counts &= counts
        else:
            products_counts &= counts
    return Rounding(
        products_counts,
        adapters_counts,
        experts_counts,
        attention=all(_attends_alike(attention, options) for attention in attentions),
        unknown=tuple(unknown),
        digest=outputs.digest,
    )


def _row_counts(alike: set[int]) -> RowCounts | None:
    """The first candidate whose measured numbers are all among `alike`."""
    for candidate in _CANDIDATES:
        counts = {count for count in _MEASURED_ROW_COUNTS if candidate.cover(count) == count}
        if counts <= alike:
            return candidate
    return None


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The results of small products over several numbers of rows.

    Attributes:
        alike: For each product, the numbers of rows that give each row what it gets among all rows.
        digest: A digest of the results over all rows.
    """

    alike: list[set[int]]
    digest: str

    @classmethod
    def of(cls, products: Sequence[Product], options: ort.SessionOptions) -> _Outputs:
        """Compute the products."""
        graph = _SmallGraph()
        for index, product in enumerate(products):
            graph.add(index, product)
        graph.add_softmax()
        session = open_session(graph.to_model(), options, (CPU,))
        whole = _run(session, graph.feeds, slice(0, _MAX_ROWS))
        alike = [set(_MEASURED_ROW_COUNTS) for _ in products]
        for count in _MEASURED_ROW_COUNTS:
            for start in (0, 1):
                rows = slice(start, start + count)
                results = _run(session, graph.feeds, rows)
                for index in range(len(products)):
                    if not np.array_equal(results[index], whole[index][rows]):
                        alike[index].discard(count)
        # Products that differ only in the number of outputs have the same first columns.
        columns = {array[:, :_DIGEST_COLUMNS].tobytes() for array in whole}
        return cls(alike, hashlib.sha256(b"".join(sorted(columns))).hexdigest()[:16])


def _run(session: ort.InferenceSession, feeds: Mapping[str, Array], rows: slice) -> list[Array]:
    """Run a small graph over some rows. Feeds of another length are the matrices of adapters."""
    inputs = {
        name: array[rows] if len(array) == _MAX_ROWS else array for name, array in feeds.items()
    }
    results: list[Array] = session.run(None, inputs)
    return results


class _SmallGraph:
    """A graph with small products of random numbers, and its `feeds`."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.feeds: dict[str, Array] = {}
        self._levels = random.integers(0, 256, _RANDOM_NUMBERS, np.uint8)
        self._normal = random.normal(0, 0.02, _RANDOM_NUMBERS).astype(np.float32)
        self._nodes: list[bytes] = []
        self._constants: list[bytes] = []
        self._outputs: dict[str, int] = {}

    def add(self, index: int, product: Product) -> None:
        """Add a product; index: its number."""
        names = self._activations(product)
        for place, (shape, dtype) in enumerate(zip(product.shapes, product.dtypes, strict=True)):
            if not shape:
                names.append("")
            elif product.given:
                names.append(self._cast(self._fed_matrix(shape, product.dtype), product))
            else:
                name = f"operand_{index}_{place}"
                self._add_constant(name, shape, dtype, product)
                names.append(self._cast(name, product))
        output = f"result_{index}"
        domain = CONTRIB_DOMAIN if product.operator in _CONTRIB_OPERATORS else b""
        self._nodes.append(
            node(product.operator, names, output, domain=domain, given=product.attributes)
        )
        self._outputs[output] = ONNX_TYPES[product.dtype]

    def add_softmax(self) -> None:
        """Add the other operator whose result depends on the processor."""
        self.feeds["logits"] = 100 * self._numbers((_MAX_ROWS, 500), "float32")
        self._nodes.append(node("Softmax", ["logits"], "weights"))
        self._outputs["weights"] = ONNX_TYPES["float32"]

    def to_model(self) -> bytes:
        """The graph as a ModelProto."""
        types = {name: ONNX_TYPES[str(array.dtype)] for name, array in self.feeds.items()}
        return model(self._nodes, types, self._outputs, self._constants)

    def _activations(self, product: Product) -> list[str]:
        """The names of the rows, and for experts the name of the choice. Products with equal inputs
        share them."""
        rows = f"rows_{product.inputs}_{product.dtype}"
        if rows not in self.feeds:
            self.feeds[rows] = 50 * self._numbers((_MAX_ROWS, product.inputs), product.dtype)
        if product.operator not in EXPERT_OPERATORS:
            return [rows]
        # All rows choose the first of two experts.
        self.feeds["choice"] = np.eye(2, dtype=product.dtype)[[0] * _MAX_ROWS]
        return [rows, "choice"]

    def _fed_matrix(self, shape: tuple[int, ...], dtype: str) -> str:
        name = f"given_{len(shape)}"
        self.feeds[name] = self._numbers(shape, dtype)
        return name

    def _add_constant(
        self, name: str, shape: tuple[int, ...], dtype: str, product: Product
    ) -> None:
        stored = "float16" if product.cast else dtype
        numbers = self._numbers(shape, stored, transposed=shape[0] == product.inputs)
        self._constants.append(tensor(name, numbers, ONNX_TYPES[stored]))

    def _cast(self, name: str, product: Product) -> str:
        """Cast an operand as the product's own graph does; returns the name of the result."""
        if not product.cast:
            return name
        result = f"{name}_cast"
        self._nodes.append(node("Cast", [name], result, to=ONNX_TYPES[product.dtype]))
        return result

    def _numbers(self, shape: tuple[int, ...], dtype: str, *, transposed: bool = False) -> Array:
        """Random numbers. transposed: The last axis counts the outputs, and the first outputs are
        the same for any number of outputs."""
        source = self._levels if dtype == "uint8" else self._normal
        if transposed:
            numbers = np.resize(source, shape[::-1]).T
        else:
            numbers = np.resize(source, shape)
        return np.ascontiguousarray(numbers).astype(dtype, copy=False)


class _SmallAttention:
    """An attention of random numbers to the tokens of one row."""

    def __init__(self, attention: Attention, options: ort.SessionOptions) -> None:
        random = np.random.default_rng(0)
        query_heads = integers_of(attention.attributes)["num_heads"]
        heads = attention.heads
        widths = (query_heads + 2 * heads,) if attention.packed else (query_heads, heads, heads)
        rows = ("query", "key", "value")[: len(widths)]
        self._rows = {
            name: random.normal(0, 1, (1, ATTENTION_TOKENS, width * attention.head_size)).astype(
                np.float32
            )
            for name, width in zip(rows, widths, strict=True)
        }
        self._cache_shape = (1, heads, ATTENTION_TOKENS, attention.head_size)
        self._cache_dtype = attention.dtype
        slots = [""] * (QUERY_SEQLENS_SLOT + 1)
        slots[: len(rows)] = rows
        slots[3:7] = "past_key", "past_value", "seqlens_k", "total_sequence_length"
        slots[QUERY_SEQLENS_SLOT] = "query_seqlens"
        total = np.array(ATTENTION_TOKENS, np.int32)
        constants = [tensor("total_sequence_length", total, ONNX_TYPES["int32"])]
        for constant in attention.constants:
            name = f"constant_{constant.slot}"
            numbers = random.uniform(0.01, 1, constant.shape).astype(constant.dtype)
            constants.append(tensor(name, numbers, ONNX_TYPES[constant.dtype]))
            slots[constant.slot] = name
        cache = ONNX_TYPES[attention.dtype]
        inputs = {
            **dict.fromkeys(rows, ONNX_TYPES["float32"]),
            **dict.fromkeys(("past_key", "past_value"), cache),
            **dict.fromkeys(("seqlens_k", "query_seqlens"), ONNX_TYPES["int32"]),
        }
        outputs = {
            "attended": ONNX_TYPES["float32"],
            **dict.fromkeys(("key_after", "value_after"), cache),
        }
        attend = node(
            "GroupQueryAttention",
            slots,
            *outputs,
            domain=CONTRIB_DOMAIN,
            given=attention.attributes,
        )
        self._session = open_session(model([attend], inputs, outputs, constants), options, (CPU,))

    def run(self, steps: Iterable[int]) -> list[Array]:
        """Read the tokens in steps; returns the attended tokens and the cache. steps: The numbers
        of tokens."""
        start = 0
        attended = list[Array]()
        key = np.zeros(self._cache_shape, self._cache_dtype)
        value = np.zeros(self._cache_shape, self._cache_dtype)
        for count in steps:
            end = start + count
            feeds = {name: array[:, start:end] for name, array in self._rows.items()}
            feeds["past_key"] = key
            feeds["past_value"] = value
            feeds["seqlens_k"] = np.array([end - 1], np.int32)
            feeds["query_seqlens"] = np.array([count], np.int32)
            part, key, value = self._session.run(None, feeds)
            attended.append(part)
            start = end
        return [np.concatenate(attended, axis=1), key, value]


def _attends_alike(attention: Attention, options: ort.SessionOptions) -> bool:
    """Whether an attention computes the same bits for some tokens of a row at once as one by
    one."""
    small = _SmallAttention(attention, options)
    one_by_one = small.run([1] * ATTENTION_TOKENS)
    for steps in _ATTENTION_STEPS:
        at_once = small.run(steps)
        if not all(map(np.array_equal, at_once, one_by_one)):
            return False
    return True
