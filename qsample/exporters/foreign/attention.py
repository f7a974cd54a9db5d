"""The attention of a foreign graph becomes GroupQueryAttention on the contract's lengths, over whole caches.

GroupQueryAttention of another exporter keeps only what the CPU's kernel has. Attention of plain operators, over a cache
that grows by Concat, is matched loosely: Softmax(f(query keys^T)) values. Runs of the file show what f is (a scale, a
soft cap, a causal mask, a window), and anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from qsample.exporters.foreign.interface import ForeignGraph, Layer, refusal
from qsample.exporters.foreign.original import Original, probes
from qsample.exporters.foreign.rows import Nodes, Rows
from qsample.graph.edit import constant, producer
from qsample.graph.gqa import OP_TYPE, Slot, get_input, set_inputs
from qsample.graph.operators import CONTRIB_DOMAIN
from qsample.tensors import Array

_QUERY_SEQLENS: Final = 16
_REFUSED: Final = {
    Slot.K_SCALE: "its cache is quantized; take the file with a float cache, and `qsample compile --kv-cache-dtype "
    "int8`",
    Slot.V_SCALE: "its cache is quantized; take the file with a float cache, and `qsample compile --kv-cache-dtype "
    "int8`",
}
_FORBIDDEN_NUMBER: Final = -1e4  # a bias below it hides a key
_PRODUCTS: Final = ("MatMul", "FusedMatMul")
_REPEATS: Final = ("Unsqueeze", "Expand", "Reshape", "Transpose", "Cast", "Identity", "Mul", "Div", "Tile")
_ELEMENTWISE: Final = ("Add", "Sub", "Where", "Mul", "Div", "Cast", "Tanh", "Identity", "Max", "Clip")
_WEIGHTS: Final = ("Cast", "Identity", "Dropout", "Where", "Reshape")
_HIDDEN_SCORE: Final = -1e4  # a key with a smaller score is hidden
# How far scores may be from the fitted rule, of the largest: float16 has 11 bits.
_FIT: Final = {ir.DataType.FLOAT: 1e-3, ir.DataType.FLOAT16: 2e-2}


def check_attentions(foreign: ForeignGraph) -> None:
    """Raise UnsupportedModelError for attention that is not causal, or not over a float cache."""
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
    """Queries, keys and values [B, S, heads * D], cut out of a single tensor if they are packed."""
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
    """Take biases away that only repeat the attention's own mask: causal, with its window; in place.

    longest: the capacity of a cache, in tokens. Raises UnsupportedModelError for any other bias.
    """
    biases = {layer.number: bias for layer in foreign.layers if (bias := _bias(layer)) is not None}
    if not biases:
        return
    original = Original(foreign, biases.values())
    generator = np.random.default_rng(0)
    for past, tokens in probes(longest):
        results = original.run([1] * tokens, original.filled(past, generator), past)
        for layer in foreign.layers:
            if layer.number in biases:
                window = layer.attention.attributes.get_int("local_window_size", -1) if layer.attention else -1
                if not _is_causal(results[str(biases[layer.number].name)], past, window):
                    raise refusal(
                        foreign.path, f"layer {layer.number} adds an attention bias that is not a causal mask"
                    )
    for layer in foreign.layers:
        if layer.attention is not None and layer.number in biases:
            set_inputs(layer.attention, {Slot.ATTENTION_BIAS: None})


def _is_causal(bias: Array, past: int, window: int) -> bool:
    """Whether `bias` [1, heads or 1, S, past + S] hides the same keys as causal attention with the window, or fewer."""
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
            if get_input(node, slot) is not None:  # they repeat the lengths
                node.replace_input_with(slot, None)
        node.attributes.pop("sliding_window_cache", None)
        while node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)


def _bias(layer: Layer) -> ir.Value | None:
    return None if layer.attention is None else get_input(layer.attention, Slot.ATTENTION_BIAS)


@dataclass(frozen=True, slots=True)
class Match:
    """Values of a layer.

    Attributes:
        layer: its cache.
        query: [B, heads, S, D], as it is multiplied with the keys.
        scores: the input of the softmax.
        cap: the soft cap, if any, as a constant or a computed value.
        output: [B, heads, S, D].
    """

    layer: Layer
    query: ir.Value
    scores: ir.Value
    cap: ir.Value | None
    output: ir.Value


@dataclass(frozen=True, slots=True)
class Rule:
    """The attributes of a layer's GroupQueryAttention. window: None = all tokens. softcap: 0 = none."""

    heads: int
    scale: float
    window: int | None
    softcap: float


