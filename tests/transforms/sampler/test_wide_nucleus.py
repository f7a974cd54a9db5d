"""Nuclei of more tokens than the candidates: exact, and found without a sort of the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from qsample.transforms.sampler import sample, wide_nucleus
from tests.helpers.reference import distribution
from tests.helpers.sampler_cases import WITH_PROBS, eager, exported, interface, make_inputs


@pytest.mark.parametrize("values", ["two", "steps", "sorted", "spikes"])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99999])
def test_data_made_against_the_search(values: str, top_p: float) -> None:
    """Few distinct values, order that defeats a strided sample, weight on few tokens: exact all the same."""
    vocab = 6000
    rng = np.random.default_rng(4)
    logits = {
        "two": np.where(np.arange(vocab) % 5 == 0, 1.0, 0.5),
        "steps": np.floor(np.arange(vocab) / 1500),
        "sorted": np.linspace(-3, 3, vocab),
        "spikes": np.where(np.arange(vocab) % (vocab // 1024) == 0, -50.0, rng.normal(size=vocab)),
    }[values].astype(np.float32)[None]
    face = interface(vocab, WITH_PROBS)
    probs = eager(face, num_candidates=4)(logits, make_inputs(face, top_p=top_p))["probs"][0]
    row = {"temperature": 1, "top_k": 0, "top_p": np.float32(top_p), "min_p": 0}
    np.testing.assert_array_equal(probs > 0, distribution(logits[0], row) > 0)


@pytest.mark.parametrize("values", ["normal", "two humps", "heavy above", "heavy below", "heavy both"])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.9), (100.0, 0.95), (0.7, 0.95), (1.0, 0.99)])
def test_the_search_needs_no_sort(
    values: str, temperature: float, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nuclei of thousands of tokens, their edge in the middle and in the tails, their weight spread or on few."""

    def sort(*_: object) -> None:
        raise AssertionError("sorted the whole vocabulary")

    vocab, rng = 150_000, np.random.default_rng(5)
    logits = {
        "normal": rng.normal(size=vocab),
        "two humps": np.where(rng.random(vocab) < 0.5, rng.normal(-6, 1, vocab), rng.normal(size=vocab)),
        "heavy above": rng.exponential(size=vocab),
        "heavy below": -rng.exponential(size=vocab),
        "heavy both": rng.laplace(size=vocab),
    }[values].astype(np.float32)[None]
    face = interface(vocab, WITH_PROBS)
    row = {"temperature": np.float32(temperature), "top_p": np.float32(top_p)}
    # A trace takes every way, so this one is made with the sort in place; the graph must be right all the same.
    in_graph = exported(face)(logits, make_inputs(face, 1, **row))["probs"][0]
    monkeypatch.setattr(sample, "_with_sort", sort)
    probs = eager(face)(logits, make_inputs(face, 1, **row))["probs"][0]
    wanted = distribution(logits[0], {"top_k": 0, "min_p": 0} | row)
    np.testing.assert_array_equal(probs > 0, wanted > 0)
    # ONNX Runtime's exp and sums may round the one token at the edge to the other side of it: in one of these cases the
    # edge is 3.4e-9 of the whole weight from the limit.
    assert ((in_graph > 0) != (wanted > 0)).sum() <= 1


def test_a_nucleus_that_ends_exactly_at_its_weight() -> None:
    """600 tokens of weight 1 and 1,200 of weight 0.5: the likelier ones weigh top_p, which is not less than it."""
    logits = np.zeros((1, 1800), np.float32)
    logits[0, np.random.default_rng(6).permutation(1800)[:1200]] = np.float32(-0.6931472)  # float32's exp: 0.5
    face = interface(1800, WITH_PROBS)
    for step in (eager(face), exported(face)):
        np.testing.assert_array_equal(step(logits, make_inputs(face, 1, top_p=0.5))["probs"][0] > 0, logits[0] == 0)


def test_a_row_keeps_its_threshold_where_another_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second attempt finds is for the row that needs it."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain = wide_nucleus._sort_rest

    def sort_rest(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        threshold, reached = plain(*arguments)
        found = (threshold + len(calls), reached if calls else torch.tensor([[True], [False]]))
        calls.append(found)
        return found

    monkeypatch.setattr(wide_nucleus, "_sort_rest", sort_rest)
    logits = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    maximum, weights = logits.amax(-1, keepdim=True), torch.exp(logits - logits.amax(-1, keepdim=True))
    total = weights.to(torch.float64).sum(-1, keepdim=True)
    bracket = wide_nucleus._all_with_weight(maximum, torch.ones_like(maximum), total)
    threshold = wide_nucleus._search(logits, weights, bracket, 0.9 * total, torch.tensor([True, True]))
    (first, _), (second, _) = calls
    assert threshold.tolist() == [first[0].tolist(), second[1].tolist()]
    assert first[0] != second[0]
