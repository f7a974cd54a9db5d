"""Log-probabilities of the tokens of prompts, by transformers in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

Scores = Callable[[Sequence[int]], np.ndarray]


def scores_by_transformers(folder: Path) -> Scores:
    """A function of n token ids that returns the log-probability of every token after each of them
    but the last, [n - 1, V] float64, by the model of a checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        experts_implementation="eager",  # torch's grouped products take no float64
    ).eval()

    def score(ids: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor([list(ids)])).logits[0, :-1]
        found: np.ndarray = torch.log_softmax(logits.double(), -1).numpy()
        return found

    return score
