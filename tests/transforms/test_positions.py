"""Models that count positions from the cache: inside a call, each row has its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qsample.transforms.cache import DecodeContext
from qsample.transforms.positions import GPTNeoWindows, RowPositions, UseRowPositions
from tests.helpers.tiny_models import random_model


class PositionTable(nn.Embedding):
    """Counts on from the cache unless it is given positions, as BART's and its like."""

    def forward(self, input_ids: Tensor, past_key_values_length: int = 0, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]) + past_key_values_length
        return super().forward(position_ids)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = PositionTable(20, 4)


def test_each_row_has_its_own_positions_inside_a_call_only() -> None:
    context, model = DecodeContext(), Model()
    table = model.table
    assert UseRowPositions(context)(model)[1]  # type: ignore[arg-type]
    assert not UseRowPositions(context)(model)[1]  # type: ignore[arg-type]
    assert isinstance(model.table, RowPositions)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    assert torch.equal(model.table(ids, past_key_values_length=4), table.weight[4:7])
    context.positions = torch.tensor([[4, 5, 6], [9, 10, 11]])
    assert torch.equal(model.table(ids, past_key_values_length=4), table.weight[context.positions])


def test_local_layers_of_gpt_neo_see_a_window_of_each_row() -> None:
    """One token at position 9 of a buffer of 12 keys, in the windows of transformers' own attention on 10 keys."""
    model = random_model("gpt_neo", attention_types=[[["global", "local"], 1]], window_size=4)
    context = DecodeContext()
    assert GPTNeoWindows(context)(model)[1]
    assert not GPTNeoWindows(context)(model)[1]
    layer = model.transformer.h[1].attn.attention
    assert layer.attention_type == "local"
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, size, 16, generator=generator) for size in (10, 12, 12))
    with torch.no_grad():
        own = layer._attn(query, key[:, :, :10], value[:, :, :10])[0]
        context.positions = torch.tensor([[9]])
        at_nine = layer._attn(query[:, :, 9:], key, value)[0]
    torch.testing.assert_close(at_nine, own[:, :, 9:], atol=1e-6, rtol=0)
