"""Fitting a graph's matrices to a text: the order, the inputs each gets, what lies in memory and on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler.quantize import walk as walk_module
from qsample.compiler.quantize.gptq import decomposed, gptq
from qsample.compiler.quantize.methods import Levels, WeightQuantization
from qsample.compiler.quantize.walk import Calibration, Wanted, calibrated_levels
from qsample.contract.arrays import Array
from qsample.errors import PackageError
from tests.compiler.quantize.test_weights import levels
from tests.helpers.small_graphs import normal, small_graph

WAY = WeightQuantization(4, 32, "gptq")
FORKED = """
g (int64[%s,S] input_ids, int32[B] input_lengths, float[50,64] table, float[64,32] left, float[16,64] right,
    float[32,8] narrow) => (float[B,S,32] a, float[B,S,16] b, float[B,S,8] c) {
    x = Gather (table, input_ids)
    a = MatMul (x, left)
    b = com.microsoft.FusedMatMul <transB = 1> (x, right)
    active = Relu (a)
    c = MatMul (active, narrow)
}"""


def fitted(weight: Array, moments: Array, way: WeightQuantization) -> Levels:
    return gptq(weight, decomposed(moments.astype(np.float32)), way)[0]


def forked(rows: int | str = "B") -> tuple[ir.Model, list[Wanted], dict[str, Array]]:
    """Two matrices that multiply x, one of them transposed, and one behind the first."""
    arrays = {
        "table": normal(50, 64),
        "left": normal(64, 32, seed=1),
        "right": normal(16, 64, seed=2),
        "narrow": normal(32, 8, seed=3),
    }
    model = small_graph(
        FORKED % rows,
        {"x": ["B", "S", 64], "a": ["B", "S", 32], "active": ["B", "S", 32]},
        constants=arrays,
    )
    nodes = {node.outputs[0].name: node for node in model.graph}
    constants = model.graph.initializers
    return (
        model,
        [
            Wanted(constants[name], nodes[product], name == "right", WAY)
            for name, product in (("left", "a"), ("right", "b"), ("narrow", "c"))
        ],
        arrays,
    )


def weights_of(found: Levels) -> Array:
    """[K, N] float64 in blocks of 32."""
    blocks = levels(np.asarray(found.blocks), 4)
    numbers = (blocks - 8.0) * np.asarray(found.scales).reshape(*blocks.shape[:2], 1)
    return numbers.reshape(len(blocks), -1).T


def same(got: Levels, wanted: Levels) -> bool:
    """Moments in float32 may round a level to the other side."""
    equal = levels(np.asarray(got.blocks), 4) == levels(wanted.blocks, 4)
    return bool(equal.mean() > 0.99) and bool(
        np.allclose(np.asarray(got.scales).reshape(-1), wanted.scales.reshape(-1), rtol=1e-4)
    )


def test_each_matrix_is_fitted_to_what_the_quantized_ones_before_it_compute(tmp_path: Path) -> None:
    """ids → Gather → first → Relu → second, beside the same in NumPy."""
    rng = np.random.default_rng(0)
    arrays = {
        "table": normal(50, 64),
        "first": normal(64, 32, seed=1),
        "second": normal(32, 48, seed=2),
    }
    model = small_graph(
        """g (int64[B,S] input_ids, float[50,64] table, float[64,32] first, float[32,48] second)
            => (float[B,S,48] result) {
            x = Gather (table, input_ids)
            hidden = MatMul (x, first)
            active = Relu (hidden)
            result = MatMul (active, second)
        }""",
        {
            "x": ["B", "S", 64],
            "hidden": ["B", "S", 32],
            "active": ["B", "S", 32],
            "result": ["B", "S", 48],
        },
        constants=arrays,
    )
    constants = model.graph.initializers
    way = WeightQuantization(4, 32, "gptq")
    nodes = {node.outputs[0].name: node for node in model.graph}
    wanted = [
        Wanted(constants["first"], nodes["hidden"], False, way),
        Wanted(constants["second"], nodes["result"], False, way),
    ]
    sequences = [rng.integers(0, 50, length) for length in (30, 17, 30)]
    told: list[float] = []
    found = calibrated_levels(model, wanted, Calibration(sequences, {}, (), tmp_path, told.append))

    x = arrays["table"][np.concatenate(sequences)].astype(np.float64)
    first = fitted(arrays["first"], x.T @ x, way)
    numbers = levels(first[0].reshape(32, 2, -1), 4) - 8
    active = np.maximum(x @ (numbers * first[1].reshape(32, 2, 1)).reshape(32, 64).T, 0)
    second = fitted(arrays["second"], active.T @ active, way)
    for value, expected in ((constants["first"], first), (constants["second"], second)):
        same = levels(np.asarray(found[value].blocks), 4) == levels(expected.blocks, 4)
        assert same.mean() > 0.99  # moments in float32 may round a level to the other side
    assert told == [64 / (64 + 48), 1.0]
    assert len(list(tmp_path.iterdir())) == 4, "levels and scales; the values are few"
    assert constants["first"].const_value is not None, "the model stays as it is"


@pytest.mark.parametrize("tokens_per_call", [2048, 20])
@pytest.mark.parametrize("weights_per_fit", [1 << 24, 64 * 5])
@pytest.mark.parametrize("bytes_in_memory", [1 << 30, 0])
@pytest.mark.parametrize("bytes_of_feed", [1 << 20, 0])
def test_the_levels_are_the_same_however_the_work_is_cut(
    tokens_per_call: int,
    weights_per_fit: int,
    bytes_in_memory: int,
    bytes_of_feed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Into calls of a few tokens, parts of a matrix, files in place of memory, and constants that are fed."""
    monkeypatch.setattr(walk_module, "_TOKENS_PER_CALL", tokens_per_call)
    monkeypatch.setattr(walk_module, "_WEIGHTS_PER_FIT", weights_per_fit)
    monkeypatch.setattr(walk_module, "_MAX_BYTES_IN_MEMORY", bytes_in_memory)
    monkeypatch.setattr(walk_module, "_MIN_BYTES_OF_FEED", bytes_of_feed)
    model, wanted, arrays = forked()
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 50, length) for length in (19, 30, 7)]
    told: list[float] = []
    found = calibrated_levels(model, wanted, Calibration(sequences, {}, (), tmp_path, told.append))

    x = arrays["table"][np.concatenate(sequences)].astype(np.float64)
    left = fitted(arrays["left"], x.T @ x, WAY)
    active = np.maximum(x @ weights_of(left), 0)
    assert same(found[wanted[0].value], left)
    assert same(found[wanted[1].value], fitted(arrays["right"].T, x.T @ x, WAY))
    assert same(found[wanted[2].value], fitted(arrays["narrow"], active.T @ active, WAY))
    numbers = np.cumsum([64 * 32, 64 * 16, 32 * 8])
    assert told == pytest.approx(numbers / numbers[-1])
    # Levels and scales of the three; and the last input, call by call, if memory has no room for it.
    left_over = 0 if bytes_in_memory else len(list(walk_module._calls(sequences, None)))
    assert len(list(tmp_path.iterdir())) == 6 + left_over


