"""The model transforms: what they match, what they leave alone, and that applying one twice changes nothing."""

from __future__ import annotations

import pytest
import torch

from qsample.contract import KeyValueShape
from qsample.errors import UnsupportedModelError
from qsample.transforms.attention import NAME, RetainedAttention
from qsample.transforms.cache import DecodeContext
from qsample.transforms.experts import BatchedExperts
from qsample.transforms.head import LastTokenHead, SampleLastToken
from qsample.transforms.pipeline import apply, default_transforms
from qsample.transforms.probe import state_shapes
from tests.helpers.tiny_models import VOCAB_SIZE, random_model


def test_every_transform_is_idempotent() -> None:
    transforms = default_transforms(DecodeContext())
    model, modified = apply(random_model("mixtral"), transforms)
    assert modified
    for transform in transforms:
        assert transform(model) == (model, False)


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


def test_layers_with_a_pattern_of_their_own_are_found() -> None:
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
