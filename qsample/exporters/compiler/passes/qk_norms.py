"""A fused decode graph with rotary attention enters; the same graph with the norms of its queries and keys inside
GroupQueryAttention leaves. For CUDA, whose kernel alone has them."""

from __future__ import annotations

from typing import Final, NamedTuple

import onnx_ir as ir

_WEIGHTS: Final = (14, 15)  # places of q_norm_weight and k_norm_weight among GroupQueryAttention's inputs
_NORMS: Final = ("SimplifiedLayerNormalization", "RMSNormalization")


class _Norm(NamedTuple):
    """An RMS norm over each head of `source`, [B, S, heads * D]."""

    source: ir.Value
    weight: ir.Value
    epsilon: float


def absorb_qk_norms(model: ir.Model) -> bool:
    """Give each GroupQueryAttention that rotates by itself the norms before its queries and keys; in place.

    The operator norms before it rotates, as models with such norms do. Returns whether anything changed.
    """
    modified = False
    for node in model.graph:
        if node.op_type != "GroupQueryAttention" or node.domain != "com.microsoft":
            continue
        query, key = (_norm(value) for value in node.inputs[:2])
        if query is None or key is None or query.epsilon != key.epsilon or not node.attributes.get_int("do_rotary", 0):
            continue
        node.replace_input_with(0, query.source)
        node.replace_input_with(1, key.source)
        node.resize_inputs(max(len(node.inputs), _WEIGHTS[-1] + 1))
        for place, norm in zip(_WEIGHTS, (query, key), strict=True):
            node.replace_input_with(place, norm.weight)
        node.attributes["qk_norm_epsilon"] = ir.AttrFloat32("qk_norm_epsilon", query.epsilon)
        modified = True
    return modified


def _norm(value: ir.Value | None) -> _Norm | None:
    """The norm of the heads that `value` merges again, if that is how it was made."""
    merge = _producer(value, "Reshape")
    norm = merge.inputs[0].producer() if merge is not None and merge.inputs[0] is not None else None
    if norm is None or norm.op_type not in _NORMS or norm.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    split, weight = _producer(norm.inputs[0], "Reshape"), norm.inputs[1]
    if split is None or split.inputs[0] is None or weight is None or weight.shape is None:
        return None
    heads = norm.outputs[0].shape
    whole = heads is not None and len(heads) == 4 and list(weight.shape) == [heads[3]]
    return _Norm(split.inputs[0], weight, norm.attributes.get_float("epsilon", 1e-5)) if whole else None


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None
