"""Graphs of a few nodes, made without the package onnx: the runtime does not need it. The fields are onnx.proto's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from qsample.contract.arrays import Array
from qsample.disk.protobuf import field

CONTRIB_DOMAIN: Final = b"com.microsoft"
_OPSET: Final = 18
_IR_VERSION: Final = 8
_INT32: Final = 6  # of onnx.TensorProto.DataType
_INT64: Final = 7


@cache
def identity(onnx_type: int) -> bytes:
    """Output y is x, of that element type and any shape."""
    return model([node("Identity", ["x"], "y")], {"x": onnx_type}, {"y": onnx_type})


@cache
def rows(onnx_type: int) -> bytes:
    """Output y is the rows `rows` [n] int64 of x, of that element type."""
    return model(
        [node("Gather", ["x", "rows"], "y", axis=0)],
        {"x": onnx_type, "rows": _INT64},
        {"y": onnx_type},
    )


@cache
def rows_replaced(onnx_type: int) -> bytes:
    """Output y is x, of that element type, with `new` [n, ...] in its rows `rows` [n, 1] int64."""
    inputs = {"x": onnx_type, "rows": _INT64, "new": onnx_type}
    return model([node("ScatterND", list(inputs), "y")], inputs, {"y": onnx_type})


@cache
def concatenated(onnx_type: int, count: int) -> bytes:
    """Output y is the rows of x0, then those of x1, and so on: `count` inputs of that element type."""
    inputs = dict.fromkeys((f"x{index}" for index in range(count)), onnx_type)
    return model([node("Concat", list(inputs), "y", axis=0)], inputs, {"y": onnx_type})


@cache
def columns_behind() -> bytes:
    """Output y[b, i] is x[b, max(0, row[b] + column[i])], all int32: x [B, T], row [B, 1], column [1, N], zero [1]."""
    nodes = [
        node("Add", ["row", "column"], "asked"),
        node("Max", ["asked", "zero"], "index"),
        node("GatherElements", ["x", "index"], "y", axis=1),
    ]
    return model(nodes, dict.fromkeys(("x", "row", "column", "zero"), _INT32), {"y": _INT32})


def one_more_output(name: str, onnx_type: int) -> bytes:
    """Bytes that, appended to the file of a model, make a value of it a further output: if a field of a protobuf
    message comes twice, its parser joins both (https://protobuf.dev/programming-guides/encoding/#last-one-wins)."""
    return field(7, field(12, _value(name, onnx_type)))


def model(
    nodes: Sequence[bytes],
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    constants: Sequence[bytes] = (),
) -> bytes:
    """A ModelProto. inputs, outputs: name → element type. constants: of `tensor`."""
    graph = b"".join(field(1, node) for node in nodes) + field(2, b"graph")
    graph += b"".join(field(5, constant) for constant in constants)
    graph += b"".join(field(11, _value(*value)) for value in inputs.items())
    graph += b"".join(field(12, _value(*value)) for value in outputs.items())
    domains = field(8, field(2, _OPSET)) + field(8, field(1, CONTRIB_DOMAIN) + field(2, 1))
    return field(1, _IR_VERSION) + field(7, graph) + domains


def node(
    operator: str,
    inputs: Sequence[str],
    *outputs: str,
    domain: bytes = b"",
    given: Sequence[bytes] = (),
    **attributes: int,
) -> bytes:
    """A NodeProto. given: AttributeProtos, in addition to the integers `attributes`."""
    content = b"".join(field(1, name.encode()) for name in inputs)
    content += b"".join(field(2, name.encode()) for name in outputs)
    content += field(4, operator.encode())
    given = (*given, *(integer(*attribute) for attribute in attributes.items()))
    return (
        content + b"".join(field(5, one) for one in given) + (field(7, domain) if domain else b"")
    )


def integer(name: str, number: int) -> bytes:
    """An AttributeProto; number: 0 or more."""
    return field(1, name.encode()) + field(3, number) + field(20, 2)


def tensor(name: str, array: Array, onnx_type: int) -> bytes:
    """A TensorProto with the numbers inside."""
    dims = b"".join(field(1, size) for size in array.shape)
    return dims + field(2, onnx_type) + field(8, name.encode()) + field(9, array.tobytes())


def _value(name: str, onnx_type: int) -> bytes:
    """ValueInfoProto { name, type { tensor_type { elem_type } } }: any shape."""
    return field(1, name.encode()) + field(2, field(1, field(1, onnx_type)))
