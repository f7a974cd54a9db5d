"""Logits of the last real token only."""

from __future__ import annotations

import torch

from qsample.transforms.cache import DecodeContext
from qsample.transforms.head import LastTokenHead, SampleLastToken
from tests.helpers.tiny_models import VOCAB_SIZE, random_model


def test_head_takes_the_last_real_token_of_each_row_inside_a_call_only() -> None:
    context = DecodeContext()
    model, _ = SampleLastToken(context)(random_model("llama"))
    head = model.get_output_embeddings()
    assert isinstance(head, LastTokenHead)
    hidden = torch.randn(3, 5, 64)
    with torch.no_grad():
        everywhere = head(hidden)
        context.input_lengths = torch.tensor([5, 1, 3], dtype=torch.int32)
        last = head(hidden)
    assert everywhere.shape == (3, 5, VOCAB_SIZE)
    expected = torch.stack([everywhere[0, 4], everywhere[1, 0], everywhere[2, 2]])[:, None]
    torch.testing.assert_close(last, expected)
