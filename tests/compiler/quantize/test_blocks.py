"""Weights in blocks: their initializers, computed piece by piece and once; known levels; what a report counts."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler.quantize import blocks as blocks_module
from qsample.compiler.quantize.blocks import (
    QuantizationReport,
    QuantizedWeight,
    added_up,
    float_bytes,
    quantization_report,
    report_quantization,
)
from qsample.compiler.quantize.methods import Levels, WeightQuantization, quantize_matrix
from qsample.contract.arrays import Array
from qsample.graph.edit import constant_value
from qsample.graph.pieces import pieces_of
from qsample.graph.save import save_graph
from qsample.graph.weights import JoinedTensor, StoredTensor
from tests.helpers.small_graphs import normal, small_graph

WITH_ZEROS = WeightQuantization(4, 32, zero_points=True)


def written(weight: QuantizedWeight, folder: Path) -> dict[str, Array]:
    """The initializers of `weight` that a product and a lookup read, from a file."""
    rows, count = weight.rows * (weight.experts or 1), weight.row_blocks
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="g")
    weight.operands((rows, count, weight.block_bytes), (rows * count,))
    weight.operands((rows, count, weight.block_bytes), (rows, count, 1), "block_scales")
    weight.register(graph)
    save_graph(ir.Model(graph, ir_version=10), folder / "graph.onnx")
    values = ir.load(folder / "graph.onnx").graph.initializers.values()
    return {
        str(value.name): value.const_value.numpy()
        for value in values
        if value.const_value is not None
    }


def stored(matrix: Array, *, transposed: bool) -> StoredTensor:
    return StoredTensor(ir.Tensor(matrix), "w", transposed=transposed)


@pytest.mark.parametrize("at_once", [1, 5 * 64, 1 << 18])
@pytest.mark.parametrize("bits", [4, 8])
def test_parts_of_a_matrix_have_the_levels_of_the_whole(
    bits: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "PIECE_ELEMENTS", at_once)
    rng = np.random.default_rng(3)
    rows = [rng.normal(size=(outputs, 64)).astype(ml_dtypes.bfloat16) for outputs in (37, 12)]
    joined = JoinedTensor([stored(part, transposed=True) for part in rows], 1, (64, 49), "w")
    way = WeightQuantization(bits, 32)
    found = written(
        QuantizedWeight(constant_value("w", joined), way, outputs_first=False), tmp_path
    )
    levels, scales, _ = quantize_matrix(np.concatenate(rows).astype(np.float32).T, way)
    scales = scales.reshape(49, 2)
    np.testing.assert_array_equal(found["w_blocks"], levels)
    np.testing.assert_array_equal(found["w_scales"], scales.reshape(-1))
    np.testing.assert_array_equal(found["w_block_scales"], scales[:, :, None])


def test_experts_and_padded_rows_and_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "PIECE_ELEMENTS", 500)
    way = WeightQuantization(4, 32)
    experts = np.random.default_rng(4).normal(size=(3, 21, 50)).astype(np.float32)
    value = constant_value("w", ir.Tensor(experts))
    found = written(QuantizedWeight(value, way, outputs_first=True, rows=40, columns=64), tmp_path)
    for expert, matrix in enumerate(np.pad(experts, ((0, 0), (0, 19), (0, 14)))):
        levels, scales, _ = quantize_matrix(matrix.T, way)
        own = slice(40 * expert, 40 * expert + 40)
        np.testing.assert_array_equal(found["w_blocks"][own], levels.reshape(40, 2, 16))
        np.testing.assert_array_equal(found["w_block_scales"][own, :, 0], scales.reshape(40, 2))


def operands(weight: QuantizedWeight, kind: str = "scales") -> list[ir.Value]:
    """As MatMulNBits takes them."""
    rows, count = weight.rows * (weight.experts or 1), weight.row_blocks
    return weight.operands((rows, count, weight.block_bytes), (rows * count,), kind)


def numbers(value: ir.Value) -> Array:
    assert value.const_value is not None
    return value.const_value.numpy()


@pytest.mark.parametrize(
    ("shape", "outputs_first", "sizes", "expected"),
    [
        ((70, 5), False, {}, (None, 70, 5, 96)),
        ((5, 70), True, {}, (None, 70, 5, 96)),
        ((64, 5), False, {}, (None, 64, 5, 64)),
        ((3, 5, 70), True, {"rows": 8}, (3, 70, 8, 96)),
        ((3, 70, 5), False, {"columns": 128}, (3, 70, 5, 128)),
    ],
)
def test_sizes(
    shape: tuple[int, ...],
    outputs_first: bool,
    sizes: dict[str, int],
    expected: tuple[int | None, ...],
) -> None:
    """experts, inputs, rows and columns."""
    value = constant_value("w", ir.Tensor(normal(*shape)))
    for bits, block_bytes in ((2, 8), (4, 16), (8, 32)):
        way = WeightQuantization(bits, 32)
        weight = QuantizedWeight(value, way, outputs_first=outputs_first, **sizes)
        assert (weight.experts, weight.inputs, weight.rows, weight.columns) == expected
        assert weight.row_blocks == expected[3] // 32  # type: ignore[operator]
        assert weight.block_bytes == block_bytes
        assert weight.nbytes == 0, "no initializer yet"


@pytest.mark.parametrize("known", [False, True])
def test_operands_are_levels_scales_and_zero_points(known: bool) -> None:
    """With an odd number of blocks, each row of zero points ends with half a byte. Known levels are not computed."""
    matrix = normal(96, 5) + 1
    wanted = quantize_matrix(matrix, WITH_ZEROS)
    assert wanted.zeros is not None
    if known:  # others, so that it shows
        wanted = Levels(wanted.blocks ^ 1, wanted.scales * 2, wanted.zeros ^ 1)
    assert wanted.zeros is not None
    weight = QuantizedWeight(
        constant_value("w", ir.Tensor(matrix)),
        WITH_ZEROS,
        outputs_first=False,
        levels=wanted if known else None,
    )
    found = operands(weight)
    assert [str(value.name) for value in found] == ["w_blocks", "w_scales", "w_zero_points"]
    assert [value.dtype for value in found] == [
        ir.DataType.UINT8,
        ir.DataType.FLOAT,
        ir.DataType.UINT8,
    ]
    assert [list(value.shape or ()) for value in found] == [[5, 3, 16], [15], [10]]
    assert operands(weight) == found, "of the same kinds are the same initializers"
    # Zero points may be asked for before the scales, and both without the levels.
    zeros = np.pad(wanted.zeros.reshape(5, 3), ((0, 0), (0, 1)))
    packed = (zeros[:, ::2] | zeros[:, 1::2] << 4).reshape(-1)
    for _ in range(2):
        np.testing.assert_array_equal(numbers(found[2]), packed)
        np.testing.assert_array_equal(numbers(found[1]), wanted.scales.reshape(-1))
        np.testing.assert_array_equal(numbers(found[0]), wanted.blocks)
    assert (pieces_of(found[0].const_value) is None) == known  # type: ignore[arg-type]
    for value in found:
        assert value.const_value is not None
        assert value.const_value.name == value.name
    assert weight.nbytes == 5 * 3 * 16 + 4 * 15 + 10
    got = weight.quantize()
    for one, two in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one).reshape(-1), np.asarray(two).reshape(-1))


def test_saving_quantizes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many initializers there are; nothing of the levels stays in memory."""
    calls = []
    real = blocks_module.quantize_matrix

    def counting(matrix: Array, way: WeightQuantization) -> Levels:
        calls.append(matrix.shape)
        return real(matrix, way)

    monkeypatch.setattr(blocks_module, "quantize_matrix", counting)
    monkeypatch.setattr(blocks_module, "PIECE_ELEMENTS", 96 * 20)
    for way in (WITH_ZEROS, WeightQuantization(8, 32)):
        calls.clear()
        value = constant_value("w", ir.Tensor(normal(96, 300)))
        weight = QuantizedWeight(value, way, outputs_first=False)
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="g")
        operands(weight)
        if not way.zero_points:
            operands(weight, "other_scales")
        weight.register(graph)
        kinds = ["blocks", "scales", "zero_points" if way.zero_points else "other_scales"]
        assert list(graph.initializers) == [f"w_{kind}" for kind in kinds]
        save_graph(ir.Model(graph, ir_version=10), tmp_path / f"{way.bits}.onnx")
        assert calls == [(96, 20)] * 15
        assert weight._scales is None
        assert weight._zeros is None


