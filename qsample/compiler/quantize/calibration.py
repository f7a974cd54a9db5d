"""A float graph and token ids enter; the levels of its matrices leave, chosen for the inputs that they meet (GPTQ).

The graph is run in parts, in its own order: up to the input of the first matrix, from there to the next, and so on. The
parts behind a matrix are given its quantized weights, so each is fitted to what the layers before it really compute. In
memory are one matrix and the moments of its inputs; what the parts hand on, and the levels, lie in a scratch folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.compiler.quantize.gptq import gptq
from qsample.compiler.quantize.rounding import Levels, WeightQuantization
from qsample.contract import BATCH, CAPACITY, INPUT_IDS, INPUT_LENGTHS, SEQUENCE
from qsample.disk.space import check_free
from qsample.graph.edit import ancestors, reads
from qsample.graph.evaluate import GraphPart, sizes
from qsample.tensors import Array, sparse_zeros

_FED_FROM: Final = 1 << 20  # bytes; larger constants are handed to a part when it runs, not copied into it


class Wanted(NamedTuple):
    """A matrix to quantize. value: the constant. node: the product. transposed: it is [N, K], not [K, N]."""

    value: ir.Value
    node: ir.Node
    transposed: bool
    way: WeightQuantization


@dataclass(frozen=True, slots=True)
class Calibration:
    """What to run a graph on. sequences: token ids, [n] int64 each. axes: the sizes of the graph's other named axes.
    folder: a scratch folder that outlives the levels. progress: called with the fraction done."""

    sequences: Sequence[Array]
    axes: Mapping[str, int]
    folder: Path
    progress: Callable[[float], None] = lambda fraction: None


def calibrated_levels(model: ir.Model, matrices: Sequence[Wanted], calibration: Calibration) -> dict[ir.Value, Levels]:
    """The levels of each of `matrices`, all in `model`'s own graph, mapped from files. `model` stays as it is.

    Raises PackageError, before the work, where the scratch folder's disk has no room for it and the package behind it.
    """
    check_free(calibration.folder, _disk_bytes(matrices, calibration.sequences), "fitting the weights to the text")
    walk = _Walk(model, matrices, calibration)
    found: dict[ir.Value, Levels] = {}
    for number, (value, group) in enumerate(walk.groups.items()):
        moments = walk.inputs_of(value)
        for wanted in group:
            weight = walk.weight(wanted.value)
            levels = gptq(weight.T if wanted.transposed else weight, moments, wanted.way)
            found[wanted.value] = walk.keep(wanted, levels)
            calibration.progress((number + 1) / len(walk.groups))
    return found


class _Walk:
    """A graph that is run part by part.

    groups: the matrices by what they multiply, in the order in which that is computed.
    """

    def __init__(self, model: ir.Model, matrices: Sequence[Wanted], calibration: Calibration) -> None:
        self._model, self._calibration = model, calibration
        by_node = {wanted.node: wanted for wanted in matrices}
        needed = ancestors([wanted.node.inputs[0] for wanted in matrices])
        self._nodes = [node for node in model.graph if node in needed or node in by_node]
        self.groups: dict[ir.Value, list[Wanted]] = {}
        for node in self._nodes:
            if node in by_node:
                source = node.inputs[0]
                assert source is not None
                self.groups.setdefault(source, []).append(by_node[node])
        self._position = 0
        self._quantized: dict[ir.Value, tuple[Wanted, Levels]] = {}
        self._names = count()
        self._held: dict[ir.Value, list[Path]] = {}  # what later parts read, for each sequence

    def inputs_of(self, value: ir.Value) -> Array:
        """The moments [K, K] float64 of `value`, over all tokens of all sequences."""
        start = self._position
        while self._position < len(self._nodes) and self._nodes[self._position] not in {
            wanted.node for wanted in self.groups[value]
        }:
            self._position += 1
        self._run(self._nodes[start : self._position], value)
        moments: Array | None = None
        for index in range(len(self._calibration.sequences)):
            rows = self._read(value, index)
            rows = np.asarray(rows, np.float32).reshape(-1, rows.shape[-1])
            product = (rows.T @ rows).astype(np.float64)
            moments = product if moments is None else np.add(moments, product, out=moments)
        assert moments is not None
        return moments

    def weight(self, value: ir.Value) -> Array:
        """The numbers of a constant."""
        assert value.const_value is not None
        return value.const_value.numpy()

    def keep(self, wanted: Wanted, levels: Levels) -> Levels:
        """`levels` in files of the scratch folder, mapped."""
        kept: Levels = tuple(self._stored(part) for part in levels)  # type: ignore[assignment]
        self._quantized[wanted.value] = wanted, kept
        return kept

    def _stored(self, array: Array) -> Array:
        path = self._calibration.folder / f"{next(self._names)}.npy"
        np.save(path, array)
        mapped: Array = np.load(path, mmap_mode="r")
        return mapped

    def _read(self, value: ir.Value, index: int) -> Array:
        array: Array = np.load(self._held[value][index], mmap_mode="r")
        return array

    def _run(self, nodes: Sequence[ir.Node], value: ir.Value) -> None:
        """Compute what `nodes` compute for later ones, and `value`; and let go what no later one reads."""
        later = {read for node in self._nodes[self._position :] for read in reads(node)} | {value}
        made = {output for node in nodes for output in node.outputs}
        wanted = [output for node in nodes for output in node.outputs if output in later]
        given: dict[ir.Value, None] = {}
        fed: dict[ir.Value, Array] = {}
        for node in nodes:
            for read in reads(node):
                if read.const_value is not None and read.is_initializer():
                    if read in self._quantized:
                        fed[read] = _dequantized(*self._quantized[read], self.weight(read).dtype)
                    elif read.const_value.nbytes >= _FED_FROM:
                        fed[read] = self.weight(read)
                elif read not in made and read in self._held:
                    given[read] = None
        if wanted:
            part = GraphPart(self._model, wanted, [*given, *fed])
            results: dict[ir.Value, list[Path]] = {output: [] for output in wanted}
            for index, ids in enumerate(self._calibration.sequences):
                feeds = {str(read.name): self._read(read, index) for read in given}
                feeds |= {str(read.name): array for read, array in fed.items()}
                for output, array in zip(wanted, part(feeds | self._sequence(part, ids), self._axes(ids)), strict=True):
                    path = self._calibration.folder / f"{next(self._names)}.npy"
                    np.save(path, array)
                    results[output].append(path)
            self._held |= results
        for read in [read for read in self._held if read not in later]:
            for path in self._held.pop(read):
                path.unlink()

    def _axes(self, ids: Array) -> dict[str, int]:
        return {**self._calibration.axes, BATCH: 1, SEQUENCE: len(ids)}

    def _sequence(self, part: GraphPart, ids: Array) -> dict[str, Array]:
        """The graph's inputs for a sequence that starts from an empty cache."""
        axes = self._axes(ids)
        zeros = {
            name: sparse_zeros(tuple(sizes(value, axes)), value.dtype.numpy())
            for name, value in part.inputs.items()
            if CAPACITY in map(str, value.shape or ()) or name.startswith("past_key_values.")
            if value.dtype is not None
        }
        own = {INPUT_IDS.name: ids[None], INPUT_LENGTHS.name: np.array([len(ids)], np.int32)}
        return zeros | {name: array for name, array in own.items() if name in part.inputs}


