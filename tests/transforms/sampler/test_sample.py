"""Candidates and whole vocabulary: one token, whichever settles the row."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.transforms.sampler import draw
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


def test_a_row_without_filters_is_drawn_alike_alone_and_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the vocabulary, whose sums round otherwise, though the candidates have all of its weight."""
    rng = np.random.default_rng(3)
    face = interface(997, WITH_PROBS)
    step = eager(face, num_candidates=200)
    logits, inputs = random_step(rng, face, 2, sequence=1)
    inputs["status"][:], inputs["max_length"][:] = 0, 100
    for name, values in {"temperature": [0.002, 1], "top_k": [0, 5], "top_p": [1, 1], "min_p": [0, 0]}.items():
        inputs[name][:] = values
    wanted = step(logits, inputs)["next_ids"]
    plain = draw.draw_candidates
    monkeypatch.setattr(draw, "draw_candidates", lambda *arguments: plain(*arguments) * 0 + 996)
    assert step(logits, inputs)["next_ids"].tolist() == [wanted[0].tolist(), [996]]
