"""GPTQ (Frantar et al., 2022, https://arxiv.org/abs/2210.17323): weights whose levels are fitted to a text.

The graph is run in parts, each up to the input of the next matrix. Later parts use the quantized weights of earlier
matrices, so each matrix is fitted to the inputs that it will really get. One matrix, its inputs' second moments and the
values that parts hand on are in memory, or, of long texts, in a scratch folder, as are the levels.

The columns of a matrix are rounded one after another, those with the largest inputs first (act-order). As far as the
inputs are correlated, the columns that are left make up for the error of each. The scales and zero points of all blocks
are chosen before, for the weights as they were: so a block is what it is in the layout of MatMulNBits, columns that lie
side by side. They give the least squared error if each weight counts by its input's mean square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, repeat
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.compiler.quantize.methods import Levels, WeightQuantization
from qsample.compiler.quantize.rounding import choose_grid, round_to_nearest
from qsample.contract.arrays import Array, sparse_zeros
from qsample.contract.tensors import (
    BATCH,
    IMAGE_ROWS,
    INPUT_IDS,
    INPUT_LENGTHS,
    LOGITS,
    SEQUENCE,
    retained_name,
)
from qsample.disk.space import check_free
from qsample.graph.edit import ancestors, reads
from qsample.graph.evaluate import GraphPart, sizes
from qsample.graph.join import return_all_logits
from qsample.graph.operators import pack_bits
from qsample.graph.pieces import read, readable
from qsample.graph.save import processors

_DAMPING: Final = 0.01  # of the mean of the diagonal, as in the paper
_TOGETHER: Final = 128  # columns that the corrections of the earlier ones reach in one product
_LAZY: Final = 32  # columns whose corrections of the later ones are put off, and made together
_OUTPUTS: Final = 1024  # columns [K] of a matrix that a thread rounds at a time: they stay in the processor's cache
_AT_ONCE: Final = 1 << 24  # weights that are rounded together
_TOKENS: Final = 2048  # of a call
_IN_MEMORY: Final = 1 << 30  # bytes of values that parts hand on; more go to files
_FED_FROM: Final = (
    1 << 20
)  # bytes; larger constants are handed to a part when it runs, not copied into it


class Moments(NamedTuple):
    """What a fit knows of the inputs of a matrix [K, N].

    Attributes:
        importance: [K] float32, the damped sum of each input's squares.
        order: [K] int64, the columns by ascending importance.
        lower: [K, K] float32, the lower Cholesky factor of the damped moments in that order.
    """

    importance: Array
    order: Array
    lower: Array


def decomposed(moments: Array) -> Moments:
    """The decomposition of the moments [K, K] float32, the sum of x xᵀ over inputs x; they are changed."""
    diagonal = np.einsum("ii->i", moments)
    damping = _DAMPING * float(diagonal.mean(dtype=np.float64)) or 1.0
    diagonal[diagonal == 0] = damping  # an input that was always 0 correlates with none
    diagonal += damping
    order = np.argsort(diagonal, kind="stable")
    sorted_moments = moments[np.ix_(order, order)]
    try:
        lower = np.linalg.cholesky(sorted_moments)
    except np.linalg.LinAlgError:  # float32 has too few digits
        lower = np.linalg.cholesky(sorted_moments.astype(np.float64)).astype(np.float32)
    return Moments(diagonal.copy(), order, lower)


def gptq(weight: Array, moments: Moments, quantization: WeightQuantization) -> tuple[Levels, Array]:
    """Levels of a matrix [K, N], as of `methods.quantize_matrix`, and the weights, [K, N] float32, that they stand for.
    K need not be a multiple of the block size: the last block is filled up.

    If the quantized weights of column k and later ones are less than the weights by e, the best for column k - 1 is its
    weight + (L[k:, k - 1]ᵀ e) / L[k - 1, k - 1]: LDLQ (Chee et al., 2023, https://arxiv.org/abs/2307.13304), which they
    prove to be GPTQ, with a single decomposition and without an inverse.
    """
    size, bits = quantization.block_size, quantization.bits
    inputs, outputs = weight.shape
    _, order, lower = moments
    parts = [slice(first, first + _OUTPUTS) for first in range(0, outputs, _OUTPUTS)]
    with ThreadPoolExecutor(processors()) as pool:
        grids = pool.map(
            _grid,
            [weight[:, part] for part in parts],
            repeat(moments.importance),
            repeat(quantization),
        )
        scales, zeros = (np.concatenate(found) for found in zip(*grids, strict=True))  # [N, blocks]
        block_of = order // size
        steps = np.ascontiguousarray(scales.T[block_of], np.float32)
        middles = np.ascontiguousarray(zeros.T[block_of], np.float32)
        weights = weight[order].astype(np.float32)
        errors, levels = (
            np.empty((inputs, outputs), np.float32),
            np.empty((inputs, outputs), np.uint8),
        )
        for first in reversed(range(0, inputs, _TOGETHER)):
            last = min(first + _TOGETHER, inputs)
            factor = lower[:, first:last] / np.diagonal(lower)[first:last]
            now = weights[first:last] + factor[last:].T @ errors[last:]
            for start in reversed(range(first, last, _LAZY)):
                stop = min(start + _LAZY, last)
                columns, own = slice(start, stop), slice(start - first, stop - first)
                jobs = [
                    (
                        weights[columns, part],
                        now[own, part],
                        steps[columns, part],
                        middles[columns, part],
                        levels[columns, part],
                        errors[columns, part],
                    )
                    for part in parts
                ]
                list(
                    pool.map(
                        _round, repeat(factor[columns, own]), repeat(bits), *zip(*jobs, strict=True)
                    )
                )
                now[: start - first] += factor[columns, : start - first].T @ errors[columns]
    fitted, ordered = np.empty_like(weights), np.empty_like(levels)
    fitted[order] = weights - errors
    ordered[order] = levels
    rows = np.pad(ordered, ((0, -inputs % size), (0, 0)), constant_values=2 ** (bits - 1)).T
    packed = pack_bits(rows.reshape(-1, size), bits).reshape(outputs, scales.shape[1], -1)
    return Levels(
        packed, scales.reshape(-1), zeros.reshape(-1) if quantization.zero_points else None
    ), fitted


def _grid(
    weight: Array, importance: Array, quantization: WeightQuantization
) -> tuple[Array, Array]:
    """Scales, in the dtype of the weights, and zero points, uint8, of a matrix [K, N]: [N, K / block size] each."""
    size, bits = quantization.block_size, quantization.bits
    inputs, outputs = weight.shape
    rows = np.pad(weight, ((0, -inputs % size), (0, 0))).T
    if quantization.zero_points:
        counts = np.broadcast_to(np.pad(importance, (0, -inputs % size)), rows.shape)
        scales, zeros = choose_grid(rows, bits, size, counts)
    else:
        _, scales = round_to_nearest(rows, bits, size)
        zeros = np.full(scales.shape, 2 ** (bits - 1), np.uint8)
    return scales.reshape(outputs, -1), zeros.reshape(outputs, -1)


def _round(
    factor: Array,
    bits: int,
    weights: Array,
    now: Array,
    steps: Array,
    middles: Array,
    levels: Array,
    errors: Array,
) -> None:
    """Round some columns, rows of arrays [k, n]: `weights` as they were, and `now`. Writes levels and errors."""
    top = 2**bits - 1
    inverse = np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps != 0)
    for column in reversed(range(len(now))):
        rounded = np.rint(now[column] * inverse[column])
        rounded += middles[column]
        np.clip(rounded, 0, top, out=rounded)
        levels[column] = rounded
        rounded -= middles[column]
        np.subtract(weights[column], rounded * steps[column], out=errors[column])
        now[:column] += factor[column, :column, None] * errors[column]


class Wanted(NamedTuple):
    """A matrix to quantize. value: the constant. node: the product. transposed: it is [N, K], not [K, N]."""

    value: ir.Value
    node: ir.Node
    transposed: bool
    way: WeightQuantization


@dataclass(frozen=True, slots=True)
class Calibration:
    """The inputs that a graph is run on. sequences: token ids, [n] int64 each. axes: the sizes of the graph's other
    named axes. caches: the names of states that are empty at the start, whatever they hold. folder: a scratch folder
    that outlives the levels. progress: called with the fraction done."""

    sequences: Sequence[Array]
    axes: Mapping[str, int]
    caches: Collection[str]
    folder: Path
    progress: Callable[[float], None] = lambda fraction: None


def calibrated_levels(
    model: ir.Model, matrices: Sequence[Wanted], calibration: Calibration
) -> dict[ir.Value, Levels]:
    """The levels of each of `matrices`, all in `model`'s own graph, mapped from files; of those that multiply every
    token. `model` stays as it is. Raises PackageError, before the work, if the scratch folder's disk has no room for
    them and the package after them."""
    needed = _disk_bytes(matrices, sum(map(len, calibration.sequences)))
    check_free(calibration.folder, needed, "fitting the weights to the text")
    walk = _Walk(model, matrices, calibration)
    found: dict[ir.Value, Levels] = {}
    done, whole = 0, sum(math.prod(_shape(wanted)) for wanted in matrices)
    for source, products in walk.groups():
        moments = walk.moments(source)
        known = None if moments is None else decomposed(moments)
        for node, wanted in products.items():
            if known is not None:
                found[wanted.value] = walk.fit(node, wanted, known)
            done += math.prod(_shape(wanted))
            calibration.progress(done / whole)
    return found


class _Walk:
    """A copy of a graph that is run part by part, on calls of several sequences each."""

    def __init__(
        self, model: ir.Model, matrices: Sequence[Wanted], calibration: Calibration
    ) -> None:
        self._model, self._calibration = model.clone(), calibration
        graph = self._model.graph
        copies = dict(zip(model.graph, graph, strict=True))
        self._of_node = {copies[wanted.node]: wanted for wanted in matrices}
        states = {str(value.name): value for value in graph.outputs}
        self._caches = {name: states[retained_name(name)] for name in calibration.caches}
        logits = [value for node in graph for value in node.outputs if value.name == LOGITS.name]
        if logits:
            graph.outputs[:] = logits
            return_all_logits(self._model)  # the head, too, gets the inputs of all tokens
        needed = ancestors([node.inputs[0] for node in self._of_node])
        self._nodes = [node for node in graph if node in needed or node in self._of_node]
        self._position = 0
        batch = next(
            (
                value.shape[0]
                for value in graph.inputs
                if value.name == INPUT_IDS.name and value.shape
            ),
            None,
        )
        self._calls = list(_calls(calibration.sequences, batch if isinstance(batch, int) else None))
        self._held: dict[ir.Value, list[Array]] = {}  # values that later parts read, for each call
        self._fitted: dict[ir.Value, Array] = {}  # weights that later parts read
        self._buffers: dict[tuple[int, tuple[int, ...], np.dtype[np.generic]], Array] = {}
        self._in_memory = 0  # bytes of `_held`
        self._names = count()

    def groups(self) -> Iterator[tuple[ir.Value, dict[ir.Node, Wanted]]]:
        """Values that matrices multiply, in the graph's order, each with its products. They are computed with the
        weights that were fitted by then."""
        by_source: dict[ir.Value, dict[ir.Node, Wanted]] = {}
        for node in self._nodes:
            if node in self._of_node and node.inputs[0] is not None:
                by_source.setdefault(node.inputs[0], {})[node] = self._of_node[node]
        for source, products in by_source.items():
            start = self._position
            while self._nodes[self._position] not in products:
                self._position += 1
            self._run(self._nodes[start : self._position], source)
            yield source, products

    def moments(self, value: ir.Value) -> Array | None:
        """The sum [K, K] float32 of x xᵀ over the values x of all tokens; None if some tokens have none."""
        moments: Array | None = None
        for (ids, lengths), held in zip(self._calls, self._held[value], strict=True):
            real = (np.arange(ids.shape[1]) < lengths[:, None]).reshape(-1)
            rows = np.asarray(held, np.float32).reshape(-1, held.shape[-1])
            if len(rows) != len(real):
                return None
            rows = rows if real.all() else rows[real]
            moments = (
                rows.T @ rows if moments is None else np.add(moments, rows.T @ rows, out=moments)
            )
        return moments

    def fit(self, node: ir.Node, wanted: Wanted, moments: Moments) -> Levels:
        """The levels of a matrix, mapped from files. Later parts multiply by the weights that they stand for."""
        tensor = wanted.value.const_value
        assert tensor is not None
        source, (_, outputs), at_once = (
            readable(tensor),
            _shape(wanted),
            max(1, _AT_ONCE // len(moments.order)),
        )
        copy = node.inputs[wanted.node.inputs.index(wanted.value)]
        fitted = None
        if copy is not None and node is not self._nodes[-1]:
            fitted = np.empty(tensor.shape.numpy(), tensor.dtype.numpy())
            self._fitted[copy] = fitted
        levels: list[Levels] = []
        for first in range(0, outputs, at_once):
            part = slice(first, first + at_once)
            weight = read(source, part).T if wanted.transposed else read(source, slice(None), part)
            found, rounded = gptq(weight, moments, wanted.way)
            levels.append(found)
            if fitted is not None:
                (fitted.T if wanted.transposed else fitted)[:, part] = rounded
        blocks, scales = (
            self._stored(np.concatenate([getattr(part, name) for part in levels]))
            for name in ("blocks", "scales")
        )
        zeros = [part.zeros for part in levels if part.zeros is not None]
        return Levels(blocks, scales, np.concatenate(zeros) if zeros else None)

    def _stored(self, array: Array) -> Array:
        path = self._calibration.folder / f"{next(self._names)}.npy"
        np.save(path, array)
        mapped: Array = np.load(path, mmap_mode="r")
        return mapped

    def _run(self, nodes: Sequence[ir.Node], value: ir.Value) -> None:
        """Compute the outputs of `nodes` that later nodes read, and `value`; drop values that no later node reads."""
        later = {source for node in self._nodes[self._position :] for source in reads(node)} | {
            value
        }
        made = {output for node in nodes for output in node.outputs}
        wanted = [output for node in nodes for output in node.outputs if output in later]
        given: dict[ir.Value, None] = {}
        fed: dict[ir.Value, Array] = {}
        for constant in dict.fromkeys(value for node in nodes for value in reads(node)):
            if constant in self._fitted:
                fed[constant] = self._fitted[constant]
            elif constant.const_value is not None and constant.is_initializer():
                if constant.const_value.nbytes >= _FED_FROM:
                    fed[constant] = constant.const_value.numpy()
            elif constant in self._held and constant not in made:
                given[constant] = None
        if wanted:
            caches = {
                name: value
                for name, value in self._caches.items()
                if value in made and value not in later
            }
            part = GraphPart(self._model, [*wanted, *caches.values()], [*given, *fed])
            constants = {str(constant.name): array for constant, array in fed.items()}
            for index, (ids, lengths) in enumerate(self._calls):
                feeds = constants | {
                    str(source.name): self._held[source][index] for source in given
                }
                axes = {**self._calibration.axes, BATCH: len(ids), SEQUENCE: ids.shape[1]}
                feeds |= {INPUT_IDS.name: ids, INPUT_LENGTHS.name: lengths}
                feeds[IMAGE_ROWS.name] = np.full(ids.shape, IMAGE_ROWS.off, np.int32)
                in_place = {}
                for number, (name, cache) in enumerate(caches.items()):
                    if name in part.inputs:
                        feeds[name] = in_place[str(cache.name)] = self._buffer(
                            number, part.inputs[name], axes
                        )
                for output, array in zip(wanted, part(feeds, axes, in_place), strict=False):
                    self._held.setdefault(output, []).append(self._kept(array))
        for unread in [held for held in self._held if held not in later]:
            for array in self._held.pop(unread):
                if isinstance(array, np.memmap):
                    Path(str(array.filename)).unlink()
                else:
                    self._in_memory -= array.nbytes
        self._fitted = {
            constant: array for constant, array in self._fitted.items() if constant in later
        }

    def _kept(self, array: Array) -> Array:
        """`array`, in a file if those in memory are many."""
        if self._in_memory + array.nbytes > _IN_MEMORY:
            return self._stored(array)
        self._in_memory += array.nbytes
        return array

    def _buffer(self, number: int, cache: ir.Value, axes: Mapping[str, int]) -> Array:
        """Memory for the cache `number` of a part: all calls write there, and read what they wrote."""
        assert cache.dtype is not None
        key = number, tuple(sizes(cache, axes)), cache.dtype.numpy()
        if key not in self._buffers:
            self._buffers[key] = sparse_zeros(*key[1:])
        return self._buffers[key]


def _calls(sequences: Sequence[Array], rows: int | None) -> Iterator[tuple[Array, Array]]:
    """Ids [B, S] and lengths [B] of calls that read all sequences; B is `rows` if that is given."""
    waiting = sorted(sequences, key=len, reverse=True)
    while waiting:
        longest = len(waiting[0])
        now, waiting = (
            waiting[: rows or max(1, _TOKENS // longest)],
            waiting[rows or max(1, _TOKENS // longest) :],
        )
        ids = np.zeros((len(now), longest), np.int64)
        for row, sequence in zip(ids, now, strict=True):
            row[: len(sequence)] = sequence
        yield ids, np.array(list(map(len, now)), np.int32)


def _shape(wanted: Wanted) -> tuple[int, int]:
    """K and N."""
    assert wanted.value.const_value is not None
    first, second = (int(size) for size in wanted.value.const_value.shape.numpy())
    return (second, first) if wanted.transposed else (first, second)


def _disk_bytes(matrices: Sequence[Wanted], tokens: int) -> int:
    """The bytes on the disk at once, about: all levels, plus the values that two parts hand on for each token, a
    residual and the input of a matrix, as far as they are not in memory; and later, in place of these, the package and
    its source."""
    levels = 0
    for wanted in matrices:
        (inputs, outputs), way = _shape(wanted), wanted.way
        block_bytes = way.block_size * way.bits // 8 + 4  # and a scale in float32
        levels += -(-inputs // way.block_size) * outputs * block_bytes
    widths = [_shape(wanted)[0] for wanted in matrices] or [0]
    handed_on = 4 * tokens * (max(widths) + min(widths)) - _IN_MEMORY
    return levels + 2 * max(levels, handed_on)
