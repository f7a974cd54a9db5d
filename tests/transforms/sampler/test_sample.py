"""Candidates and whole vocabulary: one token, whichever settles the row."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.sampler_cases import WITH_PROBS, eager, interface, random_step


@pytest.mark.parametrize("ties", [False, True])
def test_candidates_and_vocabulary_agree(ties: bool) -> None:
    """The same noise gives the same token whether the candidates settle a row or the vocabulary does: no exception.

    The weights are the same float32 numbers and the sums float64, so that nothing is left to excuse.
    """
    rng = np.random.default_rng(17)
    face = interface(997, WITH_PROBS)
    many, few = eager(face, num_candidates=200), eager(face, num_candidates=1)
    rows = 0
    for _ in range(60):
        batch = 16
        logits, inputs = random_step(rng, face, batch, sequence=1)
        logits = logits if not ties else np.round(logits).astype(np.float32)
        inputs["temperature"][:] = rng.choice([0.3, 1, 2], batch)
        a, b = many(logits, inputs), few(logits, inputs)
        np.testing.assert_array_equal(a["probs"] > 0, b["probs"] > 0)
        np.testing.assert_array_equal(a["next_ids"], b["next_ids"])
        rows += batch
    assert rows == 960
