"""Rows that the candidates settle or the vocabulary, next to any other rows; and the drawn tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from scipy.stats import chisquare
from tokenizers import Tokenizer

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import EXTRA_PARAMETERS, FILTER_ORDERS, INVALID_LOGITS
from tests.helpers.reference import REPLAY_LISTS, distribution
from tests.helpers.sampler_cases import (
    ALL_FEATURES,
    WITH_PROBS,
    check_rows,
    check_steps,
    expected_step,
    interface,
    make_inputs,
    of_rows,
    random_step,
    sampler,
    write_prompts,
)

Array = np.ndarray
ALL_FILTERS = tuple(EXTRA_PARAMETERS)
EVERYTHING = replace(ALL_FEATURES, filters=ALL_FILTERS)
slow = pytest.mark.slow


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("num_candidates", [1, 16, 64])
def test_few_or_many_candidates(num_candidates: int, captured: bool) -> None:
    """One candidate settles almost no row with a filter, 64 settle most."""
    check_steps(Interface(1000, (), features=WITH_PROBS, captured=captured), 7, 30, num_candidates)


@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_what_rows_know_of_the_whole_vocabulary(order: str) -> None:
    """The standard deviation and the entropy, whatever the candidates are."""
    features = Features(probs=True, filters=("top_n_sigma", "dynatemp"), filter_order=order)
    check_steps(interface(1000, features), 8, 20, num_candidates=16)
    # A temperature that leaves the candidates all weight, but depends on tokens beyond them.
    logits = np.float32([[0, -0.01, *np.linspace(-1.5, -2, 998)]])
    values = {"temperature": 0.01, "dynatemp_range": 0.009, "dynatemp_exponent": 50, "min_p": 0.1}
    face = interface(1000, features)
    assert check_rows(face, logits, make_inputs(face, **values), num_candidates=16) == 0


def test_candidates_and_vocabulary_agree() -> None:
    """The same noise gives the same token, whichever settles the row."""
    rng = np.random.default_rng(17)
    face = interface(997, WITH_PROBS)
    many, few = sampler(face, num_candidates=200), sampler(face, num_candidates=1)
    for _ in range(15):
        logits, inputs = random_step(rng, face, 16, sequence=1)
        inputs["top_k"] = np.where(
            inputs["top_k"] <= 200, 0, inputs["top_k"]
        )  # of those, ties are kept or not
        a, b = many(logits, inputs), few(logits, inputs)
        np.testing.assert_array_equal(a["probs"] > 0, b["probs"] > 0)
        if (a["next_ids"] != b["next_ids"]).any():
            margin = expected_step(face, logits, inputs)["margin"]
            assert margin[(a["next_ids"] != b["next_ids"])[:, 0]].max() < 1e-6


def parts_of(rng: np.random.Generator, batch: int) -> list[Array]:
    """Each row alone, and some rows in any order."""
    return [
        *np.arange(batch)[:, None],
        *(rng.permutation(batch)[:size] for size in (batch, *rng.integers(2, batch, 4))),
    ]


def check_batches(face: Interface, seed: int, steps: int) -> None:
    """Assert that each row of random batches is the same in any part of the batch, to the last bit (but 0 is -0)."""
    rng, step = np.random.default_rng(seed), sampler(face)
    for _ in range(steps):
        logits, inputs = random_step(rng, face, 7, sequence=2)
        whole = step(logits, inputs)
        for rows in parts_of(rng, 7):
            for name, found in step(logits[rows], of_rows(inputs, rows)).items():
                np.testing.assert_array_equal(found, whole[name][rows], err_msg=name)


BATCHED = (125, 1187, 50_257)
MORE = (
    97,
    250,
    997,
    1000,
    2000,
    3001,
    10_007,
    32_000,
    *range(1125, 26_000, 1125),
    128_256,
    151_936,
    262_145,
)


@pytest.mark.parametrize(
    ("vocab", "captured"),
    [
        *((vocab, False) for vocab in BATCHED),
        (3001, True),
        *(pytest.param(vocab, False, marks=slow) for vocab in MORE),
        *(pytest.param(vocab, True, marks=slow) for vocab in (*BATCHED, 32_000)),
    ],
)
def test_a_row_is_the_same_alone_and_in_any_batch(vocab: int, captured: bool) -> None:
    order = FILTER_ORDERS[vocab % 4 % 2]
    check_batches(
        Interface(vocab, (), features=replace(EVERYTHING, filter_order=order), captured=captured),
        vocab,
        2,
    )


@pytest.fixture(scope="module")
def recorded() -> Array:
    """Logits [positions, V] of a trained model over a text, in half precision: some are tied."""
    example = Path(__file__).parents[2] / "examples" / "tiny_lm_genai"
    text = "And the LORD spake unto Moses, saying, Speak unto the children of Israel, and bring out the people."
    ids = np.array([Tokenizer.from_file(str(example / "tokenizer.json")).encode(text).ids])
    inputs = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(ids.size)[None],
    }
    model = ort.InferenceSession(example / "model.onnx")
    inputs |= {node.name: np.zeros((1, 2, 0, 40), np.float16) for node in model.get_inputs()[3:]}
    return np.asarray(model.run(["logits"], inputs)[0][0], np.float32)


@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_a_captured_graph_draws_what_control_flow_draws(order: str, recorded: Array) -> None:
    """From a model's logits, with everything that a graph can have."""
    rng = np.random.default_rng(4)
    face = Interface(recorded.shape[1], (), features=replace(EVERYTHING, filter_order=order))
    other = replace(face, captured=True)
    rows = 0
    for _ in range(12):
        _, inputs = random_step(rng, face, 6, sequence=2)
        logits = recorded[rng.integers(0, len(recorded), 6)]
        replayed = {name: np.array(values) for name, values in inputs.items()}
        write_prompts(replayed)
        lists = {name: np.arange(6) for name in REPLAY_LISTS}
        replayed |= lists | {"searched_rows": rng.permutation(6)}
        a = sampler(face)(logits, inputs)
        b = sampler(other)(logits, replayed)
        for name, values in a.items():
            if name == "tokens_RetainedState":
                for row, length in enumerate(a["lengths_RetainedState"]):
                    np.testing.assert_array_equal(values[row, :length], b[name][row, :length])
            elif values.dtype == np.float32 and name != "output_counts_RetainedState":
                np.testing.assert_allclose(values, b[name], rtol=1e-5, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(values, b[name], err_msg=name)
        rows += int((a["lengths_RetainedState"] > inputs["lengths"]).sum())
    assert rows > 25


# On the CPU, ONNX Runtime before 1.32 gives reductions over no rows a wrong shape.
needs_1_32 = pytest.mark.skipif(
    tuple(map(int, ort.__version__.split(".")[:2])) < (1, 32), reason="empty reductions"
)


@pytest.mark.parametrize(
    "listed", [pytest.param([], marks=needs_1_32), [4, 2, 2], [5, 1, 0, 3, 2, 4], [3] * 9]
)
@pytest.mark.parametrize(
    "filters", [(), ("typical_p", "epsilon_cutoff", "xtc", "dynatemp", "mirostat")]
)
def test_rows_that_are_listed(filters: tuple[str, ...], listed: list[int]) -> None:
    """In any order, twice, needlessly. A row that had to be and is not ends as invalid, and commits nothing."""
    face = Interface(1000, (), features=Features(probs=True, filters=filters), captured=True)
    rng, missing, free = np.random.default_rng(8), 0, 0
    for _ in range(25):
        logits, inputs = random_step(rng, face, 6, sequence=2)
        inputs["searched_rows"] = np.array(listed, np.int64)
        check_rows(face, logits, inputs)
        expected = expected_step(face, logits, inputs)
        missing += int(
            ((expected["status_RetainedState"] == INVALID_LOGITS) & (inputs["status"] == 0)).sum()
        )
        free += int(((expected["probs"] > 0).sum(1) > 64).sum())
    assert (missing > 5) == (len(set(listed)) < 6)
    assert free > 0


# Whether a captured graph has to search a row, and its parameters.
TO_SEARCH: list[tuple[bool, dict[str, Any]]] = [
    (True, {"top_k": 65}),
    (True, {"top_p": 0.9}),
    (True, {"top_p": 0.9, "min_p": 0.1}),
    (True, {"typical_p": 0.9}),
    (True, {"top_k": 2000, "top_p": 0.9}),
    (False, {}),
    (False, {"temperature": 1.5}),
    (False, {"temperature": 0, "top_p": 0.9}),
    (False, {"temperature": 0, "typical_p": 0.9}),
    (False, {"top_k": 64}),
    (False, {"top_k": 64, "top_p": 0.9, "typical_p": 0.9}),
    (False, {"top_k": 65, "top_p": 0.9, "temperature": 0}),
    (False, {"min_p": 0.0001}),
    (False, {"min_p": 0.5, "top_n_sigma": 1}),
    (False, {"dynatemp_range": 0.5, "mirostat_tau": 3, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01}),
]


@pytest.mark.parametrize(("listed", "row"), TO_SEARCH)
@needs_1_32
def test_rows_that_have_to_be_listed(listed: bool, row: dict[str, Any]) -> None:
    face = Interface(1000, (), features=Features(filters=ALL_FILTERS), captured=True)
    logits = np.random.default_rng(0).normal(size=(1, 1000)).astype(np.float32)
    got = sampler(face)(logits, make_inputs(face, searched_rows=[], **row))
    assert got["status_RetainedState"] == (INVALID_LOGITS if listed else 0)
    assert got["lengths_RetainedState"] == (0 if listed else 1)


# Which of the first two lists a captured graph has to get, and the parameters of a row.
TO_PROCESS: list[tuple[list[str], dict[str, Any]]] = [
    ([], {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "typical_p": 0.1}),
    (["processed_rows"], {"temperature": 0, "repetition_penalty": 1.1}),
    (["processed_rows"], {"temperature": 0, "presence_penalty": -0.5}),
    (["processed_rows"], {"temperature": 0, "frequency_penalty": 1e-30}),
    (["processed_rows"], {"temperature": 0, "dry_multiplier": 0.8}),
    (["processed_rows"], {"top_k": 1}),
    (["processed_rows"], {"top_k": 64, "min_p": 0.1, "xtc_probability": 0.5}),
    (["processed_rows", "vocabulary_rows"], {}),
    (["processed_rows", "vocabulary_rows"], {"temperature": 1e-30}),
    (["processed_rows", "vocabulary_rows"], {"min_p": 0.9, "epsilon_cutoff": 0.1}),
    ([*REPLAY_LISTS], {"top_k": 65}),
]


@pytest.mark.parametrize(("needed", "row"), TO_PROCESS)
@needs_1_32
def test_a_step_needs_no_more_than_its_rows(needed: list[str], row: dict[str, Any]) -> None:
    """Each list that is given needlessly changes nothing, and each that lacks ends the row."""
    face = Interface(1000, (), features=Features(filters=ALL_FILTERS), captured=True)
    logits = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32) * 3
    whole = make_inputs(face, 3, **row)
    wanted = sampler(face)(logits, whole)
    assert wanted["status_RetainedState"].tolist() == [0, 0, 0]
    none = {name: np.zeros(0, np.int64) for name in REPLAY_LISTS}
    for count in range(len(REPLAY_LISTS) + 1):
        given = {name: whole[name] for name in REPLAY_LISTS[:count]}
        got = sampler(face)(logits, whole | none | given)
        if len(given) < len(needed):
            assert got["status_RetainedState"].tolist() == [INVALID_LOGITS] * 3
            assert (got["lengths_RetainedState"] == whole["lengths"]).all()
            assert (got["tokens_RetainedState"] == whole["tokens"]).all()
            assert not got["output_counts_RetainedState"].any()
        else:
            assert (got["next_ids"] == wanted["next_ids"]).all()
            assert (got["tokens_RetainedState"] == wanted["tokens_RetainedState"]).all()