def put_operators(
    foreign: ForeignGraph, nodes: Nodes, rows: Rows, matches: list[Match], rules: list[Rule]
) -> ForeignGraph:
    """`foreign` with a GroupQueryAttention in each layer, in place; its layers' outputs are new values."""
    graph, layers = foreign.graph, []
    for match, rule in zip(matches, rules, strict=True):
        layer, size = match.layer, match.layer.head_dim
        new = [_new_part(value) for value in layer.presents]
        flat = [
            nodes.merged_heads(value, foreign.dtype, heads, size)
            for value, heads in ((match.query, rule.heads), (new[0], layer.heads), (new[1], layer.heads))
        ]
        attributes: dict[str, Any] = {"num_heads": rule.heads, "kv_num_heads": layer.heads, "scale": rule.scale}
        if rule.window is not None:
            attributes["local_window_size"] = rule.window
        if rule.softcap:
            attributes["softcap"] = rule.softcap
        cache = ["B", layer.heads, "T", size]
        outputs = nodes.several(
            OP_TYPE,
            [*flat, *layer.pasts, rows.seqlens_k, rows.total_sequence_length],
            [(foreign.dtype, ["B", "S", rule.heads * size]), (foreign.dtype, cache), (foreign.dtype, cache)],
            domain=CONTRIB_DOMAIN,
            **attributes,
        )
        split = nodes.reshaped(outputs[0], rule.heads, size)
        by_head = nodes("Transpose", [split], foreign.dtype, ["B", rule.heads, "S", size], perm=[0, 2, 1, 3])
        match.output.replace_all_uses_with(by_head)
        for old, present in zip(layer.presents, outputs[1:], strict=True):
            graph.outputs[graph.outputs.index(old)] = present
            present.name, old.name = old.name, f"{old.name}.grown"
        layers.append(replace(layer, present_key=outputs[1], present_value=outputs[2], attention=outputs[0].producer()))
    return replace(foreign, layers=tuple(layers))


def _new_part(present: ir.Value) -> ir.Value:
    """The new tokens' keys or values, [B, heads, S, D]."""
    node = present.producer()
    assert node is not None
    assert node.inputs[1] is not None
    return node.inputs[1]


def match(foreign: ForeignGraph, layer: Layer) -> Match:
    """The attention of `layer`. Raises UnsupportedModelError if it is not of this form."""
    name = f"layer {layer.number}"
    with_values = _products_with(layer.present_value)
    with_keys = _products_with(layer.present_key)
    if len(with_values) != 1 or len(with_keys) != 1:
        raise refusal(foreign.path, f"the attention of {name} is not Softmax(query keys) values, one product each")
    product, output = with_keys[0], with_values[0]
    weights = output.inputs[0]
    softmax = next((node for node in _above(weights, _WEIGHTS) if node.op_type == "Softmax"), None)
    if softmax is None or softmax.inputs[0] is None:
        raise refusal(foreign.path, f"the attention of {name} has no Softmax before its values (a sink, or a sigmoid)")
    between = list(_above(softmax.inputs[0], _ELEMENTWISE))
    if product not in between or product.inputs[0] is None:
        raise refusal(foreign.path, f"the scores of {name} are not made of query keys by numbers and a mask alone")
    caps = [node for node in between if node.op_type == "Tanh" and product in _above(node.inputs[0], _ELEMENTWISE)]
    cap = _factor_behind(caps[0]) if caps else None
    if len(caps) > 1 or (caps and cap is None):
        raise refusal(foreign.path, f"the scores of {name} pass a Tanh that is not a soft cap")
    return Match(layer, product.inputs[0], softmax.inputs[0], cap, output.outputs[0])


def _products_with(value: ir.Value) -> list[ir.Node]:
    """Products whose second factor is `value`, its heads repeated or its axes turned."""
    found: dict[ir.Node, None] = {}
    waiting, seen = [value], {value}
    while waiting:
        for node, place in waiting.pop().uses():
            if node.op_type in _PRODUCTS and place == 1:
                found[node] = None
            elif node.op_type in _REPEATS and node.outputs[0] not in seen and (place == 0 or node.op_type == "Mul"):
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])
    return list(found)


def _above(value: ir.Value | None, through: tuple[str, ...]) -> Iterator[ir.Node]:
    """The nodes that `value` comes from, nearest first, up to those that are not in `through`, which come too."""
    waiting, seen = [value], set()
    while waiting:
        current = waiting.pop(0)
        node = producer(current)
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if node.op_type in through:
            waiting += [source for source in node.inputs[:3] if source is not None]


