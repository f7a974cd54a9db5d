"""Mask rules: which patterns are plainly causal, and the masks over buffers that they give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qsample.transforms.masks import MaskRule, causal, eager_masks_over_buffers, mask_rule


def chunked(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & (key // 8 == query // 8)


def bidirectional(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) | (key < 4)


@pytest.mark.parametrize("window", [None, 1, 3, 100, 4096])
def test_causal_rules_are_recognised(window: int | None) -> None:
    rule = mask_rule(mask_function=causal(window), batch_size=2)
    assert rule.is_causal(window)
    assert not rule.is_causal(7)


@pytest.mark.parametrize("function", [chunked, bidirectional])
@pytest.mark.parametrize("window", [None, 8])
def test_other_rules_are_not_causal(function: object, window: int | None) -> None:
    assert not MaskRule(function).is_causal(window)  # type: ignore[arg-type]


def test_the_mask_of_ragged_rows() -> None:
    """Row 0 is at positions 2 and 3, row 1 at 0 and 1; a query sees itself and the key before it."""
    allowed = MaskRule(causal(2)).allowed(torch.tensor([[2, 3], [0, 1]]), keys=5)
    assert allowed.shape == (2, 1, 2, 5)
    assert allowed[:, 0].int().tolist() == [[[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]], [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]]


def test_eager_masks_are_transformers_own_outside_the_context() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    own = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    with eager_masks_over_buffers(torch.tensor([[1]]), capacity=3):
        mask = ALL_MASK_ATTENTION_FUNCTIONS["eager"](mask_function=causal())
        assert mask.tolist() == [[[[0.0, 0.0, torch.finfo(torch.float32).min]]]]
    assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is own
