"""The attention of a foreign graph becomes GroupQueryAttention on the contract's lengths, over
whole caches.

GroupQueryAttention of another exporter keeps only the features of the CPU's kernel. ONNX's
Attention, and attention of plain operators, is matched loosely: Softmax(f(query keys^T)) values,
with or without a sink. Runs of the file show the form of f (a scale, a soft cap, a causal mask, a
window), and any other is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from qsample.addons.bake.conventions import (
    MASK,
    POSITIONS,
    REFUSED_SLOTS,
    SCORES_BIAS,
    ForeignGraph,
    Layer,
    is_onnx_attention,
    is_plain_attention,
    refusal,
)
from qsample.addons.bake.original import Original, probes
from qsample.addons.bake.rows import PREFIX, Nodes, Rows
from qsample.contract.arrays import Array
from qsample.graph.edit import constant, initializer, producer
from qsample.graph.gqa import OP_TYPE, Slot, get_input, set_inputs
from qsample.graph.operators import CONTRIB_DOMAIN

_QUERY_SEQLENS: Final = 16
_PRODUCTS: Final = ("MatMul", "FusedMatMul")
# The inputs of ONNX's Attention for keys and values, and its output for scores.
_KEYS: Final = 1
_VALUES: Final = 2
_SCORES: Final = 3
_SCORES_MODE: Final = "qk_matmul_output_mode"
_WITH_CAP_AND_MASK: Final = 2
_REPEATS: Final = (
    "Unsqueeze",
    "Expand",
    "Reshape",
    "Transpose",
    "Cast",
    "Identity",
    "Mul",
    "Div",
    "Tile",
)
_ELEMENTWISE: Final = (
    "Add",
    "Sub",
    "Where",
    "Mul",
    "Div",
    "Cast",
    "Tanh",
    "Identity",
    "Max",
    "Clip",
)
_WEIGHTS: Final = ("Cast", "Identity", "Dropout", "Where", "Reshape", "Slice")
# A key with a smaller score or bias is hidden.
_HIDDEN_SCORE: Final = -1e4
# The largest difference of scores from the fitted rule, per unit of the largest score; float16 has
# 11 bits.
_FIT_TOLERANCES: Final = {ir.DataType.FLOAT: 1e-3, ir.DataType.FLOAT16: 2e-2}


def check_attentions(foreign: ForeignGraph) -> None:
    """Raise UnsupportedModelError for attention that is not causal, or not over a float cache."""
    for layer in foreign.layers:
        node = layer.attention
        assert node is not None
        for slot, why in REFUSED_SLOTS.items():
            if get_input(node, slot) is not None:
                raise refusal(foreign.path, why)
        if node.attributes.get_int("causal", 1) == 0:
            raise refusal(foreign.path, f"{node.name} is not causal")
        if node.attributes.get_int("qk_output", 0) != 0:
            raise refusal(
                foreign.path, f"{node.name} returns its scores; export it without qk_output"
            )


def windows(foreign: ForeignGraph) -> list[int]:
    """The attention window of each layer; -1 for none."""
    return [
        layer.attention.attributes.get_int("local_window_size", -1)
        for layer in foreign.layers
        if layer.attention
    ]


def rotates(foreign: ForeignGraph) -> bool:
    """Whether the attentions rotate by themselves, so that positions are read nowhere else."""
    return all(
        layer.attention.attributes.get_int("do_rotary", 0)
        for layer in foreign.layers
        if layer.attention
    )


def unfuse_norms(foreign: ForeignGraph) -> bool:
    """Take the norms of queries and keys out of GroupQueryAttention, in place; returns whether
    there were any. The CPU's kernel has none; a compile for CUDA puts them back."""
    nodes = Nodes(foreign.graph)
    modified = False
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
        for kind, source, weight, count in (
            ("q", query, weights[0], heads),
            ("k", key, weights[1], layer.heads),
        ):
            shape = ["B", "S", count, layer.head_dim]
            own = node.attributes.get_float(f"{kind}_norm_epsilon", epsilon)
            split = nodes.reshaped(source, count, layer.head_dim)
            norm = nodes(
                "SimplifiedLayerNormalization",
                [split, weight],
                source.dtype,
                shape,
                axis=-1,
                epsilon=own,
                stash_type=1,
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


def _separate(
    node: ir.Node, layer: Layer, nodes: Nodes, heads: int
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Queries, keys and values [B, S, heads * D], cut out of a single tensor if they are packed."""
    query, key, value = (get_input(node, slot) for slot in (Slot.QUERY, Slot.KEY, Slot.VALUE))
    assert query is not None
    if key is not None and value is not None:
        return query, key, value
    sizes = [heads * layer.head_dim, layer.heads * layer.head_dim, layer.heads * layer.head_dim]
    parts = nodes.several(
        "Split",
        [query, nodes.integers(*sizes)],
        [(query.dtype, ["B", "S", size]) for size in sizes],
        axis=-1,
    )
    return parts[0], parts[1], parts[2]


def drop_causal_biases(foreign: ForeignGraph, longest: int) -> None:
    """Take biases away that only repeat the attention's own mask, causal with its window, in place;
    UnsupportedModelError for any other bias. longest: the capacity of a cache, in tokens."""
    biases = [(layer, bias) for layer in foreign.layers if (bias := _bias(layer)) is not None]
    if not biases:
        return
    original = Original(foreign, [bias for _, bias in biases])
    generator = np.random.default_rng(0)
    for past, tokens in probes(longest):
        results = original.run([1] * tokens, original.filled(past, generator), past)
        for layer, bias in biases:
            assert layer.attention is not None
            window = layer.attention.attributes.get_int("local_window_size", -1)
            if not _repeats_the_mask(results[str(bias.name)], past, window):
                raise refusal(
                    foreign.path,
                    f"layer {layer.number} adds an attention bias that is not a causal mask",
                )
    for layer, _ in biases:
        assert layer.attention is not None
        set_inputs(layer.attention, {Slot.ATTENTION_BIAS: None})


def _repeats_the_mask(bias: Array, past: int, window: int) -> bool:
    """Whether `bias` [1, heads or 1, S, past + S] hides the same keys as causal attention with the
    window, or fewer."""
    tokens, size = bias.shape[-2:]
    seen = _causal((past, tokens), size, window if window > 0 else size)
    outside = bias[..., ~seen]
    return bool((bias[..., seen] == 0).all() and ((outside == 0) | (outside < _HIDDEN_SCORE)).all())


def unfuse_attentions(foreign: ForeignGraph) -> None:
    """Write each MultiHeadAttention over a cache that grows by Concat as two products and a
    Softmax, in place."""
    nodes = Nodes(foreign.graph)
    dtype = foreign.dtype
    found = [node for node in foreign.graph if is_plain_attention(node)]
    for node in found:
        query, keys, values = node.inputs[:3]
        heads = node.attributes.get_int("num_heads", 0)
        size = foreign.layers[0].head_dim
        split = nodes.integers(0, 0, heads, size)
        by_head = [
            nodes("Transpose", [nodes("Reshape", [value, split], dtype)], dtype, perm=perm)
            for value, perm in ((query, [0, 2, 1, 3]), (keys, [0, 2, 3, 1]), (values, [0, 2, 1, 3]))
            if value is not None
        ]
        scale = node.attributes.get_float("scale", 0.0)
        if scale == 0:  # the default
            scale = size**-0.5
        number = initializer(
            foreign.graph, f"{PREFIX}scale_{scale}", np.array(scale, dtype.numpy())
        )
        scores = nodes("Mul", [nodes("MatMul", by_head[:2], dtype), number], dtype)
        bias = get_input(node, SCORES_BIAS)
        if bias is not None:
            scores = nodes("Add", [scores, bias], dtype)
        weights = nodes("Softmax", [scores], dtype, axis=-1)
        output = nodes("MatMul", [weights, by_head[2]], dtype)
        node.outputs[0].replace_all_uses_with(nodes.merged_heads(output, dtype, heads, size))
        foreign.graph.remove(node, safe=True)
    if found:
        foreign.graph.sort()


def drop_unseen_rows(foreign: ForeignGraph, longest: int) -> None:
    """Take away, in place, what replaces the output of a query that sees no key by zeros:
    transformers' exporter puts it behind each attention. Every query of a package sees itself. A
    condition counts if it follows from the mask and from sizes alone, and is false throughout the
    calls of `probes`."""
    found = [node for node in foreign.graph if node.op_type == "Where" and _is_zero(node.inputs[1])]
    found = [node for node in found if _follows_from_sizes(node.inputs[0])]
    if not found:
        return
    original = Original(foreign, {value for node in found if (value := node.inputs[0]) is not None})
    generator = np.random.default_rng(0)
    runs = [
        original.run([1] * tokens, original.filled(past, generator), past)
        for past, tokens in probes(longest)
    ]
    for node in found:
        condition = node.inputs[0]
        kept = node.inputs[2]
        assert condition is not None
        assert kept is not None
        if not any(run[str(condition.name)].any() for run in runs):
            node.outputs[0].replace_all_uses_with(kept, replace_graph_outputs=True)
            foreign.graph.remove(node, safe=True)


def _is_zero(value: ir.Value | None) -> bool:
    number = None if value is None else constant(value)
    return number is not None and not number.any()


def _follows_from_sizes(value: ir.Value | None) -> bool:
    """Whether `value` is computed from the mask and from shapes alone, not from the contents of ids
    or caches."""
    waiting = [value]
    seen = set[ir.Value]()
    while waiting:
        current = waiting.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        if current.is_graph_input() and current.name not in (MASK, POSITIONS):
            return False
        node = producer(current)
        if node is not None and node.op_type not in ("Shape", "Size"):
            waiting += node.inputs
    return True


def use_rows(foreign: ForeignGraph, rows: Rows) -> None:
    """Let every GroupQueryAttention read the rows' lengths, and keep all tokens; in place."""
    for layer in foreign.layers:
        node = layer.attention
        assert node is not None
        set_inputs(
            node,
            {
                Slot.SEQLENS_K: rows.seqlens_k,
                Slot.TOTAL_SEQUENCE_LENGTH: rows.total_sequence_length,
            },
        )
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
    """The values of a layer's attention.

    Tensors of heads are [B, heads, S, D], or [B, S, heads * D] if `heads` is set.

    Attributes:
        layer: the cache of the layer, with its new keys and values.
        query: the left factor of the product with the keys.
        scores: the input of the softmax, [B, heads, S, tokens].
        cap: the soft cap as a constant or a computed value; None for no soft cap.
        output: the result of the attention.
        heads: the number of query heads, if the tensors are not split into heads.
        sink: the scores of the attention sink, which are the same for all queries: [1, heads, S,
            1].
    """

    layer: Layer
    query: ir.Value
    scores: ir.Value
    cap: ir.Value | float | None
    output: ir.Value
    heads: int | None = None
    sink: ir.Value | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """The attributes of a layer's GroupQueryAttention.

    Attributes:
        heads: the number of query heads.
        scale: the factor on the scores.
        window: the number of keys that a query sees; None for all keys.
        softcap: the soft cap; 0 for no soft cap.
        sink: [heads], the logit of each head's attention sink; None for no sinks.
    """

    heads: int
    scale: float
    window: int | None
    softcap: float
    sink: Array | None = None


def put_operators(
    foreign: ForeignGraph, nodes: Nodes, rows: Rows, matches: list[Match], rules: list[Rule]
) -> ForeignGraph:
    """`foreign` with a GroupQueryAttention in each layer, in place; its layers' outputs are new
    values."""
    graph = foreign.graph
    layers = []
    for match, rule in zip(matches, rules, strict=True):
        layer = match.layer
        size = match.layer.head_dim

        def flat(value: ir.Value, heads: int, is_flat: bool, size: int = size) -> ir.Value:
            return value if is_flat else nodes.merged_heads(value, foreign.dtype, heads, size)

        assert layer.new is not None
        query = flat(match.query, rule.heads, match.heads is not None)
        new = [flat(value, layer.heads, layer.new_is_flat) for value in layer.new]
        attributes: dict[str, Any] = {
            "num_heads": rule.heads,
            "kv_num_heads": layer.heads,
            "scale": rule.scale,
        }
        if rule.window is not None:
            attributes["local_window_size"] = rule.window
        if rule.softcap != 0:
            attributes["softcap"] = rule.softcap
        cache = ["B", layer.heads, "T", size]
        outputs = nodes.several(
            OP_TYPE,
            [query, *new, *layer.pasts, rows.seqlens_k, rows.total_sequence_length],
            [
                (foreign.dtype, ["B", "S", rule.heads * size]),
                (foreign.dtype, cache),
                (foreign.dtype, cache),
            ],
            domain=CONTRIB_DOMAIN,
            **attributes,
        )
        node = outputs[0].producer()
        assert node is not None
        if rule.sink is not None:
            name = f"{PREFIX}sink_{layer.number}"
            sink = initializer(graph, name, rule.sink.astype(foreign.dtype.numpy()))
            set_inputs(node, {Slot.HEAD_SINK: sink})
        output = outputs[0]
        if match.heads is None:
            split = nodes.reshaped(output, rule.heads, size)
            output = nodes(
                "Transpose", [split], foreign.dtype, ["B", rule.heads, "S", size], perm=[0, 2, 1, 3]
            )
        match.output.replace_all_uses_with(output)
        for old, present in zip(layer.presents, outputs[1:], strict=True):
            graph.outputs[graph.outputs.index(old)] = present
            present.name = old.name
            old.name = f"{old.name}.grown"
        layers.append(
            replace(layer, present_key=outputs[1], present_value=outputs[2], attention=node)
        )
    return replace(foreign, layers=tuple(layers))


def match(foreign: ForeignGraph, layer: Layer) -> Match:
    """The attention of `layer`; UnsupportedModelError for one of another form."""
    name = f"layer {layer.number}"
    grown = producer(layer.present_key)
    if grown is not None and is_onnx_attention(grown):
        return _of_operator(foreign, layer, grown)
    with_values = _products_with(layer.present_value, _VALUES)
    with_keys = _products_with(layer.present_key, _KEYS)
    if len(with_values) != 1 or len(with_keys) != 1:
        raise refusal(
            foreign.path,
            f"the attention of {name} is not Softmax(query keys) values, one product each",
        )
    product = with_keys[0]
    output = with_values[0]
    if is_onnx_attention(product) and product is output:
        return _of_operator(foreign, layer, product)
    weights = output.inputs[0]
    softmax = next((node for node in _above(weights, _WEIGHTS) if node.op_type == "Softmax"), None)
    if softmax is None or softmax.inputs[0] is None:
        raise refusal(
            foreign.path, f"the attention of {name} has no Softmax before its values (a sigmoid)"
        )
    scores, sink = _without_sink(softmax.inputs[0])
    between = list(_above(scores, _ELEMENTWISE))
    if product not in between or product.inputs[0] is None:
        raise refusal(
            foreign.path,
            f"the scores of {name} are not made of query keys by numbers and a mask alone",
        )
    caps = [
        node
        for node in between
        if node.op_type == "Tanh" and product in _above(node.inputs[0], _ELEMENTWISE)
    ]
    cap = _factor_behind(caps[0]) if caps else None
    if len(caps) > 1 or (caps and cap is None):
        raise refusal(foreign.path, f"the scores of {name} pass a Tanh that is not a soft cap")
    return Match(layer, product.inputs[0], scores, cap, output.outputs[0], sink=sink)


def _of_operator(foreign: ForeignGraph, layer: Layer, node: ir.Node) -> Match:
    """The attention of ONNX's operator; it gets a further output: its scores with cap and mask."""
    query = node.inputs[0]
    assert query is not None
    if len(node.outputs) > _SCORES:
        raise refusal(
            foreign.path, f"{node.name} returns its scores; export it without qk_matmul_output"
        )
    first = len(node.outputs)
    node.resize_outputs(_SCORES + 1)
    for value in node.outputs[first:_SCORES]:
        value.name = ""
    scores = node.outputs[_SCORES]
    scores.name = f"{PREFIX}scores_{layer.number}"
    scores.type = query.type
    node.attributes[_SCORES_MODE] = ir.AttrInt64(_SCORES_MODE, _WITH_CAP_AND_MASK)
    cap = node.attributes.get_float("softcap", 0.0)
    return Match(
        layer,
        query,
        scores,
        None if cap == 0 else cap,
        node.outputs[0],
        node.attributes.get_int("q_num_heads", None),
    )


def _without_sink(scores: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Split the sink's score from the token scores. A subtracted maximum is ignored: softmax does
    not depend on it."""
    node = producer(scores)
    if node is not None and node.op_type == "Sub":
        most = producer(node.inputs[1])
        if most is not None and most.op_type == "ReduceMax" and most.inputs[0] is node.inputs[0]:
            node = producer(node.inputs[0])
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2 or node.inputs[0] is None:
        return scores, None
    return node.inputs[0], node.inputs[1]


def _products_with(value: ir.Value, slot: int) -> list[ir.Node]:
    """Products with `value` on the right, its heads repeated or axes turned; or ONNX's Attention
    with it in `slot`."""
    found: dict[ir.Node, None] = {}
    waiting = [value]
    seen = {value}
    while waiting:
        for node, place in waiting.pop().uses():
            if place == (slot if is_onnx_attention(node) else 1) and node.op_type in (
                *_PRODUCTS,
                "Attention",
            ):
                found[node] = None
            elif (
                node.op_type in _REPEATS
                and node.outputs[0] not in seen
                and (place == 0 or node.op_type == "Mul")
            ):
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])
    return list(found)


def _above(value: ir.Value | None, through: tuple[str, ...]) -> Iterator[ir.Node]:
    """The nodes that `value` comes from, nearest first, up to and including the first nodes outside
    of `through`."""
    waiting = [value]
    seen = set()
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
    """Measure the rule of each layer in the calls of `probes`, over caches of random numbers of up
    to `longest` tokens. Raises UnsupportedModelError for a rule that GroupQueryAttention lacks."""
    extra = [
        value for match in matches for value in (match.query, match.scores, match.layer.present_key)
    ]
    numbers = [
        value
        for match in matches
        for value in (match.cap, match.sink)
        if isinstance(value, ir.Value)
    ]
    extra += [value for value in numbers if constant(value) is None]
    original = Original(foreign, extra)
    generator = np.random.default_rng(0)
    calls = probes(longest)
    runs = []
    for past, tokens in calls:
        ids = generator.integers(0, foreign.vocab_size, tokens).tolist()
        runs.append(original.run(ids, original.filled(past, generator), past))
    return [_rule(foreign, match, calls, runs) for match in matches]


def _rule(
    foreign: ForeignGraph,
    match: Match,
    calls: Sequence[tuple[int, int]],
    runs: Sequence[Mapping[str, Array]],
) -> Rule:
    layer = match.layer
    name = f"layer {match.layer.number}"
    query = _by_head(runs[0][str(match.query.name)], match.heads)
    is_known = query.ndim == 3 and all(run[str(match.scores.name)].ndim == 4 for run in runs)
    if not is_known or len(query) % layer.heads != 0 or query.shape[-1] != layer.head_dim:
        raise refusal(foreign.path, f"the attention of {name} is not over [B, heads, S, size]")
    caps = (
        {0.0}
        if match.cap is None
        else {float(cap) for each in _numbers(match.cap, runs) for cap in each.ravel()}
    )
    if len(caps) != 1:
        raise refusal(foreign.path, f"the soft cap of {name} is not a number")
    cap = caps.pop()
    seen = [_seen(run[str(match.scores.name)]) for run in runs]
    window = int(seen[-1][-1].sum())
    is_causal = all(
        np.array_equal(keys, _causal(call, keys.shape[1], window))
        for call, keys in zip(calls, seen, strict=True)
    )
    if window == 0 or not is_causal:
        raise refusal(foreign.path, f"the mask of {name} is not causal, with or without a window")
    scale = _scale(foreign, match, runs, seen, cap)
    sink = None
    if match.sink is not None:
        # [all queries, heads]
        sinks = np.concatenate(
            [each.reshape(len(query), -1).T for each in _numbers(match.sink, runs)]
        )
        sink = sinks[0]
        if (sinks != sink).any():
            raise refusal(foreign.path, f"the sink of {name} is not a number for each head")
    return Rule(len(query), scale, None if window >= seen[-1].shape[-1] else window, cap, sink)


def _numbers(value: ir.Value | float, runs: Sequence[Mapping[str, Array]]) -> list[Array]:
    """A constant, or a value in all runs."""
    if not isinstance(value, ir.Value):
        return [np.array(value)]
    number = constant(value)
    return [run[str(value.name)] for run in runs] if number is None else [number]


def _by_head(array: Array, heads: int | None) -> Array:
    """A row's vectors, [1, heads, tokens, D] or [1, tokens, heads * D], as [heads, tokens, D]."""
    row: Array = array[0]
    return row if heads is None else row.reshape(len(row), heads, -1).transpose(1, 0, 2)


def _seen(scores: Array) -> Array:
    """[S, T]: which keys a query sees; none unless all heads see the same."""
    seen = scores[0] > _HIDDEN_SCORE
    return seen[0] if (seen == seen[:1]).all() else np.zeros_like(seen[0])


def _causal(call: tuple[int, int], size: int, window: int) -> Array:
    """[S, size], for a cache of `size`: the keys that new tokens see. call: the numbers of cached
    and of new tokens."""
    past, tokens = call
    query = np.arange(past, past + tokens)[:, None]
    key = np.arange(size)
    return (key <= query) & (key > query - window)


def _scale(
    foreign: ForeignGraph,
    match: Match,
    runs: Sequence[Mapping[str, Array]],
    seen: list[Array],
    cap: float,
) -> float:
    """The s of scores = s query keys, or cap tanh(s query keys / cap); fitted over all runs."""
    products = []
    scores = []
    for results, visible in zip(runs, seen, strict=True):
        query = _by_head(results[str(match.query.name)], match.heads).astype(np.float64)
        keys = results[str(match.layer.present_key.name)].astype(np.float64)
        keys = _by_head(keys, match.layer.heads if keys.ndim == 3 else None)
        repeated = np.repeat(keys, len(query) // len(keys), axis=0)
        products.append((query @ repeated.transpose(0, 2, 1))[:, visible].ravel())
        scores.append(results[str(match.scores.name)][0].astype(np.float64)[:, visible].ravel())
    x = np.concatenate(products)
    y = np.concatenate(scores)
    linear = cap * np.arctanh(np.clip(y / cap, -0.999, 0.999)) if cap != 0 else y
    fitted = np.abs(y) < 0.9 * cap if cap != 0 else np.ones(len(y), bool)
    scale = float(x[fitted] @ linear[fitted] / max(float(x[fitted] @ x[fitted]), 1e-30))
    wanted = cap * np.tanh(scale * x / cap) if cap != 0 else scale * x
    if scale <= 0 or not np.abs(wanted - y).max() <= _FIT_TOLERANCES[foreign.dtype] * max(
        1.0, float(np.abs(y).max())
    ):
        raise refusal(
            foreign.path,
            f"the scores of layer {match.layer.number} are not a multiple of query keys: it adds a bias that follows "
            "the distance (ALiBi), or norms them; export the checkpoint with `qsample export`",
        )
    return scale
