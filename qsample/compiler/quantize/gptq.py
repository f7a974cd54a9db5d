"""GPTQ (Frantar et al., 2022, https://arxiv.org/abs/2210.17323): weights whose levels are fitted to a text.

A matrix and the second moments of its inputs enter, its levels leave; walk.py takes the inputs from a graph.

The columns of a matrix are rounded one after another, those with the largest inputs first (act-order). As far as the
inputs are correlated, the columns that are left make up for the error of each. The scales and zero points of all blocks
are chosen before, for the weights as they were: so a block is what it is in the layout of MatMulNBits, columns that lie
side by side. They give the least squared error if each weight counts by its input's mean square.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from qsample.compiler.quantize.methods import Levels, WeightQuantization
from qsample.compiler.quantize.rounding import choose_grid, round_to_nearest
from qsample.contract.arrays import Array
from qsample.graph.operators import pack_bits
from qsample.graph.save import processors

_DAMPING_SHARE: Final = 0.01
"""The share of the diagonal's mean that is added to the diagonal, as in the paper."""
_INPUTS_PER_PRODUCT: Final = 128
"""The inputs whose weights get the corrections of all inputs rounded before in one product."""
_INPUTS_PER_CORRECTION: Final = 32
"""The inputs rounded with corrections of each other alone, before the rest of a product's inputs get theirs."""
_OUTPUTS_PER_THREAD: Final = 1024
"""The outputs that a thread rounds at a time: their weights stay in the processor's cache."""


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
    damping = _DAMPING_SHARE * float(diagonal.mean(dtype=np.float64))
    if damping == 0:
        damping = 1.0
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
    outputs = weight.shape[1]
    parts = [
        slice(first, first + _OUTPUTS_PER_THREAD)
        for first in range(0, outputs, _OUTPUTS_PER_THREAD)
    ]
    with ThreadPoolExecutor(processors()) as pool:
        scales, zeros = _grids(pool, weight, moments.importance, quantization, parts)
        block_of = moments.order // quantization.block_size
        matrix = _Rounding(
            bits=quantization.bits,
            weights=weight[moments.order].astype(np.float32),
            steps=np.ascontiguousarray(scales.T[block_of], np.float32),
            middles=np.ascontiguousarray(zeros.T[block_of], np.float32),
            levels=np.empty(weight.shape, np.uint8),
            errors=np.empty(weight.shape, np.float32),
        )
        _round_backwards(pool, matrix, moments.lower, parts)
    fitted = np.empty_like(matrix.weights)
    fitted[moments.order] = matrix.weights - matrix.errors
    levels = np.empty_like(matrix.levels)
    levels[moments.order] = matrix.levels
    blocks = _packed(levels, quantization)
    kept_zeros = zeros.reshape(-1) if quantization.zero_points else None
    return Levels(blocks, scales.reshape(-1), kept_zeros), fitted


@dataclass(frozen=True, slots=True)
class _Rounding:
    """A matrix [K, N] on its way to levels, its inputs in the order of `Moments`.

    Attributes:
        bits: the bits of a level.
        weights: [K, N] float32, the weights as they were.
        steps: [K, N] float32, the scale of each weight's block.
        middles: [K, N] float32, the zero point of each weight's block.
        levels: [K, N] uint8, written by `round_inputs`.
        errors: [K, N] float32, weight less quantized weight, written by `round_inputs`.
    """

    bits: int
    weights: Array
    steps: Array
    middles: Array
    levels: Array
    errors: Array

    def round_inputs(self, inputs: slice, outputs: slice, corrected: Array, factor: Array) -> None:
        """Round a part of the matrix, the last input first.

        Args:
            inputs: the k inputs to round.
            outputs: the n outputs to round.
            corrected: [k, n] float32, the weights with the corrections of all later inputs; it is changed.
            factor: [k, k] float32, the correction of each input's weights per error of each later one.
        """
        steps = self.steps[inputs, outputs]
        middles = self.middles[inputs, outputs]
        weights = self.weights[inputs, outputs]
        levels = self.levels[inputs, outputs]
        errors = self.errors[inputs, outputs]
        top = 2**self.bits - 1
        inverse = np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps != 0)
        for column in reversed(range(len(corrected))):
            rounded = np.rint(corrected[column] * inverse[column])
            rounded += middles[column]
            np.clip(rounded, 0, top, out=rounded)
            levels[column] = rounded
            rounded -= middles[column]
            np.subtract(weights[column], rounded * steps[column], out=errors[column])
            corrected[:column] += factor[column, :column, None] * errors[column]


