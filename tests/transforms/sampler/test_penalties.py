"""logit_bias, allowed_tokens, minimum length and penalties: each by itself, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.contract import INVALID_LOGITS, Features
from tests.helpers.sampler_cases import WITH_PROBS, eager, interface, make_inputs

FACE = interface(4, WITH_PROBS)


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


def test_repetition_penalty_applies_once_per_distinct_id() -> None:
    """r = 2: token 0 (l = 4) is in the history three times, token 3 (l = -1) once: 4 / 2 = 2 and -1 * 2 = -2."""
    logits = np.array([[4, 2, 1, -1]], np.float32)
    inputs = make_inputs(FACE, sequence=4, input_ids=[[0, 0, 0, 3]], repetition_penalty=2)
    weights = np.exp([2, 2, 1, -2])
    np.testing.assert_allclose(eager(FACE)(logits, inputs)["probs"][0], weights / weights.sum(), rtol=1e-6)


def test_presence_and_frequency_count_sampled_tokens_only() -> None:
    """Token 1 was sampled twice, token 2 is in the prompt: l[1] -= 0.25 * 2 + 0.5."""
    logits = np.array([[1, 1, 1, 1]], np.float32)
    inputs = make_inputs(
        FACE,
        lengths=3,
        tokens=[[2, 1, 1] + [2] * 13],
        input_ids=1,
        output_counts=[[0, 2, 0, 0]],
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    weights = np.exp([1, 0, 1, 1])
    np.testing.assert_allclose(eager(FACE)(logits, inputs)["probs"][0], weights / weights.sum(), rtol=1e-6)


@pytest.mark.parametrize(("min_length", "expected"), [(2, [1, 0, 0, 0]), (1, [0, 1, 0, 0]), (0, [0, 1, 0, 0])])
def test_min_length_forbids_stops(min_length: int, expected: list[int]) -> None:
    """One token in the row, so lengths + n = 1: token 1, a stop, is forbidden while that is below min_length."""
    logits = np.array([[1, 5, 0, 0]], np.float32)
    inputs = make_inputs(FACE, temperature=0, min_length=min_length, stop_ids=[[1, -1]], stops=2)
    assert eager(FACE)(logits, inputs)["probs"][0].tolist() == expected


def test_padding_of_stop_ids_leaves_token_0_alone() -> None:
    logits = np.array([[9, 5, 0, 0]], np.float32)
    result = eager(FACE)(logits, make_inputs(FACE, temperature=0, min_length=9, stop_ids=[[-1, 1, -1]], stops=3))
    assert result["next_ids"][0, 0] == 0
    assert result["status_RetainedState"][0] == 0
