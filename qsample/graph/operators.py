"""The operators of exported graphs: ONNX's version, ONNX Runtime's own domain, and the layout of MatMulNBits.

MatMulNBits is the product with weights of 2, 4 or 8 bits:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MatMulNBits

Loads NumPy only: the options of compile are checked even if onnx is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import onnx_ir as ir

# 23 blocks the skip-norm fusion and 24's TopK lacks a CUDA kernel, so 20 is the newest opset that loses nothing.
OPSET: Final = 20
CONTRIB_DOMAIN: Final = "com.microsoft"  # ONNX Runtime calls these contrib operators


def is_contrib(node: ir.Node, *operators: str) -> bool:
    """Whether `node` is an ONNX Runtime operator of these types."""
    return node.domain == CONTRIB_DOMAIN and node.op_type in operators


Bytes = npt.NDArray[np.uint8]
MATMUL_NBITS: Final = "MatMulNBits"
# The attribute accuracy_level: activations are rounded to int8 a block, as the fast CPU kernels take them.
INT8_ACTIVATIONS: Final = 4
FLOAT32_ACTIVATIONS: Final = 1


def is_matmul_nbits(node: ir.Node) -> bool:
    """Whether `node` multiplies by quantized weights."""
    return is_contrib(node, MATMUL_NBITS)


def pack_bits(levels: Bytes, bits: int) -> Bytes:
    """[N, n] levels as [N, ceil(n * bits / 8)] bytes, 8 / bits levels in each, the first in the low bits."""
    if bits == 8:
        return levels
    count = 8 // bits
    levels = np.pad(levels, ((0, 0), (0, -levels.shape[1] % count)))
    packed = levels[:, ::count].copy()
    for place in range(1, count):
        packed |= np.left_shift(levels[:, place::count], place * bits, dtype=np.uint8)
    return packed


def middle_zero_points(rows: int, blocks: int, bits: int) -> Bytes:
    """The zero points that MatMulNBits takes without such an input, 2 ** (bits - 1) each: packed by row, flat."""
    return np.full(rows * -(-blocks * bits // 8), 0x88 if bits == 4 else 0x80, np.uint8)
