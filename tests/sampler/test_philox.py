"""Philox: the published vectors, the reference's numbers from both forms, and operators that every provider has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.graph.operators import OPSET
from qsample.sampler.philox import noise_buffer, philox, uniforms
from qsample.sampler.tensor import Tensor, building
from tests.helpers.cuda_kernels import KERNELS
from tests.helpers.reference import (
    Array,
    philox4x32,
    philox_uniform,
    philox_uniforms,
)

# kat_vectors of the Random123 distribution (Salmon et al., SC'11), philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
SEEDS = [
    0,
    1,
    -1,
    2**63 - 1,
    -(2**63),
    2**32,
    2**32 - 1,
    -(2**32),
    2**53 + 1,
    -(2**53) - 1,
    0x0123456789ABCDEF,
]
# Which WebGPU has kernels of for float32 and int32 (github.com/microsoft/onnxruntime, core/providers/webgpu).
WEBGPU = {
    "Add",
    "Cast",
    "Div",
    "Floor",
    "Gather",
    "GatherElements",
    "Gemm",
    "MatMul",
    "Mul",
    "Reshape",
    "Split",
    "Sub",
}
WEBGPU |= {"Unsqueeze"}


def graph_of(*inputs: ir.Value) -> ir.Graph:
    return ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSET}, name="philox")


def load(graph: ir.Graph, folder: Path) -> ort.InferenceSession:
    ir.save(ir.Model(graph, ir_version=10), folder / "graph.onnx")
    return ort.InferenceSession(folder / "graph.onnx")


def step_graph(streams: Sequence[int]) -> ir.Graph:
    graph = graph_of(
        ir.val("seed", ir.DataType.INT64, ["B"]), ir.val("position", ir.DataType.INT32, ["B"])
    )
    with building(graph):
        numbers = uniforms(*(Tensor(value) for value in graph.inputs), streams)
    graph.outputs.extend(tensor.value for tensor in numbers)
    return graph


def some_rows(count: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    seeds = [*SEEDS, 0, 0, *rng.integers(-(2**63), 2**63 - 1, count, endpoint=True)]
    # The last two, with seed 0: of 200,000 blocks the only blocks in which a carry out of the first group decides a
    # carry out of the second.
    first = [0, 1, 2, 3, 2**20, 2**20 - 1, 4, 5, 6, 7, 2**31 - 1, 239004, 667080]
    positions = [*first, *rng.integers(0, 2**20, count, endpoint=True)]
    return {"seed": np.array(seeds[:count]), "position": np.array(positions[:count], np.int32)}


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_published_vectors(
    counter: list[int], key: list[int], expected: list[int], tmp_path: Path
) -> None:
    inputs = [ir.val(f"i{index}", ir.DataType.INT64, [1]) for index in range(6)]
    graph = graph_of(*inputs)
    with building(graph):
        words = philox(
            [Tensor(value) for value in inputs[:4]], [Tensor(value) for value in inputs[4:]]
        )
    graph.outputs.extend(word.value for word in words)
    feeds = {f"i{index}": np.array([word], np.int64) for index, word in enumerate(counter + key)}
    assert [int(word[0]) for word in load(graph, tmp_path).run(None, feeds)] == expected
    assert list(philox4x32(tuple(counter), tuple(key))) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 5, 1023])
@pytest.mark.parametrize("stream", [0, 1])
def test_buffer(capacity: int, stream: int, tmp_path: Path) -> None:
    graph = graph_of(
        ir.val("seed", ir.DataType.INT64, ["B"]), ir.val("capacity", ir.DataType.INT64, [])
    )
    with building(graph):
        graph.outputs.append(noise_buffer(*(Tensor(value) for value in graph.inputs), stream).value)
    buffer = load(graph, tmp_path).run(
        None, {"seed": np.array(SEEDS), "capacity": np.array(capacity)}
    )[0]
    assert buffer.dtype == np.float32
    np.testing.assert_array_equal(
        buffer, [philox_uniforms(seed, capacity, stream) for seed in SEEDS]
    )
    assert buffer.min() >= 0
    assert buffer.max() < 1


@pytest.mark.parametrize("streams", [(0,), (1,), (0, 15)])
def test_one_number_a_row(streams: tuple[int, ...], tmp_path: Path) -> None:
    session = load(step_graph(streams), tmp_path)
    for count in (1, 1000):
        rows = some_rows(count)
        pairs = list(zip(rows["seed"].tolist(), rows["position"].tolist(), strict=True))
        for stream, got in zip(streams, session.run(None, rows), strict=True):
            assert got.dtype == np.float32
            expected = [philox_uniform(seed, position, stream) for seed, position in pairs]
            np.testing.assert_array_equal(got, np.float32(expected)[:, None])


def test_operators_of_every_provider() -> None:
    graph = step_graph((0,))
    int64 = [node for node in graph if node.outputs[0].dtype == ir.DataType.INT64]
    assert [node.op_type for node in int64] == [
        "Unsqueeze",
        "Mod",
        "Sub",
        "Div",
        "Mod",
    ]  # the seed's digits
    for node in graph:
        dtype = node.outputs[0].dtype
        assert dtype is not None
        assert dtype.name.lower() in KERNELS[node.op_type]
        assert node in int64 or (
            node.op_type in WEBGPU and dtype in (ir.DataType.FLOAT, ir.DataType.INT32)
        )


def test_products_are_exact_in_tf32(tmp_path: Path) -> None:
    """CUDA rounds the operands of float32 products to 11 bits by default, and a Gemm's bias for a single row."""
    graph = step_graph((0, 15))
    operands = {
        value
        for node in graph
        if node.op_type in ("MatMul", "Gemm")
        for value in node.inputs
        if value
    }
    sums = {node.outputs[0]: node.inputs[1] for node in graph if node.op_type == "MatMul"}
    computed = [value for value in operands | sums.keys() if value.producer()]
    graph.outputs[:] = computed
    values = dict(zip(computed, load(graph, tmp_path).run(None, some_rows(1000)), strict=True))
    for value in operands:
        numbers = values[value] if value in values else value.const_value.numpy()  # type: ignore[union-attr]
        significant = np.frexp(numbers)[0] * 2**11
        assert np.array_equal(significant, np.round(significant)), value.name

    # Whatever is added up first: the digits are 0 to 15, a carry from the group below is less than 16.
    matrices = [
        value.const_value.numpy() for value in graph.initializers.values() if value.const_value
    ]
    fractions = next(matrix for matrix in matrices if matrix.shape == (48, 78))[:, 32:62]
    integers = np.int64(fractions.astype(np.float64) * 16**5)
    assert np.array_equal(fractions, integers / 16**5)
    reached = (
        15
        * np.maximum(integers.clip(0).sum(0), (-integers).clip(0).sum(0))
        / np.gcd.reduce(integers)
    )
    assert reached.max() + 16 <= 2**24
