"""The operators that exported graphs are made of: the version of ONNX's, and the domain of ONNX Runtime's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import onnx_ir as ir

# 23 blocks the skip-norm fusion and 24's TopK lacks a CUDA kernel, so 20 is the newest opset that loses nothing.
OPSET: Final = 20
CONTRIB_DOMAIN: Final = "com.microsoft"  # ONNX Runtime calls its own operators contrib operators


def is_contrib(node: ir.Node, *operators: str) -> bool:
    """Whether `node` is one of these operators of ONNX Runtime's own."""
    return node.domain == CONTRIB_DOMAIN and node.op_type in operators
