"""Sampling parameters that between them take every way through the sampler, one set a row."""

from __future__ import annotations

from typing import Any

from qsample.runtime import CausalLM, SamplingParams

PROMPTS = [[5, 6, 7, 8], [9], list(range(10, 19)), [20, 21], [22, 23, 24], [25]]
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3},  # no filter: from the whole vocabulary at every step
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.98, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_k": 200, "frequency_penalty": 0.5},
    {"temperature": 0.8, "min_p": 0.001, "presence_penalty": 0.3},
]


def rows() -> list[SamplingParams]:
    """One set of PARAMETERS a row, ended by two stop tokens or after 20."""
    return [SamplingParams(**row, max_new_tokens=20, eos_token_id=(3, 250)) for row in PARAMETERS]


def generate(model: CausalLM, **options: Any) -> list[list[int]]:
    """The tokens that `model` samples after PROMPTS, a row each of `rows`."""
    return model.generate(PROMPTS, rows(), seed=4, **options).token_ids
