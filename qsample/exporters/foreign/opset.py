"""Operators that ONNX has since opset 23 become ONNX Runtime's own, which compile fuses and every provider has. Then
the graph gets the oldest opset from OPSET on that has all of its operators."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx
import onnx_ir as ir

from qsample.exporters.foreign.graph_file import refusal
from qsample.exporters.foreign.recognise import ForeignGraph
from qsample.exporters.foreign.rows import Nodes
from qsample.graph.edit import initializer, producer
from qsample.graph.operators import CONTRIB_DOMAIN, OPSET

_AXES_INPUT: Final = 18  # the opset from which reductions take their axes as an input, and Split says how many parts
_REDUCTIONS: Final = (
    *("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"),
    "ReduceSumSquare",
)
_ROTARY: Final = ("interleaved", "num_heads", "rotary_embedding_dim")
_COS, _SIN, _POSITIONS = 1, 2, 3  # inputs of ONNX's RotaryEmbedding


def rotary_tables(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Positions, cosines and sines [positions, size] of ONNX's RotaryEmbedding; None if it computes its angles."""
    cos, sin = node.inputs[_COS], node.inputs[_SIN]
    positions = node.inputs[_POSITIONS] if len(node.inputs) > _POSITIONS else None
    if cos is None or sin is None:
        return None
    if positions is not None:
        return positions, cos, sin
    looked_up = producer(cos), producer(sin)
    if looked_up[0] is None or looked_up[1] is None or {node.op_type for node in looked_up if node} != {"Gather"}:
        return None
    (cos, positions), (sin, others) = (node.inputs[:2] for node in looked_up if node)
    axes = {node.attributes.get_int("axis", 0) for node in looked_up if node}
    if positions is not others or axes != {0} or cos is None or sin is None or positions is None:
        return None
    return positions, cos, sin


def use_own_operators(foreign: ForeignGraph, nodes: Nodes) -> None:
    """Replace RMSNormalization and RotaryEmbedding of ONNX by ONNX Runtime's operators, in place."""
    for node in list(foreign.graph):
        if node.domain:
            continue
        output = node.outputs[0]
        if node.op_type == "RMSNormalization":
            new = nodes(
                "SimplifiedLayerNormalization",
                node.inputs[:2],
                output.dtype,
                output.shape,
                epsilon=node.attributes.get_float("epsilon", 1e-5),
                axis=node.attributes.get_int("axis", -1),
                stash_type=node.attributes.get_int("stash_type", 1),
            )
        elif node.op_type == "RotaryEmbedding" and (tables := rotary_tables(node)) is not None:
            positions, *angles = tables
            given = {name: node.attributes.get_int(name, 0) for name in _ROTARY}
            inputs = [node.inputs[0], positions, *angles]
            new = nodes("RotaryEmbedding", inputs, output.dtype, output.shape, domain=CONTRIB_DOMAIN, **given)
        else:
            continue
        output.replace_all_uses_with(new)
        foreign.graph.remove(node, safe=True)


def set_opset(foreign: ForeignGraph) -> None:
    """To OPSET, or the next that has all operators as they are, in place. Between opset 14 and OPSET, reductions and
    equal splits alone came to be written differently.

    Raises UnsupportedModelError if an operator of the graph is in no such opset.
    """
    model, graph = foreign.model, foreign.graph
    have = graph.opset_imports[""]
    for node in graph.all_nodes():
        node.version = None
        if have < _AXES_INPUT and not node.domain:
            _write_inputs(graph, node)
    missing = ""
    for target in range(OPSET, max(have, OPSET) + 1):
        missing = next(
            (text for node in graph.all_nodes() if (text := _missing(node, target, is_older=target < have))), ""
        )
        if not missing:
            graph.opset_imports[""] = target
            model.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
            return
    raise refusal(foreign.path, missing)


def _write_inputs(graph: ir.Graph, node: ir.Node) -> None:
    if node.op_type in _REDUCTIONS and "axes" in node.attributes:
        axes = list(node.attributes.pop("axes").as_ints())
        node.resize_inputs(2)
        name = "axes_" + "_".join(map(str, axes))
        node.replace_input_with(1, initializer(graph, f"qsample.{name}", np.array(axes, np.int64)))
    if node.op_type == "Split" and (len(node.inputs) < 2 or node.inputs[1] is None):
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))


def _missing(node: ir.Node, opset: int, *, is_older: bool) -> str:
    """What `opset` lacks of `node`; "" = nothing. is_older: than the opset of the file."""
    if node.domain or not onnx.defs.has(node.op_type, ""):
        return ""  # ONNX Runtime keeps some operators of its own in ONNX's domain
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return f"its {node.op_type} is not in opset {opset}"
    unknown = [name for name in node.attributes if name not in schema.attributes]
    if unknown:
        return f"its {node.op_type} has {unknown[0]}, which opset {opset} lacks"
    if not is_older:
        return ""
    if len(node.inputs) > schema.max_input:
        return f"its {node.op_type} has {len(node.inputs)} inputs, and {schema.max_input} in opset {opset}"
    for value, parameter in zip(node.inputs, schema.inputs, strict=False):
        dtype = None if value is None else value.dtype
        if dtype is not None and f"tensor({dtype.name.lower()})" not in parameter.types:
            return f"its {node.op_type} takes {dtype}, which opset {opset} does not"
    return ""