@pytest.mark.parametrize(
    ("num_candidates", "captured", "order"),
    [
        (1, True, FILTER_ORDERS[0]),
        (1, False, FILTER_ORDERS[1]),
        (64, False, FILTER_ORDERS[0]),
        *(
            pytest.param(*case, marks=slow)
            for case in ((1, False, FILTER_ORDERS[0]), (64, False, FILTER_ORDERS[1]))
        ),
        pytest.param(1, True, FILTER_ORDERS[1], marks=slow),
    ],
)
def test_any_temperature(num_candidates: int, captured: bool, order: str) -> None:
    """From temperatures that leave a single token to those that leave all alike, without the masked token."""
    temperatures = [0, 1e-45, 1e-38, 1e-30, 1e-6, 0.05, 1, 40, 1e4, 1e30, 1e36, 3e38]
    rows = [
        (t, p)
        for t in temperatures
        for p in ({}, {"top_p": 0.5}, {"min_p": 0.3}, {"typical_p": 0.2, "top_k": 99})
    ]
    face = Interface(
        300,
        (),
        features=Features(probs=True, filters=("typical_p",), filter_order=order),
        captured=captured,
    )
    logits = np.random.default_rng(1).normal(size=(len(rows), 300)) * 3
    logits[:, ::7], logits[:, 5] = -np.inf, -3.3e38
    values: dict[str, Any] = {"temperature": [t for t, _ in rows], "noise": 0.999}
    values |= {
        n: [p.get(n, off) for _, p in rows]
        for n, off in (("top_p", 1), ("min_p", 0), ("typical_p", 1), ("top_k", 0))
    }
    assert (
        check_rows(
            face, logits.astype(np.float32), make_inputs(face, len(rows), **values), num_candidates
        )
        <= 1
    )


