"""The transforms together, the shapes of a model's states, and logits of the last real token only."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from qsample.contract.interface import KeyValueShape
from qsample.errors import UnsupportedModelError
from qsample.transforms.attention import IMPLEMENTATION
from qsample.transforms.cache import DecodeContext, RetainedCache
from qsample.transforms.decoder import (
    LastTokenHead,
    apply_transforms,
    linear_layers_marked,
    run_model,
    state_shapes,
    use_last_token_head,
)
from tests.helpers.tiny_models import VOCAB_SIZE, random_model
from tests.transforms.decoding import Decoding, check_decoding, compute_operators


def test_every_transform_is_idempotent() -> None:
    model, context = random_model("mixtral"), DecodeContext()
    apply_transforms(model, DecodeContext())
    modules = {name: type(module) for name, module in model.named_modules()}
    apply_transforms(model, context)
    assert {name: type(module) for name, module in model.named_modules()} == modules
    head = model.get_output_embeddings()
    assert isinstance(head, LastTokenHead)
    assert head.context is context


def test_head_takes_the_last_real_token_of_each_row_inside_a_call_only() -> None:
    context = DecodeContext()
    model = random_model("llama")
    use_last_token_head(model, context)
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


def test_all_linear_layers_but_the_head_are_marked_in_a_trace() -> None:
    model = random_model("llama")
    use_last_token_head(model, DecodeContext())

    def marked() -> set[str]:
        return {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if module._forward_hooks
        }

    with linear_layers_marked(model):
        assert marked() == {
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        }
    assert marked() == set()


@pytest.mark.parametrize(
    ("model_type", "heads", "size"),
    [("llama", 2, 16), ("qwen3", 2, 32), ("gpt2", 4, 16), ("gemma3_text", 2, 16)],
)
def test_cache_shapes_are_read_off_the_model(model_type: str, heads: int, size: int) -> None:
    context = DecodeContext()
    model = random_model(model_type)
    apply_transforms(model, context)
    assert model.config._attn_implementation == IMPLEMENTATION
    assert state_shapes(model, context)[0] == (KeyValueShape(heads, size),) * 2
    assert not context.active
    assert not context.present


def test_states_of_convolutional_and_recurrent_layers_are_read_off_the_model() -> None:
    context = DecodeContext()
    model = random_model("lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3)
    apply_transforms(model, context)
    key_values, (state,) = state_shapes(model, context)
    assert [shape.layer for shape in key_values] == [1]
    assert (state.name, state.shape, state.dtype) == (
        "past_key_values.0.conv_state",
        (64, 3),
        "float32",
    )
    model = random_model("mamba", state_size=4)
    apply_transforms(model, context)
    key_values, states = state_shapes(model, context)
    assert key_values == ()
    assert [state.name for state in states][:2] == [
        "past_key_values.0.conv_state",
        "past_key_values.0.recurrent_state",
    ]


def test_a_model_without_a_cache_is_refused() -> None:
    context = DecodeContext()
    model = random_model("openai-gpt", n_embd=64, n_layer=2, n_head=4)
    apply_transforms(model, context)
    with pytest.raises(UnsupportedModelError, match="puts nothing into the cache"):
        state_shapes(model, context)


def test_layers_without_a_cache_leave_gaps_in_the_numbering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = DecodeContext()
    model = random_model("llama")
    apply_transforms(model, context)
    monkeypatch.setattr(
        model.model.layers[0].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None)
    )
    assert state_shapes(model, context)[0] == (KeyValueShape(2, 16, layer=1),)


@pytest.mark.parametrize("name", ["cache", "cache_params", "past_key_values"])
def test_the_name_under_which_a_model_takes_its_cache(name: str) -> None:
    class Model(nn.Module):
        def forward(self, **given: Any) -> dict[str, Any]:
            return given

    names = ("self", "input_ids", "position_ids", name)
    parameters = [
        inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in names
    ]
    Model.forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    context, ids = DecodeContext(), torch.zeros(1, 2, dtype=torch.int64)
    cache = RetainedCache(context, 1)
    assert run_model(cast("Any", Model()), context, ids, ids, cache)[name] is cache


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("bloom", {}),  # its own attention
        ("roberta", {"is_decoder": True}),  # positions from the padding's on
        ("lfm2", {}),  # a convolution, and attention
    ],
)
def test_a_call_gives_the_logits_of_transformers(
    model_type: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_operators(monkeypatch)
    check_decoding(random_model(model_type, **options))


def test_a_row_that_has_ended_keeps_its_recurrent_states() -> None:
    decoding = Decoding(random_model("mamba2"))
    state = decoding.start(2, 8)
    decoding.step(state, [[5, 6], [7, 8]])
    before = dict(state)
    decoding.step(state, [[9], [9]], ended=1)
    for spec in decoding.interface.recurrent:
        assert not torch.equal(state[spec.name][0], before[spec.name][0])
        assert torch.equal(state[spec.name][1], before[spec.name][1])


def test_the_lengths_that_the_operator_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells first pieces by a total of S. Later pieces of several rows have more, and are refused."""
    given: list[tuple[list[int], int]] = []

    def note(inputs: Any, attributes: dict[str, Any]) -> list[torch.Tensor]:
        given.append((inputs[5].tolist(), int(inputs[6])))
        return [inputs[0], inputs[3], inputs[4]]

    compute_operators(monkeypatch, GroupQueryAttention=note)
    decoding = Decoding(random_model("llama"))
    for rows in (2, 1):
        state = decoding.start(rows, 8)
        for ids in ([[5, 6], [7]], [[8], [9]], [[5, 6], [7, 8]]):
            decoding.step(state, ids[:rows])
    of_a_layer = [([1, 1], 2), ([2, 1], 8), ([4, 3], 5), ([1], 8), ([2], 8), ([4], 8)]
    assert given == [one for one in of_a_layer for _ in range(2)]


def test_a_head_shows_its_weight_and_bias() -> None:
    for bias in (True, False):
        linear = nn.Linear(3, 4, bias=bias)
        head = LastTokenHead(linear, DecodeContext())
        assert head.weight is linear.weight
        assert head.bias is linear.bias
    model: Any = SimpleNamespace(get_output_embeddings=lambda: None)
    with pytest.raises(UnsupportedModelError, match="has no output embeddings"):
        use_last_token_head(model, DecodeContext())
