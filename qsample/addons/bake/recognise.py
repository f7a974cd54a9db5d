"""A decoder file enters; its graph leaves with the meaning of its inputs and outputs.

A file that cannot be baked is refused in a single line.
"""

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
    POSITIONS,
    RECURRENT_STATE_NAME,
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

# Operators of ONNX Runtime that a file may define again, as functions.
_OPERATORS_WITH_FUNCTIONS: Final = (
    "CausalConvWithState",
    "LinearAttention",
    "SkipSimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "MatMulNBits",
)
_AXES_OF_IDS: Final = ("rows", "tokens")
# A graph of 100 layers has half as many nodes.
_MAX_NODES: Final = 50_000


def load(path: Path) -> ir.Model:
    """The model in `path`, without functions and with its constants as initializers.

    Weights next to the file stay mapped. An operator of ONNX Runtime stays an operator, even if the
    file has a function that defines it for other runtimes.

    Raises:
        UnsupportedModelError: the file is not an ONNX file, or its functions cannot be inlined.
    """
    # The library would print the file's names to the log; errors are reported below.
    log = logging.getLogger("onnx_ir.serde")
    was_disabled = log.disabled
    log.disabled = True
    try:
        model = ir.load(path)
    except Exception as error:  # protobuf's exceptions have no common base class
        raise UnsupportedModelError(
            f"{path} is not an ONNX file ({type(error).__name__}: {error!s:.200})"
        ) from error
    finally:
        log.disabled = was_disabled
    for domain, name, overload in list(model.functions):
        if domain == CONTRIB_DOMAIN and name in _OPERATORS_WITH_FUNCTIONS:
            del model.functions[domain, name, overload]
    _check_node_count(path, sum(1 for _ in model.graph.all_nodes()), "it has")
    if model.functions:
        _inline(path, model)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common_passes.RemoveUnusedNodesPass()(model)
    _read_sizes(model.graph)
    return model


def _read_sizes(graph: ir.Graph) -> None:
    """Turn names of axes that are numbers into numbers, in place: torch's exporter writes some
    sizes as "2"."""
    values = [*graph.inputs, *graph.outputs]
    for node in graph:
        values += node.outputs
    for value in values:
        if value.shape is not None and any(str(dim).isdecimal() for dim in value.shape):
            dims = [int(str(dim)) if str(dim).isdecimal() else dim for dim in value.shape]
            value.shape = ir.Shape(dims)


@contextmanager
def graph_errors(path: Path) -> Iterator[None]:
    """Turn errors of the graph's libraries, and of a rewrite of a malformed operator, into a
    refusal."""
    try:
        yield
    except (QsampleError, OSError, MemoryError):
        raise
    except Exception as error:
        raise refusal(
            path,
            f"its graph is not as its operators are defined ({type(error).__name__}: {error!s:.200})",
        ) from error


def _check_node_count(path: Path, count: int, what: str) -> None:
    """Refuse a file with too many nodes. what: the beginning of the reason."""
    if count > _MAX_NODES:
        raise refusal(path, f"{what} {count} nodes, and bake reads at most {_MAX_NODES}")


def _inline(path: Path, model: ir.Model) -> None:
    """Put the bodies of functions in place of their calls."""
    calls: dict[ir.OperatorIdentifier, Counter[ir.OperatorIdentifier]] = {}
    for name, function in model.functions.items():
        calls[name] = Counter(node.op_identifier() for node in function.all_nodes())
    called_functions = {name: called.keys() & calls.keys() for name, called in calls.items()}
    sizes: dict[ir.OperatorIdentifier, int] = {}
    try:
        for name in TopologicalSorter(called_functions).static_order():
            sizes[name] = sum(count * sizes.get(called, 1) for called, count in calls[name].items())
    except CycleError:
        raise refusal(path, "its functions call one another in a circle") from None
    total = sum(sizes.get(node.op_identifier(), 1) for node in model.graph.all_nodes())
    _check_node_count(path, total, "its functions stand for")
    try:
        common_passes.InlinePass()(model)
    except ValueError as error:
        raise refusal(
            path, f"its functions cannot be inlined ({' '.join(str(error).split())!s:.200})"
        ) from error


