"""Which models attend through the interface, and in which layers GroupQueryAttention does not fit."""

from __future__ import annotations

from qsample.contract import KeyValueShape
from qsample.transforms.attention import RetainedAttention
from qsample.transforms.cache import DecodeContext
from qsample.transforms.pipeline import apply, default_transforms
from qsample.transforms.probe import state_shapes
from tests.helpers.tiny_models import random_model


def test_a_model_off_the_interface_keeps_its_attention() -> None:
    context = DecodeContext()
    model = random_model("bloom")
    assert RetainedAttention(context)(model) == (model, False)
    assert context.buffered
    assert state_shapes(model, context)[0] == (KeyValueShape(4, 16),) * 2


def test_a_model_that_uses_the_interface_in_its_own_way_gets_its_attention_back() -> None:
    """DiffLlama attends twice with the same keys and other values than it put into the cache."""
    context = DecodeContext()
    model, _ = apply(random_model("diffllama"), default_transforms(context))
    assert not context.buffered
    state_shapes(model, context)
    assert context.buffered
    assert model.config._attn_implementation == "eager"


def test_layers_with_a_pattern_of_their_own_are_masked() -> None:
    context = DecodeContext()
    model = random_model(
        "llama4_text",
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
        num_local_experts=2,
        intermediate_size_mlp=96,
        head_dim=16,
    )
    model, _ = apply(model, default_transforms(context))
    state_shapes(model, context)
    assert context.masked == {0}
