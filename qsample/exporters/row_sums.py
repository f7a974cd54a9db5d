"""Sums of a few numbers a row, as of a token's routing weights, in one order for every row.

ONNX Runtime's CPU adds up what is aligned in memory several numbers at a time. In a tensor [B, 10], every other row
begins beside such a boundary and would round otherwise: a row's place in the batch would decide its last bits.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.graph.edit import initializer, insert

_ALIGNED: Final = 16  # float32 of the widest registers
_MOST: Final = 256  # numbers a row; more are no routing weights, and would take a copy that costs something


def align_row_sums(model: ir.Model) -> None:
    """Pad what is summed over the last axis with zeros, in place, to a length at which every row is aligned alike."""
    for node in list(model.graph):
        length = _length(node)
        if length is not None and length % _ALIGNED and length & (length - 1):
            source = node.inputs[0]
            assert source is not None
            assert source.shape is not None
            padding = -length % _ALIGNED
            ends = np.array([*[0] * (2 * len(source.shape) - 1), padding], dtype=np.int64)
            pads = initializer(model.graph, f"pads_{len(source.shape)}_{padding}", ends)
            padded = insert(node, "Pad", [source, pads], [*source.shape[:-1], length + padding])
            node.replace_input_with(0, padded)


def _length(node: ir.Node) -> int | None:
    """How many numbers `node` sums in each row, where they are few, known, and the last axis alone."""
    source = node.inputs[0] if node.op_type == "ReduceSum" and len(node.inputs) == 2 else None
    if source is None or source.shape is None or node.inputs[1] is None:
        return None
    axes, length = ir.convenience.get_const_tensor(node.inputs[1]), source.shape[-1]
    if axes is None or axes.numpy().tolist() not in ([-1], [len(source.shape) - 1]):
        return None
    is_float = source.dtype is not None and source.dtype.is_floating_point()
    return length if is_float and isinstance(length, int) and length <= _MOST else None
