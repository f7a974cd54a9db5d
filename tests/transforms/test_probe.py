"""The shapes of a model's states, and models without any."""

from __future__ import annotations

import pytest

from qsample.errors import UnsupportedModelError
from qsample.interface import KeyValueShape
from qsample.transforms.attention import NAME
from qsample.transforms.cache import DecodeContext
from qsample.transforms.pipeline import apply, default_transforms
from qsample.transforms.probe import state_shapes
from tests.helpers.tiny_models import random_model


@pytest.mark.parametrize(
    ("model_type", "heads", "size"), [("llama", 2, 16), ("qwen3", 2, 32), ("gpt2", 4, 16), ("gemma3_text", 2, 16)]
)
def test_cache_shapes_are_read_off_the_model(model_type: str, heads: int, size: int) -> None:
    context = DecodeContext()
    model, _ = apply(random_model(model_type), default_transforms(context))
    assert model.config._attn_implementation == NAME
    assert state_shapes(model, context)[0] == (KeyValueShape(heads, size),) * 2
    assert not context.active
    assert not context.present


def test_states_of_convolutional_and_recurrent_layers_are_read_off_the_model() -> None:
    context = DecodeContext()
    model, _ = apply(
        random_model("lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3), default_transforms(context)
    )
    key_values, (state,) = state_shapes(model, context)
    assert [shape.layer for shape in key_values] == [1]
    assert (state.name, state.shape, state.dtype) == ("past_key_values.0.conv_state", (64, 3), "float32")
    model, _ = apply(random_model("mamba", state_size=4), default_transforms(context))
    key_values, states = state_shapes(model, context)
    assert key_values == ()
    assert [state.name for state in states][:2] == [
        "past_key_values.0.conv_state",
        "past_key_values.0.recurrent_state",
    ]


def test_a_model_without_a_cache_is_refused() -> None:
    context = DecodeContext()
    model, _ = apply(random_model("openai-gpt", n_embd=64, n_layer=2, n_head=4), default_transforms(context))
    with pytest.raises(UnsupportedModelError, match="puts nothing into the cache"):
        state_shapes(model, context)


def test_layers_without_a_cache_leave_gaps_in_the_numbering(monkeypatch: pytest.MonkeyPatch) -> None:
    context = DecodeContext()
    model, _ = apply(random_model("llama"), default_transforms(context))
    monkeypatch.setattr(model.model.layers[0].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))
    assert state_shapes(model, context)[0] == (KeyValueShape(2, 16, layer=1),)
