"""The NumPy reference itself: against transformers' own processors, and on distributions worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsample.contract.interface import Features
from qsample.contract.tensors import EXTRA_PARAMETERS, FILTER_ORDERS
from tests.helpers.reference import adjust, distribution, needs_search, reference_step
from tests.helpers.reference_adjust import dry_penalties
from tests.helpers.reference_filters import survivors
from tests.helpers.sampler_cases import interface, make_inputs, random_step
from tests.helpers.transformers_processors import PROCESSORS, WARPERS, draw, padded, scores
from tests.sampler.test_adjust import DRY
from tests.sampler.test_draw import TO_SEARCH
from tests.sampler.test_filters import by_hand

Array = np.ndarray
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_length": 0}
OFF |= {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dynatemp_exponent": 1.0,
}
ALL_FILTERS = tuple(EXTRA_PARAMETERS)


@pytest.mark.parametrize("vocab", [2, 30, 3000])
def test_filters_are_those_of_transformers(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(150):
        # No two equal, because of ties transformers' top-p keeps any; float32 holds every difference exactly.
        logits = (rng.permutation(vocab) * rng.integers(1, 1 + 40000 // vocab) / 4096).astype(
            np.float32
        )
        parameters = draw(rng, WARPERS)
        expected = scores(logits, [0], parameters).softmax(-1)
        left = survivors(logits, {**OFF, **parameters})
        if left.edge > 1e-7:  # eta_cutoff's threshold is a float32 there
            np.testing.assert_array_equal(left.left, expected > 0, err_msg=str(parameters))
            np.testing.assert_allclose(left.probs(), expected, rtol=1e-9, err_msg=str(parameters))


def test_adjustments_are_those_of_transformers() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        logits, history = (
            rng.normal(size=8).astype(np.float32),
            rng.integers(0, 4, rng.integers(1, 12)),
        )
        parameters = draw(rng, PROCESSORS)
        expected = scores(logits, history, parameters).float()
        row = {**OFF, "output_counts": np.zeros(8), **parameters}
        row["bad_words_ids"] = padded(parameters.get("bad_words_ids", [[]]))
        np.testing.assert_array_equal(adjust(logits, row, history, len(history)), expected)


# exp(l) = 4, 2, 1, 1: probabilities 1/2, 1/4, 1/8, 1/8; tokens 2 and 3 are tied. In bits, the surprises are 1, 2, 3, 3
# and the entropy 7/4.
LOGITS = np.log(np.array([4, 2, 1, 1])).astype(np.float32)


@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_filters_by_hand(order: str) -> None:
    """The cases that the graph is tested with."""
    for parameters, weights in by_hand(order):
        probs = distribution(
            LOGITS,
            {**OFF, "mirostat_mu": 0.0, "adaptive_error": 0.0, **parameters},
            order,
            xtc_uniform=0.5,
        )
        np.testing.assert_allclose(
            probs, weights / np.sum(weights), rtol=1e-6, atol=1e-30, err_msg=str(parameters)
        )


def test_float32_differences_decide_ties() -> None:
    """1e-9 and 2e-9 below 1 are the same in float32, 3e38 below the largest logit is a mask."""
    for k in (0, 2):
        probs = distribution(
            np.float32([1, 1e-9, 2e-9, -3.2e38]), {**OFF, "top_k": k, "temperature": 1e36}
        )
        np.testing.assert_allclose(probs, [1 / 3, 1 / 3, 1 / 3, 0])


@pytest.mark.parametrize(("text", "changes", "penalties"), DRY)
def test_dry(text: str, changes: dict[str, Any], penalties: dict[str, float]) -> None:
    """The cases that the graph is tested with."""
    row = {
        "dry_multiplier": 1.0,
        "dry_base": 2.0,
        "dry_allowed_length": 1,
        "dry_penalty_last_n": -1,
    }
    row |= {"dry_sequence_breakers": [-1], **changes}
    found = dry_penalties(row, np.array([ord(c) - ord("a") for c in text]))
    assert found == {ord(c) - ord("a"): p for c, p in penalties.items()}


@pytest.mark.parametrize(
    ("needed", "parameters"), [case for case in TO_SEARCH if case[1].keys() <= {*OFF, "typical_p"}]
)
def test_rows_to_search(needed: bool, parameters: dict[str, float]) -> None:
    assert needs_search({**OFF, **parameters}) == needed
    face = interface(100, Features(filters=("typical_p",)))
    inputs = make_inputs(face, **parameters) | {"searched_rows": np.empty(0, np.int64)}
    logits = np.pad(LOGITS, (0, 96), constant_values=-30)
    out = reference_step(logits[None], inputs, pad_token_id=9)
    assert out["status_RetainedState"] == (3 if needed else 0)
    assert (out["next_ids"] == 9) == (out["lengths_RetainedState"] == 0) == needed


@pytest.mark.parametrize(
    ("parameters", "threshold"),
    [
        ({"top_n_sigma": 1.0}, float(LOGITS[0] - LOGITS[1]) / float(np.std(LOGITS))),
        ({"top_p": 1.0}, 0.75),
        ({"min_p": 1.0}, 0.25),
        ({"typical_p": 1.0}, 0.25),
        ({"epsilon_cutoff": 1.0}, 0.25),
        ({"eta_cutoff": 1.0}, 2**-2.5),
        ({"xtc_threshold": 1.0, "xtc_probability": 1.0}, 0.25),
        ({"mirostat_mu": 1.0, "mirostat_tau": 1.0}, 2.0),
    ],
)
def test_close_calls(parameters: dict[str, float], threshold: float) -> None:
    first = next(iter(parameters))
    for away, close in ((1e-6, True), (0.05, False)):
        edge = survivors(
            LOGITS, {**OFF, **parameters, first: threshold * (1 + away)}, xtc_uniform=0.0
        ).edge
        assert (edge < 1e-5) == close, edge
        assert edge > 1e-7


@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_random_cases_use_every_input(order: str) -> None:
    """The values of random_step for each filter change the distribution of some rows."""
    face, rng = interface(300, Features(filters=ALL_FILTERS)), np.random.default_rng(0)
    changed = dict.fromkeys(ALL_FILTERS, 0)
    for _ in range(100):
        logits, inputs = random_step(rng, face, 6, 2)
        on = reference_step(logits, inputs, pad_token_id=0, filter_order=order)["probs"]
        for name, (first, *_) in EXTRA_PARAMETERS.items():
            off = inputs | {first.name: np.full_like(inputs[first.name], first.off)}
            probs = reference_step(logits, off, pad_token_id=0, filter_order=order)["probs"]
            changed[name] += int(np.any(probs != on, axis=1).sum())
    assert min(changed.values()) >= 8, changed
