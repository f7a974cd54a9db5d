"""Shapes that a graph came without, and what is computed from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qsample.exporters.foreign.names import record_shapes
from qsample.graph.edit import constant

INT64, FLOAT = ir.DataType.INT64, ir.DataType.FLOAT


def value(name: str, dims: list[int | str], dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(dtype))


def numbers(graph: ir.Graph, name: str, given: object) -> ir.Value:
    tensor = ir.tensor(np.array(given, np.int64), name=name)
    made = ir.Value(name=name, const_value=tensor, type=ir.TensorType(INT64), shape=tensor.shape)
    graph.register_initializer(made)
    return made


@pytest.fixture
def split_heads() -> tuple[ir.Model, dict[str, ir.Node]]:
    """Ids [B, S] as float [B, S, 8], split into [B, S, 2, 4] and halved as TorchScript writes it."""
    ids, lengths = value("input_ids", ["B", "S"], INT64), value("input_lengths", ["B"], ir.DataType.INT32)
    cache = value("past_key_values.0.key", ["B", 2, "T", 4], FLOAT)
    graph = ir.Graph([ids, lengths, cache], [], nodes=[], opset_imports={"": 20})
    nodes: dict[str, ir.Node] = {}

    def add(name: str, op: str, inputs: list[ir.Value], **attributes: object) -> ir.Value:
        nodes[name] = ir.node(op, inputs, attributes, name=name)
        nodes[name].outputs[0].name = name
        graph.append(nodes[name])
        return nodes[name].outputs[0]

    weights = ir.tensor(np.ones((16, 8), np.float32), name="table")
    table = ir.Value(name="table", const_value=weights, type=ir.TensorType(FLOAT), shape=weights.shape)
    graph.register_initializer(table)
    hidden = add("hidden", "Gather", [table, ids])
    size = add("size", "Shape", [ids])
    both = add("both", "Concat", [size, numbers(graph, "heads", [2, 4])], axis=0)
    split = add("split", "Reshape", [hidden, both])
    width = add("width", "Gather", [add("shape", "Shape", [split]), numbers(graph, "last", [3])])
    half = add("half", "Div", [width, numbers(graph, "two", [2])])
    axis = numbers(graph, "axis", [3])
    first = add("first", "Slice", [split, numbers(graph, "zero", [0]), half, axis])
    capacity = add("capacity", "Gather", [add("cached", "Shape", [cache]), numbers(graph, "two_", 2)])
    least = add("least", "Min", [capacity, numbers(graph, "limit", 100)])
    graph.outputs.extend([first, least])
    return ir.Model(graph, ir_version=10), nodes


def test_shapes_have_the_contracts_axes(split_heads: tuple[ir.Model, dict[str, ir.Node]], tmp_path: Path) -> None:
    model, nodes = split_heads
    assert record_shapes(model, tmp_path) > 0
    assert nodes["split"].outputs[0].shape == ["B", "S", 2, 4]
    assert nodes["first"].outputs[0].shape == ["B", "S", 2, 2]
    assert nodes["first"].outputs[0].dtype == FLOAT


def test_what_shapes_decide_alone_is_a_constant(
    split_heads: tuple[ir.Model, dict[str, ir.Node]], tmp_path: Path
) -> None:
    model, nodes = split_heads
    record_shapes(model, tmp_path)
    target, stop = constant(nodes["split"].inputs[1]), constant(nodes["first"].inputs[2])
    assert target is not None
    assert target.tolist() == [0, 0, 2, 4]
    assert stop is not None
    assert stop.tolist() == [2]


def test_what_follows_an_axis_stays(split_heads: tuple[ir.Model, dict[str, ir.Node]], tmp_path: Path) -> None:
    """min(T, 100) is T for short caches only."""
    model, nodes = split_heads
    record_shapes(model, tmp_path)
    assert nodes["least"].outputs[0] in model.graph.outputs
    assert nodes["least"].op_type == "Min"
