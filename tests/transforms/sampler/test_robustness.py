"""Whatever the logits and parameters: an id in range, never a masked token, and the status that the contract says."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from qsample.contract import INVALID_LOGITS
from tests.helpers.reference import distribution, reference_step
from tests.helpers.sampler_cases import BOUNDARY, PAD, WITH_PROBS, compare_step, eager, interface, make_inputs

EDGE = [0.0, -0.0, 1.0, -1.0, 1e-30, 88.0, -104.0, 1e4, -65504.0, 3e38, -3.4028235e38, -np.inf, np.inf, np.nan]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.one_of(st.sampled_from(EDGE), st.floats(-50, 50, width=32)), min_size=1, max_size=40),
    temperature=st.sampled_from([0, 1e-45, 1e-30, 1e-6, 0.3, 1, 100, 1e30]),
    top_k=st.sampled_from([0, 1, 2, 3, 39, 40, 41, 10**6]),
    top_p=st.sampled_from([1, 1e-30, 1e-6, 0.5, 0.999999]),
    min_p=st.sampled_from([0, 1e-30, 0.5, 1]),
    u=st.sampled_from([0, 2**-24, 0.3, 0.5, 1 - 2**-24]),
    num_candidates=st.sampled_from([1, 4, 80]),
)
def test_never_an_impossible_token(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, u: float, num_candidates: int
) -> None:
    row = np.array([logits], np.float32)
    face = interface(row.shape[1], WITH_PROBS)
    inputs = make_inputs(face, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, noise=u)
    result = eager(face, num_candidates=num_candidates)(row, inputs)
    token, status = result["next_ids"][0, 0], result["status_RetainedState"][0]
    valid = not (np.isnan(row).any() or (row == np.inf).any()) and np.isfinite(row).any()
    if not valid:
        assert status == INVALID_LOGITS
        return
    if status == INVALID_LOGITS:  # allowed for sums that overflow beside an infinite logit
        assert row.max() > 2.0**120
        assert row.min() < -(2.0**120)
        return
    assert 0 <= token < row.shape[1]
    assert np.isfinite(row[0, token])
    assert result["probs"][0, token] > 0
    assert np.isclose(result["probs"].sum(), 1, rtol=1e-5)


@pytest.mark.parametrize("num_candidates", [None, 8])
@pytest.mark.parametrize("parameters", [{}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 1}])
@pytest.mark.parametrize("vocab", [1, 2, 49, 97, 5003])
def test_equal_logits(vocab: int, parameters: dict[str, float], num_candidates: int | None) -> None:
    """Ties are kept or dropped whole, so every filter keeps all of them; only greedy picks one, the first."""
    face = interface(vocab, WITH_PROBS)
    step = eager(face) if num_candidates is None else eager(face, num_candidates=num_candidates)
    result = step(np.full((1, vocab), -7, np.float32), make_inputs(face, noise=0.7, **parameters))
    greedy = parameters.get("temperature") == 0
    assert result["next_ids"][0, 0] == (0 if greedy else int(np.float32(0.7) * np.float64(vocab)))
    np.testing.assert_allclose(result["probs"][0], np.eye(vocab)[0] if greedy else 1 / vocab, rtol=1e-6)


@pytest.mark.parametrize("vocab", [1, 32000, 262144])
@pytest.mark.parametrize(
    "parameters", [{"top_p": 0.9}, {"top_k": 700, "top_p": 0.99}, {"min_p": 0.001}, {"temperature": 2}]
)
def test_large_and_small_vocabularies(vocab: int, parameters: dict[str, float]) -> None:
    rng = np.random.default_rng(vocab)
    face = interface(vocab, WITH_PROBS)
    logits = rng.normal(size=(2, vocab)).astype(np.float32)
    inputs = make_inputs(face, 2, noise=[0.3, 0.97], **parameters)
    expected = reference_step(logits, inputs, pad_token_id=PAD)
    got = eager(face)(logits, inputs)
    for row in range(2):
        wrong = compare_step(got, expected, row)
        assert not wrong or (expected["margin"][row] < BOUNDARY and "support" not in wrong), wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parameters", [{"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.3, "top_k": 400}, {"min_p": 0.05}])
def test_low_precision_ties(dtype: torch.dtype, parameters: dict[str, float]) -> None:
    """Logits of a half-precision model: thousands of ties across every edge; support exactly the reference's."""
    vocab = 20000
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, vocab, generator=generator).to(dtype).to(torch.float32).numpy()
    face = interface(vocab, WITH_PROBS)
    probs = eager(face)(logits, make_inputs(face, 4, **parameters))["probs"]
    row = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0} | {n: np.float32(v) for n, v in parameters.items()}
    for b in range(4):
        np.testing.assert_array_equal(probs[b] > 0, distribution(logits[b], row) > 0)