@pytest.mark.parametrize(
    ("weights_per_fit", "outputs"),
    [
        (1 << 24, [32, 16, 8]),
        (64 * 12, [12, 12, 8, 12, 4, 8]),  # 12 outputs of 64 inputs, 24 of 32
        (1, [1] * 56),  # an output is never cut
    ],
)
def test_outputs_are_fitted_together_as_far_as_there_is_room(
    weights_per_fit: int, outputs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk_module, "_WEIGHTS_PER_FIT", weights_per_fit)
    fitted_outputs: list[int] = []

    def noting(weight: Array, *given: Any) -> Any:
        fitted_outputs.append(weight.shape[1])
        return gptq(weight, *given)

    monkeypatch.setattr(walk_module, "gptq", noting)
    model, wanted, _ = forked()
    calibrated_levels(model, wanted, Calibration([np.arange(20)], {}, (), tmp_path))
    assert fitted_outputs == outputs


STATEFUL = """
g (int64[B,S] input_ids, int32[B] input_lengths, float[B,T] past, float[B,S] image_rows_unread, int32[B,S] image_rows,
    float[50,64] table, float[64,32] first, float[32,8] second, int64[1] one) => (float[B,S,8] y, float[B,T] present) {
    x = Gather (table, input_ids)
    hidden = MatMul (x, first)
    sums = ReduceSum <keepdims = 0> (hidden, one)
    mean = ReduceMean <keepdims = 0> (sums, one)
    column = Unsqueeze (mean, one)
    present = Add (past, column)
    width = ReduceMax <keepdims = 1> (present, one)
    images = Cast <to = 1> (image_rows)
    off = ReduceMax <keepdims = 1> (images, one)
    more = Add (width, off)
    rows = Unsqueeze (more, one)
    mixed = Add (hidden, rows)
    y = MatMul (mixed, second)
}"""


