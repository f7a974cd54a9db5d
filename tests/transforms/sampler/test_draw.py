"""The draw by inverse CDF: boundaries in id order, from candidates and from the whole vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qsample.transforms.sampler.draw import draw_candidates, draw_vocabulary
from tests.helpers.sampler_cases import WITH_PROBS, eager, interface, make_inputs

FACE = interface(4, WITH_PROBS)


@pytest.mark.parametrize(
    ("u", "token"), [(0, 0), (0.4999, 0), (0.5, 1), (0.7499, 1), (0.75, 2), (0.8749, 2), (0.875, 3), (1 - 2**-24, 3)]
)
def test_inverse_cdf(u: float, token: int) -> None:
    """Boundaries in id order: 0.5, 0.75, 0.875, 1; u on a boundary belongs to the token after it."""
    logits = np.array([[3, 2, 1, 1]], np.float32) * np.float32(np.log(2))  # powers of two up to rounding
    assert eager(FACE)(np.round(logits, 6), make_inputs(FACE, noise=u))["next_ids"][0, 0] in (token, max(token - 1, 0))
    exact = eager(FACE)(np.zeros((1, 4), np.float32), make_inputs(FACE, noise=u))["next_ids"]
    assert exact[0, 0] == int(u * 4)  # four equal tokens: weights exactly 1, boundaries exactly 1/4, 1/2, 3/4


@pytest.mark.parametrize("vocab", [1, 5, 300, 4099])
def test_both_draws_take_the_first_token_whose_sum_exceeds_u(vocab: int) -> None:
    """Weights that sum without rounding, most of them 0, and u on every boundary too."""
    rng = np.random.default_rng(vocab)
    weights = rng.integers(0, 3, (64, vocab)) * (rng.random((64, vocab)) < 0.1)
    weights[:, rng.integers(vocab)] += 1
    total = 2 ** int(np.ceil(np.log2(weights.sum(-1).max())))
    weights[:, rng.integers(vocab)] += total - weights.sum(-1)  # so that u * total is exact
    cumulative = weights.cumsum(-1)
    uniform = rng.integers(0, total, (64, 1)) / total
    expected = (cumulative <= uniform * total).sum(-1)

    ids = np.stack([rng.permutation(vocab) for _ in range(64)])
    shuffled = np.take_along_axis(weights, ids, 1).astype(np.float32)
    u = torch.from_numpy(uniform.astype(np.float32))
    from_candidates = draw_candidates(torch.from_numpy(ids), torch.from_numpy(shuffled), u)
    from_vocabulary = draw_vocabulary(torch.from_numpy(weights.astype(np.float32)), u)
    np.testing.assert_array_equal(from_candidates[:, 0], expected)
    np.testing.assert_array_equal(from_vocabulary[:, 0], expected)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24, 1.0])
def test_a_token_without_weight_is_never_drawn(u: float) -> None:
    weights = torch.zeros(1, 1000)
    weights[0, [400, 600]] = torch.tensor([1e-38, 1.0])
    uniform = torch.tensor([[u]])
    expected = 400 if u == 0 else 600
    assert draw_vocabulary(weights, uniform).item() == expected
    assert draw_candidates(torch.arange(1000)[None], weights, uniform).item() == expected
