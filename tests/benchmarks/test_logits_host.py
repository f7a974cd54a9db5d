"""The hosts that sample logits with NumPy and with transformers: both draw from the distribution of the contract."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from tests.helpers.reference import adjust, distribution

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_length": 0}
OFF |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
START = 6  # tokens of the prompt


@pytest.mark.parametrize(
    "mix", ["greedy", "top-k 50, top-p 0.95", "top-p 0.95", "top-p 0.95, flat", "everything"]
)
def test_what_is_drawn_from(benchmark: Callable[[str], ModuleType], mix: str) -> None:
    host, mixes = benchmark("systems.logits_host"), benchmark("systems").ALL
    rng = np.random.default_rng(0)
    logits = (4 * rng.standard_normal((3, 300))).astype(np.float32)
    history = rng.integers(0, 300, (3, 20))
    # The likeliest tokens were seen: two in the prompt, and a token that was sampled twice.
    for row, likely in enumerate(np.argsort(-logits, axis=-1)[:, :3]):
        history[row, [0, 1, 8, 9]] = [likely[0], likely[1], likely[2], likely[2]]
    expected = []
    for row, ids in zip(logits, history, strict=True):
        counts = np.bincount(ids[START:], minlength=len(row))
        parameters = {**OFF, "stop_ids": [], "output_counts": counts, **mixes[mix]}
        expected.append(distribution(adjust(row, parameters, ids, len(ids)), parameters))
    before = logits.copy()
    samplers = [make(mixes[mix]) for make in (host.NumpySampler, host.TransformersSampler)]
    for sampler in samplers:
        assert np.all(
            np.take_along_axis(np.array(expected), sampler(logits, history, START)[:, None], axis=1)
            > 0
        )
    np.testing.assert_array_equal(logits, before)
    if mix != "greedy":
        weights = samplers[0].weights(samplers[0]._penalized(logits, history, START))
        np.testing.assert_allclose(
            weights / weights.sum(axis=-1, keepdims=True), expected, atol=1e-6
        )
        scores = samplers[1].scores(logits, history, START)
        np.testing.assert_allclose(scores.softmax(dim=-1).numpy(), expected, atol=1e-6)
