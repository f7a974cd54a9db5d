"""The numbers of rows that the products of a package round alike, measured on this processor.

On many processors, ONNX Runtime multiplies a single row, or the last of an odd number of rows, with kernels that add up
in another order than those for more rows. That depends on the processor, on the kind of the product (bits, blocks, zero
points, weights packed in advance) and on ONNX Runtime's version; docs/devices.md has a table. So when a package is
opened, a small product of each of its kinds is computed over several numbers of rows, in milliseconds.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import onnxruntime as ort

from qsample.contract.arrays import Array
from qsample.errors import PackageError
from qsample.ort.kernels import (
    EXPERTS,
    ONNX_TYPES,
    QUERY_SEQLENS,
    TOKENS,
    Attention,
    Product,
    integer_of,
    read_kernels,
)
from qsample.ort.options import most_shares, session_options
from qsample.ort.providers import CPU, open_session
from qsample.ort.small_graphs import CONTRIB_DOMAIN, model, node, tensor

_COUNTS: Final = (*range(1, 10), 13, 16, 37)
_ROWS: Final = 40
_COLUMNS: Final = (
    128  # outputs of a small product, for each thread: with fewer, MLAS cuts the inputs otherwise
)
_PERIOD: Final = 65537  # random numbers, of which larger tensors repeat them
_HASHED: Final = 16  # columns; the number of the rest depends on the number of threads
_SEVERAL: Final = ((3, 1, 5, 2, 1), (1, 8, 3))  # tokens that a small attention reads at once
_CONTRIB: Final = ("FusedMatMul", "MatMulNBits", *EXPERTS)


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
# The first that holds is taken. Each follows from the one before it.
_CANDIDATES: Final = (ANY_ROWS, RowCounts(2), RowCounts(2, 2))
_WORDS: Final = {
    ANY_ROWS: "every number of rows rounds alike",
    RowCounts(2): "one row rounds otherwise than several, so a step computes two",
    RowCounts(
        2, 2
    ): "the last of an odd number of rows rounds otherwise, so a step computes an even number",
}


class Rounding(NamedTuple):
    """How the products of a package round here.

    Attributes:
        products, adapters, experts: numbers of rows for products with the model's weights, with the matrices of LoRA
            adapters, and for the rows of each expert.
        attention: several tokens of a row round as one by one; of graphs whose attention gets the tokens of each row
            (`query_seqlens`), as in packages with guesses.
        unknown: in words, products for which no such numbers were found, or that could not be measured.
        digest: hexadecimal; another processor whose kernels round otherwise has another.
    """

    products: RowCounts = ANY_ROWS
    adapters: RowCounts = ANY_ROWS
    experts: RowCounts = ANY_ROWS
    attention: bool = True
    unknown: tuple[str, ...] = ()
    digest: str = ""

    @property
    def is_uniform(self) -> bool:
        """Whether products and experts round every number of rows alike, so that a graph need not pad its rows."""
        return self.products.any and self.experts.any

    def described(self) -> str:
        """In words, such as "products: one row rounds otherwise than several, so a step computes two"."""
        groups = {"products": self.products, "experts": self.experts, "adapters": self.adapters}
        parts = [
            f"{name}: {_WORDS[counts]}"
            for name, counts in groups.items()
            if name == "products" or not counts.any
        ]
        parts += (
            []
            if self.attention
            else ["attention: one token rounds otherwise than several, so nothing is guessed"]
        )
        return "; ".join([*parts, *self.unknown])


def measured(
    path: Path, threads: int | None = None, config: Mapping[str, str] | None = None
) -> Rounding:
    """How the products of the graph at `path` round here, on the CPU, in sessions with `session_options(config,
    threads)`. Raises PackageError if the file is no ONNX graph."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            kernels = read_kernels(data, _COLUMNS * most_shares(threads))
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise PackageError(
            f"{path} is not an ONNX file: {error}; export the package again"
        ) from error
    try:
        return _measured(kernels, threads, tuple(sorted((config or {}).items())))
    except Exception as error:  # ONNX Runtime's exceptions share no base but Exception
        # Of a form that no exporter here writes. An even number of rows suits every kernel that is known.
        even = _CANDIDATES[-1]
        return Rounding(
            even, even, even, unknown=(f"its products cannot be measured ({error!s:.200})",)
        )


@cache
def _measured(
    kernels: frozenset[Product | Attention],
    threads: int | None,
    config: tuple[tuple[str, str], ...],
) -> Rounding:
    ordered = sorted(one for one in kernels if isinstance(one, Product))
    graph, feeds = _small_graph(ordered)
    options = session_options(dict(config), intra_op_num_threads=threads)
    session = open_session(graph, options, (CPU,))

    def run(start: int, stop: int) -> list[Array]:
        fed = {
            name: array[start:stop] if len(array) == _ROWS else array
            for name, array in feeds.items()
        }
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
        chosen = next(
            (one for one in _CANDIDATES if {n for n in _COUNTS if one.cover(n) == n} <= counts),
            None,
        )
        if chosen is None:
            unknown.append(f"{product} rounds otherwise for every number of rows")
        else:
            found[_group(product)] &= chosen
    # Products that differ in the number of outputs alone have the same first columns.
    digest = hashlib.sha256(
        b"".join(sorted({array[:, :_HASHED].tobytes() for array in whole}))
    ).hexdigest()
    attention = all(_attends_alike(one, options) for one in kernels if isinstance(one, Attention))
    return Rounding(**found, attention=attention, unknown=tuple(unknown), digest=digest[:16])


