"""Every filter on four tokens and a masked token, by hand, in both orders and from both pools; and random rows
against the reference, with each filter alone and with all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import EXTRA_PARAMETERS, FILTER_ORDERS
from qsample.sampler import filters
from tests.helpers.reference import reference_step
from tests.helpers.sampler_cases import check_steps, make_inputs, sampler

ALL_FILTERS = tuple(EXTRA_PARAMETERS)
# exp(l) = 4, 2, 1, 1: probabilities 1/2, 1/4, 1/8, 1/8; tokens 2 and 3 are tied. In bits, the surprises are 1, 2, 3, 3
# and the entropy 7/4.
LOGITS = np.array([*np.log([4, 2, 1, 1]), -np.inf], np.float32)
ALL, THREE, TWO, ONE = [4, 2, 1, 1], [4, 2, 1, 0], [2, 1, 0, 0], [1, 0, 0, 0]


def powers(*exponents: float) -> list[float]:
    return [2**e if e > -9 else 0 for e in exponents]


def near(*distances: float) -> list[float]:
    """adaptive-p's weights of tokens with these distances from the probability that it aims at."""
    return [np.exp(-10 * (d / 0.3) ** 2 / (1 + d / 0.3)) for d in distances]


SAME_IN_BOTH_ORDERS: list[tuple[dict[str, float], Any]] = [
    ({}, ALL),
    ({"temperature": 0.5}, [16, 4, 1, 1]),
    ({"temperature": 2}, [2, 2**0.5, 1, 1]),
    ({"temperature": 0}, ONE),
    ({"temperature": 1e-45}, ONE),
    ({"temperature": 1e38}, [1, 1, 1, 1]),
    ({"top_k": 1}, ONE),
    ({"top_k": 2}, TWO),
    ({"top_k": 3}, ALL),  # see test_ties_at_the_edge_of_top_k
    ({"top_k": 4}, ALL),
    ({"top_k": 9}, ALL),
    # The mass of the strictly likelier tokens is 0, 1/2, 3/4, 3/4. Kept if it is below p.
    ({"top_p": 0.5}, ONE),
    ({"top_p": 0.51}, TWO),
    ({"top_p": 0.75}, TWO),
    ({"top_p": 0.76}, ALL),
    ({"top_p": 1e-9}, ONE),
    ({"top_p": 1e-45}, ONE),
    # p >= min_p / 2: 0.24 / 2 is below 1/8.
    ({"min_p": 0.24}, ALL),
    ({"min_p": 0.26}, TWO),
    ({"min_p": 0.49}, TWO),
    ({"min_p": 0.51}, ONE),
    ({"min_p": 1}, ONE),
    # top_k leaves 2/3 and 1/3; of the whole, 0.6 would have kept both.
    ({"top_k": 2, "top_p": 0.6}, ONE),
    # sigma is 0.575, and l[0] - l[1] is 0.693.
    ({"top_n_sigma": 1.2}, ONE),
    ({"top_n_sigma": 1.3}, TWO),
    ({"top_n_sigma": 2.5}, ALL),
    ({"top_n_sigma": 1.3, "top_p": 0.6}, ONE),
    # Distances from the entropy 3/4, 1/4, 5/4, 5/4: tokens 1, 0, then both of 2 and 3.
    ({"typical_p": 0.01}, [0, 1, 0, 0]),
    ({"typical_p": 0.24}, [0, 1, 0, 0]),
    ({"typical_p": 0.26}, TWO),
    ({"typical_p": 0.74}, TWO),
    ({"typical_p": 0.76}, ALL),
    ({"top_k": 2, "typical_p": 0.3}, ONE),  # of 2/3 and 1/3 the first is closer to the entropy
    # p >= top_a / 4.
    ({"top_a": 0.49}, ALL),
    ({"top_a": 0.51}, TWO),
    ({"top_a": 0.99}, TWO),
    ({"top_k": 2, "top_a": 0.74}, TWO),  # 1/3 and 4/9 of top_a
    ({"top_k": 2, "top_a": 0.76}, ONE),
    ({"epsilon_cutoff": 0.12}, ALL),
    ({"epsilon_cutoff": 0.2}, TWO),
    ({"epsilon_cutoff": 0.9}, ONE),
    ({"top_k": 2, "epsilon_cutoff": 0.3}, TWO),  # 1/3, which was 1/4
    ({"eta_cutoff": 0.2}, TWO),  # sqrt(0.2) exp(-H) = 0.133 is smaller than 0.2
    ({"eta_cutoff": 0.1}, ALL),  # 0.094
    ({"eta_cutoff": 0.7}, TWO),  # 0.249
    ({"eta_cutoff": 0.9}, ONE),  # 0.282
    ({"eta_cutoff": 0.4, "top_k": 2}, ONE),  # sqrt(0.4) exp(-0.637) = 0.335; of all four 0.188
    ({"eta_cutoff": 0.05, "top_k": 1}, ONE),
    (
        {"xtc_probability": 1, "xtc_threshold": 0.1},
        [0, 0, 1, 1],
    ),  # the least likely of all four are two
    ({"xtc_probability": 1, "xtc_threshold": 0.2}, [0, 2, 1, 1]),
    ({"xtc_probability": 1, "xtc_threshold": 0.3}, ALL),  # one token alone reaches it
    ({"xtc_probability": 1, "xtc_threshold": 0.51}, ALL),
    ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, ALL),  # its u is 0.5
    ({"xtc_probability": 0.51, "xtc_threshold": 0.2}, [0, 2, 1, 1]),
    ({"xtc_probability": 1, "xtc_threshold": 0.3, "top_k": 2}, [0, 1, 0, 0]),  # 1/3, which was 1/4
    # mu is 2 tau until it is set; surprises are 1, 2, 3, 3.
    ({"mirostat_tau": 0.4}, ONE),
    ({"mirostat_tau": 1.1}, TWO),
    ({"mirostat_tau": 0.4, "mirostat_mu": 3.1}, ALL),
    ({"mirostat_tau": 0.4, "mirostat_mu": 1.9}, ONE),
    ({"mirostat_tau": 0.4, "mirostat_mu": -2000}, ONE),
    ({"mirostat_tau": 0, "mirostat_mu": 0.1}, ALL),
    # Temperature 1/2 before it: 16, 4, 1, 1 of 22, surprises 0.46, 2.46, 4.46.
    ({"mirostat_tau": 1.2, "temperature": 0.5}, ONE),
    ({"mirostat_tau": 1.3, "temperature": 0.5}, [4, 1, 0, 0]),
    # The entropy is 7/8 of the largest possible: 1/2 + 7/8 of the way to 3/2.
    ({"dynatemp_range": 0.5}, powers(*np.array([2, 1, 0, 0]) / 1.375)),
    (
        {"dynatemp_range": 0.5, "dynatemp_exponent": 2},
        powers(*np.array([2, 1, 0, 0]) / (0.5 + 49 / 64)),
    ),
    ({"dynatemp_range": 3}, powers(*np.array([2, 1, 0, 0]) / 3.5)),  # from 0, not from -2
    ({"dynatemp_range": 0.5, "temperature": 0}, ONE),
    ({"dynatemp_range": 0.5, "top_n_sigma": 1.2}, ONE),  # one token has no entropy
    ({"adaptive_target": 0.5}, near(0, 1 / 4, 3 / 8, 3 / 8)),
    ({"adaptive_target": 0}, near(1 / 2, 1 / 4, 1 / 8, 1 / 8)),
    ({"adaptive_target": -0.25}, ALL),
    ({"adaptive_target": 0.5, "temperature": 0}, ONE),
    ({"adaptive_target": 0.5, "adaptive_error": 0.25}, near(1 / 4, 0, 1 / 8, 1 / 8)),
    (
        {"adaptive_target": 0.25, "adaptive_error": 0.5},
        near(1 / 2, 1 / 4, 1 / 8, 1 / 8),
    ),  # aims at 0, not below
    (
        {"adaptive_target": 0.75, "adaptive_error": -0.5, "top_k": 2},
        [*near(1 / 3, 2 / 3), 0, 0],
    ),  # and not above 1
    ({"adaptive_target": 0.5, "temperature": 0.5}, near(5 / 22, 7 / 22, 10 / 22, 10 / 22)),
    # The other tokens' weights round to 0, which is as far from 1/2 as 1 is.
    ({"adaptive_target": 0.5, "temperature": 0.001}, [1, 1, 1, 1]),
    ({"adaptive_target": 0.5, "temperature": 0.001, "top_k": 2}, [1, 1, 0, 0]),
    ({"adaptive_target": 0.5, "mirostat_tau": 1.1}, [1, 1, 0, 0]),  # 2/3 and 1/3 are equally far
]
# The order of Hugging Face, and llama.cpp's.
DIFFERENT: list[tuple[dict[str, float], Any, Any]] = [
    # Temperature 1/2 squares the weights: 16, 4, 1, 1 of 22, before the filters or after them.
    ({"temperature": 0.5, "top_p": 0.6}, ONE, [4, 1, 0, 0]),
    ({"temperature": 0.5, "min_p": 0.24}, [4, 1, 0, 0], [16, 4, 1, 1]),
    ({"temperature": 0.5, "epsilon_cutoff": 0.2}, ONE, [4, 1, 0, 0]),
    ({"temperature": 0.5, "eta_cutoff": 0.2}, ONE, [4, 1, 0, 0]),
    ({"temperature": 0.5, "typical_p": 0.2}, ONE, [0, 1, 0, 0]),
    ({"temperature": 0.5, "xtc_probability": 1, "xtc_threshold": 0.2}, [16, 4, 1, 1], [0, 4, 1, 1]),
    (
        {"temperature": 2, "xtc_probability": 1, "xtc_threshold": 0.26},
        [0, 2**0.5, 1, 1],
        [2, 2**0.5, 1, 1],
    ),
    # top_n_sigma comes before the temperature in both; only the later filters differ.
    ({"temperature": 0.5, "top_n_sigma": 1.3, "top_p": 0.7}, ONE, [4, 1, 0, 0]),
    # top_p leaves tokens 0 and 1, the first of which is the more typical; or typical_p leaves 1 and 0.
    ({"top_p": 0.7, "typical_p": 0.3}, ONE, TWO),
    # Without its likeliest token, a temperature that leaves e ** (x / t) nothing unless x is taken from the new
    # likeliest.
    ({"temperature": 0.001, "typical_p": 0.2}, ONE, [0, 1, 0, 0]),
    ({"typical_p": 0.5, "top_a": 0.7}, ONE, TWO),  # 1/4 and 0.7 of it, or of 2/3 and 1/3: 0.311
    # min_p after typical_p has taken the likeliest: 1/4, and 1/8 is half of it.
    ({"typical_p": 0.01, "min_p": 0.9}, ONE, [0, 1, 0, 0]),
    # Temperature follows the entropy of all four tokens, or of the two that top_k leaves.
    (
        {"top_k": 2, "dynatemp_range": 1},
        [2 ** (1 / 1.75), 1, 0, 0],
        [2 ** (1 / (2 * (np.log2(3) - 2 / 3))), 1, 0, 0],
    ),
    ({"top_k": 1, "dynatemp_range": 1}, ONE, ONE),
    ({"adaptive_target": 0.5, "temperature": 0.001, "min_p": 0.26}, ONE, [1, 1, 0, 0]),
]


