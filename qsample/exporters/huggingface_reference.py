"""The logits that a Hugging Face model computes on random prompts, for the parity gate to compare its export with."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel

from qsample.exporters.parity import DECODE_STEPS, Reference

PROMPT_LENGTHS: Final = (9, 4, 14)
# A window can only be seen to work on a prompt longer than it; beyond this the prompt would cost too much.
LONGEST_WINDOW: Final = 640


def reference(model: PreTrainedModel) -> Reference:
    """Run `model` eagerly, without a cache, on random prompts of different lengths (seeded)."""
    config = model.config.get_text_config(decoder=True)
    generator = np.random.default_rng(0)
    # Models that number positions themselves skip padding, which a prompt does not contain.
    allowed = np.setdiff1d(np.arange(_vocab_size(model)), [_pad_token_id(model)])
    limit = (longest_context(config) or 2**20) - DECODE_STEPS - 1
    lengths = sorted({min(length, limit) for length in (*PROMPT_LENGTHS, _beyond_the_window(config))} - {0})
    rows = [generator.choice(allowed, n + DECODE_STEPS).tolist() for n in lengths]
    model.set_attn_implementation("eager")
    logits = []
    with torch.no_grad():
        for row, n in zip(rows, lengths, strict=True):
            output = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, n - 1 :]
            logits.append(output.to(torch.float32).numpy())
    prompts = [row[:n] for row, n in zip(rows, lengths, strict=True)]
    return Reference(prompts, [row[n:] for row, n in zip(rows, lengths, strict=True)], logits)


def longest_context(config: Any) -> int | None:
    """The positions that a text model knows; None = any number, which some configurations say with -1."""
    stated = int(getattr(config, "max_position_embeddings", None) or 0)
    return stated if stated > 0 else None


def _vocab_size(model: PreTrainedModel) -> int:
    embeddings = model.get_input_embeddings()
    weight = embeddings.weight
    assert isinstance(weight, torch.Tensor)
    return int(weight.shape[0])


def _pad_token_id(model: PreTrainedModel) -> int:
    pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    return -1 if pad is None else int(pad)


def _beyond_the_window(config: Any) -> int:
    """A prompt length that runs past the smallest attention window; 0 if there is none to test."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    smallest = min((int(window) for window in windows if window), default=LONGEST_WINDOW)
    return smallest + 3 if smallest < LONGEST_WINDOW else 0
