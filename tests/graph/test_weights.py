"""Weights stored in half precision, in other files, or in parts: written as nodes of a graph and read back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.errors import PackageError
from qsample.graph import weights as stored
from qsample.graph.edit import initializer
from qsample.graph.weights import (
    JoinedTensor,
    StoredTensor,
    in_turns,
    lies_in_files,
    load_graph,
    narrow_weights,
    parts_in_files,
    read_joined,
    rearranged,
    rows_in_turns,
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
    stored: dict[str, ir.TensorProtocol] = {
        name: ir.Tensor(array, name=name) for name, array in arrays.items()
    }
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
    return {
        name: StoredTensor(tensor, name, transposed=name != "table")
        for name, tensor in stored.items()
    }


def graph(folder: Path | None = None) -> ir.Model:
    """Rows of a table that is the head's, too, through two products."""
    ids = ir.val("ids", ir.DataType.INT64, ["B", "S"])
    values = {
        name: ir.Value(
            name=name, shape=tensor.shape, type=ir.TensorType(ir.DataType.FLOAT), const_value=tensor
        )
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
        node.outputs[0].name, node.outputs[0].type = (
            f"{node.name}_out",
            ir.TensorType(ir.DataType.FLOAT),
        )
    outputs = [nodes[3].outputs[0], nodes[4].outputs[0]]
    made = ir.Graph(
        [ids],
        outputs,
        nodes=nodes,
        initializers=list(values.values()),
        opset_imports={"": 20},
        name="g",
    )
    return ir.Model(made, ir_version=10)


def wanted() -> list[np.ndarray]:
    rows = TABLE.astype(np.float32)[IDS]
    return [rows @ TABLE.astype(np.float32).T, rows @ WEIGHT.astype(np.float32).T @ EXACT.T]


def run(path: Path) -> list[np.ndarray]:
    results: list[np.ndarray] = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(
        None, {"ids": IDS}
    )
    return results


def dtypes(model: ir.Model) -> dict[str, ir.DataType | None]:
    return {name: value.dtype for name, value in model.graph.initializers.items()}


def check_numbers(model: ir.Model) -> None:
    for name, array in (("table", TABLE), ("weight", WEIGHT.T), ("exact", EXACT.T)):
        np.testing.assert_array_equal(
            model.graph.initializers[name].const_value.numpy(), array.astype(np.float32)
        )


@pytest.mark.parametrize("in_file", [True, False])
def test_written_it_is_half_as_large_and_computes_the_same(in_file: bool, tmp_path: Path) -> None:
    model = graph(tmp_path if in_file else None)
    assert narrow_weights(model)
    (tmp_path / "out").mkdir()
    ir.save(
        model,
        tmp_path / "out" / "model.onnx",
        external_data="model.onnx.data",
        size_threshold_bytes=0,
    )
    half = 2 * (TABLE.size + WEIGHT.size) + 4 * EXACT.size
    assert (
        half <= (tmp_path / "out" / "model.onnx.data").stat().st_size < half + 20_000
    )  # and what aligns them
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
    assert (
        lookup.inputs[0] is model.graph.initializers["table_stored"]
    )  # rows are cast, not the table


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
    for value in read.graph.initializers.values():
        assert value.const_value is not None
        assert list(value.shape or ()) == list(value.const_value.shape)
    check_numbers(read)
    assert sorted(node.op_type for node in read.graph) == [
        "Gather",
        "MatMul",
        "MatMul",
        "MatMul",
        "Transpose",
    ]
    ir.save(read, tmp_path / "again.onnx", external_data="again.onnx.data")
    for got, meant in zip(run(tmp_path / "again.onnx"), wanted(), strict=True):
        np.testing.assert_allclose(got, meant, rtol=1e-5, atol=1e-5)


def test_what_lies_elsewhere_is_not_copied(tmp_path: Path) -> None:
    """Nor if its file has several names: backups, caches and deduplicated disks hold files by hard links."""
    (tmp_path / "beside").mkdir()
    model = graph(tmp_path)
    os.link(tmp_path / "weights.bin", tmp_path / "backup.bin")
    save_beside(model, tmp_path / "beside", "model.onnx")
    assert sum(file.stat().st_size for file in (tmp_path / "beside").iterdir()) < 3000
    read = load_graph(tmp_path / "beside" / "model.onnx")
    tensors = [value.const_value for value in read.graph.initializers.values()]
    assert {tensor.path for tensor in tensors if isinstance(tensor, ir.ExternalTensor)} == {
        str((tmp_path / "weights.bin").resolve())
    }
    widen_weights(read)
    check_numbers(read)


def test_the_copy_of_computed_weights_needs_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        PackageError, match=r"has 0\.0 MB free and the copy of the weights that are computed needs"
    ):
        save_beside(graph(), tmp_path, "model.onnx")
    assert os.listdir(tmp_path) == []


def test_a_graph_without_such_weights_stays() -> None:
    model = graph()
    for value in model.graph.initializers.values():
        value.const_value = ir.Tensor(value.const_value.numpy(), name=value.name)
    assert not narrow_weights(model)
    assert not widen_weights(model)


