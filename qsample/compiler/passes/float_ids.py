"""Ids and flags in float32, for providers whose kernels lack integers and bools in some operators, such as WebGPU's.

ONNX Runtime would run such a node on the host, and the device would wait for each value. Token ids, positions and flags
are exact in float32: a vocabulary and a row have fewer than 2**24 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.graph.edit import cast, initializer, insert, put_behind, replace_node

# What onnx-ir's own names of new nodes and values begin with.
_NEW: Final = ("node_", "val_")
_BOOL: Final = (ir.DataType.BOOL,)
_INTEGERS: Final = (ir.DataType.INT32, ir.DataType.INT64)
# Operator → the types that its WebGPU kernels lack (onnxruntime-ep-webgpu 0.4.0, int64 enabled), and its data inputs:
# a number, or None for all.
_LACKING: Final[Mapping[str, tuple[tuple[ir.DataType, ...], int | None]]] = {
    "Concat": (_BOOL, None),
    "Expand": (_BOOL, 0),
    "Gather": (_BOOL, 0),
    "GatherElements": ((*_BOOL, *_INTEGERS), 0),
    "Identity": ((*_BOOL, ir.DataType.INT64), 0),
    "ReduceMax": ((*_BOOL, ir.DataType.INT64), 0),
    "ReduceMin": ((*_BOOL, ir.DataType.INT64), 0),
    "Reshape": (_BOOL, 0),
    "Slice": ((*_BOOL, *_INTEGERS), 0),
    "Squeeze": ((*_BOOL, ir.DataType.INT64), 0),
    "TopK": (_INTEGERS, 0),
    "Unsqueeze": (_BOOL, 0),
}


def ids_as_floats(model: ir.Model) -> bool:
    """Let the operators in `_LACKING` compute in float32, except shapes, and make And and Not of Or and Xor."""
    modified = False
    for node in list(model.graph.all_nodes()):
        if node.op_type in ("Or", "Xor") and not node.domain:
            _without(node)
            modified = True
    casts_back = set[ir.Node]()
    for node in list(model.graph.all_nodes()):
        if node.op_type == "And" and _is_repeated(node):
            _multiply(node)
            modified = True
        elif node.op_type == "Pow":
            modified |= _broadcast(node)
        elif node.op_type == "Shape":
            modified |= _shape_of_float(node)
        elif _is_copy_of_int64(node):
            _reshape_to_itself(node)
            modified = True
        elif node.op_type in _LACKING and not node.domain:
            modified |= _in_float32(node, casts_back)
    if modified:
        _name_apart(model)
    return modified


def _name_apart(model: ir.Model) -> None:
    """Give new nodes and values of graphs inside the graph names that no other graph has. They are numbered in each
    graph anew, and a provider would take them for those of the same name."""
    for number, part in enumerate(model.graph.subgraphs()):
        for node in part:
            named: list[ir.Node | ir.Value] = [node, *node.outputs]
            for each in named:
                if str(each.name).startswith(_NEW):
                    each.name = f"{part.name}_{number}.{each.name}"


def _is_repeated(node: ir.Node) -> bool:
    """Whether an And repeats one operand along the last axis of the other."""
    lengths = [value.shape[-1] for value in node.inputs if value is not None and value.shape]
    return len(lengths) == 2 and lengths.count(1) == 1


def _multiply(node: ir.Node) -> None:
    """Let an And multiply. WebGPU's provider keeps the program of an And, and takes it for every other And of the same
    ranks, whichever operand that one repeats along the last axis."""
    factors = [cast(value, ir.DataType.FLOAT, node) for value in node.inputs if value is not None]
    shape = node.outputs[0].shape or ()
    product = insert(node, "Mul", factors, shape, dtype=ir.DataType.FLOAT)
    replace_node(node, [ir.node("Cast", [product], {"to": ir.DataType.BOOL})])


def _broadcast(node: ir.Node) -> bool:
    """WebGPU's Pow fails if one operand has a last axis of 1, and the other of a multiple of 4."""
    base, exponent = node.inputs
    assert base is not None
    assert exponent is not None
    if base.shape is None or exponent.shape is None or not base.shape or not exponent.shape:
        return False
    if base.shape[-1] == exponent.shape[-1] and isinstance(base.shape[-1], int):
        return False
    for index, other in ((0, exponent), (1, base)):
        sizes = insert(node, "Shape", [other], [len(other.shape or ())], dtype=ir.DataType.INT64)
        node.replace_input_with(
            index, insert(node, "Expand", [node.inputs[index], sizes], node.outputs[0].shape or ())
        )
    return True


