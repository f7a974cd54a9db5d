"""vision.onnx as a graph: float16 graphs in float32, the dtype of features, the session, the distance of features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.graph import vision
from qsample.graph.vision import compute_in_float32, furthest, give_features_as, vision_session
from tests.helpers.small_graphs import operators, results, small_graph

SHAPES = {"wide": ["F", 3], "half": ["F", 3], "whole": ["F", 3], "features": ["F", 2]}
TOWER = """
tower (int64[F,3] pixels, float16[3,2] matrix, int64[1] one) => (float16[F,2] features) {
    more = Add (pixels, one)
    half = Cast <to = 10> (more)
    features = MatMul (half, matrix)
}"""


def tower() -> ir.Model:
    model = small_graph(
        TOWER,
        {name: SHAPES[name] for name in ("half", "features")},
        ir.DataType.FLOAT16,
        {"matrix": np.array([[1, 2], [3, 4], [5, 6]], np.float16), "one": np.array([1])},
    )
    more = model.graph[0].outputs[0]
    more.shape, more.type = ir.Shape(["F", 3]), ir.TensorType(ir.DataType.INT64)
    return model


def test_a_graph_of_float16_computes_in_float32() -> None:
    """Where float16 overflows. Weights stay in float16 where they lie, and integers are integers."""
    model = tower()
    matrix = model.graph.initializers["matrix"]
    stored = matrix.const_value
    compute_in_float32(model)
    assert matrix.dtype == ir.DataType.FLOAT
    assert matrix.const_value is not None
    assert matrix.const_value.stored is stored  # type: ignore[attr-defined]
    assert matrix.const_value.name == "matrix"
    one = model.graph.initializers["one"].const_value
    assert one is not None
    assert one.dtype == ir.DataType.INT64
    assert [value.dtype for node in model.graph for value in node.outputs] == [
        ir.DataType.INT64,
        ir.DataType.FLOAT,
        ir.DataType.FLOAT,
    ]
    (features,) = results(model, {"pixels": np.array([[99_999, 0, 0]])})
    assert features.dtype == np.float32
    assert features.tolist() == [[100_000 + 3 + 5, 200_000 + 4 + 6]]


def test_casts_to_other_dtypes_stay() -> None:
    model = small_graph(
        "g (float16[F] x) => (int32[F] y) { y = Cast <to = 6> (x) }",
        {"y": ["F"]},
        ir.DataType.INT32,
    )
    compute_in_float32(model)
    assert model.graph[0].attributes.get_int("to", 0) == ir.DataType.INT32
    assert model.graph[0].outputs[0].dtype == ir.DataType.INT32


def test_the_loop_of_a_tower_is_widened() -> None:
    """Graphs within the graph count, too."""
    model = small_graph(
        """g (float16[F,2] x, float16[2] start) => (float16[2] last, float16[F,2] sums) {
            last, sums = Scan <num_scan_inputs = 1, body = step (float16[2] state, float16[2] row)
                => (float16[2] next, float16[2] sum) {
                    narrow = Cast <to = 10> (row)
                    next = Add (state, narrow)
                    sum = Identity (next)
                }> (start, x)
        }"""
    )
    for node in model.graph.all_nodes():
        for value in node.outputs:
            value.type = ir.TensorType(ir.DataType.FLOAT16)
    compute_in_float32(model)
    nodes = list(model.graph.all_nodes())
    assert {value.dtype for node in nodes for value in node.outputs} == {ir.DataType.FLOAT}
    (narrow,) = [node for node in nodes if node.op_type == "Cast"]
    assert narrow.attributes.get_int("to", 0) == ir.DataType.FLOAT


def test_features_in_another_dtype_keep_their_name() -> None:
    model = tower()
    give_features_as(model, ir.DataType.FLOAT)
    (result,) = model.graph.outputs
    assert (result.name, result.dtype, list(result.shape or ())) == (
        "features",
        ir.DataType.FLOAT,
        ["F", 2],
    )
    product = model.graph[2].outputs[0]
    assert (product.name, product.dtype) == ("features_float16", ir.DataType.FLOAT16)
    assert operators(model) == ["Add", "Cast", "MatMul", "Cast"]
    give_features_as(model, ir.DataType.FLOAT)
    assert len(model.graph) == 4, "they have it already"
    (features,) = results(model, {"pixels": np.array([[1, 0, 0]])})
    assert (features.dtype, features.tolist()) == (np.float32, [[10, 14]])


def test_a_session_reads_the_weights_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And optimizes as much as it is told, by default as the runtime does."""
    model = small_graph(
        """tower (float[F,300] pixels, float[300,2] matrix) => (float[F,2] image_features) {
            image_features = MatMul (pixels, matrix)
        }""",
        constants={"matrix": np.full((300, 2), 0.5, np.float32)},
    )
    ir.save(model, tmp_path / "vision.onnx", external_data="vision.data")
    levels: list[ort.GraphOptimizationLevel] = []
    opened = vision.open_session

    def noting(graph: bytes, options: ort.SessionOptions, providers: list[str]) -> object:
        levels.append(options.graph_optimization_level)
        assert providers == ["CPUExecutionProvider"]
        return opened(graph, options, providers)

    monkeypatch.setattr(vision, "open_session", noting)
    for level in (None, ort.GraphOptimizationLevel.ORT_DISABLE_ALL):
        session = vision_session(tmp_path, level)
        features = session.features(np.ones((1, 300), np.float32))
        assert features.tolist() == [[150.0, 150.0]]
    assert levels == [
        vision.session_options().graph_optimization_level,
        ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ]


ROWS = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])


@pytest.mark.parametrize(
    ("got", "wanted", "distance"),
    [
        (ROWS, ROWS, 0.0),
        (ROWS, ROWS[::-1], 3.0),  # of one number, rows are compared in order
        (ROWS, ROWS + np.array([0.0, 0.5]), 0.5),
        (ROWS, ROWS[[0, 1, 2, 0, 1]], 0.0),  # of another, with the nearest
        (ROWS[[2, 0, 1, 1]], ROWS, 0.0),
        (-ROWS[[2, 0, 1, 1]], -ROWS, 0.0),
        (
            np.array([[1.0, 0.0], [-5.0, -5.0]]),
            np.array([[1.0, 0.0], [-5.0, -5.0], [1.0, 0.0]]),
            0.0,
        ),
        (ROWS, ROWS[:2], 3.0),  # (3, 3) is 3 from (0, 2), of which nobody else is far
        (ROWS[:2], ROWS, 3.0),
        (ROWS[:, :0], ROWS[:, :0], 0.0),
    ],
)
def test_the_distance_of_features(got: np.ndarray, wanted: np.ndarray, distance: float) -> None:
    assert furthest(got, wanted) == distance


def test_no_numbers_are_at_no_distance() -> None:
    spoiled = np.where(ROWS == 3, np.nan, ROWS)
    assert np.isnan(furthest(spoiled, ROWS))
    assert np.isnan(furthest(ROWS, spoiled))
    assert np.isnan(furthest(ROWS[:1], spoiled))
