"""Experts of a static graph: they compute what transformers' own do."""

from __future__ import annotations

import torch

from qsample.transforms.experts import BatchedExperts
from tests.helpers.tiny_models import random_model


def test_batched_experts_leave_a_dense_model_alone() -> None:
    model = random_model("llama")
    assert BatchedExperts()(model) == (model, False)


def test_batched_experts_compute_what_the_default_computes() -> None:
    model, ids = random_model("mixtral"), torch.arange(12)[None]
    with torch.no_grad():
        before = model(ids).logits
        model, modified = BatchedExperts()(model)
        after = model(ids).logits
    assert modified
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
