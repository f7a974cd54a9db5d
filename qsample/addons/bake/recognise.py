"""A decoder file enters; its graph leaves with the meaning of its inputs and outputs, or a line that refuses it."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final, NamedTuple

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.addons.bake.conventions import (
    BY_HEAD,
    CALLS,
    DYNAMIC,
    FLAT,
    FLOATS,
    IDS,
    LOGITS,
    NEWEST_OPSET,
    OLDEST_OPSET,
    PAST_OF_ATTENTION,
    RECURRENT,
    REFUSED_INPUTS,
    REFUSED_OPERATORS,
    STATE,
    STATES,
    WRITE,
    ForeignGraph,
    Layer,
    Recurrence,
    is_onnx_attention,
    is_plain_attention,
    layer_number,
    refusal,
)
from qsample.errors import QsampleError, UnsupportedModelError
from qsample.graph import gqa
from qsample.graph.edit import reads
from qsample.graph.gqa import Slot
from qsample.graph.operators import CONTRIB_DOMAIN, is_contrib

# Operators of ONNX Runtime for which a file may have functions.
_OPERATORS: Final = (
    *("CausalConvWithState", "LinearAttention"),
    *("SkipSimplifiedLayerNormalization", "SkipLayerNormalization", "MatMulNBits"),
)
_UNITS: Final = ("rows", "tokens")  # of the axes of input_ids
_MOST_NODES: Final = 50_000  # a graph of 100 layers has half of that


def load(path: Path) -> ir.Model:
    """The model in `path`, without functions, its constants as initializers; weights next to it stay mapped. A function
    that says, for other runtimes, what an operator of ONNX Runtime computes stays an operator."""
    log = logging.getLogger("onnx_ir.serde")
    before, log.disabled = (
        log.disabled,
        True,
    )  # it prints names as they are; what is wrong is refused below
    try:
        model = ir.load(path)
    except Exception as error:  # protobuf raises kinds unknown here
        raise UnsupportedModelError(
            f"{path} is not an ONNX file ({type(error).__name__}: {error!s:.200})"
        ) from error
    finally:
        log.disabled = before
    for domain, name, overload in list(model.functions):
        if domain == CONTRIB_DOMAIN and name in _OPERATORS:
            del model.functions[domain, name, overload]
    if model.functions:
        _inline(path, model)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common_passes.RemoveUnusedNodesPass()(model)
    _read_sizes(model.graph)
    return model


def _read_sizes(graph: ir.Graph) -> None:
    """Make sizes of axes numbers, in place: torch's exporter writes some as names ("2")."""
    for value in (
        *graph.inputs,
        *graph.outputs,
        *(output for node in graph for output in node.outputs),
    ):
        if value.shape is not None and any(str(dim).isdecimal() for dim in value.shape):
            value.shape = ir.Shape(
                [int(str(dim)) if str(dim).isdecimal() else dim for dim in value.shape]
            )


@contextmanager
def graph_errors(path: Path) -> Iterator[None]:
    """Turn errors of the graph's libraries, and of a rewrite at an operator unlike its definition, into a refusal."""
    try:
        yield
    except (QsampleError, OSError, MemoryError):
        raise
    except Exception as error:
        raise refusal(
            path,
            f"its graph is not as its operators are defined ({type(error).__name__}: {error!s:.200})",
        ) from (error)


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
        raise refusal(
            path, f"its functions stand for {total} nodes, and bake reads at most {_MOST_NODES}"
        )
    try:
        common_passes.InlinePass()(model)
    except ValueError as error:
        raise refusal(
            path, f"its functions cannot be inlined ({' '.join(str(error).split())!s:.200})"
        ) from error


