"""Experts that transformers' experts implementations reach: what they compute eagerly, and the gate that is found."""

from __future__ import annotations

import pytest
import torch

from qsample.transforms.experts.interface import RoutedExperts
from qsample.transforms.experts.swiglu import SwiGLU
from tests.helpers.tiny_models import random_model


def test_a_dense_model_is_left_alone() -> None:
    model = random_model("llama")
    assert RoutedExperts()(model) == (model, False)


def test_eagerly_they_compute_what_the_default_computes() -> None:
    model, ids = random_model("mixtral"), torch.arange(12)[None]
    with torch.no_grad():
        before = model(ids).logits
        model, modified = RoutedExperts()(model)
        after = model(ids).logits
    assert modified
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "overrides", "activation"),
    [
        ("mixtral", {}, SwiGLU()),
        ("gpt_oss", {}, SwiGLU(1.702, 1.0, 7.0, interleaved=True)),
        ("mixtral", {"hidden_act": "gelu"}, None),
    ],
)
def test_the_gate_of_a_family(model_type: str, overrides: dict[str, str], activation: SwiGLU | None) -> None:
    model, _ = RoutedExperts()(random_model(model_type, **overrides))
    found = [module.qsample_activation for module in model.modules() if hasattr(module, "qsample_activation")]
    assert found == [activation] * model.config.num_hidden_layers