def test_u_is_that_of_the_position() -> None:
    """A row of 3 tokens that gets 2 more draws with noise[5]; the last number is that of full buffers, too."""
    noise, xtc_noise = np.full((3, 16), 0.1), np.full((3, 16), 0.9)
    noise[[0, 1, 2], [5, 15, 15]] = 0.9
    xtc_noise[[0, 1, 2], [5, 15, 15]] = 0.1
    for captured in (False, True):
        face = Interface(4, (), features=Features(probs=True, filters=("xtc",)), captured=captured)
        inputs = make_inputs(
            face,
            3,
            sequence=2,
            lengths=[3, 13, 14],
            noise=noise,
            xtc_noise=xtc_noise,
            xtc_probability=0.5,
            xtc_threshold=0.2,
        )
        got = sampler(face)(np.tile(np.float32([0.1, 0, 0, 0]), (3, 1)), inputs)
        assert got["next_ids"].tolist() == [[3]] * 3
        assert (got["probs"][:, 0] == 0).all()


ROWS, CALLS = 32_768, 8  # 262,144 draws
# Seeds are fixed, so this never fails by chance; a fresh seed would fail once in ten thousand runs.
P_VALUE = 1e-4
# How many of 16 tokens are candidates: enough to settle a row with filters, or so few that the vocabulary does.
CANDIDATES, VOCABULARY = 12, 2
TOP_K = {"temperature": 0.8, "top_k": 9, "top_p": 0.9}
MIN_P = {"temperature": 1.5, "top_p": 0.95, "min_p": 0.02}


