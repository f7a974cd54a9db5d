"""Experts of classes that choose them in a loop of their own: what they compute eagerly."""

from __future__ import annotations

import pytest
import torch

from qsample.transforms.experts.own_loops import OwnExperts
from tests.architectures.configs import tiny_model


@pytest.mark.parametrize("model_type", ["dbrx", "longcat_flash", "llama4_text", "jetmoe"])
def test_eagerly_they_compute_what_their_own_code_computes(model_type: str) -> None:
    model, ids = tiny_model(model_type), torch.arange(12)[None]
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        assert OwnExperts()(model) == (model, True)
        after = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(after, before, atol=2e-5, rtol=0)
    assert OwnExperts()(model) == (model, False)
