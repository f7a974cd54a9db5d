"""ggml's blocks of quantized weights as integers, scales and offsets, exactly: the dequantized floats are, bit for bit,
those of `gguf.quants` (layouts: block_* in ggml-common.h, dequantize_row_* in ggml-quants.c of llama.cpp)."""

from __future__ import annotations

from typing import Final

import numpy as np

from qsample.addons.formats.gguf.file import KINDS, GgufFile, GgufTensor
from qsample.checkpoints.stored_matrices import IntegerWeight
from qsample.contract.arrays import Array
from qsample.errors import QsampleError, shown

FLOATS: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BLOCKS: Final = {kind.name: kind for kind in KINDS.values()}
# Weights by their 4 bits, one scale apart; both tables have a middle, so that no zero points are needed.
_IQ4: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16
)
_E2M1: Final = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16
)  # doubled
_LARGEST_SCALE: Final = 1e36  # no weight becomes infinite


def read_rows(file: GgufFile, tensor: GgufTensor, rows: slice | Array) -> IntegerWeight:
    """Some rows of a quantized tensor. Raises QsampleError for scales that are no numbers, or would make weights that
    are none."""
    weight = unpack(tensor.type, file.raw(tensor)[rows])
    for part in (weight.scales, weight.offsets):
        if part is not None and not np.abs(part).max(initial=0) <= _LARGEST_SCALE:
            raise QsampleError(
                f"{file.path}: the tensor {shown(tensor.name)} has blocks whose scale is infinite or no number; "
                "download the file again, or take another one"
            )
    return weight


def unpack(kind: str, raw: Array) -> IntegerWeight:
    """raw: [N, bytes of a row] uint8, of a type of `KINDS` that is no float."""
    b = np.ascontiguousarray(raw).reshape(-1, _BLOCKS[kind].length)
    offsets = None
    match kind:
        case "Q4_0":
            bits, levels, scales = 4, _spread(b[:, 2:], 16, 4), _half(b, 0)
        case "Q4_1":
            bits, levels, scales, offsets = 4, _spread(b[:, 4:], 16, 4), _half(b, 0), _half(b, 2)
        case "Q5_0":
            bits, levels, scales = 5, _spread(b[:, 6:], 16, 4) | _fifth(b[:, 2:6]), _half(b, 0)
        case "Q5_1":
            bits, levels, scales = 5, _spread(b[:, 8:], 16, 4) | _fifth(b[:, 4:8]), _half(b, 0)
            offsets = _half(b, 2)
        case "Q8_0":
            bits, levels, scales = 8, b[:, 2:] ^ np.uint8(128), _half(b, 0)
        case "Q2_K":
            bits, levels, scales = 2, _spread(b[:, 16:80], 32, 2), _half(b, 80) * (b[:, :16] & 15)
            offsets = -(_half(b, 82) * (b[:, :16] >> 4))
        case "Q3_K":
            bits, levels = 3, _spread(b[:, 32:96], 32, 2) | _spread(b[:, :32], 32, 1) << 2
            sixth = _spread(b[:, 96:104], 8, 4) | _spread(b[:, 104:108], 4, 2) << 4
            scales = _half(b, 108) * (sixth.astype(np.float32) - 32)
        case "Q4_K" | "Q5_K":
            bits, levels = 4, _spread(b[:, -128:], 32, 4)
            if kind == "Q5_K":
                bits, levels = 5, levels | _spread(b[:, 16:48], 32, 1) << 4
            low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
            scales = _half(b, 0) * np.hstack([low & 63, high & 15 | low >> 2 & 48])
            offsets = -(_half(b, 2) * np.hstack([middle & 63, high >> 4 | middle >> 2 & 48]))
        case "Q6_K":
            bits, levels = 6, _spread(b[:, :128], 64, 4) | _spread(b[:, 128:192], 32, 2) << 4
            scales = _half(b, 208) * b[:, 192:208].view(np.int8)
        case "TQ2_0":  # from -1 to 2
            bits, levels, scales = 3, _spread(b[:, :64], 32, 2) + np.uint8(3), _half(b, 64)
        case "IQ4_NL":
            bits, levels, scales = 8, _by_table(_IQ4, 8, _spread(b[:, 2:], 16, 4)), _half(b, 0)
        case "IQ4_XS":
            bits, levels = 8, _by_table(_IQ4, 8, _spread(b[:, 8:], 16, 4))
            sixth = _spread(b[:, 4:8], 1, 4) | _spread(b[:, 2:4], 1, 2) << 4
            scales = _half(b, 0) * (sixth.astype(np.float32) - 32)
        case "MXFP4":
            bits, levels = 5, _by_table(_E2M1, 5, _spread(b[:, 1:], 16, 4))
            scales = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
            scales[b[:, :1] == 255] = np.nan  # the format's (OCP Microscaling, 5.4.1)
        case "NVFP4":
            bits, levels = 5, _by_table(_E2M1, 5, _spread(b[:, 4:], 8, 4))
            scales = _E4M3[b[:, :4]]
        case _:
            raise AssertionError(kind)
    rows = len(raw)
    offsets = None if offsets is None else offsets.reshape(rows, -1)
    return IntegerWeight(bits, levels.reshape(rows, -1), scales.reshape(rows, -1), offsets=offsets)


def _spread(packed: Array, width: int, bits: int) -> Array:
    """packed: [B, n] uint8. Returns [B, n * 8 / bits]: of each `width` bytes the lowest `bits`, then the next, .."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts = packed.reshape(len(packed), -1, 1, width) >> shifts & np.uint8((1 << bits) - 1)
    return parts.reshape(len(packed), -1)


def _fifth(packed: Array) -> Array:
    """packed: [B, 4] uint8, a bit a weight. Returns [B, 32], the bits as the fifth of levels."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _half(blocks: Array, at: int) -> Array:
    """[B, 1] float32, from the float16 at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _by_table(table: Array, bits: int, codes: Array) -> Array:
    """Levels of `bits` for weights that `table` gives by their codes."""
    return (table + (1 << bits - 1)).astype(np.uint8)[codes]


def _e4m3() -> Array:
    """[256] float32: halves of unsigned e4m3 numbers, since _E2M1 is doubled; ggml reads 127, NaN, as 0."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = (
        np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)) / 2
    )
    values[127] = 0
    return values.astype(np.float32)


_E4M3: Final = _e4m3()