@pytest.mark.parametrize(
    ("num_candidates", "parameters"),
    [
        pytest.param(CANDIDATES, TOP_K, id="candidates-top_k+top_p"),
        pytest.param(VOCABULARY, {"temperature": 1.0}, id="vocabulary-temperature"),
        pytest.param(VOCABULARY, TOP_K, id="vocabulary-top_k+top_p", marks=slow),
        pytest.param(CANDIDATES, MIN_P, id="candidates-top_p+min_p", marks=slow),
        pytest.param(VOCABULARY, MIN_P, id="vocabulary-top_p+min_p", marks=slow),
    ],
)
def test_frequencies(num_candidates: int, parameters: dict[str, float]) -> None:
    """Chi-square over a quarter of a million draws against the exact distribution."""
    vocab = 16
    rng = np.random.default_rng(3)
    logits = rng.permutation(np.linspace(-2, 2, vocab)).astype(np.float32)
    face = interface(vocab)
    step = sampler(face, num_candidates=num_candidates)
    counts = np.zeros(vocab)
    for _ in range(CALLS):
        noise = rng.integers(0, 2**24, ROWS) / 2**24
        inputs = make_inputs(face, ROWS, capacity=3, noise=noise, **parameters)
        tokens = step(np.broadcast_to(logits, (ROWS, vocab)).copy(), inputs)["next_ids"]
        counts += np.bincount(tokens[:, 0], minlength=vocab)

    row = {"top_k": 0, "top_p": 1, "min_p": 0} | {
        name: np.float32(value) for name, value in parameters.items()
    }
    probs = distribution(logits, row)
    support = probs > 0
    assert counts[~support].sum() == 0
    assert counts.sum() == ROWS * CALLS
    assert chisquare(counts[support], probs[support] * counts.sum()).pvalue > P_VALUE
