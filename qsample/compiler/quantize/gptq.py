"""GPTQ (Frantar et al., 2022, https://arxiv.org/abs/2210.17323): weights whose levels are fitted to a text.

The graph is run in parts, each up to the input of the next matrix. Later parts use the quantized weights of earlier
matrices, so each matrix is fitted to the inputs that it will really get. One matrix and its inputs' second moments are
in memory; the values that parts hand on, and the levels, are in a scratch folder.

The columns of a matrix are rounded one after another. As far as the inputs are correlated, later columns make up for
the error of each. The scale of a block is chosen when its first column is reached, for its weights at that point.
Levels are symmetric. Columns stay in their order: the layout of MatMulNBits stores no order (act-order).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.compiler.quantize.methods import Levels, WeightQuantization
from qsample.contract.arrays import Array, sparse_zeros
from qsample.contract.tensors import BATCH, CAPACITY, IMAGE_ROWS, INPUT_IDS, INPUT_LENGTHS, SEQUENCE
from qsample.disk.space import check_free
from qsample.graph.edit import ancestors, reads
from qsample.graph.evaluate import GraphPart, sizes
from qsample.graph.operators import pack_bits, unpack_bits

if TYPE_CHECKING:
    from torch import Tensor

_DAMPING: Final = 0.01  # of the mean of the diagonal, as in the paper
_LAZY: Final = 128  # columns whose corrections of the later ones are put off, and made together
_SHRINKS: Final = tuple(1 - 0.05 * step for step in range(5))  # of a block's range


def gptq(weight: Array, moments: Array, quantization: WeightQuantization) -> Levels:
    """As `methods.quantize_matrix`, for float32 or float16. moments: [K, K] float64, the sum of x xᵀ over inputs x."""
    import torch

    size, bits = quantization.block_size, quantization.bits
    middle = 2 ** (bits - 1)
    inputs, outputs = weight.shape
    smallest = np.finfo(weight.dtype).smallest_subnormal
    rows = torch.from_numpy(np.array(weight.T, np.float32, order="C"))
    upper = _inverse_root(moments)
    levels = torch.empty((outputs, inputs), dtype=torch.uint8)
    scales = torch.empty((outputs, inputs // size))
    for start in range(0, inputs, max(_LAZY, size)):
        stop = min(start + max(_LAZY, size), inputs)
        errors = torch.empty((outputs, stop - start))
        for column in range(start, stop):
            block = column // size
            if column % size == 0:
                stored = _grid(rows[:, column : column + size], bits).numpy().astype(weight.dtype)
                stored[stored == 0] = smallest  # too small for float16; levels would be 0 / 0
                scales[:, block] = torch.from_numpy(stored.astype(np.float32))
            scale, values = scales[:, block], rows[:, column]
            level = torch.clamp(torch.round(values / scale) + middle, 0, 2**bits - 1)
            levels[:, column] = level.to(torch.uint8)
            error = (values - scale * (level - middle)) / upper[column, column]
            errors[:, column - start] = error
            rows[:, column + 1 : stop].addr_(error, upper[column, column + 1 : stop], alpha=-1)
        rows[:, stop:].addmm_(errors, upper[start:stop, stop:], alpha=-1)
    packed = pack_bits(levels.numpy().reshape(-1, size), bits)
    return packed.reshape(outputs, inputs // size, -1), scales.numpy().reshape(-1).astype(weight.dtype)


def _inverse_root(moments: Array) -> Tensor:
    """Upper triangular U, float32, UᵀU the inverse of the damped `moments`; an always-0 input correlates with none."""
    import torch

    matrix = torch.from_numpy(np.array(moments, np.float64))
    diagonal = matrix.diagonal()
    damping = _DAMPING * float(diagonal.mean()) or 1.0
    diagonal[diagonal == 0] = damping
    diagonal += damping
    lower = torch.linalg.cholesky(matrix)
    del matrix, diagonal
    inverse = torch.cholesky_inverse(lower)
    del lower
    root: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return root.to(torch.float32)


def _grid(blocks: Tensor, bits: int) -> Tensor:
    """The scale, [N], of `blocks` [N, size]: of those tried, the one with the least squared error. The weight that is
    farthest from 0 is near the lowest level."""
    import torch

    middle = 2 ** (bits - 1)
    farthest = torch.take_along_dim(blocks, blocks.abs().argmax(1, keepdim=True), 1)
    steps = torch.stack([farthest[:, 0] * (-shrink / middle) for shrink in _SHRINKS])
    divisors = torch.where(steps == 0, 1, steps)[..., None]
    rounded = torch.clamp(torch.round(blocks / divisors), -middle, middle - 1)
    best = (rounded * divisors - blocks).square().sum(2).argmin(0, keepdim=True)
    return torch.take_along_dim(steps, best, 0)[0]


FITS: Final[Mapping[str, Callable[[Array, Array, WeightQuantization], Levels]]] = {"gptq": gptq}
"""The methods that are fitted to a text: each takes a matrix and the moments of its inputs, as `gptq`."""
_FED_FROM: Final = 1 << 20  # bytes; larger constants are handed to a part when it runs, not copied into it


class Wanted(NamedTuple):
    """A matrix to quantize. value: the constant. node: the product. transposed: it is [N, K], not [K, N]."""

    value: ir.Value
    node: ir.Node
    transposed: bool
    way: WeightQuantization


@dataclass(frozen=True, slots=True)
class Calibration:
    """The inputs that a graph is run on. sequences: token ids, [n] int64 each. axes: the sizes of the graph's other
    named axes. folder: a scratch folder that outlives the levels. progress: called with the fraction done."""

    sequences: Sequence[Array]
    axes: Mapping[str, int]
    folder: Path
    progress: Callable[[float], None] = lambda fraction: None


def calibrated_levels(model: ir.Model, matrices: Sequence[Wanted], calibration: Calibration) -> dict[ir.Value, Levels]:
    """The levels of each of `matrices`, all in `model`'s own graph, mapped from files. `model` stays as it is. Raises
    PackageError, before the work, if the scratch folder's disk has no room for them and the package after them."""
    check_free(calibration.folder, _disk_bytes(matrices, calibration.sequences), "fitting the weights to the text")
    walk = _Walk(model, matrices, calibration)
    found: dict[ir.Value, Levels] = {}
    for number, (value, group) in enumerate(walk.groups.items()):
        moments = walk.inputs_of(value)
        for wanted in group:
            weight = walk.weight(wanted.value)
            levels = FITS[wanted.way.method](weight.T if wanted.transposed else weight, moments, wanted.way)
            found[wanted.value] = walk.keep(wanted, levels)
            calibration.progress((number + 1) / len(walk.groups))
    return found


