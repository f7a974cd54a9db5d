"""Retained buffers of ragged rows: the places of writes, and the reads."""

from __future__ import annotations

import pytest
import torch

from qsample.errors import UnsupportedModelError
from qsample.transforms.cache import DecodeContext, read_buffers, write_to_buffers


def test_ragged_rows_write_at_their_own_positions() -> None:
    """Row 0 has 3 tokens and gets 2, row 1 has none and gets 1; positions without a token read as 0."""
    context = DecodeContext(
        input_lengths=torch.tensor([2, 1], dtype=torch.int32),
        positions=torch.tensor([[3, 4], [0, 1]]),
    )
    buffer = torch.full((2, 1, 6, 2), torch.nan)
    buffer[0, :, :3] = 7
    context.past[0] = (buffer, buffer)
    new = torch.tensor(
        [[[[1.0], [2.0]]], [[[3.0], [4.0]]]]
    )  # [B, H, S, 1]: narrower than the buffer
    key, value = write_to_buffers(context, 0, new, -new)
    assert key[0, 0].tolist() == [[7, 7], [7, 7], [7, 7], [1, 0], [2, 0], [0, 0]]
    assert key[1, 0].tolist() == [[3, 0], *[[0, 0]] * 5]  # the padding, 4, is nowhere
    assert value[1, 0, 0].tolist() == [-3, 0]
    assert (
        context.present[0][0][1, 0, 1:].isnan().all()
    )  # the padding is not in the buffer itself either
    assert all(
        torch.equal(a, b) for a, b in zip(read_buffers(context, 0), (key, value), strict=True)
    )
    assert context.capacity == 6


def test_clear_forgets_the_call_and_keeps_the_choices() -> None:
    context = DecodeContext(buffered=True, masked={1}, input_lengths=torch.ones(1))
    assert context.active
    context.clear()
    assert not context.active
    assert context.buffered
    assert context.masked == {1}


def test_a_state_belongs_to_the_module_that_runs() -> None:
    context = DecodeContext(module=5)
    context.note_state(0, "conv_state", 0)
    context.note_state(0, "conv_state", 0)
    assert context.states_of == {5: [(0, "conv_state", 0)]}
    context.module = None
    with pytest.raises(UnsupportedModelError, match="layer 0 keeps a conv state"):
        context.note_state(0, "conv_state", 0)
