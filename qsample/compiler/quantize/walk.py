"""A graph and a text enter, the levels of the graph's matrices leave, fitted to the inputs that the text gives them.

The graph is run in parts, each up to the input of the next matrix. Later parts use the quantized weights of earlier
matrices, so each matrix is fitted to the inputs that it will really get. One matrix, its inputs' second moments and the
values that parts hand on are in memory; long texts leave these values in a scratch folder, where the levels are, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.compiler.quantize.gptq import Moments, decomposed, gptq
from qsample.compiler.quantize.methods import Levels, WeightQuantization
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
from qsample.graph.edit import ancestors, reads
from qsample.graph.evaluate import GraphPart, sizes
from qsample.graph.join import return_all_logits
from qsample.graph.pieces import read, readable
from qsample.package.disk.space import check_free

_WEIGHTS_PER_FIT: Final = 1 << 24
"""The weights that are rounded together."""
_TOKENS_PER_CALL: Final = 2048
_MAX_BYTES_IN_MEMORY: Final = 1 << 30
"""The bytes of the values that parts hand on in memory; the rest goes to files."""
_MIN_BYTES_OF_FEED: Final = 1 << 20
"""The bytes from which on a constant is handed to a part when it runs, rather than copied into it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A matrix to quantize.

    Attributes:
        value: the constant.
        node: the product that reads it.
        transposed: whether the constant is [N, K] rather than [K, N].
        way: how the matrix is quantized.
    """

    value: ir.Value
    node: ir.Node
    transposed: bool
    way: WeightQuantization

    @property
    def shape(self) -> tuple[int, int]:
        """K and N, the inputs and outputs of the matrix."""
        assert self.value.const_value is not None
        first, second = (int(size) for size in self.value.const_value.shape.numpy())
        return (second, first) if self.transposed else (first, second)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The inputs that a graph is run on.

    Attributes:
        sequences: the token ids of each sequence, [n] int64.
        axes: the sizes of the graph's other named axes.
        caches: the names of states that are empty at the start, whatever they hold.
        folder: a scratch folder that outlives the levels.
        progress: a function that is called with the fraction done.
    """

    sequences: Sequence[Array]
    axes: Mapping[str, int]
    caches: Collection[str]
    folder: Path
    progress: Callable[[float], None] = lambda fraction: None


def calibrated_levels(
    model: ir.Model, matrices: Sequence[Wanted], calibration: Calibration
) -> dict[ir.Value, Levels]:
    """The levels of each of `matrices` that multiplies every token, mapped from files.

    Args:
        model: the graph, which stays as it is.
        matrices: the matrices to quantize, all in the graph itself and none in a graph inside it.
        calibration: the inputs.

    Raises:
        PackageError: before the work, if the scratch folder's disk has no room for the levels and the package after
            them.
    """
    needed = _disk_bytes(matrices, sum(map(len, calibration.sequences)))
    check_free(calibration.folder, needed, "fitting the weights to the text")
    walk = _Walk(model, matrices, calibration)
    found: dict[ir.Value, Levels] = {}
    weights_done = 0
    weights = sum(math.prod(wanted.shape) for wanted in matrices)
    for source, products in walk.groups():
        moments = walk.moments(source)
        known = None if moments is None else decomposed(moments)
        for node, wanted in products.items():
            if known is not None:
                found[wanted.value] = walk.fit(node, wanted, known)
            weights_done += math.prod(wanted.shape)
            calibration.progress(weights_done / weights)
    return found


class _Call(NamedTuple):
    """A call of the graph. ids: [B, S] int64. lengths: [B] int32, the tokens of each row."""

    ids: Array
    lengths: Array

    @property
    def is_token(self) -> Array:
        """[B · S] bool, false where a row is padded."""
        columns = np.arange(self.ids.shape[1])
        return (columns < self.lengths[:, None]).reshape(-1)


