"""Makes graphs of a few nodes without the package onnx, which the runtime does not need.

The numbers of fields are those of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from qsample.contract.arrays import Array
from qsample.package.disk.protobuf import field

CONTRIB_DOMAIN: Final = b"com.microsoft"
_OPSET: Final = 18
_IR_VERSION: Final = 8
# Values of onnx.TensorProto.DataType.
_INT32: Final = 6
_INT64: Final = 7


@cache
def identity(onnx_type: int) -> bytes:
    """A graph whose output y is x. onnx_type: The element type; the shape is free."""
    return model([node("Identity", ["x"], "y")], {"x": onnx_type}, {"y": onnx_type})


@cache
def rows(onnx_type: int) -> bytes:
    """A graph whose output y is the rows `rows` [n] int64 of x. onnx_type: The element type of
    x."""
    return model(
        [node("Gather", ["x", "rows"], "y", axis=0)],
        {"x": onnx_type, "rows": _INT64},
        {"y": onnx_type},
    )


@cache
def rows_replaced(onnx_type: int) -> bytes:
    """A graph whose output y is x with `new` [n, ...] in its rows `rows` [n, 1] int64. onnx_type:
    The element type of x."""
    inputs = {"x": onnx_type, "rows": _INT64, "new": onnx_type}
    return model([node("ScatterND", list(inputs), "y")], inputs, {"y": onnx_type})


@cache
def concatenated(onnx_type: int, count: int) -> bytes:
    """A graph whose output y is the rows of x0, then the rows of x1, and so on. onnx_type: The
    element type. count: The number of inputs."""
    inputs = dict.fromkeys((f"x{index}" for index in range(count)), onnx_type)
    return model([node("Concat", list(inputs), "y", axis=0)], inputs, {"y": onnx_type})


@cache
def columns_behind() -> bytes:
    """A graph whose output y[b, i] is x[b, max(0, row[b] + column[i])]. All are int32: x [B, T],
    row [B, 1], column [1, N], zero [1]."""
    nodes = [
        node("Add", ["row", "column"], "asked"),
        node("Max", ["asked", "zero"], "index"),
        node("GatherElements", ["x", "index"], "y", axis=1),
    ]
    return model(nodes, dict.fromkeys(("x", "row", "column", "zero"), _INT32), {"y": _INT32})


def one_more_output(name: str, onnx_type: int) -> bytes:
    """Bytes that, appended to the file of a model, make one of its values a further output.

    If a field of a protobuf message comes twice, its parser joins both
    (https://protobuf.dev/programming-guides/encoding/#last-one-wins).

    Args:
        name: The name of the value.
        onnx_type: Its element type.
    """
    return field(7, field(12, _value(name, onnx_type)))


def model(
    nodes: Sequence[bytes],
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    constants: Sequence[bytes] = (),
) -> bytes:
    """Make a ModelProto.

    Args:
        nodes: NodeProtos, made by `node`.
        inputs: The element types of the graph's inputs by name.
        outputs: The element types of the graph's outputs by name.
        constants: TensorProtos, made by `tensor`.
    """
    graph = b"".join(field(1, node) for node in nodes) + field(2, b"graph")
    graph += b"".join(field(5, constant) for constant in constants)
    graph += b"".join(field(11, _value(name, kind)) for name, kind in inputs.items())
    graph += b"".join(field(12, _value(name, kind)) for name, kind in outputs.items())
    onnx_domain = field(8, field(2, _OPSET))
    contrib_domain = field(8, field(1, CONTRIB_DOMAIN) + field(2, 1))
    return field(1, _IR_VERSION) + field(7, graph) + onnx_domain + contrib_domain


def node(
    operator: str,
    inputs: Sequence[str],
    *outputs: str,
    domain: bytes = b"",
    given: Sequence[bytes] = (),
    **attributes: int,
) -> bytes:
    """Make a NodeProto.

    Args:
        operator: The name of the operator.
        inputs: The names of the inputs; "" for an absent input.
        outputs: The names of the outputs.
        domain: The domain of the operator; b"" for ONNX's.
        given: AttributeProtos.
        attributes: Further attributes, which are integers.
    """
    content = b"".join(field(1, name.encode()) for name in inputs)
    content += b"".join(field(2, name.encode()) for name in outputs)
    content += field(4, operator.encode())
    integers = [integer(name, number) for name, number in attributes.items()]
    content += b"".join(field(5, attribute) for attribute in (*given, *integers))
    return content + field(7, domain) if domain else content


def integer(name: str, number: int) -> bytes:
    """Make an AttributeProto of an integer of at least 0."""
    return field(1, name.encode()) + field(3, number) + field(20, 2)


def tensor(name: str, array: Array, onnx_type: int) -> bytes:
    """Make a TensorProto with the numbers inside."""
    dims = b"".join(field(1, size) for size in array.shape)
    return dims + field(2, onnx_type) + field(8, name.encode()) + field(9, array.tobytes())


def _value(name: str, onnx_type: int) -> bytes:
    """Make a ValueInfoProto { name, type { tensor_type { elem_type } } }, whose shape is free."""
    return field(1, name.encode()) + field(2, field(1, field(1, onnx_type)))
