"""GroupQueryAttention, ONNX Runtime's attention operator: its inputs by name, and the attentions of a graph.

Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

import onnx_ir as ir

from qsample.graph.opset import is_contrib

OP_TYPE: Final = "GroupQueryAttention"


class Slot(IntEnum):
    """The index of each input."""

    QUERY = 0
    KEY = 1
    VALUE = 2
    PAST_KEY = 3
    PAST_VALUE = 4
    SEQLENS_K = 5
    TOTAL_SEQUENCE_LENGTH = 6
    COS_CACHE = 7
    SIN_CACHE = 8
    POSITION_IDS = 9
    ATTENTION_BIAS = 10
    HEAD_SINK = 11
    K_SCALE = 12
    V_SCALE = 13
    Q_NORM_WEIGHT = 14
    K_NORM_WEIGHT = 15


def attentions(graph: ir.Graph) -> list[ir.Node]:
    """The GroupQueryAttention nodes of `graph`, in order; not those of graphs inside it."""
    return [node for node in graph if is_contrib(node, OP_TYPE)]


def get_input(attention: ir.Node, slot: int) -> ir.Value | None:
    """The input in a slot; None where `attention` has none."""
    return attention.inputs[slot] if len(attention.inputs) > slot else None


def set_inputs(attention: ir.Node, inputs: Mapping[Slot, ir.Value | None]) -> None:
    """Connect `inputs` to their slots, in place; slots in between that `attention` lacks are added empty."""
    attention.resize_inputs(max(len(attention.inputs), max(inputs) + 1))
    for slot, value in inputs.items():
        attention.replace_input_with(slot, value)
