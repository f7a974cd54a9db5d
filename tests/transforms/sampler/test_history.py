"""The retained tokens: what a step writes, and where."""

from __future__ import annotations

import numpy as np

from qsample.contract import LENGTH
from tests.helpers.sampler_cases import PAD, eager, interface, make_inputs

FACE = interface(300)
LOGITS = np.arange(300, dtype=np.float32)[None]  # greedy: 299


def step(**values: object) -> dict[str, np.ndarray]:
    return eager(FACE)(LOGITS, make_inputs(FACE, temperature=0, **values))


def test_first_call_fills_the_tail_with_the_first_token() -> None:
    result = step(sequence=4, input_ids=[[7, 8, 9, 0]], input_lengths=3, tokens=33)
    assert result["tokens_RetainedState"][0].tolist() == [7, 8, 9, 299] + [7] * 12
    assert result["lengths_RetainedState"][0] == 3


def test_a_row_that_does_not_emit_only_records_its_inputs() -> None:
    result = step(sequence=4, input_ids=[[7, 8, 9, 0]], input_lengths=3, emit=False)
    assert result["next_ids"][0, 0] == PAD
    assert result["tokens_RetainedState"][0].tolist() == [7, 8, 9] + [7] * 13
    assert result["lengths_RetainedState"][0] == 3
    assert result["output_counts_RetainedState"].sum() == 0


def test_prompt_up_to_the_last_position() -> None:
    """15 tokens where 16 fit: the sampled token takes the last. The padding beyond the capacity goes nowhere."""
    result = step(sequence=20, input_ids=[list(range(1, 21))], input_lengths=15)
    assert result["tokens_RetainedState"][0].tolist() == [*range(1, 16), 299]
    assert result["status_RetainedState"][0] == LENGTH