def recognise(
    path: Path, model: ir.Model, *, head_dim: int | None = None, vocab_size: int | None = None
) -> ForeignGraph:
    """Recognise the inputs and outputs of a decoder.

    Args:
        path: the file of the decoder.
        model: the model in that file, as `load` returns it; some inputs, casts and copies are
            changed in place.
        head_dim: the size of a head, if the configuration states it.
        vocab_size: the size of the vocabulary, if the configuration states it.

    Raises:
        UnsupportedModelError: the decoder cannot be baked; the message is a single line.
    """
    graph = model.graph
    # An input with an initializer becomes a constant, because no caller feeds it.
    changed = common_passes.RemoveInitializersFromInputsPass()(model).modified
    _check_inputs(path, model)
    _check_operators(path, model)
    _check_opset(path, graph)
    logits = _logits(path, graph)
    if _widen_inputs(graph):
        changed = True
    if _drop_copied_scalars(graph):
        changed = True
    if all(value.name in CALLS for value in graph.inputs):
        raise refusal(
            path,
            "it has no cache; take the file with past_key_values among its inputs (optimum: "
            "text-generation-with-past)",
        )
    recurrences = _recurrences(path, graph)
    caches = _caches(path, graph, recurrences)
    if _narrow_caches(graph, caches):
        changed = True
    attentions = gqa.attentions(graph)
    if attentions:
        layers = _operator_layers(path, graph, attentions, head_dim)
    else:
        layers = _plain_layers(path, caches, set(graph.outputs))
    _check_all_read(path, caches, layers)
    dtype = _cache_dtype(path, caches)
    size = _vocab_size(graph, logits, vocab_size)
    if size is None:
        raise refusal(
            path, "no file states the size of its vocabulary; put its config.json next to it"
        )
    ordered = tuple(sorted(layers, key=lambda layer: layer.number))
    return ForeignGraph(path, model, ordered, logits, size, dtype, changed, recurrences)


def _check_opset(path: Path, graph: ir.Graph) -> None:
    opset = graph.opset_imports.get("", 0)
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise refusal(
            path, f"its opset is {opset}; export it with {OLDEST_OPSET} to {NEWEST_OPSET}"
        )


def _logits(path: Path, graph: ir.Graph) -> ir.Value:
    """The output with the logits."""
    named = {str(value.name): value for value in graph.outputs}
    if LOGITS not in named:
        raise refusal(
            path,
            f"it has no output {LOGITS}, only {', '.join(list(named)[:3])}; take the decoder with its head",
        )
    return named[LOGITS]


def _caches(path: Path, graph: ir.Graph, recurrences: Iterable[Recurrence]) -> list[ir.Value]:
    """The inputs that hold keys or values."""
    states = {recurrence.past for recurrence in recurrences}
    caches = [value for value in graph.inputs if value.name not in CALLS and value not in states]
    for value in caches:
        if re.fullmatch(RECURRENT_STATE_NAME, str(value.name)):
            raise refusal(
                path,
                f"it has recurrent states, and {value.name} is not that of a LinearAttention or CausalConvWithState "
                "alone, so that padding would change it; export the checkpoint with `qsample export`",
            )
        rank = 0 if value.shape is None else len(value.shape)
        is_scattered = any(node.op_type == "TensorScatter" for node, _ in value.uses())
        if rank != BY_HEAD and not (rank == FLAT and is_scattered):
            raise refusal(
                path,
                f"its input {value.name} is neither a known input nor keys or values [B, heads, tokens, size]",
            )
    if not caches:
        raise refusal(
            path, "none of its layers attends; export the checkpoint with `qsample export`"
        )
    return caches


def _check_all_read(path: Path, caches: Iterable[ir.Value], layers: Iterable[Layer]) -> None:
    """Refuse a cache that belongs to none of the layers."""
    unused = {str(value.name) for value in caches}
    for layer in layers:
        unused -= {str(value.name) for value in layer.pasts}
    if unused:
        raise refusal(path, f"its input {min(unused)} is a state that no attention reads")


