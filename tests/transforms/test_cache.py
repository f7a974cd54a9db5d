"""Retained buffers of ragged rows: the places of writes, and the reads."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from qsample.errors import UnsupportedModelError
from qsample.transforms.cache import (
    BufferedLayer,
    DecodeContext,
    PassThroughLayer,
    RetainedCache,
    read_buffers,
    write_to_buffers,
)


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


def test_clear_forgets_everything_of_the_call() -> None:
    """As a new context is, except for what is decided before any call."""
    context = DecodeContext()
    kept = {"buffered": True, "masked": {2}, "states_of": {7: [(0, "conv_state", 0)]}, "module": 7}
    for field in fields(DecodeContext):
        setattr(context, field.name, kept.get(field.name, "of the call"))
    context.clear()
    fresh = DecodeContext()
    for field in fields(DecodeContext):
        expected = kept.get(field.name, getattr(fresh, field.name))
        assert getattr(context, field.name) == expected, field.name


def test_a_layer_passes_new_keys_on() -> None:
    context = DecodeContext()
    cache = RetainedCache(context, 2)
    assert len(cache.layers) == 2
    key, value = torch.ones(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)
    for layer in (1, 0, 2):  # a further layer is added
        assert context.updated != layer
        got = cache.update(key, value, layer)
        assert (got[0] is key, got[1] is value) == (True, True)
        assert context.updated == layer
    assert [type(layer) for layer in cache.layers] == [PassThroughLayer] * 3
    layer = cache.layers[0]
    assert layer.get_mask_sizes(5) == (5, 0)
    assert (layer.get_seq_length(), layer.get_max_length()) == (0, -1)
    assert (layer.is_sliding, layer.is_initialized) == (False, True)
    assert layer.keys.numel() == layer.values.numel() == 0


def test_a_buffered_layer_writes_into_its_buffers() -> None:
    context = DecodeContext(buffered=True)
    cache = RetainedCache(context, 1)
    key = torch.arange(6.0).reshape(1, 1, 3, 2)
    probed = cache.update(key, -key, 0)  # the shape probe, without buffers
    assert (probed[0] is key, torch.equal(probed[1], -key)) == (True, True)
    assert context.present[0][0] is key
    assert cache.layers[0].get_mask_sizes(3) == (3, 0)

    context.input_lengths = torch.tensor([3], dtype=torch.int32)
    context.positions = torch.tensor([[1, 2, 3]])
    buffers = torch.full((1, 1, 5, 4), 9.0), torch.full((1, 1, 5, 4), 8.0)
    context.past = {0: buffers, 1: buffers}
    assert [layer.get_mask_sizes(3) for layer in cache.layers] == [(5, 0)]
    keys, values = cache.update(key, -key, 0)
    # Narrower than the buffer, they are cut to what the attention gave.
    assert keys[0, 0].tolist() == [[9, 9], [0, 1], [2, 3], [4, 5], [0, 0]]
    assert values[0, 0].tolist() == [[8, 8], [0, -1], [-2, -3], [-4, -5], [0, 0]]
    cache.update(key, -key, 1)
    assert set(context.present) == {0, 1}
    assert [type(layer) for layer in cache.layers] == [BufferedLayer] * 2


def test_states_of_a_layer_are_noted() -> None:
    """Each with its layer, kind and number; the cache keeps what it is given."""
    context = DecodeContext(module=3)
    layer = PassThroughLayer(context, 4)
    conv, recurrent = torch.ones(1, 2, 4), torch.full((1, 2, 3), 2.0)
    assert torch.equal(layer.update_conv_state(conv), conv)
    assert torch.equal(layer.update_conv_state(2 * conv, 1), 2 * conv)
    assert torch.equal(layer.update_recurrent_state(recurrent), recurrent)
    assert torch.equal(layer.update_recurrent_state(2 * recurrent, 2), 2 * recurrent)
    assert context.states_of == {
        3: [
            (4, "conv_state", 0),
            (4, "conv_state", 1),
            (4, "recurrent_state", 0),
            (4, "recurrent_state", 2),
        ]
    }
    context.module = 5
    context.note_state(4, "conv_state", 0)
    assert context.states_of[5] == [(4, "conv_state", 0)]
