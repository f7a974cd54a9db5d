"""A float32 decode graph up to its logits enters; the same graph in float16 or bfloat16 leaves, its logits float32.

What depends on positions alone, the angles of a rotary embedding above all, stays float32: half precision counts
positions exactly to 2,048 (float16) or 256 (bfloat16) only. Norms keep their sums in float32 by themselves.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import ml_dtypes
import numpy as np
import onnx_ir as ir

from qsample.contract import LOGITS

DTYPES: Final = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_NUMPY: Final = {ir.DataType.FLOAT16: np.dtype(np.float16), ir.DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16)}


def convert_to_half(model: ir.Model, dtype: str, states: Collection[str]) -> bool:
    """Convert every weight and hidden value of `model`, and the inputs in `states`, to `dtype`, a key of DTYPES.

    In place. Weights are converted one at a time, when the model is saved. The output `logits` stays float32.
    Returns whether anything was float32.
    """
    half = DTYPES[dtype]
    graph = model.graph
    modified = False
    exact = _exact_values(graph)
    casts: dict[ir.Value, ir.Value] = {}
    for state in graph.inputs:
        if state.name in states:
            state.dtype = half
    for node in list(graph):
        if any(output in exact for output in node.outputs):
            continue
        for place, value in enumerate(node.inputs):
            if value is None or value.dtype != ir.DataType.FLOAT:
                continue
            modified = True
            if value in exact or value.is_initializer():
                if value not in casts:
                    casts[value] = _initializer(graph, value, half) if value.is_initializer() else _cast(value, half)
                node.replace_input_with(place, casts[value])
        for output in node.outputs:
            if output.dtype == ir.DataType.FLOAT:
                output.dtype = half
        if node.op_type == "Cast" and node.attributes.get_int("to") == ir.DataType.FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", half)
    for value in casts:
        if value.is_initializer() and not value.uses() and value.name is not None:
            graph.initializers.pop(value.name)
    _widen_logits(graph)
    return modified


def _exact_values(graph: ir.Graph) -> set[ir.Value]:
    """Float values that integers and vectors of constants decide: no state, and no row of a table, goes into them."""
    exact: set[ir.Value] = set()
    for node in graph:
        computed = [value for value in node.inputs if value is not None and not value.is_initializer()]
        tables = any(_is_float_table(value) for value in node.inputs)
        if computed and not tables and all(value in exact or _is_integer(value) for value in computed):
            exact.update(node.outputs)
    return exact


def _is_float_table(value: ir.Value | None) -> bool:
    if value is None or not value.is_initializer() or value.dtype != ir.DataType.FLOAT:
        return False
    return value.shape is not None and sum(dim != 1 for dim in value.shape) > 1


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and not value.dtype.is_floating_point()


def _initializer(graph: ir.Graph, value: ir.Value, half: ir.DataType) -> ir.Value:
    """The constant in half precision, converted when it is read."""
    name, tensor = f"{value.name}_{half.name.lower()}", value.const_value
    assert tensor is not None

    def convert() -> ir.TensorProtocol:
        return ir.tensor(np.asarray(tensor.numpy()).astype(_NUMPY[half]), dtype=half, name=name)

    shape = ir.Shape(tensor.shape.numpy())
    lazy = ir.LazyTensor(convert, dtype=half, shape=shape, name=name)
    converted = ir.Value(name=name, shape=shape, type=ir.TensorType(half), const_value=lazy)
    graph.register_initializer(converted)
    return converted


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """`value` as `dtype`, right behind where it is computed."""
    node = ir.node("Cast", [value], attributes={"to": dtype})
    node.outputs[0].shape, node.outputs[0].dtype = value.shape, dtype
    producer = value.producer()
    assert producer is not None
    assert producer.graph is not None
    producer.graph.insert_after(producer, node)
    return node.outputs[0]


def _widen_logits(graph: ir.Graph) -> None:
    place = next(place for place, value in enumerate(graph.outputs) if value.name == LOGITS.name)
    logits = graph.outputs[place]
    if logits.dtype == ir.DataType.FLOAT:
        return
    logits.name = f"{LOGITS.name}_half"
    widened = _cast(logits, ir.DataType.FLOAT)
    widened.name = LOGITS.name
    graph.outputs[place] = widened