def _cache_dtype(path: Path, caches: Iterable[ir.Value]) -> ir.DataType:
    dtypes = {value.dtype for value in caches}
    if len(dtypes) > 1 or not dtypes <= {*FLOATS}:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise refusal(
            path, f"its cache is {found}; this machine's CPU checks float32 and float16 caches"
        )
    dtype = next(iter(dtypes))
    assert dtype is not None
    return dtype


def _drop_copied_scalars(graph: ir.Graph) -> bool:
    """Remove scalar inputs that are only copied to outputs, in place; returns whether there were
    any.

    transformers' exporter passes the size of a window through the graph.
    """
    changed = False
    for value in list(graph.inputs):
        is_scalar = value.shape is not None and len(value.shape) == 0
        users = [node for node, _ in value.uses()]
        if not is_scalar or len(users) != 1:
            continue
        node = users[0]
        if node.op_type == "Identity" and node.outputs[0].is_graph_output():
            graph.outputs.remove(node.outputs[0])
            graph.remove(node, safe=True)
            graph.inputs.remove(value)
            changed = True
    return changed


def _widen_inputs(graph: ir.Graph) -> bool:
    """Make token ids and positions of int32 int64, as the contract has them, in place; casts give
    their readers int32. Returns whether there were any."""
    narrow = [
        value
        for value in graph.inputs
        if value.name in (IDS, POSITIONS) and value.dtype == ir.DataType.INT32
    ]
    for value in narrow:
        readers = list(value.uses())
        value.type = ir.TensorType(ir.DataType.INT64)
        cast = ir.node("Cast", [value], {"to": ir.DataType.INT32})
        copy = cast.outputs[0]
        copy.name = f"{value.name}.int32"
        copy.type = ir.TensorType(ir.DataType.INT32)
        copy.shape = value.shape
        for node, place in readers:
            node.replace_input_with(place, copy)
        graph.insert_before(graph[0], cast)
    return bool(narrow)


def _narrow_caches(graph: ir.Graph, caches: Iterable[ir.Value]) -> bool:
    """Make float32 caches float16, in place; returns whether anything changed.

    Only caches that the graph casts to float16 behind their inputs, and back before their outputs,
    are changed, so that nothing is lost."""
    narrowed = False
    for past in caches:
        casts = [node for node, _ in past.uses()]
        if past.dtype != ir.DataType.FLOAT or not casts:
            continue
        if not all(_casts_to(node, ir.DataType.FLOAT16) for node in casts):
            continue
        for node in casts:
            node.outputs[0].replace_all_uses_with(past)
            graph.remove(node, safe=True)
        past.type = ir.TensorType(ir.DataType.FLOAT16)
        narrowed = True
    if not narrowed:
        return False
    for index, present in enumerate(graph.outputs):
        cast = present.producer()
        if present.name == LOGITS or cast is None or not _casts_to(cast, ir.DataType.FLOAT):
            continue
        source = cast.inputs[0]
        assert source is not None
        name = present.name
        present.name = f"{name}.wide"
        source.name = name
        source.shape = present.shape
        source.type = ir.TensorType(ir.DataType.FLOAT16)
        graph.outputs[index] = source
    return True


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
    dims = list(shape or ())
    fixed = [axis for axis, dim in zip(_AXES_OF_IDS, dims, strict=False) if isinstance(dim, int)]
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
            advice = _other_files(path) if why is DYNAMIC else ""
            raise refusal(path, why.format(operator) + advice)
    for node in model.graph:
        has_branches = any(
            attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()
        )
        if has_branches and any(
            value.is_graph_input() and value.name not in CALLS for value in reads(node)
        ):
            raise refusal(
                path,
                f"it has a cache under an {node.op_type}: a merged decoder; take a newer export",
            )


def _other_files(path: Path) -> str:
    """The advice to take a file next to `path` without dynamic quantization."""
    others = [
        file.name
        for file in sorted(path.parent.glob("*.onnx"))
        if file != path and not re.search("quantized|int8|uint8", file.name)
    ]
    return f"; take {', '.join(others[:4])}" if others else "; take its q4, fp16 or fp32 file"


