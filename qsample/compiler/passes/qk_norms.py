"""Moves the norms of queries and keys into GroupQueryAttention. For CUDA, whose kernel alone has them."""

from __future__ import annotations

from typing import Final, NamedTuple

import onnx_ir as ir

from qsample.graph.edit import producer
from qsample.graph.gqa import Slot, attentions, set_inputs

_NORMS: Final = ("SimplifiedLayerNormalization", "RMSNormalization")


class _Norm(NamedTuple):
    """An RMS norm over each head of `source`, [B, S, heads * D]."""

    source: ir.Value
    weight: ir.Value
    epsilon: float


def absorb_qk_norms(model: ir.Model) -> bool:
    """Give each GroupQueryAttention the norms before its queries and keys; in place. Returns whether anything changed.

    1. The attention rotates by itself (see rope_into_attention): it norms before that, as models with such norms do.
    2. Both norms are RMS norms over whole heads, between a reshape that splits the heads and one that merges them.
    3. Both have the same epsilon.
    """
    modified = False
    for node in attentions(model.graph):
        query, key = _norm(node.inputs[Slot.QUERY]), _norm(node.inputs[Slot.KEY])
        if query is None or key is None or query.epsilon != key.epsilon or not node.attributes.get_int("do_rotary", 0):
            continue
        set_inputs(node, {Slot.QUERY: query.source, Slot.KEY: key.source})
        set_inputs(node, {Slot.Q_NORM_WEIGHT: query.weight, Slot.K_NORM_WEIGHT: key.weight})
        node.attributes["qk_norm_epsilon"] = ir.AttrFloat32("qk_norm_epsilon", query.epsilon)
        modified = True
    return modified


def _norm(value: ir.Value | None) -> _Norm | None:
    """The norm of the heads that `value` merges again, if that is how it was made."""
    merge = _reshape(value)
    norm = None if merge is None else producer(merge.inputs[0])
    if norm is None or norm.op_type not in _NORMS or norm.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    split, weight = _reshape(norm.inputs[0]), norm.inputs[1]
    if split is None or split.inputs[0] is None or weight is None or weight.shape is None:
        return None
    heads = norm.outputs[0].shape
    whole = heads is not None and len(heads) == 4 and list(weight.shape) == [heads[3]]
    return _Norm(split.inputs[0], weight, norm.attributes.get_float("epsilon", 1e-5)) if whole else None


def _reshape(value: ir.Value | None) -> ir.Node | None:
    """The reshape that gives `value`, if one does."""
    node = producer(value)
    return node if node is not None and node.op_type == "Reshape" else None
