"""A recurrence reads its state as it is in calls in which no row begins."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.compiler.passes.recurrences import branch_where_rows_begin
from qsample.contract.tensors import LENGTH, RUNNING

Array = np.ndarray


def parse(graph: str) -> ir.Model:
    opsets = '<ir_version: 10, opset_import: ["" : 20, "qsample" : 1]>'
    model = ir.from_proto(onnx.parser.parse_model(f"{opsets} graph {graph}"))
    for number, node in enumerate(model.graph):  # the text has no names for nodes; a trace has
        node.name = f"{node.op_type}_{number}"
    return model


def run(model: ir.Model, **inputs: object) -> list[Array]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    session = ort.InferenceSession(proto.SerializeToString())
    types = {value.name: value.dtype for value in model.graph.inputs}
    return session.run(
        None, {name: np.array(value, types[name].numpy()) for name, value in inputs.items()}
    )


def only(graph: ir.Graph, op_type: str) -> ir.Node:
    (node,) = (node for node in graph if node.op_type == op_type)
    return node


def operators(graph: ir.Graph) -> list[str]:
    return sorted(node.op_type for node in graph)


RECURRENCE = """(int32[B] lengths, int32[B] status, float[B,S,8] x, float[B,S,2] decay, float[B,2,4,4] state)
        => (float[B,S,8] result, float[B,2,4,4] next_state)
        <int32 zero = {0}, float none = {0}, int64[4] all = {-1, 1, 1, 1}> {
    has_begun = Greater (lengths, zero)
    rows = Reshape (has_begun, all)
    start = Where (rows, state, none)
    result, next_state = com.microsoft.LinearAttention
        <q_num_heads = 2, kv_num_heads = 2, update_rule = "gated"> (x, x, x, start, decay)
}"""


def recurrence() -> ir.Model:
    model = parse(RECURRENCE)
    model.opset_imports["com.microsoft"] = 1
    return model


@pytest.mark.parametrize(
    ("lengths", "status"),
    [
        ([3, 5], [RUNNING, RUNNING]),
        ([0, 5], [RUNNING, RUNNING]),
        ([0, 0], [RUNNING, RUNNING]),
        ([3, 0], [LENGTH, RUNNING]),
    ],
)
def test_a_row_that_begins_starts_from_zeros(lengths: list[int], status: list[int]) -> None:
    """Its buffers hold no numbers; those of the others are as they were."""
    plain, branched = recurrence(), recurrence()
    assert branch_where_rows_begin(branched)
    assert not branch_where_rows_begin(branched)
    branch = only(branched.graph, "If")
    begins, goes_on = (branch.attributes[f"{side}_branch"].as_graph() for side in ("then", "else"))
    assert (operators(begins), operators(goes_on)) == (
        ["LinearAttention", "Where"],
        ["LinearAttention"],
    )
    assert "Where" not in operators(branched.graph)
    rng = np.random.default_rng(0)
    state = rng.normal(size=(2, 2, 4, 4))
    state[np.array(lengths) == 0] = np.nan
    feeds = {"lengths": lengths, "status": status, "state": state}
    feeds |= {"x": rng.normal(size=(2, 3, 8)), "decay": -rng.random((2, 3, 2))}
    for got, wanted in zip(run(branched, **feeds), run(plain, **feeds), strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, wanted)


def test_a_row_that_does_not_run_has_no_beginning() -> None:
    """A slot that nobody uses, say: the calls of the others copy nothing."""
    model = recurrence()
    assert branch_where_rows_begin(model)
    rng = np.random.default_rng(0)
    state = rng.normal(size=(2, 2, 4, 4))
    x, decay = rng.normal(size=(2, 3, 8)), np.zeros((2, 3, 2))
    feeds = {"lengths": [0, 4], "x": x, "decay": decay, "state": state}
    kept = run(model, **feeds, status=[LENGTH, RUNNING])[1]
    zeroed = run(model, **feeds, status=[RUNNING, RUNNING])[1]
    np.testing.assert_allclose(kept[0] - zeroed[0], state[0], atol=1e-5)
    np.testing.assert_array_equal(kept[1], zeroed[1])


def test_a_recurrence_whose_start_is_read_elsewhere_stays() -> None:
    model = recurrence()
    start = only(model.graph, "Where").outputs[0]
    start.type, start.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["B", 2, 4, 4])
    model.graph.outputs.append(start)
    assert not branch_where_rows_begin(model)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("float none = {0}", "float none = {1}"),
        ("start = Where (rows, state, none)", "rest = Neg (none)\n start = Where (rows, state, rest)"),
        ("start = Where (rows, state, none)", "kept = Neg (state)\n start = Where (rows, kept, none)"),
        ("result, next_state =", "again = Neg (start)\n result, next_state ="),
        ("start = Where (rows, state, none)", "chosen = Where (rows, state, none)\n start = Identity (chosen)"),
    ],
    ids=["not zeros", "computed", "no input", "read twice", "no choice"],
)  # fmt: skip
def test_other_starts_stay(old: str, new: str) -> None:
    assert RECURRENCE.count(old) == 1
    model = parse(RECURRENCE.replace(old, new))
    model.opset_imports["com.microsoft"] = 1
    before = operators(model.graph)
    assert not branch_where_rows_begin(model)
    assert operators(model.graph) == before