def recognise(
    path: Path, model: ir.Model, *, head_dim: int | None = None, vocab_size: int | None = None
) -> ForeignGraph:
    """Recognise the inputs and outputs of `model`, the file at `path`; UnsupportedModelError, in a single line, if it
    cannot be baked. head_dim, vocab_size: by its configuration."""
    _check_inputs(path, model)
    _check_operators(path, model)
    graph = model.graph
    opset = graph.opset_imports.get("", 0)
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise refusal(
            path, f"its opset is {opset}; export it with {OLDEST_OPSET} to {NEWEST_OPSET}"
        )
    named = {str(value.name): value for value in graph.outputs}
    if LOGITS not in named:
        raise refusal(
            path,
            f"it has no output {LOGITS}, only {', '.join(list(named)[:3])}; take the decoder with its head",
        )
    copied = _drop_copied(graph)
    caches = [value for value in graph.inputs if value.name not in CALLS]
    if not caches:
        raise refusal(
            path,
            "it has no cache; take the file with past_key_values among its inputs (optimum: text-generation-with-past)",
        )
    recurrences = _recurrences(path, graph)
    states = {recurrence.past for recurrence in recurrences}
    caches = [value for value in caches if value not in states]
    for value in caches:
        if re.fullmatch(RECURRENT, str(value.name)):
            raise refusal(
                path,
                f"it has recurrent states, and {value.name} is not that of a LinearAttention or CausalConvWithState "
                "alone, so that padding would change it; export the checkpoint with `qsample export`",
            )
        rank = 0 if value.shape is None else len(value.shape)
        if rank != BY_HEAD and (
            rank != FLAT or all(node.op_type != "TensorScatter" for node, _ in value.uses())
        ):
            raise refusal(
                path,
                f"its input {value.name} is neither a known input nor keys or values [B, heads, tokens, size]",
            )
    if not caches:
        raise refusal(
            path, "none of its layers attends; export the checkpoint with `qsample export`"
        )
    attentions = gqa.attentions(graph)
    changed = _narrow_caches(graph, caches) or copied
    if attentions:
        layers = _operator_layers(path, graph, attentions, head_dim)
    else:
        layers = _plain_layers(path, caches, set(graph.outputs))
    unused = {str(value.name) for value in caches} - {
        str(value.name) for layer in layers for value in layer.pasts
    }
    if unused:
        raise refusal(path, f"its input {min(unused)} is a state that no attention reads")
    dtypes = {value.dtype for value in caches}
    if len(dtypes) > 1 or not dtypes <= {*FLOATS}:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise refusal(
            path, f"its cache is {found}; this machine's CPU checks float32 and float16 caches"
        )
    size = _vocab_size(graph, named[LOGITS], vocab_size)
    if size is None:
        raise refusal(
            path, "no file states the size of its vocabulary; put its config.json next to it"
        )
    dtype = next(iter(dtypes))
    assert dtype is not None
    ordered = tuple(sorted(layers, key=lambda layer: layer.number))
    return ForeignGraph(path, model, ordered, named[LOGITS], size, dtype, changed, recurrences)


def _drop_copied(graph: ir.Graph) -> bool:
    """Take away scalar inputs that are only copied to outputs, in place: transformers' exporter hands the size of a
    window through. Returns whether there were any."""
    copies = [
        (value, node)
        for value in graph.inputs
        if value.shape is not None and not len(value.shape)
        for node in [use[0] for use in value.uses()]
        if len(value.uses()) == 1
        and node.op_type == "Identity"
        and node.outputs[0].is_graph_output()
    ]
    for value, node in copies:
        graph.outputs.remove(node.outputs[0])
        graph.remove(node, safe=True)
        graph.inputs.remove(value)
    return bool(copies)


