"""Graphs of a few nodes that work on buffers in place; made without the package onnx, which the runtime does not need.

The numbers of the fields are those of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

_OPSET: Final = 18
_IR_VERSION: Final = 8
_INT32: Final = 6  # of onnx.TensorProto.DataType
_INT64: Final = 7


@cache
def identity(onnx_type: int) -> bytes:
    """Output y is x, of that element type and any shape."""
    return _model([_node("Identity", ["x"], "y")], {"x": onnx_type}, {"y": onnx_type})


@cache
def rows(onnx_type: int) -> bytes:
    """Output y is the rows `rows` [n] int64 of x, of that element type."""
    return _model([_node("Gather", ["x", "rows"], "y", axis=0)], {"x": onnx_type, "rows": _INT64}, {"y": onnx_type})


@cache
def rows_replaced(onnx_type: int) -> bytes:
    """Output y is x, of that element type, with `new` [n, ...] in its rows `rows` [n, 1] int64."""
    inputs = {"x": onnx_type, "rows": _INT64, "new": onnx_type}
    return _model([_node("ScatterND", list(inputs), "y")], inputs, {"y": onnx_type})


@cache
def columns_behind() -> bytes:
    """Output y[b, i] is x[b, max(0, row[b] + column[i])], all int32: x [B, T], row [B, 1], column [1, N], zero [1]."""
    nodes = [
        _node("Add", ["row", "column"], "asked"),
        _node("Max", ["asked", "zero"], "index"),
        _node("GatherElements", ["x", "index"], "y", axis=1),
    ]
    return _model(nodes, dict.fromkeys(("x", "row", "column", "zero"), _INT32), {"y": _INT32})


def one_more_output(name: str, onnx_type: int) -> bytes:
    """Bytes that, appended to the file of a model, make a value of it a further output: if a field of a protobuf
    message comes twice, its parser joins both (https://protobuf.dev/programming-guides/encoding/#last-one-wins)."""
    return _field(7, _field(12, _value(name, onnx_type)))


def _model(nodes: Sequence[bytes], inputs: dict[str, int], outputs: dict[str, int]) -> bytes:
    graph = b"".join(_field(1, node) for node in nodes) + _field(2, b"graph")
    graph += b"".join(_field(11, _value(*value)) for value in inputs.items())
    graph += b"".join(_field(12, _value(*value)) for value in outputs.items())
    return _field(1, _IR_VERSION) + _field(7, graph) + _field(8, _field(2, _OPSET))


def _node(operator: str, inputs: Sequence[str], output: str, **attributes: int) -> bytes:
    node = b"".join(_field(1, name.encode()) for name in inputs) + _field(2, output.encode())
    node += _field(4, operator.encode())
    for name, number in attributes.items():  # AttributeProto: name, i, type INT
        node += _field(5, _field(1, name.encode()) + _field(3, number) + _field(20, 2))
    return node


def _value(name: str, onnx_type: int) -> bytes:
    """ValueInfoProto { name, type { tensor_type { elem_type } } }: any shape."""
    return _field(1, name.encode()) + _field(2, _field(1, _field(1, onnx_type)))


def _field(number: int, content: int | bytes) -> bytes:
    """A field of a protobuf message: a number, or bytes after their length."""
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