def _operator_layers(
    path: Path, graph: ir.Graph, attentions: list[ir.Node], head_dim: int | None
) -> list[Layer]:
    """The layers of a graph that attends through GroupQueryAttention."""
    inputs = set(graph.inputs)
    outputs = set(graph.outputs)
    layers = []
    for index, node in enumerate(attentions):
        key = gqa.get_input(node, Slot.PAST_KEY)
        value = gqa.get_input(node, Slot.PAST_VALUE)
        if key is None or value is None or key not in inputs or value not in inputs:
            raise refusal(path, f"{node.name} shares its cache with another layer, or has none")
        if (
            len(node.outputs) < 3
            or node.outputs[1] not in outputs
            or node.outputs[2] not in outputs
        ):
            raise refusal(path, f"{node.name} does not return its cache")
        size = _head_dim(node, key)
        if size is None:
            size = head_dim
        if size is None:
            raise refusal(
                path,
                "no file states the size of its heads; put its config.json or genai_config.json next to it",
            )
        heads = node.attributes.get_int("kv_num_heads", 0)
        is_ring = node.attributes.get_int("sliding_window_cache", 0)
        ring = node.attributes.get_int("local_window_size", -1) if is_ring != 0 else None
        number = layer_number(key, index)
        states = key, value, node.outputs[1], node.outputs[2]
        layers.append(Layer(number, *states, heads, size, ring=ring, attention=node))
    return layers


def _head_dim(node: ir.Node, past: ir.Value) -> int | None:
    """D of a GroupQueryAttention, by its cache or the width of its input; None if unknown."""
    assert past.shape is not None
    size = past.shape[3]
    if isinstance(size, int):
        return size
    heads = node.attributes.get_int("num_heads", 0)
    kv_heads = node.attributes.get_int("kv_num_heads", 0)
    source = node.inputs[Slot.KEY]
    parts = kv_heads
    if source is None:  # queries, keys and values are packed into one tensor
        source = node.inputs[Slot.QUERY]
        parts = heads + 2 * kv_heads
    if source is None or parts == 0:
        return None
    if source.shape is not None and len(source.shape) == 3:
        width = source.shape[2]
        if isinstance(width, int):
            return width // parts
    columns = _columns(source.producer())
    return None if columns is None or columns < parts else columns // parts


def _recurrences(path: Path, graph: ir.Graph) -> tuple[Recurrence, ...]:
    """The operators whose states are inputs and outputs of the graph, in the order of their
    layers."""
    outputs = set(graph.outputs)
    nodes = [node for node in graph if is_contrib(node, *STATES)]
    found = []
    for index, node in enumerate(nodes):
        past = node.inputs[STATE] if len(node.inputs) > STATE else None
        present = node.outputs[1] if len(node.outputs) > 1 else None
        if past is None or present is None or present not in outputs or not _is_private(past, node):
            raise refusal(
                path, f"{node.name} does not keep a state of its own; export it with its states"
            )
        dims = list(past.shape or ())[1:]
        shape = tuple(size for size in dims if isinstance(size, int))
        if past.dtype not in FLOATS or not shape or len(shape) != len(dims):
            raise refusal(
                path, f"its state {past.name} has no fixed shape, or is not float32 or float16"
            )
        kind = STATES[node.op_type]
        number = layer_number(past, index)
        found.append(Recurrence(number, kind, shape, past.dtype, node, past, present))
    return tuple(sorted(found, key=lambda recurrence: recurrence.number))


def _is_private(past: ir.Value, node: ir.Node) -> bool:
    """Whether `past` is an input of the graph that only `node` reads."""
    return past.is_graph_input() and [user for user, _ in past.uses()] == [node]


def _plain_layers(path: Path, pasts: Iterable[ir.Value], outputs: set[ir.Value]) -> list[Layer]:
    """The layers whose caches grow by a Concat or inside ONNX's Attention, or that TensorScatter
    writes into.

    The names of the caches distinguish keys from values.
    """
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
        size = key.past.shape[-1]
        if len(key.past.shape) == BY_HEAD:
            heads = key.past.shape[1]
        else:
            heads = _heads(key.present) or 0
            if isinstance(size, int) and heads > 0:
                size //= heads
        if not isinstance(heads, int) or not isinstance(size, int) or heads == 0:
            raise refusal(path, f"{key.past.name} has no fixed number and size of heads")
        new = None if key.new is None or value.new is None else (key.new, value.new)
        states = key.past, value.past, key.present, value.present
        layers.append(
            Layer(number, *states, heads, size, size=key.size, new=new, new_is_flat=key.new_is_flat)
        )
    return layers


