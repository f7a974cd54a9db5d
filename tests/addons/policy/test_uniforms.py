"""The numbers of each row's seed: those of the reference, from operators that every provider has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qsample.addons.policy.uniforms import uniforms
from qsample.sampler.tensor import Tensor, building
from tests.helpers.cuda_kernels import KERNELS
from tests.helpers.reference import Array, philox_uniform
from tests.sampler.test_philox import SEEDS, graph_of, load

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
    "Unsqueeze",
}


def step_graph(stream: int) -> ir.Graph:
    graph = graph_of(
        ir.val("seed", ir.DataType.INT64, ["B"]), ir.val("position", ir.DataType.INT32, ["B"])
    )
    with building(graph):
        seed, position = (Tensor(value) for value in graph.inputs)
        graph.outputs.append(uniforms(seed, position, stream).value)
    return graph


def some_rows(count: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    seeds = [*SEEDS, 0, 0, *rng.integers(-(2**63), 2**63 - 1, count, endpoint=True)]
    # The last two, with seed 0: of 200,000 blocks the only blocks in which a carry out of the first group decides a
    # carry out of the second.
    first = [0, 1, 2, 3, 2**20, 2**20 - 1, 4, 5, 6, 7, 2**31 - 1, 239004, 667080]
    positions = [*first, *rng.integers(0, 2**20, count, endpoint=True)]
    return {"seed": np.array(seeds[:count]), "position": np.array(positions[:count], np.int32)}


@pytest.mark.parametrize("stream", [0, 1, 15])
def test_one_number_a_row(stream: int, tmp_path: Path) -> None:
    session = load(step_graph(stream), tmp_path)
    for count in (1, 1000):
        rows = some_rows(count)
        pairs = list(zip(rows["seed"].tolist(), rows["position"].tolist(), strict=True))
        (got,) = session.run(None, rows)
        assert got.dtype == np.float32
        expected = [philox_uniform(seed, position, stream) for seed, position in pairs]
        np.testing.assert_array_equal(got, np.float32(expected)[:, None])


def test_operators_of_every_provider() -> None:
    graph = step_graph(0)
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
    graph = step_graph(15)
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
