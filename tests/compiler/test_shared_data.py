"""Numbers that a graph has twice are in its data file once, and the graph computes what it did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample import AutoModelForCausalLM
from qsample.compiler import shared_data
from qsample.compiler.shared_data import share_equal_data
from qsample.tensors import Array

SIZE = 20_000  # of each constant, in numbers


def write(path: Path, arrays: dict[str, Array]) -> ir.Model:
    """A graph that adds up its input and constants, each flat, written with a data file."""
    total = ir.Value(name="x", shape=ir.Shape([SIZE]), type=ir.TensorType(ir.DataType.FLOAT))
    inputs, nodes, constants = [total], [], []
    flat = ir.Value(
        name="flat", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64), const_value=ir.tensor(np.array([-1]))
    )
    for name, array in arrays.items():
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        nodes += [reshape := ir.node("Reshape", [value, flat]), ir.node("Add", [total, reshape.outputs[0]])]
        constants.append(value)
        total = nodes[-1].outputs[0]
    total.name, total.type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(inputs, [total], nodes=nodes, initializers=[flat, *constants], opset_imports={"": 20}, name="g")
    model = ir.Model(graph, ir_version=10)
    ir.save(model, path, external_data=f"{path.name}.data", size_threshold_bytes=1024)
    return model


def run(path: Path) -> Array:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {"x": np.arange(SIZE, dtype=np.float32)})[0]
    return result


def offsets(path: Path) -> dict[str, int]:
    values = ir.load(path).graph.initializers.values()
    tensors = {str(value.name): value.const_value for value in values}
    return {name: tensor.offset or 0 for name, tensor in tensors.items() if isinstance(tensor, ir.ExternalTensor)}


def test_equal_constants_have_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_data, "_PIECE", 7_000)
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(2, SIZE)).astype(np.float32)
    nearly = one.copy()
    nearly[-1] += 1
    path = tmp_path / "graph.onnx"
    arrays = {"a": one, "b": other, "c": one.reshape(100, -1), "d": nearly, "e": other.reshape(2, 2, -1), "f": one + 1}
    write(path, arrays)
    before, size = run(path), (tmp_path / "graph.onnx.data").stat().st_size
    share_equal_data(path)
    np.testing.assert_array_equal(run(path), before)
    at = offsets(path)
    assert at["a"] == at["c"]
    assert at["b"] == at["e"]
    assert len({at[name] for name in "abdf"}) == 4
    assert all(offset % 4096 == 0 for offset in at.values())
    saved = size - (tmp_path / "graph.onnx.data").stat().st_size
    assert saved == pytest.approx(2 * one.nbytes, abs=6 * 4096)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["graph.onnx", "graph.onnx.data"]


def test_a_graph_without_such_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "graph.onnx"
    small = np.ones(SIZE, np.float32)
    write(path, {"a": small, "b": small + 1})
    before = {file: (file.read_bytes(), file.stat().st_ino) for file in tmp_path.iterdir()}
    share_equal_data(path)
    assert {file: (file.read_bytes(), file.stat().st_ino) for file in tmp_path.iterdir()} == before


def test_a_tied_table_is_stored_once(bundled_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scales, which the head and the lookup want in other shapes; this model's are small."""
    monkeypatch.setattr(shared_data, "_LEAST", 1 << 12)
    package = (
        AutoModelForCausalLM.from_pretrained(bundled_package)
        .compile(tmp_path / "int4", ctx_len=64, weights="int4")
        .package
    )
    places: dict[tuple[int, int], list[str]] = {}
    for value in ir.load(package.path / "decoder.onnx").graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= 1 << 12:
            places.setdefault((tensor.offset or 0, tensor.nbytes), []).append(str(value.name))
    contents = {(package.path / "decoder.onnx.data").read_bytes()[at : at + size] for at, size in places}
    assert len(contents) == len(places)
    assert any(len(names) > 1 for names in places.values())
