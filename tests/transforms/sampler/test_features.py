"""logprobs, top logprobs and probs: each by itself, by hand."""

from __future__ import annotations

import numpy as np

from qsample.contract import Features
from tests.helpers.sampler_cases import PAD, eager, interface, make_inputs


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