def test_what_is_only_moved_keeps_its_dtype() -> None:
    one, other = (
        StoredTensor(ir.Tensor(WEIGHT), "one"),
        StoredTensor(ir.Tensor(WEIGHT), "other", transposed=True),
    )
    moved = rearranged(
        [one, other], (24, 64), lambda arrays: np.concatenate([arrays[0], arrays[1].T], 1), "moved"
    )
    assert isinstance(moved, StoredTensor)
    assert (one.name, moved.name) == ("one", "moved")
    assert isinstance(rearranged([one], (24, 32), lambda arrays: arrays[0], "alone"), StoredTensor)
    assert moved.stored.dtype == ir.DataType.FLOAT16
    np.testing.assert_array_equal(
        moved.numpy(), np.concatenate([WEIGHT, WEIGHT], 1).astype(np.float32)
    )
    exact = StoredTensor(ir.Tensor(EXACT), "exact")
    assert not isinstance(
        rearranged([exact], (8, 24), lambda arrays: arrays[0], "exact"), StoredTensor
    )
    table = StoredTensor(ir.Tensor(TABLE), "table")
    mixed = rearranged([one, table], (64, 32), np.concatenate, "mixed")
    assert not isinstance(mixed, StoredTensor)
    assert mixed.dtype == ir.DataType.FLOAT
    np.testing.assert_array_equal(
        mixed.numpy(), np.concatenate([WEIGHT.astype(np.float32), TABLE.astype(np.float32)])
    )


def test_weights_that_are_outputs_or_only_looked_up(lying: Lying) -> None:
    ids = ir.val("ids", ir.DataType.INT64, ["B"])
    arrays = {"table": ml_dtypes.bfloat16, "exact": np.float32, "result": np.float16}
    values = {
        name: ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape((4, 6)),
            const_value=tensor,
        )
        for name, tensor in (
            (name, StoredTensor(lying(name, 4, 6, dtype=dtype), name))
            for name, dtype in arrays.items()
        )
    }
    lookup = ir.Node("", "Gather", [values["table"], ids])
    again = ir.Node("", "Cast", [values["exact"]], [ir.AttrInt64("to", int(ir.DataType.FLOAT))])
    user = ir.Node("", "Abs", [values["result"]])
    outputs = [lookup.outputs[0], again.outputs[0], values["result"], user.outputs[0]]
    made = ir.Graph(
        [ids],
        outputs,
        nodes=[lookup, again, user],
        initializers=values.values(),
        opset_imports={"": 20},
        name="g",
    )
    model = ir.Model(made, ir_version=10)
    assert narrow_weights(model, as_they_lie=True)
    assert sorted(node.op_type for node in made) == ["Abs", "Cast", "Cast", "Cast", "Gather"]
    assert isinstance(made.initializers["exact"].const_value, ir.ExternalTensor)
    assert made.outputs[2].producer() is not None, "the output is what was cast"
    assert widen_weights(model)
    assert [node.op_type for node in made] == ["Gather", "Cast", "Abs"], (
        "of a weight in float32, nothing is undone"
    )


def test_one_weight_at_a_time_is_made_float32(tmp_path: Path) -> None:
    """Where they are not folded into constants: a model's float32 weights may not fit into the memory together."""
    count = 5
    weights = [(np.eye(8) * (n + 1)).astype(ml_dtypes.bfloat16) for n in range(count)]
    x = ir.val("x", ir.DataType.FLOAT, ["B", 8])
    nodes, values, last = [], [], x
    for n, weight in enumerate(weights):
        tensor = StoredTensor(ir.Tensor(weight, name=f"weight{n}"), f"weight{n}", transposed=False)
        values.append(
            ir.Value(
                name=f"weight{n}",
                shape=tensor.shape,
                type=ir.TensorType(ir.DataType.FLOAT),
                const_value=tensor,
            )
        )
        for op_type, inputs in (("MatMul", [last, values[n]]), ("Tanh", [None])):
            node = ir.Node("", op_type, [value or last for value in inputs], name=f"{op_type}{n}")
            nodes.append(node)
            last = node.outputs[0]
            last.name, last.type = f"{op_type}{n}_out", ir.TensorType(ir.DataType.FLOAT)
    model = ir.Model(
        ir.Graph([x], [last], nodes=nodes, initializers=values, opset_imports={"": 20}),
        ir_version=10,
    )
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
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    ran = [
        event
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    ]
    ran.sort(key=lambda event: event["ts"])
    assert [event["args"]["op_name"] for event in ran] == ["Cast", "MatMul", "Tanh"] * count


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
            name,
            6,
            array.nbytes,
            kind,
            shape=ir.Shape(shape),
            name=name,
            base_dir=tmp_path.resolve(),
        )

    return make


