"""Weights stored in half precision: written with a Cast behind, read back as float32, opened where they lie."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.errors import PackageError
from qsample.graph.weights.stored import (
    StoredTensor,
    load_graph,
    narrow_weights,
    rearranged,
    save_beside,
    widen_weights,
)

TABLE = np.random.default_rng(0).standard_normal((40, 32)).astype(ml_dtypes.bfloat16)
WEIGHT = np.random.default_rng(1).standard_normal((24, 32)).astype(np.float16)
EXACT = np.random.default_rng(2).standard_normal((8, 24)).astype(np.float32)
IDS = np.array([[3, 39, 0]])


def tensors(folder: Path | None) -> dict[str, StoredTensor]:
    """A table, a weight the other way round, and one in float32; in one file of `folder`, some bytes from its start."""
    arrays = {"table": TABLE, "weight": WEIGHT, "exact": EXACT}
    stored: dict[str, ir.TensorProtocol] = {name: ir.Tensor(array, name=name) for name, array in arrays.items()}
    if folder is not None:
        content = b"12345678"
        for name, array in arrays.items():
            place = (len(content), array.nbytes)
            shape, dtype = ir.Shape(array.shape), stored[name].dtype
            stored[name] = ir.ExternalTensor(
                "weights.bin", *place, dtype, shape=shape, name=name, base_dir=folder.resolve()
            )
            content += array.tobytes()
        (folder / "weights.bin").write_bytes(content)
    return {name: StoredTensor(tensor, name, transposed=name != "table") for name, tensor in stored.items()}


def graph(folder: Path | None = None) -> ir.Model:
    """Rows of a table that is the head's, too, through two products."""
    ids = ir.val("ids", ir.DataType.INT64, ["B", "S"])
    values = {
        name: ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(ir.DataType.FLOAT), const_value=tensor)
        for name, tensor in tensors(folder).items()
    }
    nodes = [
        ir.Node("", "Gather", [values["table"], ids], name="lookup"),
        ir.Node("", "Transpose", [values["table"]], [ir.AttrInt64s("perm", (1, 0))], name="turn"),
    ]
    nodes.append(ir.Node("", "MatMul", [nodes[0].outputs[0], values["weight"]], name="first"))
    nodes.append(ir.Node("", "MatMul", [nodes[0].outputs[0], nodes[1].outputs[0]], name="head"))
    nodes.append(ir.Node("", "MatMul", [nodes[2].outputs[0], values["exact"]], name="second"))
    for node in nodes:
        node.outputs[0].name, node.outputs[0].type = f"{node.name}_out", ir.TensorType(ir.DataType.FLOAT)
    outputs = [nodes[3].outputs[0], nodes[4].outputs[0]]
    made = ir.Graph([ids], outputs, nodes=nodes, initializers=list(values.values()), opset_imports={"": 20}, name="g")
    return ir.Model(made, ir_version=10)


def wanted() -> list[np.ndarray]:
    rows = TABLE.astype(np.float32)[IDS]
    return [rows @ TABLE.astype(np.float32).T, rows @ WEIGHT.astype(np.float32).T @ EXACT.T]


def run(path: Path) -> list[np.ndarray]:
    results: list[np.ndarray] = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"ids": IDS})
    return results


def dtypes(model: ir.Model) -> dict[str, ir.DataType | None]:
    return {name: value.dtype for name, value in model.graph.initializers.items()}


@pytest.mark.parametrize("in_file", [True, False])
def test_written_it_is_half_as_large_and_computes_the_same(in_file: bool, tmp_path: Path) -> None:
    model = graph(tmp_path if in_file else None)
    assert narrow_weights(model)
    (tmp_path / "out").mkdir()
    ir.save(model, tmp_path / "out" / "model.onnx", external_data="model.onnx.data", size_threshold_bytes=0)
    half = 2 * (TABLE.size + WEIGHT.size) + 4 * EXACT.size
    assert half <= (tmp_path / "out" / "model.onnx.data").stat().st_size < half + 20_000  # and what aligns them
    assert dtypes(model) == {
        "table_stored": ir.DataType.BFLOAT16,
        "weight_stored": ir.DataType.FLOAT16,
        "exact": ir.DataType.FLOAT,
    }
    for got, meant in zip(run(tmp_path / "out" / "model.onnx"), wanted(), strict=True):
        np.testing.assert_allclose(got, meant, rtol=1e-5, atol=1e-5)
    # What the graph has the other way round is turned in the file: nothing is turned at each call.
    kinds = sorted(node.op_type for node in model.graph)
    assert kinds == ["Cast", "Cast", "Cast", "Gather", "MatMul", "MatMul", "MatMul", "Transpose"]
    lookup = next(node for node in model.graph if node.op_type == "Gather")
    assert lookup.inputs[0] is model.graph.initializers["table_stored"]  # rows are cast, not the table


