"""Matrices of integers: what they mean in float, and in blocks, against float64."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from qsample.checkpoints import stored_matrices
from qsample.checkpoints.stored_matrices import (
    FloatMatrix,
    IntegerWeight,
    StoredMatrix,
    check_part,
    in_turns,
    unpack_bits,
)
from qsample.transforms.quantized_linear import QuantizedWeight
from tests.helpers.integer_models import random_integers
from tests.helpers.quantized_checkpoints import stored_levels

OUTPUTS, INPUTS = 6, 512
FORMS: list[dict[str, Any]] = [
    {"bits": 1, "block": 16},
    {"bits": 2, "block": 16, "offsets": True},
    {"bits": 3, "block": 32, "zero_points": True},
    {"bits": 4, "block": 64},
    {"bits": 4, "block": 32, "offsets": True},
    {"bits": 4, "block": 128, "zero_points": True, "offsets": True, "act_order": True},
    {"bits": 5, "block": 32, "offsets": True},
    {"bits": 6, "block": 16},
    {"bits": 7, "block": 16, "zero_points": True},
    {"bits": 8, "block": 256, "zero_points": True, "act_order": True},
    {"bits": 8, "block": 512, "offsets": True},
]


def meaning(weight: IntegerWeight) -> np.ndarray:
    """[N, K] float64, one number at a time, as the form is defined."""
    outputs, inputs = weight.levels.shape
    size = inputs // weight.scales.shape[1]
    result = np.zeros((outputs, inputs))
    for n in range(outputs):
        for k in range(inputs):
            g = k // size if weight.groups is None else int(weight.groups[k])
            zero = 2 ** (weight.bits - 1) if weight.offsets is None else 0
            zero = zero if weight.zero_points is None else int(weight.zero_points[n, g])
            offset = 0.0 if weight.offsets is None else float(weight.offsets[n, g])
            result[n, k] = float(weight.scales[n, g]) * (int(weight.levels[n, k]) - zero) + offset
    return result


def meaning_of_blocks(weight: QuantizedWeight) -> np.ndarray:
    """[N, K] float64, its inputs in their own order: as MatMulNBits' documentation has it, plus offsets."""
    outputs, inputs = weight.sizes
    count = inputs // weight.block_size
    levels = stored_levels(weight.blocks.numpy().reshape(outputs, -1), weight.bits).reshape(
        outputs, count, -1
    )
    zeros = np.full((outputs, count), 2 ** (weight.bits - 1))
    if weight.zero_points is not None:
        zeros = stored_levels(weight.zero_points.numpy().reshape(outputs, -1), weight.bits)[
            :, :count
        ]
    floats = (levels.astype(np.int64) - zeros[:, :, None]) * weight.scales.numpy().astype(
        np.float64
    )[:, :, None]
    if weight.offsets is not None:
        floats += weight.offsets.numpy().astype(np.float64).T[:, :, None]
    floats = floats.reshape(outputs, inputs)
    return floats if weight.order is None else floats[:, np.argsort(weight.order.numpy())]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_floats_and_blocks_mean_the_same(form: dict[str, Any]) -> None:
    weight = random_integers(np.random.default_rng(0), OUTPUTS, INPUTS, **form)
    wanted = meaning(weight)
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(weight.floats(), wanted, rtol=1e-6, atol=1e-7 * largest)
    blocks = weight.blocks(torch.float32)
    assert blocks is not None
    assert (blocks.bits, blocks.block_size) == (
        4 if form["bits"] <= 4 else 8,
        min(form["block"], 256),
    )
    np.testing.assert_allclose(meaning_of_blocks(blocks), wanted, rtol=1e-6, atol=1e-7 * largest)
    assert (blocks.offsets is not None) == form.get("offsets", False)
    # Symmetric levels need no zero points, whatever their bits.
    assert (blocks.zero_points is None) == (not form.get("zero_points") and not form.get("offsets"))
    if blocks.offsets is None:  # an offset is rounded; scale * (level - zero point) is not
        np.testing.assert_array_equal(meaning_of_blocks(blocks).astype(np.float32), weight.floats())
    rows = np.array([3, 0, 5])
    np.testing.assert_array_equal(weight.rows(rows).floats(), weight.floats()[rows])


