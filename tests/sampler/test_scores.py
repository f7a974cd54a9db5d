"""Scores of tokens; the oracle is NumPy in float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.contract.interface import Features, Interface
from qsample.sampler.scores import build_scores

VOCAB = 300


def run(interface: Interface, logits: np.ndarray, ids: list[int]) -> dict[str, np.ndarray]:
    content = ir.to_proto(build_scores(interface)).SerializeToString()
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    feeds = {"all_logits": logits, "scored_ids": np.array(ids, np.int32)}
    return dict(zip(names, session.run(names, feeds), strict=True))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    values = logits.astype(np.float64)
    shifted = values - values.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 130])
def test_any_number_of_tokens(count: int, rows: int) -> None:
    """The rows of the call come first; tokens are scored 64 at a time."""
    most = 7
    interface = Interface(
        VOCAB, (), features=Features(logprobs=True, top_logprobs=most, prompt_logprobs=True)
    )
    random = np.random.default_rng(count)
    logits = random.normal(0, 5, (rows + count, VOCAB)).astype(np.float32)
    ids = random.integers(0, VOCAB, count).tolist()
    found = run(interface, logits, ids)
    logprobs = log_softmax(logits[rows:])
    own = logprobs[np.arange(count), ids]
    order = np.argsort(-logits[rows:], axis=-1, kind="stable")[:, :most]
    assert [found[name].dtype for name in found] == [np.float32, np.int32, np.int32, np.float32]
    # Logits up to 20 have an error of 1e-6 in float32.
    np.testing.assert_allclose(found["prompt_logprobs"][:, 0], own, atol=5e-6)
    ranks = 1 + (logprobs > own[:, None]).sum(axis=-1)
    np.testing.assert_array_equal(found["prompt_ranks"][:, 0], ranks)
    np.testing.assert_array_equal(found["prompt_top_logprob_ids"], order)
    np.testing.assert_allclose(
        found["prompt_top_logprobs"], np.take_along_axis(logprobs, order, -1), atol=5e-6
    )


def test_masked_tokens_and_ties() -> None:
    """A masked token has the log-probability -inf, and ranks behind all others; of ties, the lower ids are first."""
    interface = Interface(
        VOCAB, (), features=Features(logprobs=True, top_logprobs=3, prompt_logprobs=True)
    )
    logits = np.full((4, VOCAB), -np.inf, np.float32)
    logits[:, [9, 200, 250]] = [1.0, 2.0, 2.0]
    found = run(interface, logits, [0, 250, 9])
    assert found["prompt_ranks"][:, 0].tolist() == [4, 1, 3]
    assert found["prompt_logprobs"][0, 0] == -np.inf
    assert found["prompt_top_logprob_ids"].tolist() == [[200, 250, 9]] * 3


def test_without_alternatives() -> None:
    interface = Interface(VOCAB, (), features=Features(logprobs=True, prompt_logprobs=True))
    found = run(interface, np.zeros((2, VOCAB), np.float32), [5])
    assert list(found) == ["prompt_logprobs", "prompt_ranks"]
    assert found["prompt_logprobs"][0, 0] == pytest.approx(-np.log(VOCAB))
    assert found["prompt_ranks"].tolist() == [[1]]


@pytest.mark.parametrize("features", [{"logprobs": False}, {"sampler": False}], ids=str)
def test_what_scores_need(features: dict[str, bool]) -> None:
    with pytest.raises(
        ValueError, match="prompt_logprobs is True; give it with include_sampler and logprobs"
    ):
        Features(**{"logprobs": True, "prompt_logprobs": True, **features})  # type: ignore[arg-type]