def _round_backwards(
    pool: ThreadPoolExecutor, matrix: _Rounding, lower: Array, parts: Sequence[slice]
) -> None:
    """Round all inputs of `matrix`, the last first, the `parts` of its outputs side by side.

    The corrections of earlier inputs are matrix products over many inputs at once: `_INPUTS_PER_PRODUCT` inputs get
    those of all later inputs together, and within these, every `_INPUTS_PER_CORRECTION` inputs correct the rest.
    """
    inputs = len(matrix.weights)
    for first in reversed(range(0, inputs, _INPUTS_PER_PRODUCT)):
        last = min(first + _INPUTS_PER_PRODUCT, inputs)
        factor = lower[:, first:last] / np.diagonal(lower)[first:last]
        corrected = matrix.weights[first:last] + factor[last:].T @ matrix.errors[last:]
        for start in reversed(range(first, last, _INPUTS_PER_CORRECTION)):
            stop = min(start + _INPUTS_PER_CORRECTION, last)
            columns = slice(start, stop)
            own = slice(start - first, stop - first)
            jobs = [
                pool.submit(
                    matrix.round_inputs,
                    columns,
                    part,
                    corrected[own, part],
                    factor[columns, own],
                )
                for part in parts
            ]
            for job in jobs:
                job.result()
            earlier = slice(0, start - first)
            corrected[earlier] += factor[columns, earlier].T @ matrix.errors[columns]


def _packed(levels: Array, quantization: WeightQuantization) -> Array:
    """Levels [K, N] uint8 → [N, blocks, bytes] uint8, the last block filled up with zero points in the middle."""
    inputs, outputs = levels.shape
    size = quantization.block_size
    middle = 2 ** (quantization.bits - 1)
    filled = np.pad(levels, ((0, -inputs % size), (0, 0)), constant_values=middle)
    packed = pack_bits(filled.T.reshape(-1, size), quantization.bits)
    return packed.reshape(outputs, len(filled) // size, -1)


def _grids(
    pool: ThreadPoolExecutor,
    weight: Array,
    importance: Array,
    quantization: WeightQuantization,
    parts: Sequence[slice],
) -> tuple[Array, Array]:
    """Scales and zero points as of `_grid`, the `parts` of the outputs side by side."""
    jobs = [pool.submit(_grid, weight[:, part], importance, quantization) for part in parts]
    grids = [job.result() for job in jobs]
    scales = np.concatenate([scales for scales, _ in grids])
    zeros = np.concatenate([zeros for _, zeros in grids])
    return scales, zeros


def _grid(
    weight: Array, importance: Array, quantization: WeightQuantization
) -> tuple[Array, Array]:
    """Scales, in the dtype of the weights, and zero points, uint8, of a matrix [K, N]: [N, K / block size] each."""
    size = quantization.block_size
    bits = quantization.bits
    inputs, outputs = weight.shape
    rows = np.pad(weight, ((0, -inputs % size), (0, 0))).T
    if quantization.zero_points:
        counts = np.broadcast_to(np.pad(importance, (0, -inputs % size)), rows.shape)
        scales, zeros = choose_grid(rows, bits, size, counts)
    else:
        _, scales = round_to_nearest(rows, bits, size)
        zeros = np.full(scales.shape, 2 ** (bits - 1), np.uint8)
    return scales.reshape(outputs, -1), zeros.reshape(outputs, -1)