def by_hand(order: str) -> list[tuple[dict[str, float], Any]]:
    """Parameters, and the weights of the tokens that they leave; of XTC, u is 0.5."""
    place = 1 + FILTER_ORDERS.index(order)
    return [*SAME_IN_BOTH_ORDERS, *((case[0], case[place]) for case in DIFFERENT)]


@pytest.mark.parametrize(
    ("num_candidates", "captured"),
    [(64, False), (1, False), (1, True), pytest.param(64, True, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_by_hand(order: str, num_candidates: int, captured: bool) -> None:
    """All cases as one batch. Of one candidate, few cases are settled by it."""
    cases = by_hand(order)
    face = Interface(
        5,
        (),
        features=Features(probs=True, filters=ALL_FILTERS, filter_order=order),
        captured=captured,
    )
    # Values of parameters that a case leaves out: off, or else the usual values.
    usual = {
        spec.name: spec.off
        for specs in EXTRA_PARAMETERS.values()
        for spec in specs
        if len(spec.axes) == 1
    }
    usual |= {
        "temperature": 1,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "mirostat_mu": 0,
        "adaptive_error": 0,
    }
    values = {
        name: [parameters.get(name, value) for parameters, _ in cases]
        for name, value in usual.items()
    }
    inputs = make_inputs(face, len(cases), **values)
    probs = sampler(face, num_candidates=num_candidates)(np.tile(LOGITS, (len(cases), 1)), inputs)[
        "probs"
    ]
    for (parameters, weights), got in zip(cases, probs, strict=True):
        expected = np.array([*weights, 0]) / np.sum(weights)
        # adaptive-p multiplies what rounding makes of a probability by up to 33.
        rtol = 6e-6 if "adaptive_target" in parameters else 2e-6
        np.testing.assert_allclose(got, expected, rtol=rtol, err_msg=str(parameters))


@pytest.mark.parametrize("captured", [False, True])
def test_ties_at_the_edge_of_top_k(captured: bool) -> None:
    """Up to 64 the ties of lowest id stay, 64 tokens in all; beyond that all ties stay."""
    face = Interface(1000, (), features=Features(probs=True), captured=captured)
    logits = np.zeros((5, 1000), np.float32)
    logits[:, 990:] = 1
    inputs = make_inputs(face, 5, top_k=[5, 11, 64, 65, 1000], top_p=[1, 1, 1, 1, 0.99])
    probs = sampler(face)(logits, inputs)["probs"]
    for row, kept in enumerate(
        [range(990, 1000), *[[*range(54), *range(990, 1000)]] * 2, range(1000), range(1000)]
    ):
        assert np.flatnonzero(probs[row]).tolist() == list(kept)
    reference = reference_step(logits, inputs, pad_token_id=0)["probs"]
    np.testing.assert_array_equal(probs > 0, reference > 0)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        pytest.param(name, FILTER_ORDERS[(number + other) % 2], marks=[pytest.mark.slow] * other)
        for other in (0, 1)
        for number, name in enumerate(ALL_FILTERS)
    ],
)
def test_one_filter_in_the_graph(name: str, order: str) -> None:
    features = Features(probs=True, filters=(name,), filter_order=order)
    check_steps(Interface(257, (), features=features), 1, 15, num_candidates=16)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_all_filters_in_the_graph(order: str, captured: bool) -> None:
    features = Features(probs=True, filters=ALL_FILTERS, filter_order=order)
    check_steps(Interface(1000, (), features=features, captured=captured), 2, 30)


def test_each_order_has_every_filter_once() -> None:
    elsewhere = {"dry", "penalty_last_n", "no_repeat_ngram_size", "bad_words_ids", "dynatemp"}
    core = {"temperature", "top_k", "top_p", "min_p"}
    names = sorted({*core, *ALL_FILTERS} - elsewhere)
    for order in filters.ORDERS.values():
        assert sorted(step.name for step in order) == names


def test_a_filter_is_switched_off_by_its_first_input() -> None:
    for step in {*filters.ORDERS[FILTER_ORDERS[0]], filters.DYNATEMP}:
        assert step.inputs[0].off is not None
        assert step.inputs == EXTRA_PARAMETERS.get(step.name, step.inputs)
