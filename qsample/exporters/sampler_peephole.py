"""A traced sampler graph enters; the same graph leaves, without nodes that only the translation from torch brought.

A node costs ONNX Runtime most of a microsecond on the CPU, and a launch on a GPU, however little it computes; and the
sampler is a long chain of tiny ones.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.exporters.graph.edit import constant, initializer


def simplify(model: ir.Model, *, bool_maximum: bool) -> None:
    """Rewrite, in place, what torch's translation makes of three operations.

    - `any` is the maximum of integers made from bools; opset 20 has the maximum of bools itself.
    - An integer division that rounds goes through float32. What the sampler divides is never negative, where an
      integer division rounds down, too.
    - Reading the number in a scalar reshapes and gathers it.

    bool_maximum: False leaves the first as it is; ONNX Runtime's CUDA provider has no such kernel.
    """
    for node in list(model.graph):
        if bool_maximum:
            _reduce_bools(node)
        _divide_integers(node)
        _read_scalar(node)
    common_passes.RemoveUnusedNodesPass()(model)


def _reduce_bools(node: ir.Node) -> None:
    """Cast to bool ← ReduceMax ← Cast from bool."""
    maximum = _producer(node, "Cast", "ReduceMax")
    source = _producer(maximum, "ReduceMax", "Cast")
    if maximum is None or source is None or node.outputs[0].dtype != ir.DataType.BOOL:
        return
    flags = source.inputs[0]
    if flags is None or flags.dtype != ir.DataType.BOOL:
        return
    attributes = {name: attribute.value for name, attribute in maximum.attributes.items()}
    _replace(node, ir.node("ReduceMax", [flags, *maximum.inputs[1:]], attributes))


def _divide_integers(node: ir.Node) -> None:
    """Cast ← Floor ← Div ← Cast, and a constant divisor."""
    floor = _producer(node, "Cast", "Floor")
    division = _producer(floor, "Floor", "Div")
    source = _producer(division, "Div", "Cast")
    if division is None or source is None or source.inputs[0] is None:
        return
    dividend, divisor = source.inputs[0], constant(division.inputs[1])
    if divisor is None or dividend.dtype != node.outputs[0].dtype or dividend.dtype != ir.DataType.INT64:
        return
    assert node.graph is not None
    number = initializer(node.graph, f"divisor_{int(divisor)}", np.array(int(divisor), dtype=np.int64))
    _replace(node, ir.node("Div", [dividend, number]))


def _read_scalar(node: ir.Node) -> None:
    """Gather ← Reshape of a scalar: whatever it gathers is that scalar."""
    reshape = _producer(node, "Gather", "Reshape")
    if reshape is None or reshape.inputs[0] is None or reshape.inputs[0].shape is None:
        return
    place = node.inputs[1]
    if len(reshape.inputs[0].shape) == 0 and place is not None and place.shape is not None and len(place.shape) == 0:
        ir.convenience.replace_all_uses_with(node.outputs[0], reshape.inputs[0])


def _producer(node: ir.Node | None, op_type: str, before: str) -> ir.Node | None:
    """The node of type `before` that the first input of `node`, itself of type `op_type`, comes from."""
    if node is None or node.op_type != op_type or node.inputs[0] is None:
        return None
    producer = node.inputs[0].producer()
    return producer if producer is not None and producer.op_type == before else None


def _replace(old: ir.Node, new: ir.Node) -> None:
    result = new.outputs[0]
    result.type, result.shape = old.outputs[0].type, old.outputs[0].shape
    assert old.graph is not None
    old.graph.insert_before(old, new)
    ir.convenience.replace_all_uses_with(old.outputs[0], result)