def _disk_bytes(matrices: Sequence[Wanted], sequences: Sequence[Array]) -> int:
    """What lies on the disk at once, about: all levels, beside what two parts hand on of each token, which is a
    residual and the input of a matrix; and later, in place of that, the package and what it is written from."""
    levels, inputs = 0, [0]
    for wanted in matrices:
        assert wanted.value.const_value is not None
        shape = wanted.value.const_value.shape.numpy()
        numbers, way = math.prod(shape), wanted.way
        levels += numbers * way.bits // 8 + numbers // way.block_size * 5  # a scale in float32, and a zero point
        inputs.append(shape[1 if wanted.transposed else 0])
    handed_on = 4 * sum(map(len, sequences)) * (max(inputs) + min(inputs[1:], default=0))
    return levels + 2 * max(levels, handed_on)


def _dequantized(wanted: Wanted, levels: Levels, dtype: np.dtype[np.generic]) -> Array:
    """The weight, as the graph has it, that the levels stand for."""
    packed, scales, zero_points = levels
    size, bits = wanted.way.block_size, wanted.way.bits
    blocks = packed if bits == 8 else np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    outputs = len(zero_points)
    numbers = blocks.reshape(-1, size).astype(np.float32) - zero_points.reshape(-1, 1)
    rows = (numbers * scales.astype(np.float32).reshape(-1, 1)).reshape(outputs, -1).astype(dtype)
    weight: Array = np.ascontiguousarray(rows if wanted.transposed else rows.T)
    return weight
