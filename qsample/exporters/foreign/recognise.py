"""A decoder file enters; the meaning of its inputs and outputs leaves, or a line that says why it cannot be baked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import onnx_ir as ir

from qsample.exporters.foreign.graph_file import refusal
from qsample.graph import gqa
from qsample.graph.edit import reads
from qsample.graph.gqa import Slot
from qsample.graph.operators import is_contrib

IDS: Final = "input_ids"
MASK: Final = "attention_mask"
POSITIONS: Final = "position_ids"
LOGITS: Final = "logits"
# How many logits a graph shall compute: 0 = all.
KEEP: Final = ("num_logits_to_keep", "logits_to_keep")
# Of a cache of fixed size: where the new tokens are written, and how many tokens there are then; [B] each.
WRITE: Final = "write_indices"
FILLED: Final = "nonpad_kv_seqlen"
_CALLS: Final = (IDS, MASK, POSITIONS, *KEEP, WRITE, FILLED)
_OLDEST: Final = 14
_NEWEST: Final = 24

_FLAT, _BY_HEAD = 3, 4  # ranks of keys and values: [B, tokens, heads * size], [B, heads, tokens, size]
_PAST_OF_ATTENTION: Final = (4, 5)  # inputs of ONNX's Attention; its outputs 1 and 2 are the new ones
# Operators that keep a state: its name in the contract, and the index of the input.
_STATES: Final = {"CausalConvWithState": "conv_state", "LinearAttention": "recurrent_state"}
_STATE: Final = 3
_FLOATS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_REFUSED_INPUTS: Final = {
    r"use_cache_branch": "it is a merged decoder, two graphs under one If; take decoder_with_past_model.onnx, or a "
    "file of a newer export, with GroupQueryAttention or without use_cache_branch",
    r"inputs_embeds": "it has no token embedding: it takes inputs_embeds; take a file whose input is input_ids",
    r"block_table|slot_mapping|.*_blocks?": "its cache is paged (PagedAttention); export it without "
    "use_paged_attention",
    r"beam_idx|beam_width|cache_indirection": "its cache has the state of a beam search; export it without",
    r"encoder_.*|pixel_values.*|audio_.*|input_features": "it is not a language model of tokens alone",
    r"cache_position": "it takes cache_position, positions of its own; export it for ONNX Runtime (optimum, "
    "onnxruntime-genai)",
}
_RECURRENT: Final = r".*(conv|recurrent|ssm).*"  # names of states
_DYNAMIC: Final = (
    "it quantizes activations with a single scale per tensor ({}), so that a row would depend on the rest of its batch"
)
_PER_TOKEN: Final = (
    "it has a {} that may go through tokens; export it with ONNX Runtime's LinearAttention and CausalConvWithState "
    "(mobius without --ep onnx-standard), or the checkpoint with `qsample export`"
)
_REFUSED_OPERATORS: Final = {
    "MatMulInteger": _DYNAMIC,
    "DynamicQuantizeMatMul": _DYNAMIC,
    "MatMulIntegerToFloat": _DYNAMIC,
    "DynamicQuantizeLinear": _DYNAMIC,
    "PagedAttention": "its cache is paged ({}); export it without use_paged_attention",
    "Loop": _PER_TOKEN,
    "Scan": _PER_TOKEN,
} | dict.fromkeys(
    ("MultiHeadAttention", "DecoderMaskedMultiHeadAttention", "SparseAttention", "DecoderAttention", "Attention"),
    "it attends through {}; only GroupQueryAttention, ONNX's own Attention and plain operators (MatMul, Softmax, "
    "MatMul) can be baked",
)


@dataclass(frozen=True, slots=True)
class Layer:
    """The cache of an attention layer: graph inputs and outputs.

    Attributes:
        number: the layer's in the names.
        past_key, past_value, present_key, present_value: [B, heads, tokens, head_dim], or [B, tokens, heads *
            head_dim].
        ring: tokens that the file keeps; None = all.
        size: the tokens of a cache of fixed size; None = it grows.
        attention: the GroupQueryAttention; None = another operator, or several.
        new: keys and values of the new tokens, [B, heads, S, head_dim], if the file shows them.
        new_is_flat: `new` are [B, S, heads * head_dim].
    """

    number: int
    past_key: ir.Value
    past_value: ir.Value
    present_key: ir.Value
    present_value: ir.Value
    heads: int
    head_dim: int
    ring: int | None = None
    size: int | None = None
    attention: ir.Node | None = None
    new: tuple[ir.Value, ir.Value] | None = None
    new_is_flat: bool = False

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Of the file's keys or values, a row of `tokens` tokens; of a cache of fixed size: all its tokens."""
        tokens = tokens if self.size is None else self.size
        is_flat = self.past_key.shape is not None and len(self.past_key.shape) == _FLAT
        return (1, tokens, self.heads * self.head_dim) if is_flat else (1, self.heads, tokens, self.head_dim)

    @property
    def pasts(self) -> tuple[ir.Value, ir.Value]:
        return self.past_key, self.past_value

    @property
    def presents(self) -> tuple[ir.Value, ir.Value]:
        return self.present_key, self.present_value


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A LinearAttention or CausalConvWithState, and its state: a graph input and output, [B, ...].

    number, kind, shape: as in `interface.RecurrentShape`.
    """

    number: int
    kind: str
    shape: tuple[int, ...]
    dtype: ir.DataType
    node: ir.Node
    past: ir.Value
    present: ir.Value


@dataclass(frozen=True, slots=True)
class ForeignGraph:
    """A decoder file, read. dtype: of the cache. changed: whether the inputs of `model` differ from
    those of the file. recurrences: in the order of their layers."""

    path: Path
    model: ir.Model
    layers: tuple[Layer, ...]
    logits: ir.Value
    vocab_size: int
    dtype: ir.DataType
    changed: bool = False
    recurrences: tuple[Recurrence, ...] = ()

    @property
    def size(self) -> int | None:
        """The tokens of its caches; None = they grow."""
        return min((layer.size for layer in self.layers if layer.size is not None), default=None)

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    def input(self, name: str) -> ir.Value | None:
        return next((value for value in self.graph.inputs if value.name == name), None)


def recognise(
    path: Path, model: ir.Model, *, head_dim: int | None = None, vocab_size: int | None = None
) -> ForeignGraph:
    """Recognise the inputs and outputs of `model`, the file at `path`. head_dim, vocab_size: by its configuration.

    Raises UnsupportedModelError, in a single line, if it cannot be baked.
    """
    _check_inputs(path, model)
    _check_operators(path, model)
    graph = model.graph
    opset = graph.opset_imports.get("", 0)
    if not _OLDEST <= opset <= _NEWEST:
        raise refusal(path, f"its opset is {opset}; export it with {_OLDEST} to {_NEWEST}")
    named = {str(value.name): value for value in graph.outputs}
    if LOGITS not in named:
        raise refusal(
            path, f"it has no output {LOGITS}, only {', '.join(list(named)[:3])}; take the decoder with its head"
        )
    caches = [value for value in graph.inputs if value.name not in _CALLS]
    if not caches:
        raise refusal(
            path,
            "it has no cache; take the file with past_key_values among its inputs (optimum: text-generation-with-past)",
        )
    recurrences = _recurrences(path, graph)
    states = {recurrence.past for recurrence in recurrences}
    caches = [value for value in caches if value not in states]
    for value in caches:
        if re.fullmatch(_RECURRENT, str(value.name)):
            raise refusal(
                path,
                f"it has recurrent states, and {value.name} is not that of a LinearAttention or CausalConvWithState "
                "alone, so that padding would change it; export the checkpoint with `qsample export`",
            )
        rank = 0 if value.shape is None else len(value.shape)
        if rank != _BY_HEAD and (rank != _FLAT or all(node.op_type != "TensorScatter" for node, _ in value.uses())):
            raise refusal(
                path, f"its input {value.name} is neither a known input nor keys or values [B, heads, tokens, size]"
            )
    if not caches:
        raise refusal(path, "none of its layers attends; export the checkpoint with `qsample export`")
    attentions = gqa.attentions(graph)
    changed = _narrow_caches(graph, caches)
    if attentions:
        layers = _operator_layers(path, graph, attentions, head_dim)
    else:
        layers = _plain_layers(path, caches, set(graph.outputs))
    unused = {str(value.name) for value in caches} - {str(value.name) for layer in layers for value in layer.pasts}
    if unused:
        raise refusal(path, f"its input {min(unused)} is a state that no attention reads")
    dtypes = {value.dtype for value in caches}
    if len(dtypes) > 1 or not dtypes <= {*_FLOATS}:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise refusal(path, f"its cache is {found}; this machine's CPU checks float32 and float16 caches")
    size = _vocab_size(graph, named[LOGITS], vocab_size)
    if size is None:
        raise refusal(path, "no file states the size of its vocabulary; put its config.json next to it")
    dtype = next(iter(dtypes))
    assert dtype is not None
    ordered = tuple(sorted(layers, key=lambda layer: layer.number))
    return ForeignGraph(path, model, ordered, named[LOGITS], size, dtype, changed, recurrences)


def _narrow_caches(graph: ir.Graph, caches: Iterable[ir.Value]) -> bool:
    """Take caches in half precision that are cast to it after their inputs and back before their outputs, in place; the
    numbers themselves are of half precision, so nothing is lost. Returns whether anything changed."""
    narrowed = False
    for past in caches:
        casts = [node for node, _ in past.uses()]
        half = past.dtype == ir.DataType.FLOAT and casts and all(_casts_to(node, ir.DataType.FLOAT16) for node in casts)
        if not half:
            continue
        for node in casts:
            node.outputs[0].replace_all_uses_with(past)
            graph.remove(node, safe=True)
        past.type = ir.TensorType(ir.DataType.FLOAT16)
        narrowed = True
    for index, present in enumerate(graph.outputs):
        made = present.producer()
        if narrowed and present.name != LOGITS and made is not None and _casts_to(made, ir.DataType.FLOAT):
            source = made.inputs[0]
            assert source is not None
            name, present.name = present.name, f"{present.name}.wide"
            source.name, source.shape = name, present.shape
            source.type = ir.TensorType(ir.DataType.FLOAT16)
            graph.outputs[index] = source
    return narrowed


def _casts_to(node: ir.Node, dtype: ir.DataType) -> bool:
    return node.op_type == "Cast" and node.attributes.get_int("to", 0) == dtype


def _check_inputs(path: Path, model: ir.Model) -> None:
    names = [str(value.name) for value in model.graph.inputs]
    for name in names:
        for pattern, why in _REFUSED_INPUTS.items():
            if re.fullmatch(pattern, name):
                raise refusal(path, why)
    if IDS not in names:
        raise refusal(path, f"it has no input {IDS}, only {', '.join(names[:3])}")


def _check_operators(path: Path, model: ir.Model) -> None:
    counts = Counter(node.op_type for node in model.graph.all_nodes() if not is_onnx_attention(node))
    for operator, why in _REFUSED_OPERATORS.items():
        if operator in counts:
            raise refusal(path, why.format(operator) + (_other_files(path) if why is _DYNAMIC else ""))
    for node in model.graph:
        inner = [attribute for attribute in node.attributes.values() if attribute.type == ir.AttributeType.GRAPH]
        if inner and any(value.is_graph_input() and value.name not in _CALLS for value in reads(node)):
            raise refusal(path, f"it has a cache under an {node.op_type}: a merged decoder; take a newer export")


def _other_files(path: Path) -> str:
    """Advice: the files next to `path` without dynamic quantization."""
    others = [
        file.name
        for file in sorted(path.parent.glob("*.onnx"))
        if file != path and not re.search("quantized|int8|uint8", file.name)
    ]
    return f"; take {', '.join(others[:4])}" if others else "; take its q4, fp16 or fp32 file"


def _operator_layers(path: Path, graph: ir.Graph, attentions: list[ir.Node], head_dim: int | None) -> list[Layer]:
    inputs, outputs = set(graph.inputs), set(graph.outputs)
    layers = []
    for index, node in enumerate(attentions):
        key, value = gqa.get_input(node, Slot.PAST_KEY), gqa.get_input(node, Slot.PAST_VALUE)
        if key is None or value is None or key not in inputs or value not in inputs:
            raise refusal(path, f"{node.name} shares its cache with another layer, or has none")
        if len(node.outputs) < 3 or node.outputs[1] not in outputs or node.outputs[2] not in outputs:
            raise refusal(path, f"{node.name} does not return its cache")
        size = _head_dim(node, key) or head_dim
        if size is None:
            raise refusal(
                path, "no file states the size of its heads; put its config.json or genai_config.json next to it"
            )
        heads = node.attributes.get_int("kv_num_heads", 0)
        is_ring = node.attributes.get_int("sliding_window_cache", 0)
        ring = node.attributes.get_int("local_window_size", -1) if is_ring else None
        number = layer_number(key, index)
        states = key, value, node.outputs[1], node.outputs[2]
        layers.append(Layer(number, *states, heads, size, ring=ring, attention=node))
    return layers


def _head_dim(node: ir.Node, past: ir.Value) -> int | None:
    """D of a GroupQueryAttention, by its cache, its rotary table or its input."""
    assert past.shape is not None
    if isinstance(size := past.shape[3], int):
        return size
    heads, grouped = node.attributes.get_int("num_heads", 0), node.attributes.get_int("kv_num_heads", 0)
    packed = node.inputs[Slot.KEY] is None
    source, parts = (node.inputs[Slot.QUERY], heads + 2 * grouped) if packed else (node.inputs[Slot.KEY], grouped)
    if source is None or not parts:
        return None
    if source.shape is not None and len(source.shape) == 3 and isinstance(width := source.shape[2], int):
        return width // parts
    columns = _columns(source.producer())
    return None if columns is None else columns // parts or None


def is_onnx_attention(node: ir.Node) -> bool:
    """Whether `node` is ONNX's Attention, not ONNX Runtime's operator of that name."""
    return node.op_type == "Attention" and not node.domain


def _recurrences(path: Path, graph: ir.Graph) -> tuple[Recurrence, ...]:
    """The operators whose states are inputs and outputs of the graph, by their layers."""
    outputs, found = set(graph.outputs), []
    for index, node in enumerate(node for node in graph if is_contrib(node, *_STATES)):
        past = node.inputs[_STATE] if len(node.inputs) > _STATE else None
        present = node.outputs[1] if len(node.outputs) > 1 else None
        alone = past is not None and past.is_graph_input() and [user for user, _ in past.uses()] == [node]
        if past is None or present is None or not alone or present not in outputs:
            raise refusal(path, f"{node.name} does not keep a state of its own; export it with its states")
        shape = tuple(size for size in list(past.shape or ())[1:] if isinstance(size, int))
        if past.dtype not in _FLOATS or not shape or past.shape is None or len(shape) != len(past.shape) - 1:
            raise refusal(path, f"its state {past.name} has no fixed shape, or is not float32 or float16")
        kind, number = _STATES[node.op_type], layer_number(past, index)
        found.append(Recurrence(number, kind, shape, past.dtype, node, past, present))
    return tuple(sorted(found, key=lambda each: each.number))


def _plain_layers(path: Path, pasts: Iterable[ir.Value], outputs: set[ir.Value]) -> list[Layer]:
    """Caches that grow by a Concat or inside ONNX's Attention, or that TensorScatter writes into; their names
    distinguish keys from values."""
    keys: dict[int, _Cache] = {}
    values: dict[int, _Cache] = {}
    for index, past in enumerate(pasts):
        cache = _cache(past)
        if cache is None or cache.present not in outputs:
            raise refusal(
                path,
                f"its cache {past.name} is not one that a Concat or an attention operator makes longer, or that "
                "TensorScatter writes into, and whose new value is an output",
            )
        name = str(past.name)
        if re.search(r"key(?!_values)", name):
            kind = keys
        elif "value" in name.replace("key_values", ""):
            kind = values
        else:
            raise refusal(path, f"the name {name} says neither key nor value")
        kind[layer_number(past, index // 2)] = cache
    if keys.keys() != values.keys():
        raise refusal(path, "it has not as many caches of keys as of values")
    layers = []
    for number, key in keys.items():
        value = values[number]
        assert key.past.shape is not None
        width = key.past.shape[-1]
        if len(key.past.shape) == _BY_HEAD:
            heads, size = key.past.shape[1], width
        else:
            heads = _heads(key.present) or 0
            size = width // heads if isinstance(width, int) and heads else width
        if not isinstance(heads, int) or not isinstance(size, int) or not heads:
            raise refusal(path, f"{key.past.name} has no fixed number and size of heads")
        new = None if key.new is None or value.new is None else (key.new, value.new)
        states = key.past, value.past, key.present, value.present
        layers.append(Layer(number, *states, heads, size, size=key.size, new=new, new_is_flat=key.new_is_flat))
    return layers


class _Cache(NamedTuple):
    """Keys or values; the fields are those of `Layer`."""

    past: ir.Value
    present: ir.Value
    new: ir.Value | None
    new_is_flat: bool
    size: int | None = None


def _cache(past: ir.Value) -> _Cache | None:
    """The cache that `past` is of; None if it is kept in no known way."""
    assert past.shape is not None
    is_flat = len(past.shape) == _FLAT
    for node, place in past.uses():
        if node.op_type == "Concat" and place == 0 and len(node.inputs) == 2:
            return _Cache(past, node.outputs[0], node.inputs[1], is_flat)
        if is_onnx_attention(node) and place in _PAST_OF_ATTENTION and len(node.outputs) > place - 3:
            heads = node.attributes.get_int("q_num_heads", 0)
            return _Cache(past, node.outputs[place - 3], node.inputs[place - 3], heads > 0)
        if node.op_type == "TensorScatter" and place == 0:
            tokens = 1 if is_flat else 2
            axis = node.attributes.get_int("axis", -2)
            start = node.inputs[2] if len(node.inputs) > 2 else None
            is_linear = node.attributes.get_string("mode", "linear") == "linear"
            size = past.shape[tokens]
            is_known = start is not None and start.name == WRITE and (axis - tokens) % len(past.shape) == 0
            if is_known and is_linear and isinstance(size, int):
                return _Cache(past, node.outputs[0], node.inputs[1], is_flat, size)
    return None


def _heads(keys: ir.Value) -> int | None:
    """The number of heads of `keys` [B, tokens, heads * size], by the attention that reads them."""
    found = {node.attributes.get_int("kv_num_heads", 0) for node, _ in keys.uses() if is_onnx_attention(node)}
    return found.pop() or None if len(found) == 1 else None


def layer_number(value: ir.Value, index: int) -> int:
    """The number in a cache's name; `index` if it has none."""
    found = re.search(r"\d+", str(value.name))
    return int(found.group()) if found else index


def _vocab_size(graph: ir.Graph, logits: ir.Value, stated: int | None) -> int | None:
    """V: of the logits' shape, the head's weights, else as the configuration says."""
    if logits.shape is not None and isinstance(size := logits.shape[-1], int):
        return size
    node = logits.producer()
    while node is not None and node.op_type in ("Cast", "Mul", "Div", "Tanh", "Identity"):
        computed = [value for value in node.inputs if value is not None and value.const_value is None]
        node = computed[0].producer() if computed else None
    return _columns(node) or stated


def _columns(product: ir.Node | None) -> int | None:
    """N of a product [..., K] x [K, N]; None = unknown."""
    if product is not None and product.op_type == "MatMulNBits":
        return product.attributes.get_int("N", 0) or None
    weight = product.inputs[1] if product is not None and product.op_type in ("MatMul", "FusedMatMul", "Gemm") else None
    if product is None or weight is None or weight.shape is None or len(weight.shape) != 2:
        return None
    size = weight.shape[0 if product.attributes.get_int("transB", 0) else 1]
    return size if isinstance(size, int) else None
