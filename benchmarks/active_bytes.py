"""The bytes of weights and states that one decode step of a compiled package has to read, for one row."""

from __future__ import annotations

import math
from pathlib import Path

import onnx_ir as ir

from qsample.graph import gqa, moe

_LOOKUPS = ("Gather", "GatherBlockQuantized")  # a row of a table
_TABLES = ("GroupQueryAttention", "RotaryEmbedding")  # of cosines and sines, a row of each


def active_bytes(package: Path, experts_per_token: int, history: int) -> int:
    """Weights once each, of a mixture those of `experts_per_token` experts; keys and values of `history` tokens, or of
    a layer's window; recurrent and convolutional states. Not activations, nor what is written."""
    graph = ir.load(package / "decoder.onnx").graph
    sizes: dict[ir.Value, int] = {}
    seen: dict[ir.Value | None, int] = {}  # keys and values → tokens that are read of them
    for node in graph:
        if node.op_type == gqa.OP_TYPE:
            window = node.attributes.get_int("local_window_size", -1)
            for slot in (gqa.Slot.PAST_KEY, gqa.Slot.PAST_VALUE):
                seen[node.inputs[slot]] = min(history, window) if window > 0 else history
        if node.op_type in _LOOKUPS or node.op_type in _TABLES:
            continue
        for value in node.inputs:
            if value is None or value.const_value is None or not value.is_initializer():
                continue
            sizes[value] = value.const_value.nbytes
            if node.op_type in (moe.OP_TYPE, moe.QUANTIZED_OP_TYPE):
                sizes[value] = sizes[value] * experts_per_token // int(value.const_value.shape.numpy()[0])
    return sum(sizes.values()) + sum(_state_bytes(value, seen.get(value, history)) for value in graph.inputs)


def _state_bytes(value: ir.Value, history: int) -> int:
    """Of one row of a model's own state; 0 for any other input."""
    if value.name is None or not value.name.startswith("past_key_values."):
        return 0
    assert value.shape is not None
    assert value.dtype is not None
    sizes = [dim for dim in value.shape[1:] if isinstance(dim, int)]
    if value.name.endswith((".key", ".value")):  # [B, heads, capacity, head size]
        sizes = [sizes[0], history, sizes[-1]]
    return math.prod(sizes) * int(value.dtype.itemsize)
