"""next_ids, log-probabilities and the sampled distribution: the reported values, and their rows."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.sampler import build_sampler
from tests.helpers.sampler_cases import (
    ALL_FEATURES,
    PAD,
    check_rows,
    interface,
    make_inputs,
    opened,
    random_step,
    sampler,
)


@pytest.mark.parametrize("captured", [False, True])
def test_logprobs_are_those_of_the_model(captured: bool) -> None:
    """Raw log-softmax: penalties, temperature, filters and masks change the draw, not the report."""
    features = Features(logprobs=True, top_logprobs=3, logit_bias=True)
    face = Interface(4, (), features=features, captured=captured)
    logits = np.log(np.array([[4, 2, 1, 1]], np.float32)) + 50
    inputs = make_inputs(face, temperature=0, logit_bias_ids=1, logit_bias=9, repetition_penalty=3)
    result = sampler(face)(logits, inputs)
    assert result["next_ids"][0, 0] == 1
    np.testing.assert_allclose(result["logprobs"], np.log([[0.25]]), rtol=1e-5)
    np.testing.assert_allclose(result["top_logprobs"], np.log([[0.5, 0.25, 0.125]]), rtol=1e-5)
    assert result["top_logprob_ids"].tolist() == [[0, 1, 2]]


def test_small_log_probabilities_keep_their_digits() -> None:
    """(l - max) - log sum: if the maximum is large, its sum with the logarithm would lose them."""
    logits = np.float32([[4000, 3999.5, 3990, -1e35, -np.inf]])
    face = interface(5, Features(logprobs=True, top_logprobs=5))
    result = sampler(face)(logits, make_inputs(face, temperature=0))
    exact = logits - 4000.0 - np.log(np.exp(logits.astype(np.float64) - 4000).sum())
    np.testing.assert_allclose(result["logprobs"], exact[:, :1], rtol=1e-6)
    np.testing.assert_allclose(result["top_logprobs"], exact, rtol=1e-6)


@pytest.mark.parametrize("captured", [False, True])
def test_rows_that_emit_nothing_report_nothing(captured: bool) -> None:
    face = Interface(4, (), features=Features(logprobs=True, top_logprobs=2, probs=True), captured=captured)
    logits = np.array([[1, 2, 3, 4], [1, np.nan, 3, 4], [1, 2, 3, 4]], np.float32)
    result = sampler(face)(logits, make_inputs(face, 3, emit=[False, True, True], status=[0, 0, 1]))
    assert result["next_ids"].tolist() == [[PAD]] * 3
    for name in ("logprobs", "top_logprobs", "probs"):
        assert not result[name].any(), name
    assert (result["top_logprob_ids"] == -1).all()


@pytest.mark.parametrize("pad", [0, 3])
def test_the_pad_token(pad: int) -> None:
    """Of rows that emit nothing. The graph is loaded here: it is not that of the other tests."""
    face = interface(4)
    session = opened(build_sampler(face, pad))
    feeds = {"logits": np.zeros((2, 4), np.float32), **make_inputs(face, 2, emit=[False, True], noise=0.3)}
    assert session.run(["next_ids"], feeds)[0].tolist() == [[pad], [1]]


def test_ties_of_top_logprobs_are_in_id_order() -> None:
    face = interface(1000, ALL_FEATURES)
    logits = np.round(np.random.default_rng(0).normal(size=(50, 1000))).astype(np.float32)
    ids = sampler(face)(logits, make_inputs(face, 50))["top_logprob_ids"]
    np.testing.assert_array_equal(ids, np.argsort(-logits, kind="stable", axis=1)[:, :3])


def test_the_distribution_of_greedy_and_random_rows() -> None:
    """A single 1 at the argmax; and whatever the vocabulary's padding, all that random rows may draw."""
    for vocab in (5, 300):
        face = interface(vocab, Features(probs=True))
        logits = np.tile(np.arange(vocab, dtype=np.float32) / vocab, (3, 1))
        probs = sampler(face)(logits, make_inputs(face, 3, temperature=[0, 1, 1], top_k=[0, 0, 2]))["probs"]
        weights = np.exp(logits[0].astype(np.float64))
        np.testing.assert_array_equal(probs[0], np.eye(vocab)[-1])
        np.testing.assert_allclose(probs[1], weights / weights.sum(), rtol=1e-6)
        np.testing.assert_allclose(probs[2, -2:], weights[-2:] / weights[-2:].sum(), rtol=1e-6)
        assert not probs[2, :-2].any()


def test_every_output_alone() -> None:
    """Against the reference; an absent feature adds no output."""
    alone = [{"logprobs": True}, {"top_logprobs": 1}, {"top_logprobs": 7}, {"probs": True}, {}]
    for vocab, features in zip((1000, 7, 7, 1000, 7), (Features(**chosen) for chosen in alone), strict=True):
        face = interface(vocab, features)
        logits, inputs = random_step(np.random.default_rng(vocab), face, 6, 1)
        check_rows(face, logits, inputs)
        assert [*sampler(face)(logits, inputs)] == face.sampler.output_names
