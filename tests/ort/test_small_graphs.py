"""Graphs that are made without the package onnx: that package reads them, and ONNX Runtime computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from qsample.ort import small_graphs

FLOAT = onnx.TensorProto.FLOAT
MATRIX = np.arange(12, dtype=np.float32).reshape(4, 3)


def run(data: bytes, **feeds: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    (result,) = session.run(["y"], feeds)
    return np.asarray(result)


@pytest.mark.parametrize(
    ("graph", "feeds", "expected"),
    [
        (lambda: small_graphs.identity(FLOAT), {"x": MATRIX}, MATRIX),
        (
            lambda: small_graphs.rows(FLOAT),
            {"x": MATRIX, "rows": np.array([3, 0, 3])},
            MATRIX[[3, 0, 3]],
        ),
        (
            lambda: small_graphs.rows_replaced(FLOAT),
            {"x": MATRIX, "rows": np.array([[2], [0]]), "new": -MATRIX[:2]},
            np.stack([-MATRIX[1], MATRIX[1], -MATRIX[0], MATRIX[3]]),
        ),
        (
            lambda: small_graphs.concatenated(FLOAT, 3),
            {"x0": MATRIX, "x1": -MATRIX[:1], "x2": MATRIX[1:2]},
            np.concatenate([MATRIX, -MATRIX[:1], MATRIX[1:2]]),
        ),
    ],
    ids=["identity", "rows", "rows_replaced", "concatenated"],
)
def test_what_a_graph_computes(
    graph: Callable[[], bytes], feeds: dict[str, np.ndarray], expected: np.ndarray
) -> None:
    assert np.array_equal(run(graph(), **feeds), expected)


def test_columns_behind_the_row_of_each() -> None:
    """Before the first column, the first one is taken."""
    x = np.arange(10, dtype=np.int32).reshape(2, 5)
    result = run(
        small_graphs.columns_behind(),
        x=x,
        row=np.array([[0], [3]], np.int32),
        column=np.array([[-1, 0, 1]], np.int32),
        zero=np.zeros(1, np.int32),
    )
    assert result.tolist() == [[0, 0, 1], [7, 8, 9]]


def test_a_value_becomes_an_output() -> None:
    add = small_graphs.node("Add", ["x", "x"], "twice")
    last = small_graphs.node("Mul", ["twice", "twice"], "y")
    data = small_graphs.model([add, last], {"x": FLOAT}, {"y": FLOAT})
    longer = data + small_graphs.one_more_output("twice", FLOAT)
    session = ort.InferenceSession(longer, providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_outputs()] == ["y", "twice"]
    squares, twice = session.run(None, {"x": MATRIX})
    assert np.array_equal(twice, 2 * MATRIX)
    assert np.array_equal(squares, 4 * MATRIX * MATRIX)


def test_what_onnx_reads_of_a_model() -> None:
    """Every part under its own name, in its order."""
    numbers = np.array([[1, 2, 3]], np.int64)
    data = small_graphs.model(
        [
            small_graphs.node("Identity", ["c", ""], "a", "b"),
            small_graphs.node(
                "Fused",
                ["a"],
                "y",
                domain=small_graphs.CONTRIB_DOMAIN,
                given=[small_graphs.integer("given", 0)],
                first=5,
                second=2**40,
            ),
        ],
        {"x": 1, "z": 7},
        {"y": 10},
        [small_graphs.tensor("c", numbers, onnx.TensorProto.INT64)],
    )
    model = onnx.load_from_string(data)
    assert model.ir_version == 8
    opsets = {opset.domain: opset.version for opset in model.opset_import}
    assert opsets == {"": 18, "com.microsoft": 1}

    plain, fused = model.graph.node
    assert (plain.op_type, plain.domain, list(plain.input), list(plain.output)) == (
        "Identity",
        "",
        ["c", ""],
        ["a", "b"],
    )
    assert list(plain.attribute) == []
    assert (fused.op_type, fused.domain) == ("Fused", "com.microsoft")
    read = {one.name: onnx.helper.get_attribute_value(one) for one in fused.attribute}
    assert read == {"given": 0, "first": 5, "second": 2**40}

    def types(values: Any) -> dict[str, int]:
        return {value.name: value.type.tensor_type.elem_type for value in values}

    assert types(model.graph.input) == {"x": 1, "z": 7}
    assert types(model.graph.output) == {"y": 10}
    assert model.graph.name
    (constant,) = model.graph.initializer
    assert constant.name == "c"
    assert onnx.numpy_helper.to_array(constant).tolist() == [[1, 2, 3]]
    assert constant.data_type == onnx.TensorProto.INT64