def own_constants(model: ir.Model) -> bool:
    """Copy the constants that a graph inside the graph reads into it."""
    modified = False
    for part in model.graph.subgraphs():
        for node in part:
            for index, value in enumerate(node.inputs):
                tensor = value.const_value if value is not None and value.is_initializer() else None
                if value is not None and tensor is not None and value.graph is not part:
                    own = initializer(part, f"{part.name}.{value.name}", tensor.numpy())
                    node.replace_input_with(index, own)
                    modified = True
    return modified


def _shape_of_float(node: ir.Node) -> bool:
    """Take the shape of a float: Shape has no kernel for these types, and the host would copy all of the input. Of
    another rank, because ONNX Runtime takes the shape of another value of equal shape (its ShapeInputMerge)."""
    value = node.inputs[0]
    if value is None or value.dtype not in (*_BOOL, ir.DataType.INT64) or value.shape is None:
        return False
    graph = node.graph
    rank = len(value.shape)
    assert graph is not None
    column = initializer(graph, f"axis_{rank}", np.array([rank]))
    start, end = (
        node.attributes.get_int(name, default) for name, default in (("start", 0), ("end", rank))
    )
    for name, place in (("start", start), ("end", end)):
        node.attributes[name] = ir.AttrInt64(name, min(place + rank if place < 0 else place, rank))
    floats = cast(value, ir.DataType.FLOAT, node)
    node.replace_input_with(0, insert(node, "Unsqueeze", [floats, column], [*value.shape, 1]))
    return True


def _is_copy_of_int64(node: ir.Node) -> bool:
    value = node.inputs[0] if node.op_type == "Identity" else None
    return value is not None and value.dtype == ir.DataType.INT64 and value.shape is not None


def _reshape_to_itself(node: ir.Node) -> None:
    """Copy int64 by a Reshape, which computes nothing. In a graph inside the graph, an output needs a node of its
    own."""
    (value,) = node.inputs
    assert value is not None
    assert value.shape is not None
    assert node.graph is not None
    rank = len(value.shape)
    same_sizes = initializer(node.graph, f"same_sizes_{rank}", np.zeros(rank, np.int64))
    replace_node(node, [ir.node("Reshape", [value, same_sizes])])


def _in_float32(node: ir.Node, casts_back: set[ir.Node]) -> bool:
    """Let `node` compute in float32, and cast its result back: `casts_back` has the casts of earlier nodes, and of
    which a later node takes the float32 before the cast."""
    lacking, place = _LACKING[node.op_type]
    places = range(len(node.inputs)) if place is None else (place,)
    data = node.inputs[places[0]]
    output = node.outputs[0]
    if data is None or data.dtype not in lacking or _is_shape(data):
        return False
    for index in places:
        value = node.inputs[index]
        assert value is not None
        producer = value.producer()
        number = producer.inputs[0] if producer in casts_back else None
        node.replace_input_with(index, number or cast(value, ir.DataType.FLOAT, node))
    dtype = data.dtype if output.dtype is None else output.dtype
    back = put_behind(output, "Cast", attributes={"to": dtype}, dtype=dtype)
    back.name = output.name
    output.name = f"{output.name}_as_float"
    output.type = ir.TensorType(ir.DataType.FLOAT)
    maker = back.producer()
    assert maker is not None
    casts_back.add(maker)
    return True


def _is_shape(value: ir.Value) -> bool:
    """Whether a value is a shape, or computed of shapes and constants alone."""
    producer = value.producer()
    if producer is None:
        return value.is_initializer()
    return producer.op_type in ("Shape", "Size") or all(
        _is_shape(one) for one in producer.inputs if one is not None
    )


def _without(node: ir.Node) -> None:
    """A or b: not (not a and not b). a xor b: that, and not (a and b)."""
    values = [value for value in node.inputs if value is not None]
    shape = list(node.outputs[0].shape or ())
    neither = insert(
        node, "And", [insert(node, "Not", [value], value.shape or ()) for value in values], shape
    )
    last = ir.node("Not", [neither])
    if node.op_type == "Xor":
        both = insert(node, "And", values, shape)
        last = ir.node(
            "And", [insert(node, "Not", [neither], shape), insert(node, "Not", [both], shape)]
        )
    replace_node(node, [last])