def _narrow_caches(graph: ir.Graph, caches: Iterable[ir.Value]) -> bool:
    """Make caches float16, in place, if they are cast to it after their inputs and back before their outputs: nothing
    is lost. Returns whether anything changed."""
    narrowed = False
    for past in caches:
        casts = [node for node, _ in past.uses()]
        half = (
            past.dtype == ir.DataType.FLOAT
            and casts
            and all(_casts_to(node, ir.DataType.FLOAT16) for node in casts)
        )
        if not half:
            continue
        for node in casts:
            node.outputs[0].replace_all_uses_with(past)
            graph.remove(node, safe=True)
        past.type = ir.TensorType(ir.DataType.FLOAT16)
        narrowed = True
    for index, present in enumerate(graph.outputs):
        made = present.producer()
        if (
            narrowed
            and present.name != LOGITS
            and made is not None
            and _casts_to(made, ir.DataType.FLOAT)
        ):
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
        for pattern, why in REFUSED_INPUTS.items():
            if re.fullmatch(pattern, name):
                raise refusal(path, why)
    if IDS not in names:
        raise refusal(path, f"it has no input {IDS}, only {', '.join(names[:3])}")
    shape = next(value.shape for value in model.graph.inputs if value.name == IDS)
    fixed = [unit for dim, unit in zip(shape or (), _UNITS, strict=False) if isinstance(dim, int)]
    if fixed:
        raise refusal(
            path,
            f"its number of {' and '.join(fixed)} is fixed; export it for any number of both (transformers: "
            "OnnxConfig(dynamic=True) and export_for_generation(..., multi_token_decode=True))",
        )


def _check_operators(path: Path, model: ir.Model) -> None:
    counts = Counter(
        node.op_type
        for node in model.graph.all_nodes()
        if not is_onnx_attention(node) and not is_plain_attention(node)
    )
    for operator, why in REFUSED_OPERATORS.items():
        if operator in counts:
            raise refusal(
                path, why.format(operator) + (_other_files(path) if why is DYNAMIC else "")
            )
    for node in model.graph:
        inner = [
            attribute
            for attribute in node.attributes.values()
            if attribute.type == ir.AttributeType.GRAPH
        ]
        if inner and any(
            value.is_graph_input() and value.name not in CALLS for value in reads(node)
        ):
            raise refusal(
                path,
                f"it has a cache under an {node.op_type}: a merged decoder; take a newer export",
            )


def _other_files(path: Path) -> str:
    """Advice: the files next to `path` without dynamic quantization."""
    others = [
        file.name
        for file in sorted(path.parent.glob("*.onnx"))
        if file != path and not re.search("quantized|int8|uint8", file.name)
    ]
    return f"; take {', '.join(others[:4])}" if others else "; take its q4, fp16 or fp32 file"


