"""GroupQueryAttention of a foreign graph: on the contract's lengths, over whole caches, with what the CPU's kernel
has."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.exporters.foreign.interface import ForeignGraph, Layer, refusal
from qsample.exporters.foreign.nodes import Nodes
from qsample.exporters.foreign.original import Original
from qsample.exporters.foreign.rows import Rows
from qsample.graph.gqa import Slot, get_input, set_inputs
from qsample.tensors import Array

_QUERY_SEQLENS: Final = 16
_REFUSED: Final = {
    Slot.K_SCALE: "its cache is quantized; take the file with a float cache, and `qsample compile --kv-cache-dtype "
    "int8`",
    Slot.V_SCALE: "its cache is quantized; take the file with a float cache, and `qsample compile --kv-cache-dtype "
    "int8`",
}
_FORBIDDEN_NUMBER: Final = -1e4  # a bias below it hides a key


def check_attentions(foreign: ForeignGraph) -> None:
    """Raise UnsupportedModelError for attention that is no causal one over a float cache."""
    for layer in foreign.layers:
        node = layer.attention
        assert node is not None
        for slot, why in _REFUSED.items():
            if get_input(node, slot) is not None:
                raise refusal(foreign.path, why)
        if not node.attributes.get_int("causal", 1):
            raise refusal(foreign.path, f"{node.name} is not causal")
        if node.attributes.get_int("qk_output", 0):
            raise refusal(foreign.path, f"{node.name} returns its scores; export it without qk_output")


def windows(foreign: ForeignGraph) -> list[int]:
    """The attention window of each layer; -1 = none."""
    return [layer.attention.attributes.get_int("local_window_size", -1) for layer in foreign.layers if layer.attention]


def rotates(foreign: ForeignGraph) -> bool:
    """Whether the attentions rotate by themselves, so that positions are read nowhere else."""
    return all(layer.attention.attributes.get_int("do_rotary", 0) for layer in foreign.layers if layer.attention)


def unfuse_norms(foreign: ForeignGraph) -> bool:
    """Take the norms of queries and keys out of GroupQueryAttention, in place: the CPU's kernel has none. Returns
    whether there were any. A compile for CUDA puts them back."""
    nodes, modified = Nodes(foreign.graph), False
    for layer in foreign.layers:
        node = layer.attention
        assert node is not None
        weights = get_input(node, Slot.Q_NORM_WEIGHT), get_input(node, Slot.K_NORM_WEIGHT)
        if weights[0] is None or weights[1] is None:
            continue
        heads = node.attributes.get_int("num_heads", 0)
        query, key, value = _separate(node, layer, nodes, heads)
        epsilon = node.attributes.get_float("qk_norm_epsilon", 1e-6)
        normed = []
        for kind, source, weight, count in (("q", query, weights[0], heads), ("k", key, weights[1], layer.heads)):
            shape = ["B", "S", count, layer.head_dim]
            own = node.attributes.get_float(f"{kind}_norm_epsilon", epsilon)
            split = nodes.reshaped(source, count, layer.head_dim)
            norm = nodes(
                "SimplifiedLayerNormalization", [split, weight], source.dtype, shape, axis=-1, epsilon=own, stash_type=1
            )
            normed.append(nodes.reshaped(norm, count * layer.head_dim))
        set_inputs(node, {Slot.QUERY: normed[0], Slot.KEY: normed[1], Slot.VALUE: value})
        set_inputs(node, {Slot.Q_NORM_WEIGHT: None, Slot.K_NORM_WEIGHT: None})
        node.resize_inputs(Slot.Q_NORM_WEIGHT)
        for name in ("qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon"):
            node.attributes.pop(name, None)
        modified = True
    if modified:
        foreign.graph.sort()
    return modified


def _separate(node: ir.Node, layer: Layer, nodes: Nodes, heads: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Queries, keys and values [B, S, heads * D], cut out of one tensor where they are packed."""
    query, key, value = (get_input(node, slot) for slot in (Slot.QUERY, Slot.KEY, Slot.VALUE))
    assert query is not None
    if key is not None and value is not None:
        return query, key, value
    sizes = [heads * layer.head_dim, layer.heads * layer.head_dim, layer.heads * layer.head_dim]
    parts = nodes.several(
        "Split", [query, nodes.integers(*sizes)], [(query.dtype, ["B", "S", size]) for size in sizes], axis=-1
    )
    return parts[0], parts[1], parts[2]


def drop_causal_biases(foreign: ForeignGraph, longest: int) -> None:
    """Take biases away that say no more than the attention does by itself: causal, with its window; in place.

    longest: how many tokens a cache can hold. Told by running the file on a few tokens, and on one behind a full cache.
    Raises UnsupportedModelError for a bias that says more.
    """
    biases = {layer.number: bias for layer in foreign.layers if (bias := _bias(layer)) is not None}
    if not biases:
        return
    original = Original(foreign, biases.values())
    generator = np.random.default_rng(0)
    for past, tokens in ((0, 9), (longest - 1, 1)):
        results = original.run([1] * tokens, original.filled(past, generator), past)
        for layer in foreign.layers:
            if layer.number in biases:
                window = layer.attention.attributes.get_int("local_window_size", -1) if layer.attention else -1
                if not _is_causal(results[str(biases[layer.number].name)], past, window):
                    raise refusal(foreign.path, f"layer {layer.number} adds an attention bias that is no causal mask")
    for layer in foreign.layers:
        if layer.attention is not None and layer.number in biases:
            set_inputs(layer.attention, {Slot.ATTENTION_BIAS: None})


def _is_causal(bias: Array, past: int, window: int) -> bool:
    """Whether `bias` [1, heads or 1, S, past + S] hides what a causal attention with this window hides, or less."""
    query, key = np.arange(past, past + bias.shape[-2])[:, None], np.arange(bias.shape[-1])
    seen = key <= query
    if window > 0:
        seen &= key > query - window
    inside = bias[..., seen]
    outside = bias[..., ~seen]
    return bool((inside == 0).all() and ((outside == 0) | (outside < _FORBIDDEN_NUMBER)).all())


def use_rows(foreign: ForeignGraph, rows: Rows) -> None:
    """Let every GroupQueryAttention read the rows' lengths, and keep all tokens; in place."""
    for layer in foreign.layers:
        node = layer.attention
        assert node is not None
        set_inputs(node, {Slot.SEQLENS_K: rows.seqlens_k, Slot.TOTAL_SEQUENCE_LENGTH: rows.total_sequence_length})
        for slot in (Slot.POSITION_IDS, _QUERY_SEQLENS):
            if get_input(node, slot) is not None:  # they say what the lengths say
                node.replace_input_with(slot, None)
        node.attributes.pop("sliding_window_cache", None)
        while node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)


def _bias(layer: Layer) -> ir.Value | None:
    return None if layer.attention is None else get_input(layer.attention, Slot.ATTENTION_BIAS)
