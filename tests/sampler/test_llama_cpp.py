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
from tests.helpers.reference import adjust, reference_step
from tests.helpers.reference_filters import survivors
from tests.helpers.sampler_cases import make_inputs, sampler

RECORDED = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "llama_cpp_samplers.json").read_text()
)
OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "dynatemp_exponent": 1.0,
    "min_length": 0,
}
OFF |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
Case = dict[str, Any]
VOCAB = 64  # at least that of any case; the rest is masked
FEATURES = Features(
    probs=True,
    filters=(
        "top_n_sigma",
        "typical_p",
        "xtc",
        "dry",
        "penalty_last_n",
        "dynatemp",
        "mirostat",
        "adaptive_p",
    ),
    filter_order=LLAMA_CPP,
)
# With control flow and without; the candidates hold all tokens, or few.
GRAPHS = [
    (Interface(VOCAB, (), features=FEATURES, captured=captured), 8 if captured else 64)
    for captured in (False, True)
]


def row_of(case: Case) -> dict[str, Any]:
    """The reference's inputs, in float32 as llama.cpp took them."""
    parameters = {
        name: np.float32(v) if isinstance(v, float) else v for name, v in case["parameters"].items()
    }
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
        sampler(face, num_candidates=count)(
            logits, make_inputs(face, **sizes, **parameters, **values)
        )
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
            assert (
                {id_ for id_, p in case["probs"].items() if p > 1e-37}
                <= drawn
                <= case["probs"].keys()
            )
            np.testing.assert_allclose(
                got["probs"][0, : len(expected)], expected, rtol=1e-4, atol=1e-8
            )


def check_dry(case: Case) -> None:
    logits, history = np.float32(case["logits"]), np.array(case["history"])
    expected = dense(case["changed"], logits)
    np.testing.assert_allclose(
        adjust(logits, row_of(case), history, len(history)), expected, rtol=1e-5, atol=1e-6
    )
    for got in graphs(case, input_ids=[case["history"]]):
        np.testing.assert_allclose(
            got["adjusted_logits"][0, : len(logits)], expected, rtol=1e-5, atol=1e-6
        )


def check_steps(cases: list[Case]) -> None:
    """As the rows of a batch, step by step, each with the u that takes llama.cpp's token."""
    logits, prompts = (
        np.full((len(cases), VOCAB), -np.inf, np.float32),
        [case.get("prompt", [0]) for case in cases],
    )
    ids = np.zeros((len(cases), max(map(len, prompts))), np.int64)
    for row, case in enumerate(cases):
        logits[row, : len(case["logits"])], ids[row, : len(prompts[row])] = (
            case["logits"],
            prompts[row],
        )
    for face, count in GRAPHS:
        off = {spec.name: spec.off for spec in face.parameters if spec.axes == ("B",)}
        given = {
            name: [case["parameters"].get(name, value) for case in cases]
            for name, value in off.items()
        }
        given |= {"input_ids": ids, "input_lengths": [*map(len, prompts)]}
        inputs = make_inputs(face, len(cases), sequence=ids.shape[1], capacity=64, **given)
        clear = [True] * len(cases)
        for step in range(len(cases[0]["tokens"])):
            tokens = [case["tokens"][step] for case in cases]
            expected = np.array([dense(case["probs"][step], np.zeros(VOCAB)) for case in cases])
            for row, (token, probs) in enumerate(zip(tokens, expected, strict=True)):
                inputs["noise"][row] = (probs[:token].sum() + probs[token] / 2) / probs.sum()
            by_reference = reference_step(logits, inputs, pad_token_id=0, filter_order=LLAMA_CPP)
            got = sampler(face, num_candidates=count)(logits, inputs)
            for row, case in enumerate(cases):
                clear[row] &= by_reference["edge"][row] > 1e-5
                for out in (by_reference, got) if clear[row] else ():
                    assert out["next_ids"][row] == tokens[row]
                    np.testing.assert_allclose(
                        out["probs"][row], expected[row], rtol=1e-4, atol=1e-9
                    )
                    if "changed" in case:
                        adjusted = dense(case["changed"][step], logits[row])
                        np.testing.assert_allclose(
                            out["adjusted_logits"][row], adjusted, rtol=1e-6, atol=1e-6
                        )
                    for name in {"mirostat_mu", "adaptive_error"} & case.keys():
                        state = out[f"{name}_RetainedState"][row]
                        np.testing.assert_allclose(state, case[name][step], rtol=1e-5, atol=1e-5)
            inputs |= {
                name: got.get(f"{name}_RetainedState", value) for name, value in inputs.items()
            }
            inputs |= {"input_ids": got["next_ids"], "input_lengths": np.ones(len(cases), np.int32)}
        assert sum(clear) > 0.9 * len(cases)


@pytest.mark.parametrize("case", RECORDED["filters"], ids=lambda case: "-".join(case["parameters"]))
def test_recorded_filters(case: Case) -> None:
    check_filters(case)


def test_both_outcomes_of_xtc_are_recorded() -> None:
    cases = [
        case
        for case in RECORDED["filters"]
        if list(case["parameters"]) == ["xtc_probability", "xtc_threshold"]
    ]
    assert {len(case["probs"]) < len(case["logits"]) for case in cases} == {True, False}


@pytest.mark.parametrize("case", RECORDED["dry"])
def test_recorded_dry(case: Case) -> None:
    check_dry(case)


@pytest.mark.parametrize("kind", ["mirostat", "chains", "adaptive_p"])
def test_recorded_steps(kind: str) -> None:
    check_steps(RECORDED[kind])


def test_live() -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    live = importlib.import_module("tests.helpers.llama_cpp_samplers")
    rng = np.random.default_rng(1)
    for _ in range(300):
        check_filters(live.filters_case(rng, live.random_filters(rng)))
        check_dry(live.dry_case(rng))
    check_steps([live.mirostat_case(rng) for _ in range(300)])
    check_steps([live.adaptive_case(rng) for _ in range(300)])
    for _ in range(20):
        check_steps([live.chain_case(rng) for _ in range(100)])
