"""Sampling parameters that between them take every way through the sampler, one set a row."""

from __future__ import annotations

from typing import Any

PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3},  # no filter: from the whole vocabulary at every step
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.98, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_k": 200, "frequency_penalty": 0.5},
    {"temperature": 0.8, "min_p": 0.001, "presence_penalty": 0.3},
]
