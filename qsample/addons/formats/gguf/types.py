"""ggml's blocks of quantized weights as integers, scales and offsets, exactly: the dequantized
floats are, bit for bit, those of `gguf.quants` (layouts: block_* in ggml-common.h, dequantize_row_*
in ggml-quants.c of llama.cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from qsample.addons.formats.gguf.file import TENSOR_TYPES, GgufFile, GgufTensor
from qsample.checkpoints.stored_matrices import IntegerWeight
from qsample.contract.arrays import Array
from qsample.errors import QsampleError, shown

# torch's dtypes of the types that are not quantized.
FLOATS: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BLOCK_BYTES: Final = {one.name: one.length for one in TENSOR_TYPES.values()}
# The weights that 4 bits stand for, before they are scaled. Both tables lie around 0, so no zero
# points are needed.
_IQ4_WEIGHTS: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16
)
_TWICE_E2M1: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)
# With larger scales, weights could become infinite.
_MAX_SCALE: Final = 1e36


def read_rows(file: GgufFile, tensor: GgufTensor, rows: slice | Array) -> IntegerWeight:
    """Some rows of a quantized tensor. Raises QsampleError for scales that are not numbers, or that
    are too large for finite weights."""
    weight = unpack(tensor.type, file.raw(tensor)[rows])
    for numbers in (weight.scales, weight.offsets):
        if numbers is not None and not np.abs(numbers).max(initial=0) <= _MAX_SCALE:
            raise QsampleError(
                f"{file.path}: the tensor {shown(tensor.name)} has blocks whose scale is infinite or no number; "
                "download the file again, or take another one"
            )
    return weight


def unpack(type_name: str, raw: Array) -> IntegerWeight:
    """The integers of some rows.

    Args:
        type_name: a type of `TENSOR_TYPES` that is not in `FLOATS`.
        raw: [N, bytes of a row] uint8.
    """
    blocks = np.ascontiguousarray(raw).reshape(-1, _BLOCK_BYTES[type_name])
    unpacked = _UNPACK[type_name](blocks)
    rows = len(raw)
    offsets = unpacked.offsets
    return IntegerWeight(
        bits=unpacked.bits,
        levels=unpacked.levels.reshape(rows, -1),
        scales=unpacked.scales.reshape(rows, -1),
        offsets=None if offsets is None else offsets.reshape(rows, -1),
    )


@functools.cache
def symmetric_types() -> tuple[str, ...]:
    """The quantized types whose weights are integers around 0 times a scale, without offsets."""
    return tuple(
        name
        for name in _UNPACK
        if unpack(name, np.zeros((1, _BLOCK_BYTES[name]), np.uint8)).is_symmetric
    )


@dataclass(frozen=True, slots=True)
class _Blocks:
    """B unpacked blocks, each of some groups of weights.

    Attributes:
        bits: the bits of a level.
        levels: [B, weights of a block] uint8.
        scales: [B, groups of a block] float32.
        offsets: [B, groups of a block] float32; None for no offsets.
    """

    bits: int
    levels: Array
    scales: Array
    offsets: Array | None = None


# Each function below unpacks blocks [B, bytes of a block] uint8 of the type in its name. A comment
# names the fields of a block in order, with their bytes.


def _q4_0(blocks: Array) -> _Blocks:
    # scale 2, levels 16
    return _Blocks(4, _spread(blocks[:, 2:], 16, 4), _float16(blocks, 0))


def _q4_1(blocks: Array) -> _Blocks:
    # scale 2, offset 2, levels 16
    return _Blocks(4, _spread(blocks[:, 4:], 16, 4), _float16(blocks, 0), _float16(blocks, 2))


def _q5_0(blocks: Array) -> _Blocks:
    # scale 2, fifth bits 4, low bits 16
    levels = _spread(blocks[:, 6:], 16, 4) | _fifth_bits(blocks[:, 2:6])
    return _Blocks(5, levels, _float16(blocks, 0))


def _q5_1(blocks: Array) -> _Blocks:
    # scale 2, offset 2, fifth bits 4, low bits 16
    levels = _spread(blocks[:, 8:], 16, 4) | _fifth_bits(blocks[:, 4:8])
    return _Blocks(5, levels, _float16(blocks, 0), _float16(blocks, 2))


def _q8_0(blocks: Array) -> _Blocks:
    # scale 2, signed levels 32
    return _Blocks(8, blocks[:, 2:] ^ np.uint8(128), _float16(blocks, 0))


def _q2_k(blocks: Array) -> _Blocks:
    # scale and minimum of each group 16, levels 64, scale of scales 2, scale of minima 2
    factors = blocks[:, :16]
    scales = _float16(blocks, 80) * (factors & 15)
    minima = _float16(blocks, 82) * (factors >> 4)
    return _Blocks(2, _spread(blocks[:, 16:80], 32, 2), scales, -minima)


def _q3_k(blocks: Array) -> _Blocks:
    # third bits 32, low bits 64, scales of groups 12, scale of scales 2
    levels = _spread(blocks[:, 32:96], 32, 2) | _spread(blocks[:, :32], 32, 1) << 2
    factors = _spread(blocks[:, 96:104], 8, 4) | _spread(blocks[:, 104:108], 4, 2) << 4
    scales = _float16(blocks, 108) * (factors.astype(np.float32) - 32)
    return _Blocks(3, levels, scales)


def _q4_k(blocks: Array) -> _Blocks:
    # scale of scales 2, scale of minima 2, scales and minima of groups 12, levels 128
    scales, offsets = _scales_and_offsets_of_k(blocks)
    return _Blocks(4, _spread(blocks[:, -128:], 32, 4), scales, offsets)


def _q5_k(blocks: Array) -> _Blocks:
    # as Q4_K, with fifth bits 32 before the low bits 128
    levels = _spread(blocks[:, -128:], 32, 4) | _spread(blocks[:, 16:48], 32, 1) << 4
    scales, offsets = _scales_and_offsets_of_k(blocks)
    return _Blocks(5, levels, scales, offsets)


def _scales_and_offsets_of_k(blocks: Array) -> tuple[Array, Array]:
    """The scales and the offsets, [B, 8] each, of blocks of Q4_K and Q5_K."""
    low = blocks[:, 4:8]
    middle = blocks[:, 8:12]
    high = blocks[:, 12:16]
    scale_factors = np.hstack([low & 63, high & 15 | low >> 2 & 48])
    minimum_factors = np.hstack([middle & 63, high >> 4 | middle >> 2 & 48])
    return _float16(blocks, 0) * scale_factors, -(_float16(blocks, 2) * minimum_factors)


def _q6_k(blocks: Array) -> _Blocks:
    # low bits 128, high bits 64, signed scales of groups 16, scale of scales 2
    levels = _spread(blocks[:, :128], 64, 4) | _spread(blocks[:, 128:192], 32, 2) << 4
    return _Blocks(6, levels, _float16(blocks, 208) * blocks[:, 192:208].view(np.int8))


def _tq2_0(blocks: Array) -> _Blocks:
    # codes for -1 to 2, 64, scale 2
    return _Blocks(3, _spread(blocks[:, :64], 32, 2) + np.uint8(3), _float16(blocks, 64))


def _iq4_nl(blocks: Array) -> _Blocks:
    # scale 2, codes 16
    levels = _levels_by_table(_IQ4_WEIGHTS, 8, _spread(blocks[:, 2:], 16, 4))
    return _Blocks(8, levels, _float16(blocks, 0))


def _iq4_xs(blocks: Array) -> _Blocks:
    # scale of scales 2, high bits of scales 2, low bits of scales 4, codes 128
    levels = _levels_by_table(_IQ4_WEIGHTS, 8, _spread(blocks[:, 8:], 16, 4))
    factors = _spread(blocks[:, 4:8], 1, 4) | _spread(blocks[:, 2:4], 1, 2) << 4
    return _Blocks(8, levels, _float16(blocks, 0) * (factors.astype(np.float32) - 32))


def _mxfp4(blocks: Array) -> _Blocks:
    # exponent 1, codes 16
    levels = _levels_by_table(_TWICE_E2M1, 5, _spread(blocks[:, 1:], 16, 4))
    exponents = blocks[:, :1]
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
    scales[exponents == 255] = np.nan  # as the format defines it (OCP Microscaling, 5.4.1)
    return _Blocks(5, levels, scales)


def _nvfp4(blocks: Array) -> _Blocks:
    # scales of groups 4, codes 32
    levels = _levels_by_table(_TWICE_E2M1, 5, _spread(blocks[:, 4:], 8, 4))
    return _Blocks(5, levels, _HALF_E4M3[blocks[:, :4]])


_UNPACK: Final[Mapping[str, Callable[[Array], _Blocks]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "TQ2_0": _tq2_0,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}


def _spread(packed: Array, width: int, bits: int) -> Array:
    """Unpack numbers that lie side by side in bytes.

    Args:
        packed: [B, n] uint8.
        width: the number of bytes that are unpacked together: first the lowest bits of each, then
            the next bits.
        bits: the bits of a number.

    Returns:
        [B, n * 8 / bits] uint8.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    mask = np.uint8((1 << bits) - 1)
    numbers = packed.reshape(len(packed), -1, 1, width) >> shifts & mask
    return numbers.reshape(len(packed), -1)


def _fifth_bits(packed: Array) -> Array:
    """The fifth bits of levels, [B, 32], from one bit for each weight, [B, 4] uint8."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _float16(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of each block, [B, 1] float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _levels_by_table(weights: Array, bits: int, codes: Array) -> Array:
    """The levels of `bits` bits that stand for the weights of a table at these codes."""
    return (weights + (1 << bits - 1)).astype(np.uint8)[codes]


def _half_e4m3() -> Array:
    """Half of each unsigned e4m3 number, [256] float32, because `_TWICE_E2M1` is doubled; ggml
    reads 127, NaN, as 0."""
    codes = np.arange(256)
    exponent = codes >> 3 & 15
    mantissa = codes & 7
    subnormal = mantissa * 2.0**-9
    normal = (8 + mantissa) * 2.0 ** (exponent - 10.0)
    halves = np.where(exponent == 0, subnormal, normal) / 2
    halves[127] = 0
    return halves.astype(np.float32)


_HALF_E4M3: Final = _half_e4m3()