def _operator_layers(
    path: Path, graph: ir.Graph, attentions: list[ir.Node], head_dim: int | None
) -> list[Layer]:
    inputs, outputs = set(graph.inputs), set(graph.outputs)
    layers = []
    for index, node in enumerate(attentions):
        key, value = gqa.get_input(node, Slot.PAST_KEY), gqa.get_input(node, Slot.PAST_VALUE)
        if key is None or value is None or key not in inputs or value not in inputs:
            raise refusal(path, f"{node.name} shares its cache with another layer, or has none")
        if (
            len(node.outputs) < 3
            or node.outputs[1] not in outputs
            or node.outputs[2] not in outputs
        ):
            raise refusal(path, f"{node.name} does not return its cache")
        size = _head_dim(node, key) or head_dim
        if size is None:
            raise refusal(
                path,
                "no file states the size of its heads; put its config.json or genai_config.json next to it",
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
    heads, grouped = (
        node.attributes.get_int("num_heads", 0),
        node.attributes.get_int("kv_num_heads", 0),
    )
    packed = node.inputs[Slot.KEY] is None
    source, parts = (
        (node.inputs[Slot.QUERY], heads + 2 * grouped)
        if packed
        else (node.inputs[Slot.KEY], grouped)
    )
    if source is None or not parts:
        return None
    if (
        source.shape is not None
        and len(source.shape) == 3
        and isinstance(width := source.shape[2], int)
    ):
        return width // parts
    columns = _columns(source.producer())
    return None if columns is None else columns // parts or None


def _recurrences(path: Path, graph: ir.Graph) -> tuple[Recurrence, ...]:
    """The operators whose states are inputs and outputs of the graph, by their layers."""
    outputs, found = set(graph.outputs), []
    for index, node in enumerate(node for node in graph if is_contrib(node, *STATES)):
        past = node.inputs[STATE] if len(node.inputs) > STATE else None
        present = node.outputs[1] if len(node.outputs) > 1 else None
        alone = (
            past is not None
            and past.is_graph_input()
            and [user for user, _ in past.uses()] == [node]
        )
        if past is None or present is None or not alone or present not in outputs:
            raise refusal(
                path, f"{node.name} does not keep a state of its own; export it with its states"
            )
        shape = tuple(size for size in list(past.shape or ())[1:] if isinstance(size, int))
        if (
            past.dtype not in FLOATS
            or not shape
            or past.shape is None
            or len(shape) != len(past.shape) - 1
        ):
            raise refusal(
                path, f"its state {past.name} has no fixed shape, or is not float32 or float16"
            )
        kind, number = STATES[node.op_type], layer_number(past, index)
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
        if len(key.past.shape) == BY_HEAD:
            heads, size = key.past.shape[1], width
        else:
            heads = _heads(key.present) or 0
            size = width // heads if isinstance(width, int) and heads else width
        if not isinstance(heads, int) or not isinstance(size, int) or not heads:
            raise refusal(path, f"{key.past.name} has no fixed number and size of heads")
        new = None if key.new is None or value.new is None else (key.new, value.new)
        states = key.past, value.past, key.present, value.present
        layers.append(
            Layer(number, *states, heads, size, size=key.size, new=new, new_is_flat=key.new_is_flat)
        )
    return layers


class _Cache(NamedTuple):
    """Keys or values; the fields as in `Layer`."""

    past: ir.Value
    present: ir.Value
    new: ir.Value | None
    new_is_flat: bool
    size: int | None = None


def _cache(past: ir.Value) -> _Cache | None:
    """The cache that `past` belongs to; None if it is kept in no known way."""
    assert past.shape is not None
    is_flat = len(past.shape) == FLAT
    for node, place in past.uses():
        if node.op_type == "Concat" and place == 0 and len(node.inputs) == 2:
            return _Cache(past, node.outputs[0], node.inputs[1], is_flat)
        if is_onnx_attention(node) and place in PAST_OF_ATTENTION and len(node.outputs) > place - 3:
            heads = node.attributes.get_int("q_num_heads", 0)
            return _Cache(past, node.outputs[place - 3], node.inputs[place - 3], heads > 0)
        if node.op_type == "TensorScatter" and place == 0:
            tokens = 1 if is_flat else 2
            axis = node.attributes.get_int("axis", -2)
            start = node.inputs[2] if len(node.inputs) > 2 else None
            is_linear = node.attributes.get_string("mode", "linear") == "linear"
            size = past.shape[tokens]
            is_known = (
                start is not None and start.name == WRITE and (axis - tokens) % len(past.shape) == 0
            )
            if is_known and is_linear and isinstance(size, int):
                return _Cache(past, node.outputs[0], node.inputs[1], is_flat, size)
    return None


def _heads(keys: ir.Value) -> int | None:
    """The number of heads of `keys` [B, tokens, heads * size], by the attention that reads them."""
    found = {
        node.attributes.get_int("kv_num_heads", 0)
        for node, _ in keys.uses()
        if is_onnx_attention(node)
    }
    return found.pop() or None if len(found) == 1 else None


def _vocab_size(graph: ir.Graph, logits: ir.Value, stated: int | None) -> int | None:
    """V of the logits' shape or of the head's weights, else `stated` by the configuration."""
    if logits.shape is not None and isinstance(size := logits.shape[-1], int):
        return size
    node = logits.producer()
    while node is not None and node.op_type in ("Cast", "Mul", "Div", "Tanh", "Identity"):
        computed = [
            value for value in node.inputs if value is not None and value.const_value is None
        ]
        node = computed[0].producer() if computed else None
    return _columns(node) or stated


def _columns(product: ir.Node | None) -> int | None:
    """N of a product [..., K] x [K, N]; None if unknown."""
    if product is not None and product.op_type == "MatMulNBits":
        return product.attributes.get_int("N", 0) or None
    weight = (
        product.inputs[1]
        if product is not None and product.op_type in ("MatMul", "FusedMatMul", "Gemm")
        else None
    )
    if product is None or weight is None or weight.shape is None or len(weight.shape) != 2:
        return None
    size = weight.shape[0 if product.attributes.get_int("transB", 0) else 1]
    return size if isinstance(size, int) else None