def test_bytes_before_and_after() -> None:
    way = WeightQuantization(8, 32)
    weights = [
        QuantizedWeight(constant_value(name, ir.Tensor(normal(64, size))), way, outputs_first=False)
        for name, size in (("a", 3), ("b", 5))
    ]
    assert added_up(weights) == (4 * 64 * 8, 0)
    for weight in weights:
        operands(weight)
    assert added_up(iter(weights)) == (4 * 64 * 8, 64 * 8 + 4 * 2 * 8)
    assert added_up([]) == (0, 0)


def test_a_report_lies_beside_the_graph() -> None:
    model = small_graph("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    assert quantization_report(model) is None
    report = QuantizationReport(1, 200, 100)
    assert (report.experts, report.expert_block_size, report.float_bytes) == (0, None, 0)
    assert (report.block_sizes, report.bits) == ((), {})
    report_quantization(model, report)
    assert quantization_report(model) is report


def test_which_floats_count() -> None:
    """Parameters of all float dtypes do; scales, tables of angles and numbers of other kinds do not."""
    model = small_graph(
        """g (float[B,S,32] x, int64[B,S] ids, float[B,1,T,32] pk, float[B,1,T,32] pv, int32[B] last, int32 total,
            uint8[32,1,16] levels, float[32] scales, uint8[9,16] rows, float[9,1] row_scales, float[8,16] cos,
            float[8,16] sin, float[8,16] angles_c, float[8,16] angles_s, uint8[4,32,16] fc1, float[4,32,1] s1,
            uint8[4,32,8] fc2, float[4,32,1] s2, float[1,1] share, float[32] norm, float16[6] half, bfloat16[5] brain,
            int64[3] sizes, double[7] double, float[1] p_scale)
            => (float[B,S,32] a, float[B,S,32] y, float[B,1,T,32] nk, float[B,1,T,32] nv, float[B,S,32] turned,
                float[B,S,32] q, float[B,S,32] m) {
            q = com.microsoft.MatMulNBits <K = 32, N = 32, bits = 4, block_size = 32> (x, levels, scales)
            looked = com.microsoft.GatherBlockQuantized <block_size = 32> (rows, ids, row_scales)
            a = Add (looked, norm)
            y, nk, nv = com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1, do_rotary = 1>
                (x, x, x, pk, pv, last, total, cos, sin)
            turned = RotaryEmbedding (x, ids, angles_c, angles_s)
            m = com.microsoft.QMoE <k = 1> (x, share, fc1, s1, , fc2, s2)
        }""",
        constants={
            "levels": np.zeros((32, 1, 16), np.uint8),
            "scales": normal(32),
            "rows": np.zeros((9, 16), np.uint8),
            "row_scales": normal(9, 1),
            "cos": normal(8, 16),
            "sin": normal(8, 16),
            "angles_c": normal(8, 16),
            "angles_s": normal(8, 16),
            "fc1": np.zeros((4, 32, 16), np.uint8),
            "s1": normal(4, 32, 1),
            "fc2": np.zeros((4, 32, 8), np.uint8),
            "s2": normal(4, 32, 1),
        },
    )
    assert float_bytes(model) == 0
    for name, array in (
        ("norm", normal(32)),
        ("half", normal(6).astype(np.float16)),
        ("brain", normal(5).astype(ml_dtypes.bfloat16)),
        ("sizes", np.zeros(3, np.int64)),
        ("double", np.zeros(7)),
    ):
        value = constant_value(f"{name}_constant", ir.Tensor(array))
        model.graph.register_initializer(value)
    assert float_bytes(model) == 4 * 32 + 2 * 6 + 2 * 5