def experts(
    lying: Lying, name: str, rows: int = ROWS, dtype: Any = ml_dtypes.bfloat16
) -> JoinedTensor:
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
    np.testing.assert_array_equal(
        joined.numpy(), np.concatenate([first.numpy(), second.numpy()], axis=1).reshape(7, 2)
    )
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
        assert lies_in_files(joined)
        np.testing.assert_array_equal(joined.numpy(), wanted)
    whole = lying("whole", EXPERTS, 2 * ROWS, COLUMNS)
    joined = in_turns([whole], "fc1")
    np.testing.assert_array_equal(joined.numpy(), taking_turns(*np.split(whole.numpy(), 2, axis=1)))


def test_what_lies_in_no_file_is_not_joined(lying: Lying) -> None:
    gate = experts(lying, "gate")
    assert in_turns([gate, ir.Tensor(gate.numpy())], "fc1") is None
    partly = JoinedTensor(
        [*gate.parts[:-1], ir.Tensor(gate.parts[-1].numpy())], 0, gate.shape.numpy()
    )
    assert in_turns([gate, partly], "fc1") is None
    assert (lies_in_files(partly), lies_in_files(gate), lies_in_files(None)) == (False, True, False)
    other = JoinedTensor(
        [experts(lying, "two", 2), experts(lying, "six", 6)], 1, (EXPERTS, 8, COLUMNS)
    )
    assert in_turns([other], "fc1") is None  # not halves
    wide = experts(lying, "wide", dtype=np.float32)
    assert rows_in_turns([StoredTensor(gate, "gate"), StoredTensor(wide, "wide")], "fc1") is None
    assert rows_in_turns([StoredTensor(gate, "gate"), gate], "fc1") is None
    assert isinstance(rows_in_turns([gate, gate], "fc1"), JoinedTensor)
    assert isinstance(rows_in_turns([StoredTensor(gate, "gate")] * 2, "fc1"), StoredTensor)


def product(weight: ir.TensorProtocol) -> ir.Model:
    """x [E, B, K] times a weight [E, K, N]."""
    x = ir.val("x", ir.DataType.FLOAT, [EXPERTS, "B", weight.shape.numpy()[1]])
    tensor = StoredTensor(weight, "weight")
    value = ir.Value(
        name="weight", shape=tensor.shape, type=ir.TensorType(ir.DataType.FLOAT), const_value=tensor
    )
    node = ir.Node("", "MatMul", [x, value], name="product")
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    made = ir.Graph(
        [x], node.outputs, nodes=[node], initializers=[value], opset_imports={"": 20}, name="g"
    )
    return ir.Model(made, ir_version=10)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("nested", [True, False])
def test_a_graph_puts_them_together_when_it_runs(
    dtype: str, nested: bool, lying: Lying, tmp_path: Path
) -> None:
    gate, up = (experts(lying, name, dtype=DTYPES[dtype]) for name in ("gate", "up"))
    weight = in_turns([gate, up], "fc1") if nested else gate
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
            value.const_value = stored.relocated(
                value.const_value, str(value.const_value.path).lstrip("/"), "/"
            )
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
    np.testing.assert_array_equal(tensor.numpy(), wanted)
    assert tensor.dtype == ir.DataType.FLOAT


def test_more_parts_than_a_process_can_map_are_copied(
    lying: Lying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = experts(lying, "gate")
    for most, op_types in (
        (EXPERTS, ["Concat", "Cast", "MatMul"]),
        (EXPERTS - 1, ["Cast", "MatMul"]),
    ):
        monkeypatch.setattr(stored, "_MAX_PARTS", most)
        folder = tmp_path / str(most)
        folder.mkdir()
        save_beside(product(gate), folder, "model.onnx")
        read = load_graph(folder / "model.onnx")
        assert [node.op_type for node in read.graph] == op_types
        widen_weights(read)
        tensor = read.graph.initializers["weight"].const_value
        np.testing.assert_array_equal(tensor.numpy(), gate.numpy().astype(np.float32))


def test_nodes_of_such_names_that_compute_stay() -> None:
    """Graphs come from others, too."""
    x = ir.val("x", ir.DataType.FLOAT, ["B", 2])
    node = ir.Node("", "Concat", [x, x], [ir.AttrInt64("axis", 0)], name="x_joined")
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 20}, name="g")
    assert not read_joined(graph)
    assert [node.op_type for node in graph] == ["Concat"]
    # Constants under another name, and a Reshape that takes a size over from its input.
    parts = [initializer(graph, name, np.ones((2, 3), np.float32)) for name in ("a", "b")]
    sizes = initializer(graph, "sizes", np.array([0, 3], np.int64))
    for name in ("plain", "y_joined"):
        node = ir.Node("", "Concat", parts, [ir.AttrInt64("axis", 0)], name=name)
        graph.extend(
            [node, ir.Node("", "Reshape", [node.outputs[0], sizes], name=f"{name}_reshaped")]
        )
        node.outputs[0].name = name
        graph.outputs.append(graph[-1].outputs[0])
    assert read_joined(graph)
    assert [node.op_type for node in graph] == ["Concat", "Concat", "Reshape", "Reshape"]
    joined = graph.initializers["y_joined"].const_value
    assert joined.numpy().shape == (4, 3)
