"""logit_bias, allowed_tokens, logprobs, top logprobs and probs: each by itself, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.contract import INVALID_LOGITS, Features
from tests.helpers.sampler_cases import PAD, eager, interface, make_inputs


@pytest.mark.parametrize(
    ("ids", "bias", "expected"),
    [
        ([[2, -1, -1]], [[5, 9, 9]], [0, 0, 5, 0]),  # padding, whatever its bias, touches nothing
        ([[2, 2, 0]], [[1, 1, -3]], [-3, 0, 2, 0]),  # the biases of a repeated id add up
        ([[-1, -1, 0]], [[9, 9, 1]], [1, 0, 0, 0]),
        ([[1, 7, 1]], [[1, 9, 0]], [0, 1, 0, 0]),  # an id beyond the vocabulary is padding
    ],
)
def test_logit_bias(ids: list[list[int]], bias: list[list[float]], expected: list[float]) -> None:
    face = interface(4, Features(logit_bias=True, probs=True))
    inputs = make_inputs(face, biases=3, logit_bias_ids=ids, logit_bias=bias)
    weights = np.exp(expected)
    np.testing.assert_allclose(
        eager(face)(np.zeros((1, 4), np.float32), inputs)["probs"][0], weights / weights.sum(), rtol=1e-6
    )


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 70])
def test_allowed_tokens(vocab: int) -> None:
    """Every single bit, the sign bits and the last incomplete word included."""
    face = interface(vocab, Features(allowed_tokens=True, probs=True))
    for token in range(vocab):
        words = np.zeros((1, -(-vocab // 32)), np.int32)
        words[0, token // 32] = np.int64(1 << (token % 32)).astype(np.int32)
        result = eager(face)(np.zeros((1, vocab), np.float32), make_inputs(face, allowed_tokens=words))
        assert result["next_ids"][0, 0] == token
        assert result["probs"][0].tolist() == np.eye(vocab)[token].tolist()


def test_nothing_allowed_is_invalid() -> None:
    face = interface(40, Features(allowed_tokens=True))
    result = eager(face)(np.zeros((1, 40), np.float32), make_inputs(face, allowed_tokens=[[0, -256]]))
    assert result["status_RetainedState"][0] == INVALID_LOGITS  # bits 8 to 31 of word 1 are tokens 40 and up


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_mask_does_not_hide_an_invalid_logit(value: float) -> None:
    face = interface(40, Features(allowed_tokens=True, logit_bias=True))
    logits = np.zeros((1, 40), np.float32)
    logits[0, 7] = value
    for mask in (
        {"allowed_tokens": [[1, 0]]},
        {"logit_bias_ids": 7, "logit_bias": -np.inf},
        {"stop_ids": 7, "min_length": 9},
    ):
        assert eager(face)(logits, make_inputs(face, **mask))["status_RetainedState"][0] == INVALID_LOGITS


def test_logprobs_are_those_of_the_model() -> None:
    """Raw log-softmax: penalties, temperature, filters and masks change what is drawn, not what is reported."""
    face = interface(4, Features(logprobs=True, top_logprobs=3, logit_bias=True))
    logits = np.log(np.array([[4, 2, 1, 1]], np.float32))
    inputs = make_inputs(face, temperature=0, logit_bias_ids=1, logit_bias=9, repetition_penalty=3)
    result = eager(face)(logits, inputs)
    assert result["next_ids"][0, 0] == 1
    np.testing.assert_allclose(result["logprobs"], np.log([[0.25]]), rtol=1e-6)
    np.testing.assert_allclose(result["top_logprobs"], np.log([[0.5, 0.25, 0.125]]), rtol=1e-6)
    assert result["top_logprob_ids"][0, :2].tolist() == [0, 1]


def test_rows_that_emit_nothing_report_nothing() -> None:
    face = interface(4, Features(logprobs=True, top_logprobs=2, probs=True))
    logits = np.array([[1, 2, 3, 4], [1, np.nan, 3, 4], [1, 2, 3, 4]], np.float32)
    result = eager(face)(logits, make_inputs(face, 3, emit=[False, True, True], status=[0, 0, 1]))
    assert result["next_ids"].tolist() == [[PAD]] * 3
    for name in ("logprobs", "top_logprobs", "probs"):
        assert not result[name].any(), name
    assert (result["top_logprob_ids"] == -1).all()


def test_an_absent_feature_adds_no_output() -> None:
    face = interface(4)
    assert set(eager(face)(np.zeros((1, 4), np.float32), make_inputs(face))) == set(face.sampler.output_names)
