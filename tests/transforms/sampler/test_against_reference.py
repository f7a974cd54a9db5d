"""The sampler against the NumPy float64 reference: whole steps, with few and many candidates, eager and exported."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.reference import reference_step
from tests.helpers.sampler_cases import (
    ALL_FEATURES,
    BOUNDARY,
    PAD,
    WITH_PROBS,
    Step,
    compare_step,
    eager,
    exported,
    interface,
    random_step,
)


def check(step: Step, vocab: int, seed: int, steps: int) -> tuple[int, int]:
    """Compare `steps` random batches. Returns rows compared and rows excused because u lies on a boundary."""
    face = interface(vocab, ALL_FEATURES if vocab >= 3 else WITH_PROBS)
    rng = np.random.default_rng(seed)
    rows = excused = 0
    for _ in range(steps):
        batch = int(rng.integers(1, 7))
        logits, inputs = random_step(rng, face, batch, sequence=int(rng.integers(1, 4)))
        expected = reference_step(logits, inputs, pad_token_id=PAD, top_logprobs=face.features.top_logprobs)
        got = step(logits, inputs)
        for row in range(batch):
            wrong = compare_step(got, expected, row)
            rows += 1
            if wrong and expected["margin"][row] < BOUNDARY and "support" not in wrong:
                excused += 1
                continue
            assert not wrong, (wrong, {name: array[row] for name, array in inputs.items() if array[row].size < 20})
    return rows, excused


# One candidate settles almost no row with a filter, 80 settle most.
@pytest.mark.parametrize("num_candidates", [1, 3, 16, 80])
@pytest.mark.parametrize("vocab", [1, 2, 3, 33, 257, 1000, 3001])
def test_step_equals_reference(vocab: int, num_candidates: int) -> None:
    face = interface(vocab, ALL_FEATURES if vocab >= 3 else WITH_PROBS)
    rows, excused = check(eager(face, num_candidates=num_candidates), vocab, seed=vocab + num_candidates, steps=40)
    assert excused <= rows // 100


def test_exported_step_equals_reference() -> None:
    rows, excused = check(exported(interface(1000, ALL_FEATURES)), 1000, seed=5, steps=150)
    assert excused <= rows // 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_exported_step_equals_reference_at_length(seed: int) -> None:
    rows, excused = check(exported(interface(1000, ALL_FEATURES)), 1000, seed=100 + seed, steps=1000)
    assert excused <= rows // 100