@pytest.mark.parametrize("size", [1, 32, 64, 512])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_inputs_in_another_order(form: dict[str, Any], size: int) -> None:
    """size: the inputs that stay together."""
    rng = np.random.default_rng(0)
    weight = random_integers(rng, OUTPUTS, INPUTS, **form)
    pieces = rng.permutation(INPUTS // size)
    index = (pieces[:, None] * size + np.arange(size)).reshape(-1)
    moved = weight.inputs(index)
    np.testing.assert_array_equal(moved.floats(), weight.floats()[:, index])
    blocks = moved.blocks(torch.float32)
    assert blocks is not None
    np.testing.assert_allclose(meaning_of_blocks(blocks), meaning(moved), rtol=1e-6, atol=1e-7)
    if not form.get("act_order") and size >= form["block"]:
        assert blocks.order is None  # whole groups changed places
        assert blocks.block_size == min(form["block"], 256)


def test_floats_are_rounded_like_products_and_sums_of_float32() -> None:
    weight = random_integers(np.random.default_rng(1), OUTPUTS, INPUTS, bits=4, offsets=True)
    assert weight.offsets is not None
    size = INPUTS // weight.scales.shape[1]
    scales, offsets = weight.scales.repeat(size, 1), weight.offsets.repeat(size, 1)
    np.testing.assert_array_equal(
        weight.floats(), scales * weight.levels.astype(np.float32) + offsets
    )


def test_the_zero_point_is_the_nearest_within_the_bits() -> None:
    """-offset / scale: within the levels, below, above, and of a block whose scale is 0."""
    scales = np.array([[0.5, 0.5, 0.5, 0.0, -0.5, 0.0]], np.float32)
    offsets = np.array([[-3.4, 1.0, -20.0, 0.7, 2.6, 0.0]], np.float32)
    levels = np.tile(np.arange(16, dtype=np.uint8), (1, 6))
    blocks = IntegerWeight(4, levels, scales, offsets=offsets).blocks(torch.float32)
    assert blocks is not None
    assert blocks.zero_points is not None
    assert blocks.offsets is not None
    assert stored_levels(blocks.zero_points.numpy()[None], 4)[0].tolist() == [7, 0, 15, 0, 5, 0]
    np.testing.assert_allclose(blocks.offsets[:, 0], [0.1, 1.0, -12.5, 0.7, 0.1, 0], rtol=1e-6)


def test_half_precision_keeps_the_levels() -> None:
    """Smaller scales would not fit."""
    weight = random_integers(np.random.default_rng(2), OUTPUTS, INPUTS, bits=5)
    blocks = weight.blocks(torch.float16)
    assert blocks is not None
    np.testing.assert_array_equal(blocks.blocks.numpy().reshape(OUTPUTS, INPUTS), weight.levels)
    np.testing.assert_allclose(meaning_of_blocks(blocks), meaning(weight), rtol=1e-3)


@pytest.mark.parametrize("block", [8, 24, 40])
def test_groups_that_no_block_lies_within(block: int) -> None:
    assert (
        random_integers(np.random.default_rng(4), 8, 480, block=block).blocks(torch.float32) is None
    )


def test_parts_are_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_integers(np.random.default_rng(5), 100, 64, zero_points=True)
    monkeypatch.setattr(stored_matrices, "_MAX_LEVELS_IN_MEMORY", 64 * 40)
    read: list[slice] = []

    def rows(index: slice) -> IntegerWeight:
        read.append(index)
        return weight.rows(index)

    matrix = StoredMatrix("layer", (100, 64), rows)
    np.testing.assert_array_equal(matrix.floats(), weight.floats())
    assert read == [slice(0, 32), slice(32, 64), slice(64, 96), slice(96, 100)]
    np.testing.assert_array_equal(
        np.concatenate([part.levels for part in matrix.parts()]), weight.levels
    )


def test_rows_in_turns() -> None:
    """Of gates and up projections."""
    first, second = (
        IntegerWeight(
            4, np.full((3, 32), base, np.uint8), np.arange(3.0, dtype=np.float32)[:, None] + base
        )
        for base in (1, 9)
    )
    both = in_turns(first, second)
    assert both.is_symmetric
    assert both.levels[:, 0].tolist() == [1, 9] * 3
    assert both.scales[:, 0].tolist() == [1, 9, 2, 10, 3, 11]
    np.testing.assert_array_equal(both.floats()[0::2], first.floats())
    np.testing.assert_array_equal(both.floats()[1::2], second.floats())


@pytest.mark.parametrize(
    ("other", "symmetric"), [({}, True), ({"zero_points": True}, False), ({"offsets": True}, False)]
)
def test_weights_around_the_middle(other: dict[str, bool], symmetric: bool) -> None:
    weight = random_integers(np.random.default_rng(0), OUTPUTS, INPUTS, **other)
    assert weight.is_symmetric == symmetric


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_levels_are_unpacked_lowest_first(bits: int, dtype: Any) -> None:
    """One number at a time, from the number that all bits of a row make."""
    rng = np.random.default_rng(bits)
    words = rng.integers(0, 256, (3, 2 * np.dtype(dtype).itemsize), np.uint8).view(dtype)
    found = unpack_bits(words, bits)
    assert found.dtype == np.uint8
    for row, levels in zip(words, found.tolist(), strict=True):
        whole = int.from_bytes(row.tobytes(), "little")
        count = 8 * row.nbytes // bits
        assert levels == [whole >> place * bits & (1 << bits) - 1 for place in range(count)]


@pytest.mark.parametrize(
    ("tensor", "dtypes", "shape", "message"),
    [
        (torch.zeros(2, 3), (torch.float32,), (2, 3), None),
        (torch.zeros(2, 3), (torch.int8, torch.float32), (None, 3), None),
        (torch.zeros(1), (torch.float32,), (None,), None),
        (torch.zeros(2, 3), (torch.int8,), (2, 3), r"scales is float32 \[2, 3\], and must be int8 \[2, 3\]: why"),
        (torch.zeros(2, 3), (torch.int8, torch.float16), (2, 4), r"must be int8 or float16 \[2, 4\]: why"),
        (torch.zeros(2, 3), (torch.float32,), (2,), r"\[2, 3\], and must be float32 \[2\]"),
        (torch.zeros(0, 3), (torch.float32,), (None, 3), r"\[0, 3\], and must be float32 \[1 or more, 3\]"),
        (torch.zeros(2, 3), (torch.float32,), (3, 3), r"must be float32 \[3, 3\]"),
    ],
)  # fmt: skip
def test_parts_of_another_kind_are_refused(
    tensor: torch.Tensor, dtypes: Any, shape: Any, message: str | None
) -> None:
    try:
        check_part("scales", tensor, dtypes, shape, "why")
    except ValueError as error:
        said = str(error)
    else:
        said = None
    if message is None:
        assert said is None
    else:
        assert said is not None
        assert re.fullmatch(f"its parts do not fit: .*{message}.*", said)


@pytest.mark.parametrize("outputs", [4, 32, 96])
@pytest.mark.parametrize("act_order", [False, True])
def test_the_bytes_of_blocks_are_foretold(outputs: int, act_order: bool) -> None:
    weight = random_integers(
        np.random.default_rng(0), outputs, 256, bits=4, block=64, act_order=act_order
    )
    asked: list[slice] = []

    def read(rows: slice) -> IntegerWeight:
        asked.append(rows)
        return weight.rows(rows)

    blocks = weight.blocks(torch.float16)
    assert blocks is not None
    found = StoredMatrix("layer", (outputs, 256), read).bytes_in_blocks(torch.float16)
    assert found == blocks.nbytes
    assert asked == [slice(0, min(outputs, 32))], "a few rows tell"


def test_what_fits_no_blocks_takes_none() -> None:
    weight = random_integers(np.random.default_rng(0), 4, 24, bits=4, block=8)
    matrix = StoredMatrix("layer", (4, 24), weight.rows)
    assert matrix.bytes_in_blocks(torch.float32) == 0


def test_a_matrix_of_floats() -> None:
    numbers = torch.arange(6.0).reshape(2, 3)
    assert FloatMatrix("layer", (2, 3), lambda: numbers).floats().tolist() == numbers.tolist()
