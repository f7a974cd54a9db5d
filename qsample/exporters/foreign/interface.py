"""A decoder file enters; the meaning of its inputs and outputs leaves, or a line that says why it cannot be baked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.errors import UnsupportedModelError
from qsample.graph import gqa
from qsample.graph.edit import reads
from qsample.graph.gqa import Slot

IDS: Final = "input_ids"
MASK: Final = "attention_mask"
POSITIONS: Final = "position_ids"
LOGITS: Final = "logits"
# How many logits a graph shall compute: 0 = all.
KEEP: Final = ("num_logits_to_keep", "logits_to_keep")
_CALLS: Final = (IDS, MASK, POSITIONS, *KEEP)
_OLDEST: Final = 14
_NEWEST: Final = 23
_MOST_NODES: Final = 200_000  # a graph of 100 layers has a tenth of that

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
    r".*(conv|recurrent|ssm).*": "it has recurrent states, which a foreign graph updates for padding, too; "
    "export the checkpoint with `qsample export`",
}
_DYNAMIC: Final = (
    "it quantizes activations with a single scale per tensor ({}), so that a row would depend on the rest of its batch"
)
_REFUSED_OPERATORS: Final = {
    "MatMulInteger": _DYNAMIC,
    "DynamicQuantizeMatMul": _DYNAMIC,
    "MatMulIntegerToFloat": _DYNAMIC,
    "DynamicQuantizeLinear": _DYNAMIC,
    "PagedAttention": "its cache is paged ({}); export it without use_paged_attention",
    "LinearAttention": "it has recurrent layers ({}); export the checkpoint with `qsample export`",
    "CausalConvWithState": "it has recurrent layers ({}); export the checkpoint with `qsample export`",
    "Loop": "it has a {} that may go through tokens; export the checkpoint with `qsample export`",
    "Scan": "it has a {} that may go through tokens; export the checkpoint with `qsample export`",
} | dict.fromkeys(
    ("MultiHeadAttention", "DecoderMaskedMultiHeadAttention", "Attention", "SparseAttention", "DecoderAttention"),
    "it attends through {}; only GroupQueryAttention and plain operators (MatMul, Softmax, MatMul) can be baked",
)


@dataclass(frozen=True, slots=True)
class Layer:
    """The cache of an attention layer: graph inputs and outputs, [B, heads, tokens, head_dim].

    number: the layer's in the names. ring: tokens that the file keeps; None = all. attention: the operator; None =
    plain operators.
    """

    number: int
    past_key: ir.Value
    past_value: ir.Value
    present_key: ir.Value
    present_value: ir.Value
    heads: int
    head_dim: int
    ring: int | None = None
    attention: ir.Node | None = None

    @property
    def pasts(self) -> tuple[ir.Value, ir.Value]:
        return self.past_key, self.past_value

    @property
    def presents(self) -> tuple[ir.Value, ir.Value]:
        return self.present_key, self.present_value


@dataclass(frozen=True, slots=True)
class ForeignGraph:
    """A decoder file, read. dtype: of the cache. changed: whether the inputs of `model` differ from
    those of the file."""

    path: Path
    model: ir.Model
    layers: tuple[Layer, ...]
    logits: ir.Value
    vocab_size: int
    dtype: ir.DataType
    changed: bool = False

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    def input(self, name: str) -> ir.Value | None:
        return next((value for value in self.graph.inputs if value.name == name), None)


def load(path: Path) -> ir.Model:
    """The model in `path`, without functions, its constants as initializers; weights next to it stay mapped."""
    try:
        model = ir.load(path)
    except Exception as error:  # protobuf has its own kinds
        raise UnsupportedModelError(f"{path} is not an ONNX file ({type(error).__name__}: {error!s:.200})") from error
    if model.functions:
        _inline(path, model)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common_passes.RemoveUnusedNodesPass()(model)
    return model


def _inline(path: Path, model: ir.Model) -> None:
    """Put the bodies of functions in place of their calls."""
    calls = {
        name: Counter(node.op_identifier() for node in function.all_nodes())
        for name, function in model.functions.items()
    }
    sizes: dict[ir.OperatorIdentifier, int] = {}
    try:
        for name in TopologicalSorter(
            {name: called.keys() & calls.keys() for name, called in calls.items()}
        ).static_order():
            sizes[name] = sum(count * sizes.get(called, 1) for called, count in calls[name].items())
    except CycleError:
        raise refusal(path, "its functions call one another in a circle") from None
    total = sum(sizes.get(node.op_identifier(), 1) for node in model.graph.all_nodes())
    if total > _MOST_NODES:
        raise refusal(path, f"its functions stand for {total} nodes, and bake reads at most {_MOST_NODES}")
    try:
        common_passes.InlinePass()(model)
    except ValueError as error:
        raise refusal(path, f"its functions cannot be inlined ({' '.join(str(error).split())!s:.200})") from error


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
    odd = [str(value.name) for value in caches if value.shape is None or len(value.shape) != 4]
    if odd:
        raise refusal(path, f"its input {odd[0]} is neither a known input nor keys or values [B, heads, tokens, size]")
    attentions = gqa.attentions(graph)
    changed = _narrow_caches(graph, caches)
    layers = _operator_layers(path, graph, attentions, head_dim) if attentions else _plain_layers(path, graph)
    unused = {str(value.name) for value in caches} - {str(value.name) for layer in layers for value in layer.pasts}
    if unused:
        raise refusal(path, f"its input {min(unused)} is a state that no attention reads")
    dtypes = {value.dtype for value in caches}
    if len(dtypes) > 1 or not dtypes <= {ir.DataType.FLOAT, ir.DataType.FLOAT16}:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise refusal(path, f"its cache is {found}; this machine's CPU checks float32 and float16 caches")
    size = _vocab_size(graph, named[LOGITS], vocab_size)
    if size is None:
        raise refusal(path, "no file states the size of its vocabulary; put its config.json next to it")
    dtype = next(iter(dtypes))
    assert dtype is not None
    ordered = tuple(sorted(layers, key=lambda layer: layer.number))
    return ForeignGraph(path, model, ordered, named[LOGITS], size, dtype, changed)


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


def refusal(path: Path, why: str) -> UnsupportedModelError:
    """An error of a single line: the file, and why it cannot be baked."""
    return UnsupportedModelError(f"{path} cannot be baked: {why}")


def _check_inputs(path: Path, model: ir.Model) -> None:
    names = [str(value.name) for value in model.graph.inputs]
    for name in names:
        for pattern, why in _REFUSED_INPUTS.items():
            if re.fullmatch(pattern, name):
                raise refusal(path, why)
    if IDS not in names:
        raise refusal(path, f"it has no input {IDS}, only {', '.join(names[:3])}")


def _check_operators(path: Path, model: ir.Model) -> None:
    counts = Counter(node.op_type for node in model.graph.all_nodes())
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
        layers.append(Layer(number, key, value, node.outputs[1], node.outputs[2], heads, size, ring, node))
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


def _plain_layers(path: Path, graph: ir.Graph) -> list[Layer]:
    """Caches that grow by a Concat; their names distinguish keys from values."""
    outputs = set(graph.outputs)
    keys: dict[int, tuple[ir.Value, ir.Value]] = {}
    values: dict[int, tuple[ir.Value, ir.Value]] = {}
    for index, past in enumerate(value for value in graph.inputs if value.name not in _CALLS):
        grown = [
            node for node, place in past.uses() if node.op_type == "Concat" and place == 0 and len(node.inputs) == 2
        ]
        if len(grown) != 1 or grown[0].outputs[0] not in outputs:
            raise refusal(
                path,
                f"its cache {past.name} neither grows by a Concat whose result it returns nor is GroupQueryAttention's",
            )
        name = str(past.name)
        if re.search(r"key(?!_values)", name):
            kind = keys
        elif "value" in name.replace("key_values", ""):
            kind = values
        else:
            raise refusal(path, f"the name {name} says neither key nor value")
        kind[layer_number(past, index // 2)] = (past, grown[0].outputs[0])
    if keys.keys() != values.keys():
        raise refusal(path, "it has not as many caches of keys as of values")
    layers = []
    for number, (past, present) in keys.items():
        assert past.shape is not None
        heads, size = past.shape[1], past.shape[3]
        if not isinstance(heads, int) or not isinstance(size, int):
            raise refusal(path, f"{past.name} has no fixed number and size of heads")
        layers.append(Layer(number, past, values[number][0], present, values[number][1], heads, size))
    return layers


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