def _group(product: Product) -> str:
    return "experts" if product.operator in EXPERTS else "adapters" if product.given else "products"


def _small_graph(products: Iterable[Product]) -> tuple[bytes, dict[str, Array]]:
    """A graph with an output for each product, and at the end one for each other kernel that rounds by the processor;
    and its inputs."""
    random = np.random.default_rng(0)
    nodes, constants, feeds, outputs = (
        list[bytes](),
        list[bytes](),
        dict[str, Array](),
        dict[str, int](),
    )

    levels = random.integers(0, 256, _PERIOD, np.uint8)
    normal = random.normal(0, 0.02, _PERIOD).astype(np.float32)

    def numbers(shape: tuple[int, ...], dtype: str, *, transposed: bool = False) -> Array:
        """transposed: the last axis counts the outputs, and the first outputs are the same for any number."""
        made = np.resize(
            levels if dtype == "uint8" else normal, shape[::-1] if transposed else shape
        )
        return np.ascontiguousarray(made.T if transposed else made).astype(dtype, copy=False)

    for index, product in enumerate(products):
        # The rows of products with the same number of inputs are the same.
        names = [f"rows_{product.inputs}_{product.dtype}"]
        if names[0] not in feeds:
            feeds[names[0]] = 50 * numbers((_ROWS, product.inputs), product.dtype)
        if product.operator in EXPERTS:
            names.append("choice")
            feeds["choice"] = np.eye(2, dtype=product.dtype)[[0] * _ROWS]
        for place, (shape, dtype) in enumerate(zip(product.shapes, product.dtypes, strict=True)):
            name = f"operand_{index}_{place}" if shape else ""
            if product.given:
                name = f"given_{len(shape)}"
                feeds[name] = numbers(shape, product.dtype)
            elif shape:
                stored, inputs_first = (
                    "float16" if product.cast else dtype,
                    shape[0] == product.inputs,
                )
                constants.append(
                    tensor(
                        name, numbers(shape, stored, transposed=inputs_first), ONNX_TYPES[stored]
                    )
                )
            if product.cast:
                nodes.append(node("Cast", [name], f"{name}_cast", to=ONNX_TYPES[product.dtype]))
                name = f"{name}_cast"
            names.append(name)
        domain = CONTRIB_DOMAIN if product.operator in _CONTRIB else b""
        nodes.append(
            node(
                product.operator, names, f"result_{index}", domain=domain, given=product.attributes
            )
        )
        outputs[f"result_{index}"] = ONNX_TYPES[product.dtype]
    feeds["logits"] = 100 * numbers((_ROWS, 500), "float32")
    nodes.append(node("Softmax", ["logits"], "weights"))
    outputs["weights"] = ONNX_TYPES["float32"]
    types = {name: ONNX_TYPES[str(array.dtype)] for name, array in feeds.items()}
    return model(nodes, types, outputs, constants), feeds


def _attends_alike(attention: Attention, options: ort.SessionOptions) -> bool:
    """Whether an attention computes the same bits for some tokens of a row at once as one by one."""
    random = np.random.default_rng(0)
    heads, size = attention.past[0], attention.past[1]
    query = dict(map(integer_of, attention.attributes))["num_heads"]
    widths = (query + 2 * heads,) if attention.packed else (query, heads, heads)
    rows = [random.normal(0, 1, (1, TOKENS, width * size)).astype(np.float32) for width in widths]
    names = [
        *("query", "key", "value")[: len(rows)],
        *[""] * (3 - len(rows)),
        "past_key",
        "past_value",
    ]
    names += ["seqlens_k", "total_sequence_length", *[""] * (QUERY_SEQLENS - 7), "query_seqlens"]
    constants = [tensor("total_sequence_length", np.array(TOKENS, np.int32), ONNX_TYPES["int32"])]
    for slot, shape, dtype in attention.constants:
        names[slot] = f"constant_{slot}"
        constants.append(
            tensor(names[slot], random.uniform(0.01, 1, shape).astype(dtype), ONNX_TYPES[dtype])
        )
    inputs = {
        **dict.fromkeys(names[: len(rows)], "float32"),
        **dict.fromkeys(names[3:5], attention.dtype),
    }
    inputs |= {"seqlens_k": "int32", "query_seqlens": "int32"}
    outputs = {"attended": "float32", "key_after": attention.dtype, "value_after": attention.dtype}
    attend = node(
        "GroupQueryAttention", names, *outputs, domain=CONTRIB_DOMAIN, given=attention.attributes
    )
    types = [
        {name: ONNX_TYPES[dtype] for name, dtype in values.items()} for values in (inputs, outputs)
    ]
    session = open_session(model([attend], types[0], types[1], constants), options, (CPU,))

    def run(steps: Iterable[int]) -> list[Array]:
        start, parts = 0, []
        caches = [np.zeros((1, heads, TOKENS, size), attention.dtype) for _ in range(2)]
        for count in steps:
            fed = dict(zip(names[3:5], caches, strict=True))
            fed |= {
                name: array[:, start : start + count]
                for name, array in zip(names, rows, strict=False)
            }
            fed |= {
                "seqlens_k": np.array([start + count - 1], np.int32),
                "query_seqlens": np.array([count], np.int32),
            }
            part, *caches = session.run(None, fed)
            parts.append(part)
            start += count
        return [np.concatenate(parts, axis=1), *caches]

    one_by_one = run([1] * TOKENS)
    return all(
        np.array_equal(*pair)
        for steps in _SEVERAL
        for pair in zip(run(steps), one_by_one, strict=True)
    )
