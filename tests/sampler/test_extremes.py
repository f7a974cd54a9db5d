"""Steps at the ends of every range: no row stops a batch, and each row is the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import (
    CANDIDATES,
    EXTRA_PARAMETERS,
    FILTER_ORDERS,
    INVALID_LOGITS,
    PAD_STOP_ID,
)
from tests.helpers.sampler_cases import (
    check_rows,
    compare_step,
    excused,
    expected_step,
    make_inputs,
    sampler,
    write_prompts,
)

Array = np.ndarray
CAPACITY = 40
LARGEST, LEAST = 3.4028234e38, 1e-45
# Values that switch a parameter off, usual ones, and the ends of its range in the contract.
VALUES: dict[str, list[float]] = {
    "temperature": [
        0,
        LEAST,
        1e-39,
        2.0**-126,
        1e-20,
        1e-3,
        0.7,
        1,
        1,
        50,
        1e4,
        1e20,
        1e36,
        LARGEST,
    ],
    "top_k": [0, 0, 0, 1, 2, 20, 64, 65, 90, 2**31 - 1],
    "top_p": [1, 1, 0.9999999, 0.9, 0.5, 1e-6, 1e-38, LEAST],
    "min_p": [0, 0, 1e-38, 1e-6, 0.2, 0.999999, 1],
    "typical_p": [1, 1, 1, 0.9999999, 0.9, 0.2, 1e-38, LEAST],
    "top_a": [0, 0, 0, 1e-30, 0.2, 1],
    "epsilon_cutoff": [0, 0, 0, 1e-38, 1e-6, 0.1, 1],
    "eta_cutoff": [0, 0, 0, 1e-38, 1e-6, 0.1, 1],
    "top_n_sigma": [0, 0, LEAST, 0.5, 1, 3.5, 1e6, LARGEST],
    "xtc_probability": [0, 0, LEAST, 0.5, 1],
    "xtc_threshold": [0, LEAST, 1e-38, 1e-6, 0.1, 0.5, 0.6, 1],
    "dynatemp_range": [0, 0, LEAST, 0.3, 3, 1e30, LARGEST],
    "dynatemp_exponent": [0, LEAST, 0.5, 1, 3, 1e30, LARGEST],
    "mirostat_tau": [0, 0, 1e-38, 1, 5, 20, 1e30, LARGEST],
    "mirostat_eta": [0, LEAST, 0.1, 1, 1e30, LARGEST],
    "mirostat_mu": [0, 1, 40, LEAST, 1e3, -1e3, 1e30, -1e30],
    "repetition_penalty": [1, 1, 1e-6, 0.8, 1.3, 1e6, LEAST, LARGEST],
    "presence_penalty": [0, 0, 0.5, -0.5, 1e6, -1e6, LARGEST, -LARGEST],
    "frequency_penalty": [0, 0, 0.5, -0.5, 1e6, -1e6, LARGEST, -LARGEST],
    "dry_multiplier": [0, 0, LEAST, 0.8, 1e6, LARGEST],
    "dry_base": [0, 0.99, 1, 1.75, 10, 1e10, LARGEST],
    "dry_allowed_length": [1, 1, 2, 30, 2**31 - 1],
    "dry_penalty_last_n": [-1, -1, 0, 1, 10, 2**31 - 1],
    "no_repeat_ngram_size": [0, 0, 0, 1, 2, 7, 65],
    "penalty_last_n": [-1, -1, 0, 1, 10, 2**31 - 1],
    "adaptive_target": [-1, -1, -1, 0, LEAST, 0.3, 1],
    "adaptive_decay": [0, LEAST, 0.9, 0.99],
    "adaptive_error": [0, 0, 0.5, -0.5, 1, -1],
    "min_length": [0, 0, 20, 2**31 - 1],
    "max_length": [1, 25, 2**31 - 1, 2**31 - 1],
}
UNIFORMS = [0, 2.0**-24, 0.5, 1 - 2.0**-24]
BIASES = [0, 1, -1, 1e30, -1e30, 1e38, -1e38, LARGEST, -LARGEST, -np.inf]
ENDS = [
    0,
    -0.0,
    LEAST,
    -LEAST,
    2e-38,
    1,
    -1,
    88,
    -104,
    1e4,
    1e38,
    -1e38,
    3e38,
    -2.9e38,
    LARGEST,
    -LARGEST,
]


def face_of(
    vocab: int, order: str, captured: bool, filters: tuple[str, ...] = tuple(EXTRA_PARAMETERS)
) -> Interface:
    features = Features(
        logit_bias=True, allowed_tokens=True, probs=True, filters=filters, filter_order=order
    )
    return Interface(vocab, (), features=features, captured=captured)


def extreme_logits(rng: np.random.Generator, vocab: int) -> Array:
    """[V] float32: of a single size, of many sizes, tied, one of the ends, masked, a single finite logit, invalid."""
    size = 10.0 ** rng.choice([-45, -38, -20, -3, 0, 0, 1, 4, 20, 31, 38])
    normal = rng.normal(size=vocab)
    sizes = rng.choice([-1, 1], vocab) * 10.0 ** rng.uniform(-45, 38.4, vocab)
    kinds: list[Array] = [
        normal * size,
        np.round(normal * 2) * size,
        np.full(vocab, rng.choice(ENDS)),
        sizes,
        -np.abs(sizes),
        rng.choice(ENDS, vocab),
        rng.choice(rng.choice(ENDS, 2), vocab),
        np.where(np.arange(vocab) == rng.integers(vocab), rng.choice(ENDS), -np.inf),
        normal * rng.choice([1, 5]) + rng.choice([0, 1e4]),
        np.where(rng.random(vocab) < 0.1, rng.choice([np.nan, np.inf]), normal),
    ]
    logits = kinds[rng.integers(len(kinds))]
    logits = np.where(np.isinf(logits), logits, np.clip(logits, -LARGEST, LARGEST))
    masked = rng.random(vocab) < rng.choice([0, 0, 0, 0.1, 0.9])
    return np.asarray(np.where(masked, rng.choice([-np.inf, -LARGEST]), logits), np.float32)


def extreme_step(rng: np.random.Generator, face: Interface) -> tuple[Array, dict[str, Array]]:
    """Logits, a consistent state and parameters of up to 8 rows."""
    vocab, batch, sequence = face.vocab_size, int(rng.integers(1, 9)), int(rng.integers(1, 4))
    logits = np.stack([extreme_logits(rng, vocab) for _ in range(batch)])
    likely = np.argsort(-logits, axis=1)[:, :4]

    def one_of(often: float, usual: Array | float, other: Array) -> Array:
        return np.where(rng.random(np.shape(other)) < often, usual, other)

    def ids(*shape: int) -> Array:
        """Likely tokens, so that they repeat themselves, and any others."""
        chosen = np.take_along_axis(
            likely, rng.integers(0, likely.shape[1], (batch, int(np.prod(shape)))), axis=1
        )
        return one_of(0.6, chosen.reshape(batch, *shape), rng.integers(0, vocab, (batch, *shape)))

    def uniforms() -> Array:
        any_number = rng.integers(0, 2**24, (batch, CAPACITY)) / 2**24
        return one_of(0.3, rng.choice(UNIFORMS, (batch, CAPACITY)), any_number)

    # Many at once leave a single token: in most rows, most are off.
    share = rng.choice([0.1, 0.3, 1], batch)
    values: dict[str, Any] = {}
    for spec in (*face.sampler.inputs, *face.sampler.states):
        if spec.name in VALUES:
            values[spec.name] = np.where(
                rng.random(batch) < share, rng.choice(VALUES[spec.name], batch), spec.off or 0
            )
    bad_words = np.where(np.arange(3) < rng.integers(0, 4, (batch, 3, 1)), PAD_STOP_ID, ids(3, 3))
    masks = rng.integers(-(2**31), 2**31, (batch, -(-vocab // 32)))
    values |= {
        "stop_ids": one_of(0.7, PAD_STOP_ID, ids(3)),
        "logit_bias_ids": one_of(0.7, PAD_STOP_ID, ids(4)),
        "logit_bias": rng.choice(BIASES, (batch, 4)),
        "allowed_tokens": np.where(rng.random((batch, 1)) < 0.8, -1, masks),
        "dry_sequence_breakers": one_of(0.7, PAD_STOP_ID, ids(2)),
        "bad_words_ids": np.where(rng.random((batch, 1, 1)) < 0.8, PAD_STOP_ID, bad_words),
        "lengths": rng.choice([0, 3, 20, CAPACITY - sequence], batch),
        "status": rng.choice([0] * 9 + [1, 2, 3], batch),
        "emit": rng.random(batch) < 0.95,
        "input_ids": ids(sequence),
        "input_lengths": rng.integers(1, sequence + 1, batch),
        "noise": uniforms(),
        "xtc_noise": uniforms(),
        "tokens": ids(CAPACITY),
    }
    known = {spec.name for spec in (*face.sampler.inputs, *face.sampler.states)}
    values = {name: value for name, value in values.items() if name in known}
    sizes = {"stops": 3, "biases": 4, "breakers": 2}
    inputs = make_inputs(
        face, batch, sequence=sequence, capacity=CAPACITY, bad_words=(3, 3), **sizes, **values
    )
    for row, length in enumerate(inputs["lengths"]):
        inputs["tokens"][row, length:] = inputs["tokens"][row, 0]
        np.add.at(inputs["output_counts"][row], inputs["tokens"][row, 1:length], 1)
    if face.captured:
        write_prompts(inputs)
    return logits, inputs


def unexplained(
    face: Interface, logits: Array, inputs: dict[str, Array], num_candidates: int = CANDIDATES
) -> dict[int, list[str]]:
    """Row → what differs from the reference, of rows for which docs/contract.md leaves no other result."""
    expected = expected_step(face, logits, inputs, num_candidates)
    got = sampler(face, num_candidates=num_candidates)(logits, inputs)
    found = {}
    for row in range(len(logits)):
        wrong = compare_step(got, expected, row)
        if (
            wrong
            and "status_RetainedState" in wrong
            and got["status_RetainedState"][row] == INVALID_LOGITS
        ):
            if not (got["adjusted_logits"][row] > 2.0**110).any():
                found[row] = wrong
        elif (
            wrong
            and not excused(expected, row, wrong)
            and not (is_open(got["adjusted_logits"][row]) and is_sound(got, row))
        ):
            found[row] = wrong
    return found


def is_sound(got: dict[str, Array], row: int) -> bool:
    """Whether a row drew a token that it may draw, from a distribution."""
    token, probs = got["next_ids"][row, 0], got["probs"][row]
    drawn = np.isfinite(got["adjusted_logits"][row, token]) and probs[token] > 0
    return bool(drawn and np.isclose(probs.sum(), 1, rtol=1e-5))


def is_open(adjusted: Array) -> bool:
    """Whether the contract leaves the result of a valid row with such logits open."""
    finite = adjusted[np.isfinite(adjusted)]
    if finite.min() <= -3e38 and finite.max() < 0:  # may count as masked
        return True
    # Logits that may count as tied.
    x = np.unique(finite - finite.max()).astype(np.float64)
    return bool((np.diff(x) < 2.0**-126).any())


def check_extremes(face: Interface, seed: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    for step in range(steps):
        logits, inputs = extreme_step(rng, face)
        for row, wrong in unexplained(face, logits, inputs).items():
            raise AssertionError(
                (step, row, wrong, {name: inputs[name][row] for name in VALUES if name in inputs})
            )


both_kinds = pytest.mark.parametrize("captured", [False, pytest.param(True, marks=pytest.mark.ci)])


@both_kinds
def test_rows_are_the_references(captured: bool) -> None:
    check_extremes(face_of(97, FILTER_ORDERS[0], captured), 1, 12)


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize(("vocab", "steps"), [(97, 600), (1000, 300), (32_000, 20), (151_936, 5)])
def test_rows_are_the_references_at_length(
    vocab: int, steps: int, order: str, captured: bool
) -> None:
    check_extremes(face_of(vocab, order, captured), vocab, steps)


@both_kinds
def test_a_standard_deviation_beyond_sums_of_float32(captured: bool) -> None:
    """Next to a row that the vocabulary settles. 40 logits that add up to infinity left no token."""
    face = face_of(97, FILTER_ORDERS[0], captured)
    logits = np.zeros((3, 97), np.float32)
    logits[1:, :40] = -6e37 * np.linspace(1, 2, 40)
    values: dict[str, Any] = {
        "temperature": [0.001, 0.001, 1e36],
        "top_p": [0.9, 1, 1],
        "top_n_sigma": [0, 1, 2.5],
        "top_k": [0, 2, 0],
    }
    assert check_rows(face, logits, make_inputs(face, 3, **values)) == 0


@both_kinds
def test_a_row_with_nothing_above_a_mask_is_invalid(captured: bool) -> None:
    face = face_of(97, FILTER_ORDERS[0], captured)
    logits = np.full((2, 97), -3.3e38, np.float32)
    logits[:, ::2] = -np.inf
    assert check_rows(face, logits, make_inputs(face, 2, temperature=[0, 1], top_k=5)) == 0


def row_of(logits: dict[int, float], rest: float) -> Array:
    row = np.full(97, rest, np.float32)
    row[list(logits)] = list(logits.values())
    return row


STEPS = {token: 0.0 if token < 40 else -2e37 for token in range(80)}
# What is drawn from, parameters, and the tokens that may be drawn.
ENDS_OF_RANGES: dict[str, tuple[Array, dict[str, Any], list[int]]] = {
    "masked next to a low logit": (
        row_of({7: -2.9e38}, -np.inf),
        {"temperature": 1e36, "top_k": 5},
        [7],
    ),
    "left, though far below": (row_of({3: 0, 5: -1}, -2e38), {"dynatemp_range": 0.5}, [3, 5]),
    "of a deviation, though far below": (
        row_of(STEPS, -2e38),
        {"temperature": 1e36, "top_n_sigma": 0.3},
        [*range(80)],
    ),
    "a range without end": (
        row_of({3: 0, 5: -1}, -np.inf),
        {"temperature": LARGEST, "dynatemp_range": LARGEST, "dynatemp_exponent": LARGEST},
        [3],
    ),
    "a stop that a penalty makes infinite": (
        row_of({5: 1e33, 6: 1.0}, -np.inf),
        {"repetition_penalty": 1e-6, "min_length": 20, "stop_ids": 5},
        [6],
    ),
    "a weight that reaches no threshold": (
        row_of({3: 0, 5: -80}, -np.inf),
        {"xtc_probability": 1, "xtc_threshold": 0},
        [3, 5],
    ),
}


@both_kinds
@pytest.mark.parametrize("name", ENDS_OF_RANGES)
def test_ends_of_ranges(name: str, captured: bool) -> None:
    face = face_of(97, FILTER_ORDERS[0], captured)
    logits, parameters, tokens = ENDS_OF_RANGES[name]
    inputs = make_inputs(face, **parameters)
    assert check_rows(face, logits[None], inputs) == 0
    got = sampler(face, num_candidates=CANDIDATES)(logits[None], inputs)
    assert got["status_RetainedState"] == 0
    assert np.flatnonzero(got["probs"][0]).tolist() == tokens


@both_kinds
def test_nearly_even_distributions(captured: bool) -> None:
    """Their entropy, rounded, may exceed that of an even distribution: to a large power, infinity."""
    face = face_of(97, FILTER_ORDERS[0], captured)
    noise = np.random.default_rng(0).normal(size=(96, 97)) * 1e-4
    logits = np.where(np.arange(97) <= np.arange(1, 97)[:, None], noise, -np.inf).astype(np.float32)
    inputs = make_inputs(face, 96, dynatemp_range=LEAST, dynatemp_exponent=LARGEST)
    got = sampler(face, num_candidates=CANDIDATES)(logits, inputs)
    np.testing.assert_allclose(got["probs"].sum(1), 1, rtol=1e-5)


@both_kinds
def test_a_tiny_temperature_next_to_filters_that_are_off(captured: bool) -> None:
    """Its reciprocal stood for a total that no filter needed, and left no token."""
    face = face_of(97, FILTER_ORDERS[0], captured)
    logits = np.linspace(0, 1, 97, dtype=np.float32)[None]
    assert check_rows(face, logits, make_inputs(face, temperature=1e-39, min_p=0.5)) == 0


@both_kinds
def test_the_surprise_of_mirostat_stays_finite(captured: bool) -> None:
    """At any learning rate and for any token: from -1e30 to 1e30. Sums of infinities left no token two steps later."""
    face = face_of(97, FILTER_ORDERS[0], captured)
    step = sampler(face, num_candidates=CANDIDATES)
    logits = np.full((4, 97), -90, np.float32)
    logits[:, 96] = 0
    logits[3, :90] = -103  # u = 0 draws a token of a weight without a finite reciprocal
    values: dict[str, Any] = {
        "mirostat_tau": [1, 5, LARGEST, 300],
        "mirostat_eta": [LARGEST, LARGEST, LARGEST, 0],
        "noise": 0,
    }
    inputs = make_inputs(face, 4, **values)
    for _ in range(4):
        got = step(logits, inputs)
        assert (got["status_RetainedState"] == 0).all()
        np.testing.assert_allclose(got["probs"].sum(1), 1, rtol=1e-6)
        assert (np.abs(got["mirostat_mu_RetainedState"]) <= np.float32(1e30)).all()
        inputs["mirostat_mu"] = got["mirostat_mu_RetainedState"]
