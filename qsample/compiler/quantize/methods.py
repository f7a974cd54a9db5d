"""The registry of quantization methods: each turns a matrix into levels, scales and zero points.

The numbers equal the results of ONNX Runtime's quantizers. A new method is a function here, its line in `FUNCTIONS` and
in `quantize.METHODS`; a method that is fitted to a text is a function in `gptq.FITS`. Loads NumPy only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from qsample.compiler.quantize import METHODS
from qsample.compiler.quantize.rounding import round_to_nearest
from qsample.contract.arrays import Array
from qsample.contract.tensors import BLOCK_SIZES
from qsample.graph.operators import pack_bits

_AT_ONCE: Final = 2**22  # weights that are looked at together
_FIRST: Final = 4  # weights of a block that are looked at before all of it

Levels = tuple[Array, Array, Array]
"""Blocks, scales and zero points of a matrix, or of the same matrix of several experts."""


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """How weights are quantized. bits: 4 or 8. block_size: weights of a row that share a scale, one of BLOCK_SIZES.
    method: a name in METHODS. mixed: whether the matrices that `weights.sensitive_products` names get 8 bits."""

    bits: int
    block_size: int = 32
    method: str = "rtn"
    mixed: bool = False

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size is {self.block_size}; choose one of {', '.join(map(str, BLOCK_SIZES))}")
        if self.method not in METHODS:
            raise ValueError(f"quantization method is {self.method!r}; choose one of {', '.join(METHODS)}")

    @property
    def symmetric(self) -> bool:
        """Whether levels are symmetric around the middle level, so that no zero points are stored."""
        return METHODS[self.method].symmetric

    @property
    def by_rows(self) -> bool:
        """Whether a part of a matrix's outputs gets the same levels by itself."""
        return METHODS[self.method].by_rows

    @property
    def unfitted(self) -> WeightQuantization:
        """The same for a matrix whose levels no text decides."""
        return replace(self, method=METHODS[self.method].unfitted or self.method)


def quantize_matrix(weight: Array, quantization: WeightQuantization) -> Levels:
    """Quantize a matrix [K, N] of float32, float16 or bfloat16, K a multiple of the block size. Returns blocks [N, K /
    block size, bytes], uint8; scales, one a block, dtype of the weight; zero points [N, K / block size], uint8, without
    meaning if the levels are symmetric."""
    quantize = FUNCTIONS[quantization.method]
    if weight.dtype in (np.float32, np.float16):
        return quantize(weight, quantization)
    blocks, scales, zero_points = quantize(weight.astype(np.float32), quantization)
    scales = scales.astype(weight.dtype)
    return _levels_of(scales, zero_points, weight, quantization).reshape(blocks.shape), scales, zero_points


def _levels_of(scales: Array, zero_points: Array, weight: Array, quantization: WeightQuantization) -> Array:
    """The blocks of the levels that are nearest with these very scales. bfloat16 has eight bits of precision: scales
    that are rounded to it after the levels were chosen move the largest 8-bit levels by up to half a step."""
    steps, bits = scales.astype(np.float32).reshape(-1, 1), quantization.bits
    zeros = 2.0 ** (bits - 1) if quantization.symmetric else zero_points.astype(np.float32).reshape(-1, 1)
    blocks = np.array(weight.T, np.float32, order="C").reshape(-1, quantization.block_size)
    levels = np.round(blocks / np.where(steps == 0, 1, steps) + zeros)
    return pack_bits(np.clip(levels, 0, 2**bits - 1).astype(np.uint8), bits)


