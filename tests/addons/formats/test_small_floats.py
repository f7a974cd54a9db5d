"""Floats of 4 and 8 bits: each number as OCP's Microscaling Formats define it, and the block of each scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qsample.addons.formats.small_floats import as_float32, e2m1_matrix, scaled_matrix

# The 16 numbers of e2m1, from the tables of the specification: the highest bit is the sign.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_every_number_of_e2m1_times_the_scale_of_its_group() -> None:
    codes = np.array([range(16), range(15, -1, -1), [7] * 16], np.uint8)
    packed = torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4)  # the first in the low bits
    scales = torch.tensor([[1.0, 4.0], [0.25, 3.0], [0.0, 8.0]])
    matrix = e2m1_matrix("layer", packed, lambda rows: scales[rows])
    assert (matrix.layer, matrix.shape) == ("layer", (3, 16))
    wanted = np.array(E2M1, np.float32)[codes] * scales.numpy().repeat(8, 1)
    np.testing.assert_array_equal(matrix.floats(), wanted)
    part = matrix.read(slice(1, 3))
    assert (part.bits, part.is_symmetric) == (8, True)  # as MatMulNBits reads it
    np.testing.assert_array_equal(part.floats(), wanted[1:3])


def test_words_of_32_bits_hold_eight_numbers_of_e2m1() -> None:
    word = torch.tensor([[0x76543210]], dtype=torch.uint32)
    matrix = e2m1_matrix("layer", word, lambda rows: torch.ones(1, 1))
    assert matrix.shape == (1, 8)
    np.testing.assert_array_equal(matrix.floats(), [E2M1[:8]])


@pytest.mark.parametrize(
    ("block", "scales"),
    [
        ((2, 2), [[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]),  # the last blocks are cut off
        ((1, 5), [[1.0], [2.0], [4.0]]),
        ((3, 1), [[1.0, 2.0, 3.0, 4.0, 5.0]]),
        ((128, 128), [[0.5]]),  # a block larger than the weight
        ((2, 128), [[0.5], [3.0]]),
    ],
)
def test_a_scale_for_each_block(block: tuple[int, int], scales: list[list[float]]) -> None:
    weight = torch.arange(1, 16).reshape(3, 5).to(torch.float8_e4m3fn)
    matrix = scaled_matrix("layer", weight, torch.tensor(scales), block)
    assert (matrix.layer, matrix.shape) == ("layer", (3, 5))
    wanted = [
        [
            float(weight[row, column]) * scales[row // block[0]][column // block[1]]
            for column in range(5)
        ]
        for row in range(3)
    ]
    assert matrix.read().dtype == torch.float32
    np.testing.assert_array_equal(matrix.floats(), np.array(wanted, np.float32))


def test_scales_are_numbers_or_exponents() -> None:
    exponents = as_float32(torch.tensor([127, 128, 126, 0], dtype=torch.uint8))  # e8m0: 2^(n - 127)
    assert exponents.dtype == torch.float32
    assert exponents.tolist() == [1.0, 2.0, 0.5, 2.0**-127]
    halves = as_float32(torch.tensor([1.5, -2.0], dtype=torch.float16))
    assert (halves.dtype, halves.tolist()) == (torch.float32, [1.5, -2.0])
