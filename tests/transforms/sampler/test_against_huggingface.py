"""The sampler's distribution against Hugging Face's own logits processors, in the contract's order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.helpers.sampler_cases import WITH_PROBS, eager, interface, make_inputs


def huggingface_probs(logits: np.ndarray, history: np.ndarray, p: dict[str, float]) -> np.ndarray:
    processors = LogitsProcessorList()
    if p["repetition_penalty"] != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(p["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(p["temperature"]))
    if p["top_k"]:
        processors.append(TopKLogitsWarper(int(p["top_k"])))
    if p["top_p"] < 1:
        processors.append(TopPLogitsWarper(p["top_p"]))
    if p["min_p"]:
        processors.append(MinPLogitsWarper(p["min_p"]))
    # In float64, so that the only rounding compared is the sampler's own.
    scores = torch.from_numpy(logits[None].astype(np.float64))
    return processors(torch.from_numpy(history[None]), scores).softmax(-1).numpy()[0]


@pytest.mark.parametrize(
    ("vocab", "sets"), [(3, 60), (10, 60), (100, 60), (1000, 60), (5000, 30), (32000, 16), (50000, 12)]
)
@pytest.mark.parametrize("num_candidates", [None, 2])
def test_distribution(vocab: int, sets: int, num_candidates: int | None) -> None:
    rng = np.random.default_rng(vocab)
    face = interface(vocab, WITH_PROBS)
    step = eager(face) if num_candidates is None else eager(face, num_candidates=num_candidates)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    parameters = [
        {
            "temperature": float(np.float32(rng.uniform(0.2, 2.5))),
            "top_k": int(rng.choice([0, 1, 2, 5, 50, 300])),
            "top_p": float(np.float32(rng.choice([1, rng.uniform(0.02, 0.999)]))),
            "min_p": float(np.float32(rng.choice([0, rng.uniform(0.001, 0.8)]))),
            "repetition_penalty": float(np.float32(rng.choice([1, rng.uniform(0.7, 1.5)]))),
        }
        for _ in range(sets)
    ]
    # No two logits equal: among ties Hugging Face's top-p keeps an arbitrary few, the contract all or none.
    logits = np.stack([np.linspace(-1, 1, vocab)[rng.permutation(vocab)] for _ in range(sets)])
    logits = (logits * rng.uniform(0.5, 8, (sets, 1)) + rng.normal(size=(sets, vocab)) * 1e-3).astype(np.float32)
    history = rng.integers(0, vocab, (sets, 6))

    values = {name: [p[name] for p in parameters] for name in names}
    probs = step(logits, make_inputs(face, sets, sequence=6, input_ids=history, **values))["probs"]
    for row in range(sets):
        expected = huggingface_probs(logits[row], history[row], parameters[row])
        np.testing.assert_array_equal(probs[row] > 0, expected > 0, err_msg=str(parameters[row]))
        np.testing.assert_allclose(probs[row], expected, rtol=1e-5, atol=1e-9, err_msg=str(parameters[row]))