def _round_to_nearest(weight: Array, quantization: WeightQuantization) -> Levels:
    """The nearest symmetric levels."""
    inputs, outputs = weight.shape
    size, bits = quantization.block_size, quantization.bits
    levels, scales = round_to_nearest(weight.T, bits, size)
    blocks = levels.reshape(outputs, inputs // size, -1)
    if bits == 8:
        _keep_exact_blocks(weight, size, blocks, scales)
    return blocks, scales, np.zeros((outputs, inputs // size), np.uint8)


def _keep_exact_blocks(weight: Array, block_size: int, blocks: Array, scales: Array) -> None:
    """Put levels and scales into `blocks` and `scales`, in place, for blocks that lose nothing: their weights are all
    less than 128 steps of a power of two. MXFP4's are (OCP Microscaling Formats 1.0): 12 halves of their scale at most.
    """
    inputs, outputs = weight.shape
    all_levels, all_scales = blocks.reshape(outputs, -1), scales.reshape(outputs, -1)
    rows = max(1, _AT_ONCE // inputs)
    for first in range(0, outputs, rows):
        part = slice(first, min(first + rows, outputs))
        weights = np.ascontiguousarray(weight[:, part].T).reshape(-1, block_size)
        _, exponents = np.frexp(np.abs(weights).max(axis=1, keepdims=True))
        steps = np.ldexp(np.ones_like(weights[:, :1]), exponents - 7)
        exact = np.flatnonzero(steps[:, 0] > 0)
        for count in (_FIRST, block_size):  # a few weights rule out nearly all blocks
            levels = weights[exact, :count] / steps[exact]
            whole = (levels == np.round(levels)).all(axis=1)
            exact, levels = exact[whole], levels[whole]
        all_levels[part].reshape(-1, block_size)[exact] = (levels + 128).astype(np.uint8)
        all_scales[part].reshape(-1)[exact] = steps[exact, 0]


@contextmanager
def _quiet_import() -> Iterator[None]:
    """ONNX Runtime's quantizers set the root logger to INFO when imported; that is not theirs to decide."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def _k_quant(weight: Array, quantization: WeightQuantization) -> Levels:
    """A search of each block's scale and offset, as in llama.cpp: in NumPy, so slower, and closer."""
    with _quiet_import():
        from onnxruntime.quantization.neural_compressor.weight_only import quant_tensor_k_quant_cpu

    bits, size = quantization.bits, quantization.block_size
    rows = np.array(weight.T, np.float32, order="C")
    with np.errstate(invalid="ignore", divide="ignore"):  # it divides by the range of blocks of zeros
        scales, zero_points = quant_tensor_k_quant_cpu(rows, bits, size)[1:]
    return _on_grids(rows.reshape(-1, size), scales, zero_points, weight, quantization)


def _hqq(weight: Array, quantization: WeightQuantization) -> Levels:
    """The offset that few large errors weigh least on (half-quadratic quantization,
    https://mobiusml.github.io/hqq_blog), rounded: MatMulNBits multiplies some 300 times slower by levels with
    fractional offsets."""
    import torch

    with _quiet_import():
        from onnxruntime.quantization.matmul_nbits_quantizer import HQQWeightOnlyQuantConfig, HQQWeightOnlyQuantizer

    bits, size = quantization.bits, quantization.block_size
    rows = np.array(weight.T, dtype=np.float32, order="C")
    quantizer = HQQWeightOnlyQuantizer(HQQWeightOnlyQuantConfig(size, bits))
    _, scales, offsets = quantizer.quantize_internal(torch.from_numpy(rows), bits=bits, group_size=size)
    zero_points = np.round(offsets.numpy().reshape(-1, 1))
    return _on_grids(rows.reshape(-1, size), scales.numpy().reshape(-1, 1), zero_points, weight, quantization)


def _on_grids(
    blocks: Array, scales: Array, zero_points: Array, weight: Array, quantization: WeightQuantization
) -> Levels:
    """The nearest levels of `blocks` [n, size] on the grids that a library found, [n, 1] each. Its grid misses blocks
    of weights with one sign and far from 0, because a zero point is a level itself, of equal weights, and of small
    ones: hqq's smallest step is 1 / 20,000. They get a grid from their smallest weight, or 0, to their largest."""
    bits, largest = quantization.bits, 2**quantization.bits - 1
    low, high = np.minimum(blocks.min(-1, keepdims=True), 0), np.maximum(blocks.max(-1, keepdims=True), 0)
    span = np.maximum(high - low, np.finfo(np.float32).tiny)
    near = 2 * scales + 0.05 * span  # an outlier may be clipped
    too_short = (high - (largest - zero_points) * scales > near) | (-low - zero_points * scales > near)
    misses = (zero_points < 0) | (zero_points > largest) | (scales * largest > 1.2 * span) | too_short
    scales = np.where(misses, span / largest, scales)
    zero_points = np.where(misses, np.round(-low / scales), zero_points)
    levels = blocks / scales
    levels += zero_points
    np.clip(np.round(levels, out=levels), 0, largest, out=levels)
    outputs = weight.shape[1]
    return (
        pack_bits(levels.astype(np.uint8), bits),
        scales.astype(weight.dtype).reshape(outputs, -1, 1),
        zero_points.astype(np.uint8).reshape(outputs, -1),
    )


FUNCTIONS: Final[Mapping[str, Callable[[Array, WeightQuantization], Levels]]] = {
    "rtn": _round_to_nearest,
    "k_quant": _k_quant,
    "hqq": _hqq,
}
