"""The tokens that the fake package must generate for a prompt: NumPy float64, without a cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from qsample.request.sampling_params import SamplingParams
from tests.helpers.fake_graphs import DIM, VOCAB
from tests.helpers.fake_images import Seen
from tests.helpers.fake_package import EOS, MAX_POSITIONS, fake_weights
from tests.helpers.reference import philox_uniforms


@functools.cache
def _uniforms(seed: int) -> np.ndarray:
    return philox_uniforms(seed, MAX_POSITIONS)


def noise(seed: int, position: int) -> float:
    return float(_uniforms(seed)[position])


@functools.cache
def _weights() -> dict[str, np.ndarray]:
    return {name: np.asarray(value, dtype=np.float64) for name, value in fake_weights().items()}


def logits(history: Sequence[int], seen: Seen | None = None) -> np.ndarray:
    """[V] float64: the model on the whole history, without a cache. seen: the images of its beginning."""
    w = _weights()
    embedded, places = w["embedding"][list(history)], np.arange(len(history))[:, None]
    if seen is not None:
        embedded, places = seen.embedded(embedded), places + seen.shift(len(history))
    hidden = embedded + np.sin(places * w["frequencies"])
    query, keys, values = hidden[-1] @ w["w_query"], hidden @ w["w_key"], hidden @ w["w_value"]
    scores = keys @ query / math.sqrt(DIM)
    weights = np.exp(scores - scores.max())
    attended = weights @ values / weights.sum()
    result: np.ndarray = (hidden[-1] + attended) @ w["w_head"] + w["head_bias"]
    return result


def generate(
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    capacity: int,
    seen: Seen | None = None,
) -> tuple[list[int], str]:
    """New tokens and finish reason. seen: the images of the prompt. The fake sampler has no top-k, top-p and min-p."""
    least, most = params.lengths(len(prompt), capacity)
    stops = (EOS,) if params.eos_token_id is None else params.eos_token_id
    history, counts = list(prompt), np.zeros(VOCAB)
    while True:
        values = logits(history, seen)
        if np.isnan(values).any():
            return history[len(prompt) :], "invalid"
        for token, bias in (params.logit_bias or {}).items():
            values[token] += bias
        if len(history) < least:
            values[list(stops)] = -np.inf
        for token in set(history):
            r = params.repetition_penalty
            values[token] = values[token] * r if values[token] < 0 else values[token] / r
        values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if params.temperature == 0:
            token = int(values.argmax())
        else:
            p = np.exp((values - values.max()) / params.temperature)
            token = int((np.cumsum(p / p.sum()) <= noise(seed, len(history))).sum())
        history.append(token)
        counts[token] += 1
        if token in stops:
            return history[len(prompt) :], "stop"
        if len(history) >= most:
            return history[len(prompt) :], "length"
