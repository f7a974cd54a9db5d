"""Gives a rewritten foreign graph the contract's names and axes, and the operators' version that ours have."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.contract import retained_name
from qsample.exporters.foreign.interface import IDS, ForeignGraph, refusal
from qsample.exporters.foreign.rows import Rows
from qsample.graph.edit import initializer
from qsample.graph.operators import CONTRIB_DOMAIN, OPSET
from qsample.interface import Features, Interface, KeyValueShape

_IR_VERSION: Final = 10
_AXES: Final = {"batch_size": "B", "sequence_length": "S"}
_OURS: Final = ("B", "S", "T")
_AXES_INPUT: Final = 18  # the opset from which reductions take their axes as an input, and Split says how many parts
_REDUCTIONS: Final = (
    *("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"),
    "ReduceSumSquare",
)


def interface_of(foreign: ForeignGraph, features: Features) -> Interface:
    """The package's, of a foreign graph with a cache of `foreign.dtype`."""
    dtype = "float32" if foreign.dtype == ir.DataType.FLOAT else "float16"
    shapes = tuple(KeyValueShape(layer.heads, layer.head_dim, layer.number) for layer in foreign.layers)
    in_order = [shape.layer for shape in shapes] == list(range(len(shapes)))
    if in_order:  # as an export writes them
        shapes = tuple(KeyValueShape(shape.num_key_value_heads, shape.head_dim) for shape in shapes)
    return Interface(foreign.vocab_size, shapes, dtype, features)


def use_contract_names(foreign: ForeignGraph, logits: ir.Value, rows: Rows, interface: Interface) -> ir.Model:
    """The model up to its logits, as `Interface.model` has it; in place.

    Raises UnsupportedModelError where an input of the file is still used that the contract does not have.
    """
    model, graph = foreign.model, foreign.graph
    ids = foreign.input(IDS)
    assert ids is not None
    ids.shape = ir.Shape(["B", "S"])
    _free_names(graph, {*interface.decoder.input_names, *interface.decoder.output_names}, {logits})
    inputs, outputs = [ids, rows.input_lengths, rows.lengths], [logits]
    states = iter(interface.cache_states)
    for layer in foreign.layers:
        for past, present in zip(layer.pasts, layer.presents, strict=True):
            spec = next(states)
            for value, name in ((past, spec.name), (present, retained_name(spec.name))):
                value.name = name
                value.shape = ir.Shape(list(spec.axes))
            present.type = ir.TensorType(foreign.dtype)
            inputs.append(past)
            outputs.append(present)
    dropped = [value for value in graph.inputs if value not in inputs]
    graph.outputs[:] = outputs
    graph.inputs[:] = [*inputs, *dropped]
    common_passes.RemoveUnusedNodesPass()(model)
    used = {str(value.name): sorted({node.op_type for node, _ in value.uses()}) for value in dropped if value.uses()}
    for name, users in used.items():
        raise refusal(foreign.path, f"its input {name} is still used by {', '.join(users)}")
    graph.inputs[:] = inputs
    _rename_axes(graph)
    graph.sort()
    _raise_opset(foreign)
    model.ir_version = max(model.ir_version or _IR_VERSION, _IR_VERSION)
    common_passes.ClearMetadataAndDocStringPass()(model)
    model.producer_name, model.producer_version = "qsample", None
    return model


def _free_names(graph: ir.Graph, names: set[str], kept: set[ir.Value]) -> None:
    """Give what has one of the contract's names another: the sampler's own values will have them."""
    values = [value for node in graph.all_nodes() for value in node.outputs]
    constants = [value for part in (graph, *graph.subgraphs()) for value in part.initializers.values()]
    for value in [*values, *constants, *graph.inputs]:
        if value.name in names and value not in kept and value.name != IDS:
            value.name = f"{value.name}.foreign"


def _rename_axes(graph: ir.Graph) -> None:
    """Our names for the axes that are ours; the others are forgotten: shape inference finds them again."""
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.shape is not None:
                dims = [dim if isinstance(dim, int) else _AXES.get(str(dim), str(dim)) for dim in value.shape]
                value.shape = ir.Shape([dim if isinstance(dim, int) or dim in _OURS else None for dim in dims])


def _raise_opset(foreign: ForeignGraph) -> None:
    """To OPSET at least. Between opset 14 and that, reductions and equal splits alone came to be written
    differently."""
    model, graph = foreign.model, foreign.graph
    have = graph.opset_imports[""]
    target = max(have, OPSET)
    for node in graph.all_nodes():
        node.version = None
        if node.domain or not onnx.defs.has(node.op_type, ""):
            continue  # ONNX Runtime keeps some operators of its own in ONNX's domain
        if have < _AXES_INPUT and node.op_type in _REDUCTIONS and "axes" in node.attributes:
            axes = list(node.attributes.pop("axes").as_ints())
            node.resize_inputs(2)
            name = "axes_" + "_".join(map(str, axes))
            node.replace_input_with(1, initializer(graph, f"qsample.{name}", np.array(axes, np.int64)))
        if have < _AXES_INPUT and node.op_type == "Split" and (len(node.inputs) < 2 or node.inputs[1] is None):
            node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
        known = onnx.defs.get_schema(node.op_type, target, "").attributes
        unknown = [name for name in node.attributes if name not in known]
        if unknown:
            raise refusal(foreign.path, f"its {node.op_type} has {unknown[0]}, which opset {target} lacks")
    graph.opset_imports[""] = target
    model.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