def test_states_are_empty_at_the_start_and_other_inputs_are_off(tmp_path: Path) -> None:
    """A cache has the sizes of the axes; `image_rows` says that no token is an image's."""
    arrays = {
        "table": normal(50, 64),
        "first": normal(64, 32, seed=1),
        "second": normal(32, 8, seed=2),
    }
    model = small_graph(
        STATEFUL,
        {
            "x": ["B", "S", 64],
            "hidden": ["B", "S", 32],
            "mixed": ["B", "S", 32],
            "present": ["B", "T"],
            "width": ["B", 1],
        },
        constants={**arrays, "one": np.array([1])},
    )
    model.graph.inputs[2].name, model.graph.outputs[1].name = (
        "past_key_values.0.key",
        "present.0.key",
    )
    nodes = {node.outputs[0].name: node for node in model.graph}
    constants = model.graph.initializers
    wanted = [
        Wanted(constants["first"], nodes["hidden"], False, WAY),
        Wanted(constants["second"], nodes["y"], False, WAY),
    ]
    sequences = [np.arange(9), np.arange(20, 29)]
    found = calibrated_levels(
        model, wanted, Calibration(sequences, {"T": 5}, ["past_key_values.0.key"], tmp_path)
    )
    x = arrays["table"][np.stack(sequences)].astype(np.float64)
    flat = x.reshape(-1, 64)
    first = fitted(arrays["first"], flat.T @ flat, WAY)
    hidden = x @ weights_of(first)
    mixed = hidden + hidden.sum(1).mean(-1)[:, None, None] - 1  # -1 is no image
    flat = mixed.reshape(-1, 32)
    assert same(found[constants["first"]], first)
    assert same(found[constants["second"]], fitted(arrays["second"], flat.T @ flat, WAY))


def test_zero_points_and_the_shape_of_a_matrix(tmp_path: Path) -> None:
    model, wanted, _ = forked()
    assert [matrix.shape for matrix in wanted] == [(64, 32), (64, 16), (32, 8)]
    way = WeightQuantization(4, 32, "gptq", zero_points=True)
    wanted = [Wanted(one.value, one.node, one.transposed, way) for one in wanted]
    found = calibrated_levels(model, wanted, Calibration([np.arange(20)], {}, (), tmp_path))
    zeros = [found[one.value].zeros for one in wanted]
    assert [None if one is None else (one.size, one.dtype) for one in zeros] == [
        (64, np.uint8),
        (32, np.uint8),
        (8, np.uint8),
    ]


def test_a_value_that_not_every_token_has(tmp_path: Path) -> None:
    """A head that reads one position gets no moments here: it has no levels, and the progress goes on."""
    arrays = {
        "table": normal(50, 64),
        "whole": normal(64, 32, seed=1),
        "last": normal(32, 8, seed=2),
    }
    model = small_graph(
        """g (int64[B,S] input_ids, float[50,64] table, float[64,32] whole, float[32,8] last, int64[1] end)
            => (float[B,1,8] y) {
            x = Gather (table, input_ids)
            hidden = MatMul (x, whole)
            chosen = Gather <axis = 1> (hidden, end)
            y = MatMul (chosen, last)
        }""",
        {"x": ["B", "S", 64], "hidden": ["B", "S", 32], "chosen": ["B", 1, 32], "y": ["B", 1, 8]},
        constants={**arrays, "end": np.array([0])},
    )
    nodes = {node.outputs[0].name: node for node in model.graph}
    constants = model.graph.initializers
    wanted = [
        Wanted(constants["whole"], nodes["hidden"], False, WAY),
        Wanted(constants["last"], nodes["y"], False, WAY),
    ]
    told: list[float] = []
    found = calibrated_levels(
        model, wanted, Calibration([np.arange(9), np.arange(5)], {}, (), tmp_path, told.append)
    )
    assert list(found) == [constants["whole"]]
    assert told == [8 / 9, 1.0]


