"""The reference of the parity gate: prompts that reach beyond windows and stay within the context, and their logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qsample.exporters.huggingface_reference import NARROW_WINDOW, longest_context, reference
from qsample.exporters.parity import CONTINUATION_TOKENS
from tests.helpers.tiny_models import VOCAB_SIZE, random_model

_LOCAL: dict[str, Any] = {
    "attention_types": [[["global", "local"], 1]],
    "num_layers": 2,
    "num_heads": 4,
}


@pytest.mark.parametrize(
    ("model_type", "overrides", "lengths", "windows"),
    [
        ("llama", {}, [4, 9, 14], "none"),
        ("mistral", {"sliding_window": 20}, [4, 9, 14, 23], "passed by a prompt"),
        ("mistral", {"sliding_window": 4096}, [4, 9, 14], "narrowed"),
        ("llama", {"max_position_embeddings": 16}, [4, 9, 11], "none"),
        ("mistral", {"max_position_embeddings": 16, "sliding_window": 12}, [4, 9, 11], "narrowed"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
            [4, 9, 14],
            "narrowed",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 9},
            [4, 9, 14],
            "none",
        ),
        ("gpt_neo", {"window_size": 20, **_LOCAL}, [4, 9, 14, 23], "passed by a prompt"),
        ("gpt_neo", {"window_size": 900, **_LOCAL}, [4, 9, 14], "not compared: 900"),
    ],
)
def test_prompts_and_windows(
    model_type: str, overrides: dict[str, Any], lengths: list[int], windows: str
) -> None:
    expected = reference(random_model(model_type, **overrides))
    assert (expected.windows, expected.narrowed is not None) == (windows, windows == "narrowed")
    assert [len(prompt) for prompt in expected.prompts] == lengths
    assert {len(tokens) for tokens in expected.continuations} == {CONTINUATION_TOKENS}
    assert {array.shape for array in expected.logits} == {(CONTINUATION_TOKENS + 1, VOCAB_SIZE)}


def test_logits_are_those_after_the_prompt_and_after_each_token() -> None:
    model = random_model("llama")
    expected = reference(model)
    for prompt, tokens, logits in zip(
        expected.prompts, expected.continuations, expected.logits, strict=True
    ):
        assert 0 not in prompt + tokens  # the pad token
        for step in (0, 3, CONTINUATION_TOKENS):
            with torch.no_grad():
                wanted = model(torch.tensor([prompt + tokens[:step]])).logits[0, -1].numpy()
            np.testing.assert_allclose(logits[step], wanted, atol=1e-5)


def test_a_narrowed_window_is_that_of_a_model_made_with_it() -> None:
    model = random_model("gemma2", sliding_window=2048)
    before = [parameter.clone() for parameter in model.parameters()]
    expected = reference(model)
    narrowed, prompt = expected.narrowed, expected.prompts[-1]
    assert narrowed.windows == {2048: NARROW_WINDOW}
    assert model.config.sliding_window == 2048
    assert model.model.layers[0].self_attn.sliding_window == 2048
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
    other = random_model("gemma2", sliding_window=NARROW_WINDOW)
    other.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = other(torch.tensor([prompt + expected.continuations[-1]])).logits[
            0, len(prompt) - 1 :
        ]
    np.testing.assert_allclose(narrowed.logits, wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize(("stated", "positions"), [(256, 256), (-1, None), (None, None)])
def test_longest_context(stated: int | None, positions: int | None) -> None:
    assert longest_context(SimpleNamespace(max_position_embeddings=stated)) == positions
    assert longest_context(SimpleNamespace()) is None
    assert (
        longest_context(SimpleNamespace(max_position_embeddings=9000, keep_window_size=2048))
        == 2048
    )  # Doge


@pytest.mark.parametrize(("window", "passes"), [(None, 1), (20, 2), (600, 2)])
def test_the_weights_are_read_once_for_prompts_of_similar_lengths(
    window: int | None, passes: int
) -> None:
    """A pass over the weights of a large model takes seconds; padding to a much longer prompt would take more."""
    model = random_model("mistral", sliding_window=window)
    calls: list[Any] = []
    model.register_forward_pre_hook(lambda module, given: calls.append(given))
    reference(model)
    assert len(calls) == passes
