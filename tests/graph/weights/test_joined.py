"""Weights whose parts lie apart in files: put together by nodes of a graph, and read back from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.graph.weights import stored
from qsample.graph.weights.joined import JoinedTensor, in_turns, lies_in_files, parts_in_files, read_joined
from qsample.graph.weights.stored import StoredTensor, load_graph, rows_in_turns, save_beside, widen_weights

EXPERTS, ROWS, COLUMNS = 3, 4, 5
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
Lying = Callable[..., ir.ExternalTensor]


@pytest.fixture
def lying(tmp_path: Path) -> Lying:
    """Makes a tensor of random numbers that lies in a file of its own, some bytes from its start."""

    def make(name: str, *shape: int, dtype: Any = ml_dtypes.bfloat16) -> ir.ExternalTensor:
        seed = np.frombuffer(name.encode(), np.uint8).tolist()
        array = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
        (tmp_path / name).write_bytes(b"header" + array.tobytes())
        kind = ir.DataType.from_numpy(array.dtype)
        return ir.ExternalTensor(
            name, 6, array.nbytes, kind, shape=ir.Shape(shape), name=name, base_dir=tmp_path.resolve()
        )

    return make


def experts(lying: Lying, name: str, rows: int = ROWS, dtype: Any = ml_dtypes.bfloat16) -> JoinedTensor:
    """[E, rows, K] of as many files."""
    parts = [lying(f"{name}{expert}", 1, rows, COLUMNS, dtype=dtype) for expert in range(EXPERTS)]
    return JoinedTensor(parts, 0, (EXPERTS, rows, COLUMNS), name)


def taking_turns(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    result = np.empty((EXPERTS, 2 * ROWS, COLUMNS), gate.dtype)
    result[:, 0::2], result[:, 1::2] = gate, up
    return result


def test_parts_are_put_together_along_the_axis(lying: Lying) -> None:
    first, second = lying("first", 2, 3), lying("second", 2, 4)
    joined = JoinedTensor([first, second], 1, (7, 2))
    np.testing.assert_array_equal(joined.numpy(), np.concatenate([first.numpy(), second.numpy()], axis=1).reshape(7, 2))
    assert joined.dtype == ir.DataType.BFLOAT16
    assert [part.name for part in parts_in_files(JoinedTensor([joined, first], 0, (20,)))] == [
        "first",
        "second",
        "first",
    ]


def test_gate_and_up_take_turns_wherever_they_lie(lying: Lying) -> None:
    gate, up = experts(lying, "gate"), experts(lying, "up")
    wanted = taking_turns(gate.numpy(), up.numpy())
    both = JoinedTensor([gate, up], 1, (EXPERTS, 2 * ROWS, COLUMNS))
    for tensors in ([gate, up], [both]):
        joined = in_turns(tensors, "fc1")
        assert joined is not None
        assert lies_in_files(joined)
        np.testing.assert_array_equal(joined.numpy(), wanted)
    whole = lying("whole", EXPERTS, 2 * ROWS, COLUMNS)
    joined = in_turns([whole], "fc1")
    assert joined is not None
    np.testing.assert_array_equal(joined.numpy(), taking_turns(*np.split(whole.numpy(), 2, axis=1)))


def test_what_lies_in_no_file_is_not_joined(lying: Lying) -> None:
    gate = experts(lying, "gate")
    assert in_turns([gate, ir.Tensor(gate.numpy())], "fc1") is None
    other = JoinedTensor([experts(lying, "two", 2), experts(lying, "six", 6)], 1, (EXPERTS, 8, COLUMNS))
    assert in_turns([other], "fc1") is None  # not halves
    wide = experts(lying, "wide", dtype=np.float32)
    assert rows_in_turns([StoredTensor(gate, "gate"), StoredTensor(wide, "wide")], "fc1") is None


def product(weight: ir.TensorProtocol) -> ir.Model:
    """x [E, B, K] times a weight [E, K, N]."""
    x = ir.val("x", ir.DataType.FLOAT, [EXPERTS, "B", weight.shape.numpy()[1]])
    tensor = StoredTensor(weight, "weight")
    value = ir.Value(name="weight", shape=tensor.shape, type=ir.TensorType(ir.DataType.FLOAT), const_value=tensor)
    node = ir.Node("", "MatMul", [x, value], name="product")
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    made = ir.Graph([x], node.outputs, nodes=[node], initializers=[value], opset_imports={"": 20}, name="g")
    return ir.Model(made, ir_version=10)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("nested", [True, False])
def test_a_graph_puts_them_together_when_it_runs(dtype: str, nested: bool, lying: Lying, tmp_path: Path) -> None:
    gate, up = (experts(lying, name, dtype=DTYPES[dtype]) for name in ("gate", "up"))
    weight = in_turns([gate, up], "fc1") if nested else gate
    assert weight is not None
    model, wanted = product(weight), weight.numpy().astype(np.float32)
    (tmp_path / "beside").mkdir()
    save_beside(model, tmp_path / "beside", "model.onnx")
    assert sum(file.stat().st_size for file in (tmp_path / "beside").iterdir()) < 6000
    read = load_graph(tmp_path / "beside" / "model.onnx")
    x = np.random.default_rng(0).standard_normal((EXPERTS, 2, wanted.shape[1])).astype(np.float32)
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", "/")
    for value in read.graph.initializers.values():  # ONNX Runtime opens files below a folder
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = stored.relocated(value.const_value, str(value.const_value.path).lstrip("/"), "/")
    session = ort.InferenceSession(
        ir.to_proto(read).SerializeToString(),
        options,
        ["CPUExecutionProvider"],
        disabled_optimizers=["ConstantFolding"],
    )
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ wanted, rtol=1e-5, atol=1e-5)

    again = load_graph(tmp_path / "beside" / "model.onnx")
    assert widen_weights(again)
    assert [node.op_type for node in again.graph] == ["MatMul"]
    assert list(again.graph.initializers) == ["weight"]
    tensor = again.graph.initializers["weight"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), wanted)
    assert tensor.dtype == ir.DataType.FLOAT


def test_more_parts_than_a_process_can_map_are_copied(
    lying: Lying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = experts(lying, "gate")
    for most, op_types in ((EXPERTS, ["Concat", "Cast", "MatMul"]), (EXPERTS - 1, ["Cast", "MatMul"])):
        monkeypatch.setattr(stored, "_MOST_PARTS", most)
        folder = tmp_path / str(most)
        folder.mkdir()
        save_beside(product(gate), folder, "model.onnx")
        read = load_graph(folder / "model.onnx")
        assert [node.op_type for node in read.graph] == op_types
        widen_weights(read)
        tensor = read.graph.initializers["weight"].const_value
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), gate.numpy().astype(np.float32))


def test_nodes_of_such_names_that_compute_stay() -> None:
    """Graphs come from others, too."""
    x = ir.val("x", ir.DataType.FLOAT, ["B", 2])
    node = ir.Node("", "Concat", [x, x], [ir.AttrInt64("axis", 0)], name="x_joined")
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 20}, name="g")
    assert not read_joined(graph)
    assert [node.op_type for node in graph] == ["Concat"]
