"""GroupQueryAttention, ONNX Runtime's attention operator: its inputs by name, and its windows.

Source:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.graph.edit import constant, initializer
from qsample.graph.operators import is_contrib

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
    QUERY_SEQLENS = 16  # from ONNX Runtime 1.32 on


def attentions(graph: ir.Graph) -> list[ir.Node]:
    """The GroupQueryAttention nodes of `graph`, in order; not in graphs inside it."""
    return [node for node in graph if is_contrib(node, OP_TYPE)]


def get_input(attention: ir.Node, slot: int) -> ir.Value | None:
    """The input in a slot; None if `attention` does not have it."""
    return attention.inputs[slot] if len(attention.inputs) > slot else None


def set_inputs(attention: ir.Node, inputs: Mapping[Slot, ir.Value | None]) -> None:
    """Connect `inputs` to their slots, in place; missing slots before them are added empty."""
    attention.resize_inputs(max(len(attention.inputs), max(inputs) + 1))
    for slot, value in inputs.items():
        attention.replace_input_with(slot, value)


WINDOW: Final = "local_window_size"
_MASK_RANK: Final = 4
_ARITHMETIC_OPERATORS: Final = (
    "Add",
    "Sub",
    "Div",
    "Mod",
    "Less",
    "LessOrEqual",
    "Greater",
    "GreaterOrEqual",
)


def narrow_windows(model: ir.Model, windows: Mapping[int, int]) -> int:
    """Replace each window that is a key of `windows` by its value, in place.

    Windows are attributes of attentions, or numbers in the arithmetic of masks. Returns the number
    of replaced windows.
    """
    numbers: dict[int, int] = {}
    for window, narrow in windows.items():
        numbers[window] = narrow
        numbers[-window] = -narrow
    count = 0
    for attention in attentions(model.graph):
        window = attention.attributes.get_int(WINDOW, -1)
        if window in windows:
            attention.attributes[WINDOW] = ir.AttrInt64(WINDOW, windows[window])
            count += 1
    for node in model.graph:
        if not _computes_mask(node):
            continue
        for index, value in enumerate(node.inputs):
            number = constant(value)
            if number is not None and number.size == 1 and number.item() in numbers:
                array = np.full_like(number, numbers[number.item()])
                name = f"window_{array.item()}_{array.dtype}"
                node.replace_input_with(index, initializer(model.graph, name, array))
                count += 1
    return count


def _computes_mask(node: ir.Node) -> bool:
    """Whether `node` is arithmetic of integers in a mask."""
    is_arithmetic = node.op_type in _ARITHMETIC_OPERATORS and not node.domain
    return is_arithmetic and any(_is_mask(value) for value in node.inputs)


def _is_mask(value: ir.Value | None) -> bool:
    """Whether `value` is computed, has integers, and has the rank of a mask."""
    if value is None or value.dtype is None or value.shape is None or constant(value) is not None:
        return False
    return value.dtype.is_integer() and len(value.shape) == _MASK_RANK
