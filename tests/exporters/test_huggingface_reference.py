"""The reference of the parity gate: prompts that reach beyond windows and stay within the context, and their logits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qsample.exporters.huggingface_reference import longest_context, reference
from qsample.exporters.parity import DECODE_STEPS
from tests.helpers.tiny_models import VOCAB_SIZE, random_model


@pytest.mark.parametrize(
    ("model_type", "overrides", "lengths"),
    [
        ("llama", {}, [4, 9, 14]),
        ("mistral", {"sliding_window": 20}, [4, 9, 14, 23]),
        ("mistral", {"sliding_window": 4096}, [4, 9, 14]),
        ("llama", {"max_position_embeddings": 16}, [4, 7]),
    ],
)
def test_lengths_of_the_prompts(model_type: str, overrides: dict[str, int], lengths: list[int]) -> None:
    expected = reference(random_model(model_type, **overrides))
    assert [len(prompt) for prompt in expected.prompts] == lengths
    assert {len(tokens) for tokens in expected.continuations} == {DECODE_STEPS}
    assert {array.shape for array in expected.logits} == {(DECODE_STEPS + 1, VOCAB_SIZE)}


def test_logits_are_those_after_the_prompt_and_after_each_token() -> None:
    model = random_model("llama")
    expected = reference(model)
    for prompt, tokens, logits in zip(expected.prompts, expected.continuations, expected.logits, strict=True):
        assert 0 not in prompt + tokens  # the pad token
        for step in (0, 3, DECODE_STEPS):
            with torch.no_grad():
                wanted = model(torch.tensor([prompt + tokens[:step]])).logits[0, -1].numpy()
            np.testing.assert_allclose(logits[step], wanted, atol=1e-5)


@pytest.mark.parametrize(("stated", "positions"), [(256, 256), (-1, None), (None, None)])
def test_longest_context(stated: int | None, positions: int | None) -> None:
    assert longest_context(SimpleNamespace(max_position_embeddings=stated)) == positions
    assert longest_context(SimpleNamespace()) is None