@pytest.mark.parametrize("as_they_lie", [True, False])
def test_read_back_it_is_what_it_was(as_they_lie: bool, tmp_path: Path) -> None:
    model = graph(tmp_path)
    narrow_weights(model, as_they_lie=as_they_lie)
    if as_they_lie:
        save_beside(model, tmp_path, "model.onnx")
    else:
        ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")
    read = load_graph(tmp_path / "model.onnx")
    widen_weights(read)
    assert dtypes(read) == dict.fromkeys(("table", "weight", "exact"), ir.DataType.FLOAT)
    for name, array in (("table", TABLE), ("weight", WEIGHT.T), ("exact", EXACT.T)):
        tensor = read.graph.initializers[name].const_value
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), array.astype(np.float32))
    assert sorted(node.op_type for node in read.graph) == ["Gather", "MatMul", "MatMul", "MatMul", "Transpose"]
    ir.save(read, tmp_path / "again.onnx", external_data="again.onnx.data")
    for got, meant in zip(run(tmp_path / "again.onnx"), wanted(), strict=True):
        np.testing.assert_allclose(got, meant, rtol=1e-5, atol=1e-5)


def test_what_lies_elsewhere_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    save_beside(graph(tmp_path), tmp_path / "beside", "model.onnx")
    assert sum(file.stat().st_size for file in (tmp_path / "beside").iterdir()) < 3000
    tensors = [
        value.const_value for value in load_graph(tmp_path / "beside" / "model.onnx").graph.initializers.values()
    ]
    assert {tensor.path for tensor in tensors if isinstance(tensor, ir.ExternalTensor)} == {
        str((tmp_path / "weights.bin").resolve())
    }


def test_a_file_may_have_several_names(tmp_path: Path) -> None:
    """Backups, caches and deduplicated disks hold files by hard links."""
    (tmp_path / "scratch").mkdir()
    model = graph(tmp_path)
    os.link(tmp_path / "weights.bin", tmp_path / "backup.bin")
    save_beside(model, tmp_path / "scratch", "model.onnx")
    read = load_graph(tmp_path / "scratch" / "model.onnx")
    widen_weights(read)
    for name, array in (("table", TABLE), ("weight", WEIGHT.T), ("exact", EXACT.T)):
        tensor = read.graph.initializers[name].const_value
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), array.astype(np.float32))


def test_the_copy_of_computed_weights_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(PackageError, match=r"has 0\.0 MB free and the copy of the weights that are computed needs"):
        save_beside(graph(), tmp_path, "model.onnx")
    assert os.listdir(tmp_path) == []


def test_a_graph_without_such_weights_stays() -> None:
    model = graph()
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        value.const_value = ir.Tensor(value.const_value.numpy(), name=value.name)
    assert not narrow_weights(model)
    assert not widen_weights(model)


def test_what_is_only_moved_keeps_its_dtype() -> None:
    one, other = StoredTensor(ir.Tensor(WEIGHT), "one"), StoredTensor(ir.Tensor(WEIGHT), "other", transposed=True)
    moved = rearranged([one, other], (24, 64), lambda arrays: np.concatenate([arrays[0], arrays[1].T], 1), "moved")
    assert isinstance(moved, StoredTensor)
    assert moved.stored.dtype == ir.DataType.FLOAT16
    np.testing.assert_array_equal(moved.numpy(), np.concatenate([WEIGHT, WEIGHT], 1).astype(np.float32))
    table = StoredTensor(ir.Tensor(TABLE), "table")
    mixed = rearranged([one, table], (64, 32), np.concatenate, "mixed")
    assert not isinstance(mixed, StoredTensor)
    assert mixed.dtype == ir.DataType.FLOAT
    np.testing.assert_array_equal(mixed.numpy(), np.concatenate([WEIGHT.astype(np.float32), TABLE.astype(np.float32)]))


def test_one_weight_at_a_time_is_made_float32(tmp_path: Path) -> None:
    """Where they are not folded into constants: a model's float32 weights may not fit into the memory together."""
    count = 5
    weights = [(np.eye(8) * (n + 1)).astype(ml_dtypes.bfloat16) for n in range(count)]
    x = ir.val("x", ir.DataType.FLOAT, ["B", 8])
    nodes, values, last = [], [], x
    for n, weight in enumerate(weights):
        tensor = StoredTensor(ir.Tensor(weight, name=f"weight{n}"), f"weight{n}", transposed=False)
        values.append(
            ir.Value(name=f"weight{n}", shape=tensor.shape, type=ir.TensorType(ir.DataType.FLOAT), const_value=tensor)
        )
        for op_type, inputs in (("MatMul", [last, values[n]]), ("Tanh", [None])):
            node = ir.Node("", op_type, [value or last for value in inputs], name=f"{op_type}{n}")
            nodes.append(node)
            last = node.outputs[0]
            last.name, last.type = f"{op_type}{n}_out", ir.TensorType(ir.DataType.FLOAT)
    model = ir.Model(ir.Graph([x], [last], nodes=nodes, initializers=values, opset_imports={"": 20}), ir_version=10)
    assert narrow_weights(model)
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(),
        options,
        ["CPUExecutionProvider"],
        disabled_optimizers=["ConstantFolding"],
    )
    session.run(None, {"x": np.ones((1, 8), np.float32)})
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    ran.sort(key=lambda event: event["ts"])
    assert [event["args"]["op_name"] for event in ran] == ["Cast", "MatMul", "Tanh"] * count
