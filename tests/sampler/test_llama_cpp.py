"""The graph and its reference against llama.cpp's own samplers: as recorded, and live with llama-cpp-python."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import LLAMA_CPP
from tests.helpers.reference import adjust, distribution, reference_step
from tests.helpers.reference_filters import survivors
from tests.helpers.sampler_cases import make_inputs, sampler

RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "llama_cpp_samplers.json").read_text())
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "dynatemp_exponent": 1.0, "min_length": 0}
OFF |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
Case = dict[str, Any]
VOCAB = 64  # at least that of any case; the rest is masked
FEATURES = Features(
    probs=True, filters=("top_n_sigma", "typical_p", "xtc", "dry", "dynatemp", "mirostat"), filter_order=LLAMA_CPP
)
# With control flow and without; the candidates hold all tokens, or few.
GRAPHS = [
    (Interface(VOCAB, (), features=FEATURES, captured=captured), 8 if captured else 64) for captured in (False, True)
]


def row_of(case: Case) -> dict[str, Any]:
    """The reference's inputs, in float32 as llama.cpp took them."""
    parameters = {name: np.float32(v) if isinstance(v, float) else v for name, v in case["parameters"].items()}
    return {**OFF, "output_counts": np.zeros(len(case["logits"])), **parameters}


def dense(values: dict[str, float], otherwise: Any) -> np.ndarray:
    result = np.array(otherwise, np.float64)
    result[[int(id_) for id_ in values]] = list(values.values())
    return result


def graphs(case: Case, **values: Any) -> list[dict[str, np.ndarray]]:
    """The results of each of GRAPHS for the case's logits and parameters, and the `values` of other inputs."""
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, : len(case["logits"])] = case["logits"]
    parameters = {name: [value] for name, value in case["parameters"].items()}
    sizes = {"sequence": len(values.get("input_ids", [[0]])[0]), "capacity": 64, "breakers": 2}
    return [
        sampler(face, num_candidates=count)(logits, make_inputs(face, **sizes, **parameters, **values))
        for face, count in GRAPHS
    ]


def check_filters(case: Case) -> None:
    left = survivors(np.float32(case["logits"]), row_of(case), "llama.cpp", case["xtc_uniform"])
    if left.edge > 1e-5:  # otherwise llama.cpp's float32 may decide another way
        assert np.flatnonzero(left.left).tolist() == sorted(int(id_) for id_ in case["probs"])
        expected = dense(case["probs"], 0 * left.x)
        np.testing.assert_allclose(left.probs(), expected, rtol=1e-4, atol=1e-8)
        for got in graphs(case, xtc_noise=case["xtc_uniform"]):
            drawn = {str(id_) for id_ in np.flatnonzero(got["probs"])}
            assert {id_ for id_, p in case["probs"].items() if p > 1e-37} <= drawn <= case["probs"].keys()
            np.testing.assert_allclose(got["probs"][0, : len(expected)], expected, rtol=1e-4, atol=1e-8)


def check_dry(case: Case) -> None:
    logits, history = np.float32(case["logits"]), np.array(case["history"])
    expected = dense(case["changed"], logits)
    np.testing.assert_allclose(adjust(logits, row_of(case), history, len(history)), expected, rtol=1e-5, atol=1e-6)
    for got in graphs(case, input_ids=[case["history"]]):
        np.testing.assert_allclose(got["adjusted_logits"][0, : len(logits)], expected, rtol=1e-5, atol=1e-6)


def check_mirostat(case: Case) -> None:
    """Step by step, each with the u that takes llama.cpp's token."""
    logits = np.float32([case["logits"]])
    inputs = {name: np.array([value]) for name, value in row_of(case).items()}
    inputs |= {name: np.zeros(1, int) for name in ("status", "lengths", "max_length")}
    inputs |= {"input_lengths": np.ones(1, int), "emit": np.ones(1, bool), "mirostat_mu": np.zeros(1, np.float32)}
    inputs |= {"input_ids": np.zeros((1, 1), int), "tokens": np.zeros((1, 4), int), "stop_ids": np.full((1, 1), -1)}
    states = [np.zeros(1, np.float32)] * len(GRAPHS)
    for token, mu, probs in zip(case["tokens"], case["mirostat_mu"], case["probs"], strict=True):
        row = {name: value[0] for name, value in inputs.items()}
        expected = dense(probs, 0 * logits[0])
        np.testing.assert_allclose(distribution(logits[0], row, "llama.cpp"), expected, rtol=1e-4)
        inputs["noise"] = np.full((1, 4), (expected[:token].sum() + expected[token] / 2) / expected.sum())
        out = reference_step(logits, inputs, pad_token_id=0, filter_order="llama.cpp")
        assert out["next_ids"] == token
        np.testing.assert_allclose(out["mirostat_mu_RetainedState"], mu, rtol=1e-5, atol=1e-5)
        inputs["mirostat_mu"] = out["mirostat_mu_RetainedState"]
        for index, _ in enumerate(GRAPHS):
            got = graphs(case, noise=inputs["noise"][0, 0], mirostat_mu=states[index])[index]
            assert got["next_ids"] == token
            np.testing.assert_allclose(got["probs"][0, : len(expected)], expected, rtol=1e-4)
            np.testing.assert_allclose(got["mirostat_mu_RetainedState"], mu, rtol=1e-5, atol=1e-5)
            states[index] = got["mirostat_mu_RetainedState"]


@pytest.mark.parametrize("case", RECORDED["filters"], ids=lambda case: "-".join(case["parameters"]))
def test_recorded_filters(case: Case) -> None:
    check_filters(case)


def test_both_outcomes_of_xtc_are_recorded() -> None:
    cases = [case for case in RECORDED["filters"] if list(case["parameters"]) == ["xtc_probability", "xtc_threshold"]]
    assert {len(case["probs"]) < len(case["logits"]) for case in cases} == {True, False}


@pytest.mark.parametrize("case", RECORDED["dry"])
def test_recorded_dry(case: Case) -> None:
    check_dry(case)


@pytest.mark.parametrize("case", RECORDED["mirostat"])
def test_recorded_mirostat(case: Case) -> None:
    check_mirostat(case)


def test_live() -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    live = importlib.import_module("tests.helpers.llama_cpp_samplers")
    rng = np.random.default_rng(1)
    for _ in range(300):
        check_filters(live.filters_case(rng, live.random_filters(rng)))
        check_dry(live.dry_case(rng))
        check_mirostat(live.mirostat_case(rng))
