"""Blocks: selection against a stable sort, validity, and sums that are the same for a row wherever it lies."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.sampler import blocks
from qsample.sampler.blocks import block_size
from qsample.sampler.tensor import Tensor, Tensors
from tests.helpers.computed import computed

Array = np.ndarray


def logits_of(vocab: int, kind: str, rows: int = 6) -> Array:
    logits = np.random.default_rng(vocab).normal(size=(rows, vocab)).astype(np.float32)
    if kind == "ties":
        return np.round(logits)
    return np.where(logits > -0.5, -np.inf, logits) if kind == "masked" else logits


@pytest.mark.parametrize("for_webgpu", [None, False, True])
@pytest.mark.parametrize("kind", ["different", "ties", "masked"])
@pytest.mark.parametrize(
    ("vocab", "block", "count"),
    [
        (1, 16, 1),
        (50, 16, 50),
        (300, 16, 5),
        (300, 16, 64),
        (320, 64, 64),
        (997, 16, 62),
        (2000, 80, 3),
        # More maxima than WebGPU sorts at once, or more numbers in the chosen blocks.
        (34_000, 16, 64),
        (40_000, 128, 64),
        (40_000, 128, 17),
    ],
)
def test_selection_equals_a_stable_sort(
    vocab: int, block: int, count: int, kind: str, for_webgpu: bool | None
) -> None:
    """In graphs with control flow, for CUDA and for WebGPU. Of ties the lowest ids, in order; masked tokens are as
    likely as each other, but less than any other token."""

    def select(logits: Tensor) -> Tensors:
        split = blocks.split(logits, vocab, block)
        assert split.size == block
        if for_webgpu is None:
            candidates = blocks.top_candidates(split, count)
        else:
            candidates = blocks.replayed_top_candidates(split, count, for_webgpu=for_webgpu)
        return *candidates, blocks.argmax(split)

    logits = logits_of(vocab, kind)
    order = np.argsort(-logits, kind="stable", axis=1)
    values, ids, best = computed(select, logits)
    wanted = np.take_along_axis(logits, order[:, :count], 1)
    least = np.float32(blocks.FLOOR if for_webgpu else -np.inf)
    np.testing.assert_array_equal(values, np.maximum(wanted, least))
    np.testing.assert_array_equal(
        np.where(wanted > -np.inf, ids, -1), np.where(wanted > -np.inf, order[:, :count], -1)
    )
    np.testing.assert_array_equal(best, order[:, :1])


@pytest.mark.parametrize("vocab", [40, 48])
def test_valid_rows(vocab: int) -> None:
    """With and without padding: of -inf, as a mask is."""
    rows = np.zeros((9, vocab), np.float32)
    rows[1, 7], rows[2, -1], rows[3, 0] = np.nan, np.inf, -np.inf
    rows[4], rows[5], rows[6] = -np.inf, np.nan, 2.0**110
    rows[7, 3:5] = np.inf, -np.inf
    rows[8, :-1] = -3.4e38

    def valid(logits: Tensor) -> Tensor:
        split = blocks.split(logits, vocab, 16)
        return blocks.is_valid(split, split.maxima.max(keep=False))

    assert computed(valid, rows)[0].tolist() == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_invalid_logit_is_noticed_anywhere(value: float) -> None:
    """ONNX Runtime's ReduceMax drops NaN."""
    rows = np.where(np.eye(320, dtype=bool), value, -np.arange(320.0)).astype(np.float32)

    def valid(logits: Tensor) -> Tensor:
        split = blocks.split(logits, 320, block_size(320))
        return blocks.is_valid(split, split.maxima.max(keep=False))

    assert not computed(valid, rows)[0].any()


@pytest.mark.parametrize(
    ("vocab", "size"),
    [
        (1, 16),
        (17, 32),
        (100, 112),
        (320, 160),
        (32_000, 128),
        (128_256, 128),
        (151_936, 128),
        (50_257, 128),
        (125 * 80, 80),
        (127 * 208, 208),
    ],
)
def test_block_sizes(vocab: int, size: int) -> None:
    """Multiples of 16 that cut the vocabulary without a rest, if a number from 64 to 256 does."""
    assert block_size(vocab) == size


@pytest.mark.parametrize("count", [1, 3, 16, 125, 393])
def test_sums_do_not_depend_on_the_batch(count: int) -> None:
    """Of blocks and of their sums, near enough to float64, and to the last bit those of the row alone."""
    values = np.random.default_rng(count).lognormal(0, 2, (7, count, 80)).astype(np.float32)

    def sums(values: Tensor) -> Tensors:
        of_blocks = blocks.block_sums(values)
        return of_blocks, blocks.total(of_blocks), blocks.aligned(of_blocks)

    of_blocks, total, aligned = computed(sums, values)
    np.testing.assert_allclose(of_blocks, values.sum(-1, dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(total[:, 0], values.sum((1, 2), dtype=np.float64), rtol=1e-6)
    assert aligned.shape[1] % 16 == 0
    np.testing.assert_array_equal(aligned[:, :count], of_blocks)
    assert not aligned[:, count:].any()
    for row in range(7):
        for end in range(row + 1, 8):
            for whole, part in zip(
                (of_blocks, total), computed(sums, values[row:end].copy()), strict=False
            ):
                np.testing.assert_array_equal(part, whole[row:end])
