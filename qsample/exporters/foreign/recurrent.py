"""The recurrent layers of a foreign graph keep their states over padding, over calls in which a row has no token, and
start from zeros if the row begins.

LinearAttention and CausalConvWithState read all tokens of a call. Of a token that is not real, keys, values and decay
become 0, so that nothing is written and nothing decays. The inputs of a convolution are kept up to the row's last real
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.contract.tensors import RUNNING
from qsample.exporters.foreign.recognise import IDS, ForeignGraph, Recurrence
from qsample.exporters.foreign.rows import PREFIX, Nodes, Rows
from qsample.graph.edit import initializer

_INT64: Final = ir.DataType.INT64
_BOOL: Final = ir.DataType.BOOL
# Inputs of LinearAttention. Without decay or beta, it has no such input.
_KEY, _VALUE, _DECAY, _BETA = 1, 2, 4, 5
_STATE: Final = 3
_LINEAR: Final = "recurrent_state"


def keep_states(foreign: ForeignGraph, nodes: Nodes, rows: Rows) -> ForeignGraph:
    """`foreign` with recurrences that read real tokens only, in place; the next states of convolutions are new values.

    Padding becomes the row's first token, whose hidden states are numbers: those of a padding token may be 0, and a
    norm of them NaN, which an attention would spread.
    """
    ids = foreign.input(IDS)
    assert ids is not None
    assert rows.status is not None
    one = nodes.integers(1)
    running = nodes("Equal", [rows.status, nodes.integers(RUNNING, dtype="int32")], _BOOL, ["B"])
    none = nodes.integers(0, dtype="int32")
    advances = nodes("Where", [running, rows.input_lengths, none], rows.input_lengths.dtype, ["B"])
    counts = nodes("Unsqueeze", [nodes("Cast", [advances], _INT64, ["B"], to=_INT64), one], _INT64, ["B", 1])
    real = nodes("Less", [rows.steps, counts], _BOOL, ["B", "S"])
    goes_on = nodes("Greater", [rows.lengths, none], _BOOL, ["B"])

    readers = [use for use in ids.uses() if not str(use[0].name).startswith(PREFIX)]
    first = nodes("Slice", [ids, nodes.integers(0), one, one], ids.dtype, ["B", 1])
    filled = nodes("Where", [real, ids, first], ids.dtype, ["B", "S"])
    for node, place in readers:
        node.replace_input_with(place, filled)

    real = nodes("Unsqueeze", [real, nodes.integers(2)], _BOOL, ["B", "S", 1])
    changed = []
    for each in foreign.recurrences:
        axes = nodes.integers(*range(1, 1 + len(each.shape)))
        kept = nodes("Unsqueeze", [goes_on, axes], _BOOL, ["B", *[1] * len(each.shape)])
        past = nodes("Where", [kept, each.past, _zero(nodes, each.dtype)], each.dtype, ["B", *each.shape])
        each.node.replace_input_with(_STATE, past)
        if each.kind == _LINEAR:
            _leave_out(each.node, (_KEY, _VALUE, _DECAY, _BETA), real, nodes)
            changed.append(each)
        else:
            changed.append(replace(each, present=_end_at_last(foreign, each, past, counts, nodes)))
    return replace(foreign, recurrences=tuple(changed))


def _zero(nodes: Nodes, dtype: ir.DataType) -> ir.Value:
    return initializer(nodes.graph, f"{PREFIX}zero_{dtype.name.lower()}", np.zeros((), dtype.numpy()))


def _leave_out(node: ir.Node, places: Sequence[int], real: ir.Value, nodes: Nodes) -> None:
    for place in places:
        value = node.inputs[place] if len(node.inputs) > place else None
        if value is not None:
            assert value.dtype is not None
            zero = _zero(nodes, value.dtype)
            node.replace_input_with(place, nodes("Where", [real, value, zero], value.dtype, value.shape))


def _end_at_last(foreign: ForeignGraph, each: Recurrence, past: ir.Value, counts: ir.Value, nodes: Nodes) -> ir.Value:
    """The next state of a convolution: the inputs [B, C, K - 1] before and up to the row's last real token."""
    channels, width = each.shape
    source = each.node.inputs[0]
    joined = nodes("Concat", [past, source], each.dtype, ["B", channels, None], axis=-1)
    columns = nodes("Add", [counts, nodes.integers(*range(width))], _INT64, ["B", width])
    columns = nodes("Unsqueeze", [columns, nodes.integers(1)], _INT64, ["B", 1, width])
    columns = nodes("Expand", [columns, nodes.integers(1, channels, 1)], _INT64, ["B", channels, width])
    present = nodes("GatherElements", [joined, columns], each.dtype, ["B", *each.shape], axis=-1)
    outputs = foreign.graph.outputs
    outputs[outputs.index(each.present)] = present
    present.name, each.present.name = each.present.name, f"{each.present.name}.padded"
    return present