class _Walk:
    """A graph that is run part by part. groups: the matrices by the value that they multiply, in the graph's order."""

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
        self._held: dict[ir.Value, list[Path]] = {}  # values that later parts read, for each sequence

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
        """Compute the outputs of `nodes` that later nodes read, and `value`; drop values that no later node reads."""
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
        own[IMAGE_ROWS.name] = np.full((1, len(ids)), IMAGE_ROWS.off, np.int32)
        return zeros | {name: array for name, array in own.items() if name in part.inputs}


def _disk_bytes(matrices: Sequence[Wanted], sequences: Sequence[Array]) -> int:
    """The bytes on the disk at once, about: all levels, plus the values that two parts hand on for each token, a
    residual and the input of a matrix; and later, in place of these, the package and its source."""
    levels, inputs = 0, [0]
    for wanted in matrices:
        assert wanted.value.const_value is not None
        shape = wanted.value.const_value.shape.numpy()
        numbers, way = math.prod(shape), wanted.way
        levels += numbers * way.bits // 8 + numbers // way.block_size * 4  # a scale in float32
        inputs.append(shape[1 if wanted.transposed else 0])
    handed_on = 4 * sum(map(len, sequences)) * (max(inputs) + min(inputs[1:], default=0))
    return levels + 2 * max(levels, handed_on)


def _dequantized(wanted: Wanted, levels: Levels, dtype: np.dtype[np.generic]) -> Array:
    """The weight, as the graph has it, that the levels stand for."""
    packed, scales = levels
    size, bits = wanted.way.block_size, wanted.way.bits
    numbers = unpack_bits(packed, bits).reshape(-1, size).astype(np.float32) - 2 ** (bits - 1)
    rows = (numbers * scales.astype(np.float32).reshape(-1, 1)).reshape(len(packed), -1).astype(dtype)
    weight: Array = np.ascontiguousarray(rows if wanted.transposed else rows.T)
    return weight
