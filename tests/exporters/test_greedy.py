"""Greedy tokens of an exported graph against Hugging Face's own generate, for ragged batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import qsample
from qsample import AutoModelForCausalLM
from tests.helpers.tiny_models import FAMILIES, VOCAB_SIZE

NEW_TOKENS = 64
BUNDLED = Path(qsample.__file__).parent / "assets" / "tiny_lm"


def prompts(vocab_size: int, lengths: tuple[int, ...] = (3, 17, 9, 1)) -> list[list[int]]:
    generator = np.random.default_rng(7)
    return [generator.integers(4, vocab_size, n).tolist() for n in lengths]


def hugging_face_greedy(checkpoint: Path, rows: list[list[int]]) -> list[list[int]]:
    """New tokens of each prompt, run alone so that no padding is involved."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    out = []
    for row in rows:
        ids = torch.tensor([row])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        out.append(generated[0, len(row) :].tolist())
    return out


# A cache alone; windows and soft caps; learned positions; a recurrence next to attention.
QUICK = ("llama", "gemma2", "gpt2", "qwen3_5_text")


@pytest.mark.ci
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in sorted(FAMILIES)
    ],
)
def test_random_models(
    model_type: str, checkpoint: Callable[[str], Path], exported: Callable[..., Path]
) -> None:
    rows = prompts(VOCAB_SIZE)
    output = AutoModelForCausalLM.from_pretrained(exported(model_type)).generate(
        rows, do_sample=False, max_new_tokens=NEW_TOKENS
    )
    assert output.token_ids == hugging_face_greedy(checkpoint(model_type), rows)


def test_bundled_model(bundled_package: Path) -> None:
    rows = prompts(2048)
    model = AutoModelForCausalLM.from_pretrained(bundled_package)
    output = model.generate(rows, do_sample=False, max_new_tokens=NEW_TOKENS)
    assert output.token_ids == hugging_face_greedy(BUNDLED, rows)
