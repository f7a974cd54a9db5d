"""Makes the attention windows of a decode graph smaller, so that a short prompt runs past them: for the parity gate.

A window is a constant, in two places: an attribute of GroupQueryAttention, and an operand of the integer arithmetic on
[B, 1, S, T] that masks of plain operators are made by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.graph.edit import constant, initializer
from qsample.graph.gqa import attentions

_WINDOW: Final = "local_window_size"
_MASK_RANK: Final = 4
_ARITHMETIC: Final = ("Add", "Sub", "Div", "Mod", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")


def narrow_windows(model: ir.Model, windows: Mapping[int, int]) -> int:
    """Replace each window that is a key of `windows` by its value, in place. Returns how many places had one."""
    numbers = {sign * window: sign * narrow for window, narrow in windows.items() for sign in (1, -1)}
    places = 0
    for attention in attentions(model.graph):
        if (window := attention.attributes.get_int(_WINDOW, -1)) in windows:
            attention.attributes[_WINDOW] = ir.AttrInt64(_WINDOW, windows[window])
            places += 1
    for node in model.graph:
        if node.op_type not in _ARITHMETIC or node.domain or not any(_is_mask(value) for value in node.inputs):
            continue
        for index, value in enumerate(node.inputs):
            number = constant(value)
            if number is not None and number.size == 1 and number.item() in numbers:
                narrow = np.full_like(number, numbers[number.item()])
                name = f"window_{narrow.item()}_{narrow.dtype}"
                node.replace_input_with(index, initializer(model.graph, name, narrow))
                places += 1
    return places


def _is_mask(value: ir.Value | None) -> bool:
    """Whether `value` is computed, of integers, and of a mask's rank."""
    if value is None or value.dtype is None or value.shape is None or constant(value) is not None:
        return False
    return value.dtype.is_integer() and len(value.shape) == _MASK_RANK
