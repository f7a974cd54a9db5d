"""Rotation of pairs in real arithmetic against complex numbers."""

from __future__ import annotations

import pytest
import torch

from qsample.transforms.complex_rotary import Rotation, real_rotary_embeddings
from tests.helpers.tiny_models import random_model


@pytest.mark.parametrize("heads_axis", [1, 2])
def test_rotation_is_a_complex_product(heads_axis: int) -> None:
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(2, 5, 4, generator=generator) * 7
    shape = [2, 5, 8]
    shape.insert(heads_axis, 3)
    states = torch.randn(shape, generator=generator)
    expected = torch.view_as_complex(states.reshape(*shape[:-1], 4, 2)) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(heads_axis)
    rotated = Rotation(angles.cos(), angles.sin()).rotate(states, heads_axis)
    torch.testing.assert_close(rotated, torch.view_as_real(expected).flatten(3))


def test_a_model_computes_the_same_and_is_itself_again() -> None:
    model, ids = (
        random_model("llama4_text", num_local_experts=2, intermediate_size_mlp=96, head_dim=16),
        torch.arange(6),
    )
    with torch.no_grad():
        before = model(ids[None]).logits
        with real_rotary_embeddings(model):
            inside = model(ids[None]).logits
        after = model(ids[None]).logits
    torch.testing.assert_close(inside, before, atol=1e-5, rtol=0)
    assert torch.equal(after, before)