@pytest.mark.parametrize(
    ("lengths", "rows", "tokens_per_call", "calls"),
    [
        ([3, 5, 2], None, 2048, [[5, 3, 2]]),
        ([3, 5, 2], None, 10, [[5, 3], [2]]),
        ([3, 5, 2], None, 9, [[5], [3, 2]]),
        ([3, 5, 2], None, 1, [[5], [3], [2]]),
        ([3, 5, 2], 1, 2048, [[5], [3], [2]]),
        ([3, 5, 2], 2, 1, [[5, 3], [2]]),
        ([], None, 10, []),
    ],
)
def test_calls_of_several_sequences(
    lengths: list[int],
    rows: int | None,
    tokens_per_call: int,
    calls: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The longest first; shorter ones are padded."""
    monkeypatch.setattr(walk_module, "_TOKENS_PER_CALL", tokens_per_call)
    found = list(walk_module._calls([np.full(n, n) for n in lengths], rows))
    assert [call.lengths.tolist() for call in found] == calls
    for call in found:
        assert (call.ids.dtype, call.lengths.dtype) == (np.int64, np.int32)
        width = call.lengths.max()
        padded = [[n] * n + [0] * (width - n) for n in call.lengths]
        assert call.ids.tolist() == padded
        assert call.is_token.tolist() == [number > 0 for row in padded for number in row]


@pytest.mark.parametrize(("rows", "fixed"), [("B", None), (1, 1), (3, 3)])
def test_the_rows_that_a_graph_fixes(rows: int | str, fixed: int | None) -> None:
    model, _, _ = forked(rows)
    assert walk_module._fixed_rows(model.graph) == fixed
    model.graph.inputs[0].name = "other"
    assert walk_module._fixed_rows(model.graph) is None


def test_the_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The levels, and beside them the larger of two: the package with its source, or values beyond the memory."""
    model, wanted, _ = forked()
    # Blocks of 32 levels of 4 bits, and a scale each.
    of_levels = (2 * 32 + 2 * 16 + 1 * 8) * (16 + 4)
    assert walk_module._disk_bytes(wanted, 100) == 3 * of_levels
    monkeypatch.setattr(walk_module, "_MAX_BYTES_IN_MEMORY", 1000)
    handed_on = 4 * 100 * (64 + 32) - 1000
    assert walk_module._disk_bytes(wanted, 100) == of_levels + 2 * handed_on
    assert walk_module._disk_bytes([], 0) == 0
    odd = SimpleNamespace(shape=(33, 5), way=WeightQuantization(2, 64, "gptq"))
    assert walk_module._disk_bytes([odd], 0) == 3 * 5 * (16 + 4)  # type: ignore[list-item]

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    told: list[float] = []
    with pytest.raises(PackageError, match="fitting the weights to the text needs about"):
        calibrated_levels(model, wanted, Calibration([np.arange(9)], {}, (), tmp_path, told.append))
    assert told == []


def test_arrays_beyond_the_memory_lie_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that is given back is used again."""
    monkeypatch.setattr(walk_module, "_MAX_BYTES_IN_MEMORY", 100)
    arrays = walk_module._Arrays(tmp_path)
    small, large = np.arange(15, dtype=np.float32), np.arange(10, dtype=np.float32)
    assert arrays.held(small) is small
    assert arrays.held(large) is large, "exactly as much as there is"
    mapped = arrays.held(large)
    assert isinstance(mapped, np.memmap)
    np.testing.assert_array_equal(mapped, large)
    assert [path.name for path in tmp_path.iterdir()] == ["0.npy"]
    arrays.drop(mapped)
    assert list(tmp_path.iterdir()) == []
    arrays.drop(large)
    assert arrays.held(large) is large
    assert isinstance(arrays.stored(small), np.memmap), "what is to be stored is, whatever the room"
    assert [path.name for path in tmp_path.iterdir()] == ["1.npy"]
