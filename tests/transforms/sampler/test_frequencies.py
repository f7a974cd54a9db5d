"""Drawn frequencies against the exact distribution: chi-square over more than a million draws, each way to draw."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.helpers.reference import distribution
from tests.helpers.sampler_cases import eager, interface, make_inputs

ROWS, CALLS = 32768, 32  # 1,048,576 draws
# Seeds are fixed, so this never fails by chance; a fresh seed would fail once in ten thousand runs.
P_VALUE = 1e-4


# How many of 16 tokens are candidates: enough to settle a row with filters, or so few that the vocabulary does.
CANDIDATES, VOCABULARY = 12, 2
TOP_K = {"temperature": 0.8, "top_k": 9, "top_p": 0.9}
MIN_P = {"temperature": 1.5, "top_p": 0.95, "min_p": 0.02}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("num_candidates", "parameters"),
    [
        pytest.param(CANDIDATES, TOP_K, id="candidates-top_k+top_p"),
        pytest.param(VOCABULARY, TOP_K, id="vocabulary-top_k+top_p"),
        pytest.param(VOCABULARY, {"temperature": 1.0}, id="vocabulary-temperature"),
        pytest.param(CANDIDATES, MIN_P, id="candidates-top_p+min_p", marks=slow),
        pytest.param(VOCABULARY, MIN_P, id="vocabulary-top_p+min_p", marks=slow),
    ],
)
def test_frequencies(num_candidates: int, parameters: dict[str, float]) -> None:
    vocab = 16
    rng = np.random.default_rng(3)
    logits = rng.permutation(np.linspace(-2, 2, vocab)).astype(np.float32)
    face = interface(vocab)
    step = eager(face, num_candidates=num_candidates)
    counts = np.zeros(vocab)
    for _ in range(CALLS):
        noise = rng.integers(0, 2**24, ROWS) / 2**24
        inputs = make_inputs(face, ROWS, capacity=3, noise=noise, **parameters)
        tokens = step(np.broadcast_to(logits, (ROWS, vocab)).copy(), inputs)["next_ids"]
        counts += np.bincount(tokens[:, 0], minlength=vocab)

    row = {"top_k": 0, "top_p": 1, "min_p": 0} | {name: np.float32(value) for name, value in parameters.items()}
    probs = distribution(logits, row)
    support = probs > 0
    assert counts[~support].sum() == 0
    assert counts.sum() == ROWS * CALLS
    assert chisquare(counts[support], probs[support] * counts.sum()).pvalue > P_VALUE
