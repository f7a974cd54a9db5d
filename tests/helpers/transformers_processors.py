"""transformers' own logits processors, in transformers' order, each with how a test draws its value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

Array = np.ndarray

PROCESSORS: dict[str, Any] = {
    "repetition_penalty": (
        RepetitionPenaltyLogitsProcessor,
        lambda rng: float(rng.choice([1.3, 0.7])),
    ),
    "no_repeat_ngram_size": (NoRepeatNGramLogitsProcessor, lambda rng: int(rng.integers(1, 5))),
    "bad_words_ids": (
        NoBadWordsLogitsProcessor,
        lambda rng: [rng.integers(0, 4, rng.integers(1, 4)).tolist() for _ in range(3)],
    ),
}
WARPERS: dict[str, Any] = {
    "temperature": (TemperatureLogitsWarper, lambda rng: rng.uniform(0.3, 3)),
    "top_k": (TopKLogitsWarper, lambda rng: int(rng.integers(1, 100))),
    "top_p": (TopPLogitsWarper, lambda rng: rng.uniform(0.02, 0.99)),
    "min_p": (MinPLogitsWarper, lambda rng: rng.uniform(0.001, 0.8)),
    "typical_p": (TypicalLogitsWarper, lambda rng: rng.uniform(0.02, 0.99)),
    "epsilon_cutoff": (EpsilonLogitsWarper, lambda rng: 10 ** rng.uniform(-4, -0.5)),
    "eta_cutoff": (EtaLogitsWarper, lambda rng: 10 ** rng.uniform(-4, -0.5)),
}


def draw(
    rng: np.random.Generator, known: Mapping[str, Any] = PROCESSORS | WARPERS
) -> dict[str, Any]:
    """Values of about half of them, as float32 has them."""
    values = {name: value(rng) for name, (_, value) in known.items() if rng.random() < 0.5}
    return {name: float(np.float32(v)) if isinstance(v, float) else v for name, v in values.items()}


def scores(logits: Array, history: Sequence[int], parameters: Mapping[str, Any]) -> torch.Tensor:
    """[V] float64, what the processors make of logits [V]; the order of `parameters` does not matter."""
    known = PROCESSORS | WARPERS
    chain = LogitsProcessorList(
        [known[name][0](parameters[name]) for name in known if name in parameters]
    )
    past = torch.tensor([list(history)], dtype=torch.long)
    return chain(past, torch.from_numpy(logits[None]).double())[0]


def padded(words: Sequence[Sequence[int]], length: int = 3) -> Array:
    """One row of `bad_words_ids`: [Q, length] int32."""
    return np.array([[-1] * (length - len(word)) + list(word) for word in words], np.int32)
