"""Distributions of four tokens, small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.sampler_cases import WITH_PROBS, eager, interface, make_inputs

FACE = interface(4, WITH_PROBS)
# exp(l) = 4, 2, 1, 1: probabilities 0.5, 0.25, 0.125, 0.125; tokens 2 and 3 are tied.
LOGITS = np.log(np.array([[4, 2, 1, 1]], dtype=np.float32))


def probs(logits: np.ndarray = LOGITS, **parameters: object) -> list[float]:
    return eager(FACE)(logits, make_inputs(FACE, **parameters))["probs"][0].tolist()


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, [0.5, 0.25, 0.125, 0.125]),
        # t = 0.5 squares the weights: 16, 4, 1, 1 of 22.
        ({"temperature": 0.5}, [16 / 22, 4 / 22, 1 / 22, 1 / 22]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        # The second largest is 2: weights 4 and 2 remain.
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        # The third largest is 1, and so is its tie: top_k = 3 keeps four.
        ({"top_k": 3}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_k": 4}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_k": 9}, [0.5, 0.25, 0.125, 0.125]),
        # Mass of the strictly larger tokens: 0, 0.5, 0.75, 0.75. Kept where it is below p.
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.75}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.76}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        # p >= min_p * 0.5: 0.24 * 0.5 is below 0.125 and keeps all, 0.26 * 0.5 the first two, one the maximum alone.
        ({"min_p": 0.24}, [0.5, 0.25, 0.125, 0.125]),
        ({"min_p": 0.26}, [2 / 3, 1 / 3, 0, 0]),
        ({"min_p": 0.49}, [2 / 3, 1 / 3, 0, 0]),
        ({"min_p": 0.51}, [1, 0, 0, 0]),
        ({"min_p": 1}, [1, 0, 0, 0]),
        # The order matters. top-k 2 renormalises to 2/3, 1/3; then top-p 0.6 keeps the first only. The other way round,
        # 0.6 of the whole would have kept both.
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
    ],
)
def test_filters(parameters: dict[str, float], expected: list[float]) -> None:
    np.testing.assert_allclose(probs(**parameters), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("u", "token"), [(0, 0), (0.4999, 0), (0.5, 1), (0.7499, 1), (0.75, 2), (0.8749, 2), (0.875, 3), (1 - 2**-24, 3)]
)
def test_inverse_cdf(u: float, token: int) -> None:
    """Boundaries in id order: 0.5, 0.75, 0.875, 1; u on a boundary belongs to the token after it."""
    logits = np.array([[3, 2, 1, 1]], np.float32) * np.float32(np.log(2))  # powers of two up to rounding
    assert eager(FACE)(np.round(logits, 6), make_inputs(FACE, noise=u))["next_ids"][0, 0] in (token, max(token - 1, 0))
    exact = eager(FACE)(np.zeros((1, 4), np.float32), make_inputs(FACE, noise=u))["next_ids"]
    assert exact[0, 0] == int(u * 4)  # four equal tokens: weights exactly 1, boundaries exactly 1/4, 1/2, 3/4


def test_u_is_that_of_the_position() -> None:
    """A row of 3 tokens that gets 2 more draws with noise[5]."""
    noise = np.full((1, 16), 0.1)
    noise[0, 5] = 0.9
    inputs = make_inputs(FACE, sequence=2, lengths=3, noise=noise)
    assert eager(FACE)(np.zeros((1, 4), np.float32), inputs)["next_ids"][0, 0] == 3


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = np.array([[1, 7, 7, 7]], np.float32)
    assert eager(FACE)(logits, make_inputs(FACE, temperature=0))["next_ids"][0, 0] == 1


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
