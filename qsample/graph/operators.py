"""The operators of exported graphs: ONNX's version, ONNX Runtime's domain, MatMulNBits' layout.

MatMulNBits is the product with weights of 2, 4 or 8 bits:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MatMulNBits

The module loads NumPy only, because the options of compile are checked even without onnx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import onnx_ir as ir

# The newest opset without a loss: 23 blocks the skip-norm fusion, and CUDA has no TopK of 24.
OPSET: Final = 20
# The domain of the operators that ONNX Runtime calls contrib operators.
CONTRIB_DOMAIN: Final = "com.microsoft"


def is_contrib(node: ir.Node, *operators: str) -> bool:
    """Whether `node` is one of these operators of ONNX Runtime."""
    return node.domain == CONTRIB_DOMAIN and node.op_type in operators


Bytes = npt.NDArray[np.uint8]
MATMUL_NBITS: Final = "MatMulNBits"
# Values of accuracy_level. The fast CPU kernels round the activations of each block to int8.
INT8_ACTIVATIONS: Final = 4
FLOAT32_ACTIVATIONS: Final = 1


def is_matmul_nbits(node: ir.Node) -> bool:
    """Whether `node` multiplies by quantized weights."""
    return is_contrib(node, MATMUL_NBITS)


def pack_bits(levels: Bytes, bits: int) -> Bytes:
    """Pack levels into bytes: [N, n] gives [N, ceil(n * bits / 8)].

    Each byte has 8 / bits levels, the first in the low bits.
    """
    if bits == 8:
        return levels
    count = 8 // bits
    levels = np.pad(levels, ((0, 0), (0, -levels.shape[1] % count)))
    packed = levels[:, ::count].copy()
    for place in range(1, count):
        packed |= np.left_shift(levels[:, place::count], place * bits, dtype=np.uint8)
    return packed


def middle_zero_points(rows: int, blocks: int, bits: int) -> Bytes:
    """The zero points, 2 ** (bits - 1), that MatMulNBits has without such an input.

    They are packed row by row: [rows * ceil(blocks * bits / 8)].
    """
    bytes_per_row = -(-blocks * bits // 8)
    return np.full(rows * bytes_per_row, 0x88 if bits == 4 else 0x80, np.uint8)
