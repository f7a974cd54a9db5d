"""The rewrite rules of the sampler's graph: the nodes that each leaves, and that a graph computes what it did."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx.shape_inference
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.exporters.sampler.rewrites import simplify

FLAGS = np.array([[False, False], [True, False], [True, True]])
NUMBERS = np.array([0, 3, 4, 2**40 + 7], np.int64)  # the last is more than float32 holds, where nothing rounds it
ANY = """(bool[B, C] flags) => (bool[B] result) {
    axis = Constant <value_ints = [1]> ()
    numbers = Cast <to = 6> (flags)
    maximum = ReduceMax <keepdims = 0> (numbers, axis)
    result = Cast <to = 9> (maximum)
}"""
LARGEST = """(int64[N] numbers) => (bool result) {
    narrow = Cast <to = 6> (numbers)
    maximum = ReduceMax <keepdims = 0> (narrow)
    result = Cast <to = 9> (maximum)
}"""
QUOTIENT = """(int64[N] numbers) => (int64[N] result) {
    divisor = Constant <value_float = 4.0> ()
    floats = Cast <to = 11> (numbers)
    wide_divisor = Cast <to = 11> (divisor)
    exact = Div (floats, wide_divisor)
    rounded = Floor (exact)
    result = Cast <to = 7> (rounded)
}"""
QUOTIENTS = """(int64[N] numbers) => (int64[N] result, float[N] exact) {
    divisor = Constant <value_float = 4.0> ()
    floats = Cast <to = 1> (numbers)
    exact = Div (floats, divisor)
    rounded = Floor (exact)
    once = Cast <to = 7> (rounded)
    more = Cast <to = 1> (once)
    part = Div (more, divisor)
    rounded_part = Floor (part)
    twice = Cast <to = 7> (rounded_part)
    result = Add (once, twice)
}"""
SCALARS = """(int64 scalar) => (int64 result, int64 result_of_input) {
    shape = Constant <value_ints = [-1]> ()
    zero = Constant <value_int = 0> ()
    computed = Neg (scalar)
    column = Reshape (computed, shape)
    element = Gather (column, zero)
    result = Abs (element)
    input_column = Reshape (scalar, shape)
    result_of_input = Gather (input_column, zero)
}"""
VECTOR = """(int64[N] numbers) => (int64 result) {
    shape = Constant <value_ints = [-1]> ()
    one = Constant <value_int = 1> ()
    column = Reshape (numbers, shape)
    result = Gather (column, one)
}"""


@pytest.mark.parametrize(
    ("graph", "value", "bool_maximum", "left"),
    [
        pytest.param(ANY, FLAGS, True, ["ReduceMax"], id="any"),
        pytest.param(ANY, FLAGS, False, ["Cast", "ReduceMax", "Cast"], id="any without a maximum of bools"),
        pytest.param(LARGEST, NUMBERS[:3], True, ["Cast", "ReduceMax", "Cast"], id="a maximum of numbers"),
        pytest.param(
            QUOTIENT, NUMBERS, True, ["Cast", "Cast", "Div", "Floor", "Cast"], id="a divisor that is computed"
        ),
        # The exact quotient is an output, too: its division stays.
        pytest.param(QUOTIENTS, NUMBERS[:3], True, ["Add", "Cast", "Div", "Div", "Div"], id="quotients, one divisor"),
        pytest.param(SCALARS, np.array(7), True, ["Abs", "Gather", "Neg", "Reshape"], id="scalars, one an input"),
        pytest.param(VECTOR, NUMBERS, True, ["Gather", "Reshape"], id="an element of a vector"),
    ],
)
def test_rules(graph: str, value: np.ndarray, bool_maximum: bool, left: list[str]) -> None:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> graph {graph}')
    proto = onnx.shape_inference.infer_shapes(proto, strict_mode=True)
    model = ir.from_proto(proto)
    simplify(model, bool_maximum=bool_maximum)
    assert sorted(node.op_type for node in model.graph if node.op_type != "Constant") == sorted(left)

    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    expected, got = (
        ort.InferenceSession(one.SerializeToString()).run(None, {proto.graph.input[0].name: value})
        for one in (proto, after)
    )
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_array_equal(a, b)
