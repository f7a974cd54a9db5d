"""Prompts and parameters for the models of fake packages: greedy and random rows, and both in one batch."""

from __future__ import annotations

from qsample.runtime import SamplingParams

PROMPTS = [[5, 6, 7], [9, 200, 31, 4, 5, 6, 7, 8, 9, 10, 11], [77], [50, 51, 52, 53, 54]]
GREEDY = SamplingParams(temperature=0, max_new_tokens=24)
RANDOM = SamplingParams(
    temperature=0.8, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, max_new_tokens=24
)


def mixed() -> list[SamplingParams]:
    """Greedy and random rows, other lengths and stop ids, in one batch."""
    return [
        GREEDY,
        RANDOM,
        SamplingParams(temperature=1.5, max_new_tokens=9, eos_token_id=()),
        SamplingParams(temperature=0.5, repetition_penalty=1.1, max_new_tokens=30, eos_token_id=tuple(range(3, 60))),
    ]
