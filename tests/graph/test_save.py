"""A graph's weights on the disk: as they are in memory, each once, and with their file's hash."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.contract.arrays import Array
from qsample.graph import pieces as pieces_module
from qsample.graph import save as save_module
from qsample.graph.edit import constant_value
from qsample.graph.pieces import Piece, PiecewiseTensor
from qsample.graph.save import save_graph
from qsample.graph.weights import JoinedTensor, StoredTensor

SIZE = 20_000  # of each constant, in numbers


def sum_of(tensors: dict[str, ir.TensorProtocol]) -> ir.Model:
    """A graph that adds up its input and constants, each flat."""
    total = ir.Value(name="x", shape=ir.Shape([SIZE]), type=ir.TensorType(ir.DataType.FLOAT))
    inputs, nodes, constants = [total], [], []
    flat = constant_value("flat", ir.tensor(np.array([-1])))
    for name, tensor in tensors.items():
        value = constant_value(name, tensor)
        nodes += [
            reshape := ir.node("Reshape", [value, flat]),
            ir.node("Add", [total, reshape.outputs[0]]),
        ]
        constants.append(value)
        total = nodes[-1].outputs[0]
    total.name, total.type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        inputs,
        [total],
        nodes=nodes,
        initializers=[flat, *constants],
        opset_imports={"": 20},
        name="g",
    )
    return ir.Model(graph, ir_version=10)


def run(path: Path) -> Array:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {"x": np.arange(SIZE, dtype=np.float32)})[0]
    return result


def weights(path: Path) -> dict[str, ir.ExternalTensor]:
    tensors = {
        str(value.name): value.const_value for value in ir.load(path).graph.initializers.values()
    }
    return {
        name: tensor for name, tensor in tensors.items() if isinstance(tensor, ir.ExternalTensor)
    }


def test_equal_weights_have_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_module, "_CHUNK_BYTES", 7_000)
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(2, SIZE)).astype(np.float32)
    nearly = one.copy()
    nearly[-1] += 1
    path = tmp_path / "graph.onnx"
    arrays = {
        "a": one,
        "b": other,
        "c": one.reshape(100, -1),
        "d": nearly,
        "e": other.reshape(2, 2, -1),
        "f": one + 1,
    }
    sha256 = save_graph(
        sum_of({name: ir.tensor(array, name=name) for name, array in arrays.items()}), path
    )
    expected = sum(
        (array.reshape(-1) for array in arrays.values()), np.arange(SIZE, dtype=np.float32)
    )
    np.testing.assert_allclose(run(path), expected, rtol=1e-5)
    at = {name: tensor.offset or 0 for name, tensor in weights(path).items()}
    assert at["a"] == at["c"]
    assert at["b"] == at["e"]
    assert len({at[name] for name in "abdf"}) == 4
    assert all(offset % 4096 == 0 for offset in at.values())
    content = (tmp_path / "graph.onnx.data").read_bytes()
    assert len(content) == pytest.approx(4 * one.nbytes, abs=4 * 4096)
    assert sha256 == hashlib.sha256(content).hexdigest()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["graph.onnx", "graph.onnx.data"]


def test_a_graph_without_large_weights_has_no_second_file(tmp_path: Path) -> None:
    assert (
        save_graph(sum_of({"a": ir.tensor(np.ones(1, np.float32))}), tmp_path / "graph.onnx")
        is None
    )
    assert [file.name for file in tmp_path.iterdir()] == ["graph.onnx"]


def test_small_weights_in_files_come_into_the_graph(tmp_path: Path) -> None:
    """ONNX Runtime looks at them for shapes, and does not open files for that."""
    (tmp_path / "out").mkdir()
    small = in_file(np.arange(4, dtype=np.float32), tmp_path / "small")
    assert save_graph(sum_of({"a": small}), tmp_path / "out" / "graph.onnx") is None
    (tmp_path / "small").write_bytes(b"")
    constant = ir.load(tmp_path / "out" / "graph.onnx").graph.initializers["a"].const_value
    np.testing.assert_array_equal(constant.numpy(), np.arange(4))


def in_file(array: Array, path: Path) -> ir.ExternalTensor:
    path.write_bytes(array.tobytes())
    dtype = ir.DataType.from_numpy(array.dtype)
    return ir.ExternalTensor(
        path.name,
        0,
        array.nbytes,
        dtype,
        shape=ir.Shape(array.shape),
        name=path.name,
        base_dir=path.parent,
    )


def stored(folder: Path) -> dict[str, ir.TensorProtocol]:
    """Weights of all forms, in files, of odd shapes."""
    rng = np.random.default_rng(1)
    half = rng.normal(size=(37, 53)).astype(ml_dtypes.bfloat16)
    more = rng.normal(size=(11, 53)).astype(ml_dtypes.bfloat16)
    experts = rng.normal(size=(5, 6, 7)).astype(np.float32)
    tall = [
        StoredTensor(in_file(array, folder / f"h{i}"), "t", transposed=True)
        for i, array in enumerate((half, more))
    ]
    turns = [in_file(experts[:, :, None] * sign, folder / f"e{sign}") for sign in (1, -1)]
    lazy = ir.LazyTensor(lambda: ir.Tensor(experts), ir.DataType.FLOAT, ir.Shape(experts.shape))
    return {
        "transposed": tall[0],
        "wide": StoredTensor(in_file(half, folder / "h"), "wide"),
        "columns": JoinedTensor(tall, 1, (53, 48), "columns"),
        "rows": JoinedTensor(
            [in_file(half, folder / "r0"), in_file(more, folder / "r1")], 0, (48, 53), "rows"
        ),
        "turns": JoinedTensor(turns, 2, (5, 12, 7), "turns"),
        "flattened": JoinedTensor(turns, 0, (60, 7), "flattened"),
        "computed": JoinedTensor([lazy, lazy], 0, (10, 6, 7), "computed"),
    }


@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
def test_pieces_are_the_whole(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_ELEMENTS", at_once)
    tensors = stored(tmp_path)
    expected = {name: tensor.numpy() for name, tensor in tensors.items()}
    monkeypatch.setattr(save_module, "MAX_INLINE_BYTES", 0)
    save_graph(sum_of(tensors), tmp_path / "graph.onnx")
    written = weights(tmp_path / "graph.onnx")
    for name, array in expected.items():
        np.testing.assert_array_equal(written[name].numpy(), array, name)


def piecewise(piece: Callable[[int], Array], count: int) -> PiecewiseTensor:
    def pieces() -> Iterator[Piece]:
        for number in range(count):
            yield lambda number=number: piece(number)  # type: ignore[misc]

    def whole() -> ir.TensorProtocol:
        return ir.Tensor(np.concatenate([piece(number) for number in range(count)]))

    return PiecewiseTensor(whole, pieces, ir.DataType.FLOAT, (SIZE,), "pieces")


def test_threads_are_few_pieces_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many are in memory, however large the tensor is."""
    monkeypatch.setattr(save_module, "processors", lambda: 2)
    started, ahead, written = [], [], []

    def piece(number: int) -> Array:
        started.append(number)
        return np.full(SIZE // 100, number, np.float32)

    append = save_module.WeightFile._append

    def note(self: save_module.WeightFile, data: bytes | memoryview) -> None:
        written.append(data)
        ahead.append(len(started) - len(written))
        append(self, data)

    monkeypatch.setattr(save_module.WeightFile, "_append", note)
    save_graph(sum_of({"a": piecewise(piece, 100)}), tmp_path / "graph.onnx")
    assert max(ahead) <= 8
    np.testing.assert_array_equal(
        weights(tmp_path / "graph.onnx")["a"].numpy(), np.repeat(np.arange(100), SIZE // 100)
    )


def test_an_error_in_a_thread_ends_the_work(tmp_path: Path) -> None:
    before = threading.active_count()
    begun = []

    def piece(number: int) -> Array:
        begun.append(number)
        if number == 3:
            raise OSError("the file was cut off")
        return np.zeros(SIZE // 100, np.float32)

    with pytest.raises(OSError, match="the file was cut off"):
        save_graph(sum_of({"a": piecewise(piece, 100)}), tmp_path / "graph.onnx")
    assert len(begun) < 50
    assert threading.active_count() == before


def test_a_tensor_of_another_size_than_its_shape_says(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a has 76000 bytes; its dtype and shape make 80000"):
        save_graph(
            sum_of({"a": piecewise(lambda _: np.zeros(SIZE // 20, np.float32), 19)}),
            tmp_path / "graph.onnx",
        )