def _factor_behind(tanh: ir.Node) -> ir.Value | None:
    """C of c * tanh(x)."""
    value = tanh.outputs[0]
    users = [node for node, _ in value.uses()]
    while len(users) == 1 and users[0].op_type in ("Cast", "Identity"):
        value = users[0].outputs[0]
        users = [node for node, _ in value.uses()]
    if len(users) != 1 or users[0].op_type != "Mul":
        return None
    return next((source for source in users[0].inputs if source is not value), None)


def measure(foreign: ForeignGraph, matches: list[Match], longest: int) -> list[Rule]:
    """Measure the rule of each layer in the calls of `probes`, over caches of random numbers.

    longest: how many tokens a cache can hold. Raises UnsupportedModelError for a rule that GroupQueryAttention lacks.
    """
    extra = [value for match in matches for value in (match.query, match.scores, match.layer.present_key)]
    extra += [match.cap for match in matches if match.cap is not None and constant(match.cap) is None]
    original = Original(foreign, extra)
    generator = np.random.default_rng(0)
    runs = []
    for past, tokens in probes(longest):
        ids = generator.integers(0, foreign.vocab_size, tokens).tolist()
        runs.append(original.run(ids, original.filled(past, generator), past))
    return [_rule(foreign, match, runs) for match in matches]


def _rule(foreign: ForeignGraph, match: Match, runs: Sequence[Mapping[str, Array]]) -> Rule:
    layer, name = match.layer, f"layer {match.layer.number}"
    heads = runs[0][str(match.query.name)].shape[1]
    shapes = {run[str(value.name)].ndim for run in runs for value in (match.query, match.scores)}
    if shapes != {4} or heads % layer.heads or runs[0][str(match.query.name)].shape[-1] != layer.head_dim:
        raise refusal(foreign.path, f"the attention of {name} is not over [B, heads, S, size]")
    caps = {0.0}
    if match.cap is not None:
        number = constant(match.cap)
        found = [number] if number is not None else [run[str(match.cap.name)] for run in runs]
        caps = set(np.concatenate([np.ravel(value) for value in found]).astype(float).tolist())
    if len(caps) != 1:
        raise refusal(foreign.path, f"the soft cap of {name} is not a number")
    cap = caps.pop()
    seen = [_seen(run[str(match.scores.name)]) for run in runs]
    window = int(seen[-1][-1].sum())
    if not window or not all(np.array_equal(keys, _causal(keys.shape[0], keys.shape[1], window)) for keys in seen):
        raise refusal(foreign.path, f"the mask of {name} is not causal, with or without a window")
    scale = _scale(foreign, match, runs, seen, cap)
    return Rule(heads, scale, None if window >= seen[-1].shape[-1] else window, cap)


def _seen(scores: Array) -> Array:
    """[S, T]: which keys a query sees; none unless all heads see the same."""
    seen = scores[0] > _HIDDEN_SCORE
    return seen[0] if (seen == seen[:1]).all() else np.zeros_like(seen[0])


def _causal(tokens: int, total: int, window: int) -> Array:
    """[tokens, total]: the keys that the last of `total` tokens see."""
    query, key = np.arange(total - tokens, total)[:, None], np.arange(total)
    return (key <= query) & (key > query - window)


def _scale(
    foreign: ForeignGraph, match: Match, runs: Sequence[Mapping[str, Array]], seen: list[Array], cap: float
) -> float:
    """S of scores = s query keys, or cap tanh(s query keys / cap); fitted over all runs."""
    products, scores = [], []
    for results, visible in zip(runs, seen, strict=True):
        query = results[str(match.query.name)][0].astype(np.float64)
        keys = results[str(match.layer.present_key.name)][0].astype(np.float64)
        repeated = np.repeat(keys, len(query) // len(keys), axis=0)
        products.append((query @ repeated.transpose(0, 2, 1))[:, visible].ravel())
        scores.append(results[str(match.scores.name)][0].astype(np.float64)[:, visible].ravel())
    x, y = np.concatenate(products), np.concatenate(scores)
    linear = cap * np.arctanh(np.clip(y / cap, -0.999, 0.999)) if cap else y
    fitted = np.abs(y) < 0.9 * cap if cap else np.ones(len(y), bool)
    scale = float(x[fitted] @ linear[fitted] / max(float(x[fitted] @ x[fitted]), 1e-30))
    wanted = cap * np.tanh(scale * x / cap) if cap else scale * x
    if scale <= 0 or not np.abs(wanted - y).max() <= _FIT[foreign.dtype] * max(1.0, float(np.abs(y).max())):
        raise refusal(
            foreign.path,
            f"the scores of layer {match.layer.number} are not a multiple of query keys: it adds a bias that follows "
            "the distance (ALiBi), or norms them; export the checkpoint with `qsample export`",
        )
    return scale
