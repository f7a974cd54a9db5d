"""Lets the tokens of an image see each other, as in Gemma 3, in a graph with causal attention.

GroupQueryAttention stays unchanged and writes keys and values. In calls with image rows, an If
computes the attention of the image tokens again, over the buffers with the new keys and values; in
other calls it passes the operator's result on. A further If computes the values that all layers
read: the masks, and the columns with image tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from qsample.contract.tensors import IMAGE_ROWS, INPUT_LENGTHS, LENGTHS
from qsample.errors import UnsupportedModelError
from qsample.graph.edit import initializer
from qsample.graph.gqa import OP_TYPE, Slot, attentions, get_input
from qsample.graph.operators import CONTRIB_DOMAIN

_NAME: Final = "image_blocks"
_INT64: Final = ir.DataType.INT64
_BOOL: Final = ir.DataType.BOOL
_FLOAT: Final = ir.DataType.FLOAT
_LOWEST_SCORE: Final = float(np.finfo(np.float32).min)
_UNSUPPORTED_INPUTS: Final = (
    Slot.ATTENTION_BIAS,
    Slot.HEAD_SINK,
    Slot.Q_NORM_WEIGHT,
    Slot.QUERY_SEQLENS,
)


class _Nodes:
    """Makes the nodes of a side of an If, or of the graph; their constants belong to the graph."""

    def __init__(self, graph: ir.Graph, name: str) -> None:
        self.nodes: list[ir.Node] = []
        self._graph = graph
        self._name = name

    def __call__(self, op_type: str, *inputs: Any, domain: str = "", **attributes: Any) -> ir.Value:
        values = [
            value if isinstance(value, ir.Value) else self._constant(value) for value in inputs
        ]
        node = ir.node(
            op_type, values, attributes, domain=domain, name=f"{self._name}.{len(self.nodes)}"
        )
        node.outputs[0].name = node.name
        self.nodes.append(node)
        return node.outputs[0]

    def _constant(self, number: Any) -> ir.Value:
        dtype = np.float32 if isinstance(number, float) else np.int64
        array = number if isinstance(number, np.ndarray) else np.array(number, dtype)
        sizes = "x".join(map(str, array.shape))
        return initializer(
            self._graph, f"{_NAME}_{array.dtype}_{sizes}_{'_'.join(map(str, array.flat))}", array
        )


def _branch(
    name: str,
    condition: ir.Value,
    then: _Nodes,
    otherwise: _Nodes,
    results: Sequence[Sequence[ir.Value]],
) -> ir.Node:
    """Make an If. results: the results of each side."""
    sides = [
        ir.AttrGraph(
            f"{side}_branch", ir.Graph([], values, nodes=part.nodes, name=f"{name}.{side}")
        )
        for side, part, values in zip(("then", "else"), (then, otherwise), results, strict=True)
    ]
    node = ir.Node("", "If", [condition], sides, num_outputs=len(results[0]), name=name)
    for index, (value, like) in enumerate(zip(node.outputs, results[0], strict=True)):
        value.name = f"{name}.{index}"
        value.type = like.type
        value.shape = like.shape
    return node


def see_whole_images(model: ir.Model, layers: Collection[int]) -> bool:
    """Let each image token see its whole run and the keys before it, in some layers, in place.

    A run is a stretch of neighbouring tokens with image rows, without padding. Windows hold for
    runs as well: a token sees the keys less than a window before it, and all later keys of its run.
    The attention may rotate, read packed queries, keys and values, and have a cache in int8.

    Args:
        model: the graph.
        layers: the layers in which image tokens see each other.

    Returns:
        Whether there is such a layer.

    Raises:
        UnsupportedModelError: an attention adds something to its scores.
    """
    graph = model.graph
    nodes = {layer: node for node in attentions(graph) if (layer := _layer(node)) in layers}
    if len(nodes) < len(set(layers)):
        missing = ", ".join(str(layer) for layer in sorted(set(layers) - nodes.keys()))
        raise UnsupportedModelError(
            f"the tokens of an image see each other in layers {missing}, which have no {OP_TYPE} here; export the text "
            "model alone (--text-only)"
        )
    if not nodes:
        return False
    inputs = {value.name: value for value in graph.inputs}
    top = _Nodes(graph, f"{_NAME}.any")
    any_image = top(
        "GreaterOrEqual",
        top("ReduceMax", inputs[IMAGE_ROWS.name], keepdims=0),
        np.zeros((), np.int32),
    )
    masks = _Masks(graph, inputs, any_image, {_window(node) for node in nodes.values()})
    graph.insert_before(graph[0], [*top.nodes, masks.node])
    for layer, node in nodes.items():
        _see_runs(graph, f"{_NAME}.{layer}", node, any_image, masks)
    return True


def cut_image_blocks(model: ir.Model) -> list[int]:
    """Remove the nodes of `see_whole_images`, in place; returns its layers."""
    layers = []
    for node in reversed([node for node in model.graph if str(node.name).startswith(f"{_NAME}.")]):
        last = str(node.name).rpartition(".")[2]
        if node.op_type == "If" and last.isdigit():
            plain = node.attributes["else_branch"].as_graph()[0].inputs[0]
            assert plain is not None
            node.outputs[0].replace_all_uses_with(plain, replace_graph_outputs=True)
            layers.append(int(last))
        for side in (
            value.as_graph()
            for value in node.attributes.values()
            if value.type == ir.AttributeType.GRAPH
        ):
            side.outputs.clear()
            # The nodes of a side read values of the graph around it.
            side.remove(list(side), safe=True)
        model.graph.remove(node, safe=True)
    return layers[::-1]


def _layer(attention: ir.Node) -> int:
    return int(str(attention.inputs[Slot.PAST_KEY].name).split(".")[1])  # type: ignore[union-attr]


def _window(attention: ir.Node) -> int:
    """The number of keys that a query sees, including that of its token; 0 for all."""
    return max(0, attention.attributes.get_int("local_window_size", -1))


class _Masks:
    """The If that computes the values that all layers read.

    N of the columns 0 to S - 1 have an image token in some row; T' is the end of the longest row.

    Attributes:
        columns: [N], these columns.
        index: [S], the index of each column in `columns`.
        is_image: [B, S, 1] bool, the image tokens.
        positions: [B, N], the positions of the tokens in `columns`.
        total: [1], T'.
        held: [B, 1, T', 1] bool, the places with a token of the row. Other memory may have any
            content, and a NaN among the values would pass through a weight of 0.
        allowed: for each window, the keys that these tokens see, [B, 1, 1, N, T'] bool.
    """

    def __init__(
        self,
        graph: ir.Graph,
        inputs: dict[str | None, ir.Value],
        any_image: ir.Value,
        windows: set[int],
    ) -> None:
        then = _Nodes(graph, f"{_NAME}.masks")
        otherwise = _Nodes(graph, f"{_NAME}.nothing")
        rows, (lengths, given) = (
            inputs[IMAGE_ROWS.name],
            (
                then("Unsqueeze", then("Cast", inputs[spec.name], to=_INT64), [1])
                for spec in (LENGTHS, INPUT_LENGTHS)
            ),
        )
        length = then("Gather", then("Shape", rows), 1)
        every = then("Unsqueeze", then("Range", 0, length, 1), [0])
        image = then(
            "And", then("GreaterOrEqual", rows, np.zeros((), np.int32)), then("Less", every, given)
        )
        any_row = then("ReduceMax", then("Cast", image, to=_INT64), [0], keepdims=0)
        columns = then("Squeeze", then("NonZero", any_row), [0])
        index = then("Max", then("Sub", then("CumSum", any_row, 0), 1), 0)
        # All tokens of a run have the same number of text tokens before them; the last token with
        # this number ends the run.
        texts = then("CumSum", then("Cast", then("Not", image), to=_INT64), 1)
        behind = then("Unsqueeze", then("Gather", texts, columns, axis=1), [2])
        up_to = then("Cast", then("LessOrEqual", then("Unsqueeze", texts, [1]), behind), to=_INT64)
        ends = then("Sub", then("ReduceSum", up_to, [2], keepdims=0), 1)
        of_image = then("Gather", image, columns, axis=1)
        last = then("Add", then("Where", of_image, ends, columns), lengths)
        positions = then("Add", columns, lengths)
        total = then("Add", then("ReduceMax", lengths, [0, 1], keepdims=0), length)
        keys = then("Range", 0, total, 1)
        held = then("Less", keys, then("Add", lengths, given))
        seen = then("LessOrEqual", keys, then("Unsqueeze", last, [2]))
        distance = then("Sub", then("Unsqueeze", positions, [2]), keys)
        allowed = [
            then("And", seen, then("Less", distance, window)) if window > 0 else seen
            for window in sorted(windows)
        ]
        # Each value with its rank and dtype.
        made: list[tuple[ir.Value, int, ir.DataType]] = [
            (columns, 1, _INT64),
            (index, 1, _INT64),
            (then("Unsqueeze", image, [2]), 3, _BOOL),
            (positions, 2, _INT64),
            (then("Unsqueeze", total, [0]), 1, _INT64),
            (then("Unsqueeze", held, [1, 3]), 4, _BOOL),
            *((then("Unsqueeze", mask, [1, 2]), 5, _BOOL) for mask in allowed),
        ]
        results: list[list[ir.Value]] = [[], []]
        for value, rank, dtype in made:
            empty = otherwise("Cast", np.zeros([1] * rank, np.int64), to=dtype)
            for one, side in zip((value, empty), results, strict=True):
                one.type = ir.TensorType(dtype)
                one.shape = ir.Shape([None] * rank)
                side.append(one)
        self.node = _branch(f"{_NAME}.masks", any_image, then, otherwise, results)
        self.columns, self.index, self.is_image, self.positions, self.total, self.held, *masks = (
            self.node.outputs
        )
        self.allowed = dict(zip(sorted(windows), masks, strict=True))


def _see_runs(
    graph: ir.Graph, name: str, attention: ir.Node, any_image: ir.Value, masks: _Masks
) -> None:
    """Put an If behind `attention` that computes the results of image tokens again."""
    if any(get_input(attention, slot) is not None for slot in _UNSUPPORTED_INPUTS):
        raise UnsupportedModelError(
            "the tokens of an image see each other in this model, whose attention adds a bias or a sink to its scores; "
            "export the text model alone (--text-only)"
        )
    plain, key, value = attention.outputs
    then = _Nodes(graph, f"{name}.then")
    otherwise = _Nodes(graph, f"{name}.else")
    query = then("Cast", _queries(then, attention, masks), to=_FLOAT)
    keys, values = (
        _read(then, attention, states, slot, masks)
        for states, slot in ((key, Slot.K_SCALE), (value, Slot.V_SCALE))
    )
    keys = then("Unsqueeze", then("Transpose", keys, perm=[0, 1, 3, 2]), [2])
    values = then("Unsqueeze", then("Where", masks.held, values, 0.0), [2])
    size = _head_size(attention)
    scale = attention.attributes.get_float("scale", 0.0)
    if scale == 0:  # the default
        scale = size**-0.5
    scores = then("Mul", then("MatMul", query, keys), float(scale))
    if (cap := attention.attributes.get_float("softcap", 0.0)) != 0:
        scores = then("Mul", then("Tanh", then("Div", scores, float(cap))), float(cap))
    weights = then(
        "Softmax", then("Where", masks.allowed[_window(attention)], scores, _LOWEST_SCORE), axis=-1
    )
    result = then("Transpose", then("MatMul", weights, values), perm=[0, 3, 1, 2, 4])
    result = then("Reshape", result, [0, 0, attention.attributes.get_int("num_heads") * size])
    query_dtype = attention.inputs[Slot.QUERY].dtype  # type: ignore[union-attr]
    dtype = next((one for one in (plain.dtype, query_dtype) if one is not None), _FLOAT)
    result = then("Gather", then("Cast", result, to=dtype), masks.index, axis=1)
    marker = ir.Value(name=f"{name}.plain", type=ir.TensorType(dtype), shape=plain.shape)
    sides = [then("Where", masks.is_image, result, marker)], [otherwise("Identity", marker)]
    for side in sides:
        side[0].type = ir.TensorType(dtype)
        side[0].shape = plain.shape
    node = _branch(name, any_image, then, otherwise, sides)
    plain.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
    marker.replace_all_uses_with(plain)
    graph.insert_after(attention, node)


def _head_size(attention: ir.Node) -> int:
    return int(attention.inputs[Slot.PAST_KEY].shape[3])  # type: ignore[union-attr, index, arg-type]


def _queries(then: _Nodes, attention: ir.Node, masks: _Masks) -> ir.Value:
    """The queries of the tokens in `masks.columns`, rotated: [B, KV, heads / KV, N, D]."""
    attributes = attention.attributes
    size = _head_size(attention)
    heads = attributes.get_int("num_heads")
    groups = attributes.get_int("kv_num_heads")
    query = then("Gather", attention.inputs[Slot.QUERY], masks.columns, axis=1)
    if get_input(attention, Slot.KEY) is None:
        # Queries, keys and values are one tensor.
        query = then("Slice", query, [0], [heads * size], [2])
    if attributes.get_int("do_rotary", 0) != 0:
        tables = [get_input(attention, slot) for slot in (Slot.COS_CACHE, Slot.SIN_CACHE)]
        part = 2 * int(tables[0].shape[1])  # type: ignore[union-attr, index, arg-type]
        options = {"num_heads": heads, "interleaved": attributes.get_int("rotary_interleaved", 0)}
        options |= {"rotary_embedding_dim": part} if part != size else {}
        query = then(
            "RotaryEmbedding", query, masks.positions, *tables, domain=CONTRIB_DOMAIN, **options
        )
    return then(
        "Transpose",
        then("Reshape", query, [0, 0, groups, heads // groups, size]),
        perm=[0, 2, 3, 1, 4],
    )


def _read(
    then: _Nodes, attention: ir.Node, states: ir.Value, slot: Slot, masks: _Masks
) -> ir.Value:
    """The keys or values in the buffers up to the end of the longest row: [B, KV, T', D]
    float32."""
    read = then("Cast", then("Slice", states, [0], masks.total, [2]), to=_FLOAT)
    # An int8 cache has scales.
    scales = get_input(attention, slot)
    return read if scales is None else then("Mul", read, scales)