class _Cache(NamedTuple):
    """The cache of a layer's keys or values.

    Attributes:
        past: the graph's input.
        present: the graph's output.
        new: the keys or values of the new tokens, if the file shows them.
        new_is_flat: whether `new` is [B, S, heads * head_dim].
        size: the tokens of a cache of fixed size; None if it grows.
    """

    past: ir.Value
    present: ir.Value
    new: ir.Value | None
    new_is_flat: bool
    size: int | None = None


def _cache(past: ir.Value) -> _Cache | None:
    """The cache that `past` belongs to; None if nothing known writes into it."""
    assert past.shape is not None
    is_flat = len(past.shape) == FLAT
    for node, place in past.uses():
        if node.op_type == "Concat" and place == 0 and len(node.inputs) == 2:
            return _Cache(past, node.outputs[0], node.inputs[1], is_flat)
        if is_onnx_attention(node) and place in PAST_OF_ATTENTION and len(node.outputs) > place - 3:
            heads = node.attributes.get_int("q_num_heads", 0)
            return _Cache(past, node.outputs[place - 3], node.inputs[place - 3], heads > 0)
        if node.op_type == "TensorScatter" and place == 0:
            cache = _scattered_cache(past, node, is_flat)
            if cache is not None:
                return cache
    return None


def _scattered_cache(past: ir.Value, scatter: ir.Node, is_flat: bool) -> _Cache | None:
    """The cache of fixed size into which a TensorScatter writes, if it writes at the input
    `WRITE`."""
    assert past.shape is not None
    tokens_axis = 1 if is_flat else 2
    axis = scatter.attributes.get_int("axis", -2)
    mode = scatter.attributes.get_string("mode", "linear")
    start = scatter.inputs[2] if len(scatter.inputs) > 2 else None
    size = past.shape[tokens_axis]
    if start is None or start.name != WRITE or mode != "linear" or not isinstance(size, int):
        return None
    if (axis - tokens_axis) % len(past.shape) != 0:
        return None
    return _Cache(past, scatter.outputs[0], scatter.inputs[1], is_flat, size)


def _heads(keys: ir.Value) -> int | None:
    """The number of heads of `keys` [B, tokens, heads * size], by the attention that reads them."""
    found = {
        node.attributes.get_int("kv_num_heads", 0)
        for node, _ in keys.uses()
        if is_onnx_attention(node)
    }
    if len(found) != 1:
        return None
    heads = found.pop()
    return None if heads == 0 else heads


def _vocab_size(graph: ir.Graph, logits: ir.Value, stated: int | None) -> int | None:
    """V of the logits' shape or of the head's weights, else the size `stated` by the
    configuration."""
    size = None if logits.shape is None else logits.shape[-1]
    if isinstance(size, int):
        return size
    node = logits.producer()
    while node is not None and node.op_type in ("Cast", "Mul", "Div", "Tanh", "Identity"):
        computed = [
            value for value in node.inputs if value is not None and value.const_value is None
        ]
        node = computed[0].producer() if computed else None
    columns = _columns(node)
    return stated if columns is None else columns


def _columns(product: ir.Node | None) -> int | None:
    """N of a product [..., K] x [K, N]; None if unknown."""
    if product is None:
        return None
    if product.op_type == "MatMulNBits":
        return product.attributes.get_int("N", None)
    if product.op_type not in ("MatMul", "FusedMatMul", "Gemm"):
        return None
    weight = product.inputs[1]
    if weight is None or weight.shape is None or len(weight.shape) != 2:
        return None
    size = weight.shape[0 if product.attributes.get_int("transB", 0) != 0 else 1]
    return size if isinstance(size, int) else None
