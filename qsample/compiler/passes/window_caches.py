"""Gives attention layers with a window caches that hold little more than the window.

GroupQueryAttention then forgets old tokens itself (`sliding_window_cache`, from ONNX Runtime 1.32 on): it keeps a row's
newest tokens at the start of the buffers, and moves them there once every SLACK tokens. A token that does not count
would push out one that does, so the operator is told how many of a row's tokens are real: none, if the row has ended.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.contract.tensors import INPUT_LENGTHS, LENGTHS, RUNNING, STATUS
from qsample.graph.edit import initializer, insert
from qsample.graph.gqa import WINDOW, Slot, attentions, get_input, set_inputs

# The kernels sum over blocks of a power of two, up to 512 keys of the usual heads: a cache that moves by a multiple of
# it gives the bits of a cache of all tokens.
SLACK: Final = 512
_WORTH: Final = (
    0.75  # the share of the context that a cache has at most, to be worth the loss of old tokens
)


def slide_windows(model: ir.Model, ctx_len: int) -> dict[str, int]:
    """Let each GroupQueryAttention of `model`, a decode graph with its sampler and the capacity `ctx_len`, keep a cache
    of its window and SLACK - 1 tokens, in place, if nothing else reads its cache, and it is smaller by enough. Returns
    the name of each such layer's keys and the tokens that its cache holds."""
    graph = model.graph
    held = dict[str, int]()
    for node in attentions(graph):
        window = node.attributes.get_int(WINDOW, -1)
        capacity = window + SLACK - 1
        states = [
            get_input(node, Slot.PAST_KEY),
            get_input(node, Slot.PAST_VALUE),
            *node.outputs[1:3],
        ]
        if (
            window < 1
            or capacity > _WORTH * ctx_len
            or not all(_is_of(state, node) for state in states)
        ):
            continue
        for state in states:
            assert state is not None
            assert state.shape is not None
            state.shape = ir.Shape([*state.shape[:2], capacity, *state.shape[3:]])
        node.attributes["sliding_window_cache"] = ir.AttrInt64("sliding_window_cache", 1)
        set_inputs(node, _counts(graph))
        assert states[0] is not None
        held[str(states[0].name)] = capacity
    return held


def _is_of(state: ir.Value | None, node: ir.Node) -> bool:
    """Whether a state that `node` reads or writes is an input or output of the graph, and no other node reads it, but
    for its batch."""
    return (
        state is not None
        and (state.is_graph_input() or state.is_graph_output())
        and all(user is node or _is_batch(user) for user, _ in state.uses())
    )


def _is_batch(node: ir.Node) -> bool:
    return (
        node.op_type == "Shape"
        and node.attributes.get_int("start", 0) == 0
        and node.attributes.get_int("end", 4) == 1
    )


def _counts(graph: ir.Graph) -> dict[Slot, ir.Value | None]:
    """The number of real tokens of each row, and the index of the last one: [B] int32 each. The operator wants at
    least one token before the new ones if there are none of these."""
    name = "window.seqlens_k"
    known = {value.name: value for node in graph for value in node.outputs}
    if name not in known:
        inputs = {value.name: value for value in graph.inputs}
        first = graph[0]
        lengths = inputs[LENGTHS.name]
        status = inputs[STATUS.name]
        assert lengths.shape is not None
        axes = list(lengths.shape)
        zero, one, run = (
            initializer(graph, f"window.{label}", np.array(number, LENGTHS.dtype))
            for label, number in (("zero", 0), ("one", 1), ("running", RUNNING))
        )
        runs = insert(first, "Equal", [status, run], axes, dtype=ir.DataType.BOOL)
        new = insert(
            first,
            "Where",
            [runs, inputs[INPUT_LENGTHS.name], zero],
            axes,
            dtype=lengths.dtype,
            name="window.new",
        )
        total = insert(first, "Max", [insert(first, "Add", [lengths, new], axes), one], axes)
        known |= {"window.new": new, name: insert(first, "Sub", [total, one], axes, name=name)}
    return {Slot.QUERY_SEQLENS: known["window.new"], Slot.SEQLENS_K: known[name]}
