"""top-k, top-p and min-p on distributions of four tokens, small enough to work out by hand."""

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