class _Arrays:
    """The arrays of a walk: in memory as long as there is room, otherwise in files of the scratch folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_numbers = count()
        self._bytes_in_memory = 0

    def stored(self, array: Array) -> Array:
        """The array, mapped from a new file."""
        path = self._folder / f"{next(self._file_numbers)}.npy"
        np.save(path, array)
        mapped: Array = np.load(path, mmap_mode="r")
        return mapped

    def held(self, array: Array) -> Array:
        """The array, in a file if there is no room in memory."""
        if self._bytes_in_memory + array.nbytes > _MAX_BYTES_IN_MEMORY:
            return self.stored(array)
        self._bytes_in_memory += array.nbytes
        return array

    def drop(self, array: Array) -> None:
        """Give back the room of an array that `held` returned."""
        if isinstance(array, np.memmap):
            Path(str(array.filename)).unlink()
        else:
            self._bytes_in_memory -= array.nbytes


class _Walk:
    """A copy of a graph that is run part by part, on calls of several sequences each."""

    def __init__(
        self, model: ir.Model, matrices: Sequence[Wanted], calibration: Calibration
    ) -> None:
        self._model = model.clone()
        self._calibration = calibration
        self._arrays = _Arrays(calibration.folder)
        graph = self._model.graph
        copies = dict(zip(model.graph, graph, strict=True))
        self._of_node = {copies[wanted.node]: wanted for wanted in matrices}
        states = {str(value.name): value for value in graph.outputs}
        self._caches = {name: states[retained_name(name)] for name in calibration.caches}
        logits = [value for node in graph for value in node.outputs if value.name == LOGITS.name]
        if logits:
            graph.outputs[:] = logits
            return_all_logits(self._model)  # The head, too, gets the inputs of all tokens.
        needed = ancestors([node.inputs[0] for node in self._of_node])
        self._nodes = [node for node in graph if node in needed or node in self._of_node]
        self._position = 0
        self._calls = list(_calls(calibration.sequences, _fixed_rows(graph)))
        self._held: dict[ir.Value, list[Array]] = {}
        """The values that later parts read, an array for each call."""
        self._fitted: dict[ir.Value, Array] = {}
        """The weights that later parts read in place of the constants."""
        self._buffers: dict[tuple[int, tuple[int, ...], np.dtype[np.generic]], Array] = {}

    def groups(self) -> Iterator[tuple[ir.Value, dict[ir.Node, Wanted]]]:
        """The values that matrices multiply, in the graph's order, each with its products. They are computed with the
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
        for call, held in zip(self._calls, self._held[value], strict=True):
            rows = np.asarray(held, np.float32).reshape(-1, held.shape[-1])
            is_token = call.is_token
            if len(rows) != len(is_token):
                return None
            if not is_token.all():
                rows = rows[is_token]
            product = rows.T @ rows
            moments = product if moments is None else np.add(moments, product, out=moments)
        return moments

    def fit(self, node: ir.Node, wanted: Wanted, moments: Moments) -> Levels:
        """The levels of a matrix, mapped from files. Later parts multiply by the weights that they stand for."""
        tensor = wanted.value.const_value
        assert tensor is not None
        source = readable(tensor)
        inputs, outputs = wanted.shape
        outputs_per_fit = max(1, _WEIGHTS_PER_FIT // inputs)
        copy = node.inputs[wanted.node.inputs.index(wanted.value)]
        fitted = None
        if copy is not None and node is not self._nodes[-1]:
            fitted = np.empty(tensor.shape.numpy(), tensor.dtype.numpy())
            self._fitted[copy] = fitted
        levels: list[Levels] = []
        for first in range(0, outputs, outputs_per_fit):
            part = slice(first, first + outputs_per_fit)
            weight = read(source, part).T if wanted.transposed else read(source, slice(None), part)
            found, rounded = gptq(weight, moments, wanted.way)
            levels.append(found)
            if fitted is not None:
                columns = fitted.T if wanted.transposed else fitted
                columns[:, part] = rounded
        blocks = self._arrays.stored(np.concatenate([part.blocks for part in levels]))
        scales = self._arrays.stored(np.concatenate([part.scales for part in levels]))
        zeros = [part.zeros for part in levels if part.zeros is not None]
        return Levels(blocks, scales, np.concatenate(zeros) if zeros else None)

    def _run(self, nodes: Sequence[ir.Node], value: ir.Value) -> None:
        """Compute the outputs of `nodes` that later nodes read, and `value`; drop values that no later node reads."""
        later = {source for node in self._nodes[self._position :] for source in reads(node)}
        later.add(value)
        outputs = [output for node in nodes for output in node.outputs]
        wanted = [output for output in outputs if output in later]
        if wanted:
            self._compute(nodes, set(outputs), wanted, later)
        self._drop_all_but(later)

    def _compute(
        self,
        nodes: Sequence[ir.Node],
        made: Collection[ir.Value],
        wanted: Sequence[ir.Value],
        later: Collection[ir.Value],
    ) -> None:
        """Run `nodes` on every call, and hold the values wanted.

        Args:
            nodes: the nodes of the part.
            made: the outputs of all of them.
            wanted: the outputs to hold.
            later: the values that later parts read.
        """
        values = list(dict.fromkeys(source for node in nodes for source in reads(node)))
        constants = self._fed_constants(values)
        given = [value for value in values if value in self._held and value not in made]
        caches = {
            name: cache
            for name, cache in self._caches.items()
            if cache in made and cache not in later
        }
        part = GraphPart(self._model, [*wanted, *caches.values()], [*given, *constants])
        constant_feeds = {str(constant.name): array for constant, array in constants.items()}
        for index, call in enumerate(self._calls):
            rows, columns = call.ids.shape
            axes = {**self._calibration.axes, BATCH: rows, SEQUENCE: columns}
            feeds = dict(constant_feeds)
            for source in given:
                feeds[str(source.name)] = self._held[source][index]
            feeds[INPUT_IDS.name] = call.ids
            feeds[INPUT_LENGTHS.name] = call.lengths
            feeds[IMAGE_ROWS.name] = np.full(call.ids.shape, IMAGE_ROWS.off, np.int32)
            in_place: dict[str, Array] = {}
            for number, (name, cache) in enumerate(caches.items()):
                if name in part.inputs:
                    buffer = self._buffer(number, part.inputs[name], axes)
                    feeds[name] = buffer
                    in_place[str(cache.name)] = buffer
            results = part(feeds, axes, in_place)
            for output, array in zip(wanted, results[: len(wanted)], strict=True):
                self._held.setdefault(output, []).append(self._arrays.held(array))

    def _fed_constants(self, values: Sequence[ir.Value]) -> dict[ir.Value, Array]:
        """The constants among `values` that a part gets when it runs: fitted weights, and those too large to copy."""
        fed: dict[ir.Value, Array] = {}
        for value in values:
            if value in self._fitted:
                fed[value] = self._fitted[value]
            elif value.is_initializer() and value.const_value is not None:
                if value.const_value.nbytes >= _MIN_BYTES_OF_FEED:
                    fed[value] = value.const_value.numpy()
        return fed

    def _drop_all_but(self, later: Collection[ir.Value]) -> None:
        """Drop the values and fitted weights that no later part reads."""
        for unread in [value for value in self._held if value not in later]:
            for array in self._held.pop(unread):
                self._arrays.drop(array)
        for unread in [constant for constant in self._fitted if constant not in later]:
            del self._fitted[unread]

    def _buffer(self, number: int, cache: ir.Value, axes: Mapping[str, int]) -> Array:
        """The memory of the cache `number` of a part: all calls write there, and read what they wrote."""
        assert cache.dtype is not None
        shape = tuple(sizes(cache, axes))
        dtype = cache.dtype.numpy()
        key = number, shape, dtype
        if key not in self._buffers:
            self._buffers[key] = sparse_zeros(shape, dtype)
        return self._buffers[key]


def _fixed_rows(graph: ir.Graph) -> int | None:
    """The number of rows that a graph fixes; None if it takes any number."""
    for value in graph.inputs:
        if value.name == INPUT_IDS.name and value.shape:
            rows = value.shape[0]
            return rows if isinstance(rows, int) else None
    return None


def _calls(sequences: Sequence[Array], rows: int | None) -> Iterator[_Call]:
    """Calls that read all sequences, the longest first.

    Args:
        sequences: the token ids of each sequence, [n] int64.
        rows: the rows of each call; None for as many as fit into `_TOKENS_PER_CALL`.
    """
    waiting = sorted(sequences, key=len, reverse=True)
    while waiting:
        longest = len(waiting[0])
        size = max(1, _TOKENS_PER_CALL // longest) if rows is None else rows
        now = waiting[:size]
        waiting = waiting[size:]
        ids = np.zeros((len(now), longest), np.int64)
        for row, sequence in zip(ids, now, strict=True):
            row[: len(sequence)] = sequence
        yield _Call(ids, np.array([len(sequence) for sequence in now], np.int32))


def _disk_bytes(matrices: Sequence[Wanted], tokens: int) -> int:
    """The bytes on the disk at once, about: all levels, plus the values that two parts hand on for each token, a
    residual and the input of a matrix, as far as they are not in memory; and later, in place of these, the package and
    its source."""
    levels = 0
    for wanted in matrices:
        inputs, outputs = wanted.shape
        block_size = wanted.way.block_size
        block_bytes = block_size * wanted.way.bits // 8 + 4  # The scale is a float32.
        levels += -(-inputs // block_size) * outputs * block_bytes
    widths = [wanted.shape[0] for wanted in matrices] or [0]
    handed_on = 4 * tokens * (max(widths) + min(widths)) - _MAX_BYTES_IN_MEMORY
    return levels + 2 * max(levels, handed_on)
