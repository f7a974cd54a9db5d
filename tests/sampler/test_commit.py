"""The next value of each state: lengths, status, counts and mirostat_mu; rows that finish, wait or are invalid; and
next_ids, log-probabilities and the sampled distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import (
    EXTRA_PARAMETERS,
    INVALID_LOGITS,
    LENGTH,
    LOGPROBS_MODES,
    RUNNING,
    STOPPED,
)
from qsample.sampler import build_sampler
from tests.helpers.reference import reference_step
from tests.helpers.sampler_cases import (
    ALL_FEATURES,
    PAD,
    check_rows,
    check_steps,
    expected_step,
    interface,
    make_inputs,
    opened,
    random_step,
    sampler,
    session,
)

Array = np.ndarray
FACES = [Interface(320, (), captured=captured) for captured in (False, True)]
LOGITS = np.arange(320, dtype=np.float32)[None]  # greedy: 319


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({}, RUNNING),
        ({"stop_ids": 319}, STOPPED),
        ({"stop_ids": 318}, RUNNING),
        ({"max_length": 1}, LENGTH),
        ({"max_length": 2}, LENGTH),
        ({"max_length": 3}, RUNNING),
        ({"stop_ids": 319, "max_length": 2}, STOPPED),  # a stop id takes precedence
        ({"lengths": 14}, LENGTH),  # 15 tokens and the sampled one fill a capacity of 16
        ({"lengths": 13}, RUNNING),
        ({"emit": False, "max_length": 2, "stop_ids": 319}, RUNNING),
        ({"emit": False, "lengths": 15}, RUNNING),
        ({"status": STOPPED, "max_length": 2}, STOPPED),
        ({"status": 7}, 7),  # of a later contract, say
    ],
)
def test_status(face: Interface, values: dict[str, int], status: int) -> None:
    inputs = make_inputs(face, stops=2, temperature=0, **values)
    inputs["stop_ids"][:, 0] = 5
    if face.captured:
        status = min(status, INVALID_LOGITS)
    assert sampler(face)(LOGITS, inputs)["status_RetainedState"][0] == status


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("status", [STOPPED, LENGTH, INVALID_LOGITS])
def test_a_finished_row_commits_nothing(face: Interface, status: int) -> None:
    inputs = make_inputs(
        face, temperature=0, status=status, lengths=3, tokens=[[5, 6, 7] + [5] * 13], input_ids=9
    )
    result = sampler(face)(LOGITS, inputs)
    assert result["next_ids"][0, 0] == PAD
    for name in ("lengths", "status", "tokens", "output_counts"):
        np.testing.assert_array_equal(result[f"{name}_RetainedState"], inputs[name])


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_invalid_logits_commit_nothing(value: float, temperature: float, face: Interface) -> None:
    """A NaN or +inf anywhere, or no finite logit; a row that only records its inputs reads none."""
    logits = np.tile(LOGITS, (4, 1))
    if value == -np.inf:
        logits[:] = value
    else:
        logits[[0, 1, 2, 3], [0, 7, 319, 7]] = value
    tokens = [[5, 6, 7] + [5] * 13]
    inputs = make_inputs(
        face,
        4,
        temperature=temperature,
        lengths=3,
        tokens=tokens,
        input_ids=9,
        emit=[True] * 3 + [False],
    )
    result = sampler(face)(logits, inputs)
    assert result["next_ids"][:, 0].tolist() == [PAD] * 4
    assert result["status_RetainedState"].tolist() == [INVALID_LOGITS] * 3 + [RUNNING]
    assert result["lengths_RetainedState"].tolist() == [3, 3, 3, 4]
    for name in ("tokens", "output_counts"):
        np.testing.assert_array_equal(result[f"{name}_RetainedState"][:3], inputs[name][:3])


@pytest.mark.parametrize("face", FACES)
def test_counts_are_of_sampled_tokens(face: Interface) -> None:
    counts = np.zeros((3, 320), np.float32)
    counts[:, [0, 319]] = 4
    inputs = make_inputs(
        face, 3, temperature=0, output_counts=counts, emit=[True, False, True], status=[0, 0, 1]
    )
    got = sampler(face)(np.tile(LOGITS, (3, 1)), inputs)["output_counts_RetainedState"]
    np.testing.assert_array_equal(got - counts, np.eye(320)[[319]] * [[1], [0], [0]])


@pytest.mark.parametrize("captured", [False, True])
def test_mirostat_learns_only_from_random_tokens(captured: bool) -> None:
    face = Interface(4, (), features=Features(filters=("mirostat",)), captured=captured)
    values = {"emit": [True, True, True, False, True, True], "temperature": [1, 0, 1, 1, 1, 1]}
    values |= {"mirostat_tau": [1.25, 1, 0, 1, 2, 2], "status": [0, 0, 0, 0, 0, 1]}
    inputs = make_inputs(
        face, 6, mirostat_eta=0.5, mirostat_mu=[0, 3, 3, 3, 1.5, 3], noise=0.9, **values
    )
    logits = np.log(np.float32([[4, 2, 1, 1]] * 6))
    # Tokens 0 and 1 are left, 2/3 and 1/3; the second is drawn, at log2(3) bits. A mu of 1.5 leaves token 0 alone.
    mu = [2.5 - 0.5 * (np.log2(3) - 1.25), 3, 3, 3, 1.5 - 0.5 * (0 - 2), 3]
    for out in (sampler(face)(logits, inputs), reference_step(logits, inputs, pad_token_id=PAD)):
        np.testing.assert_allclose(out["mirostat_mu_RetainedState"], mu, rtol=1e-6)


@pytest.mark.parametrize("captured", [False, True])
def test_adaptive_p_learns_only_from_random_tokens(captured: bool) -> None:
    face = Interface(4, (), features=Features(filters=("adaptive_p",)), captured=captured)
    values = {"emit": [True, True, True, False, True, True], "temperature": [1, 0, 1, 1, 1, 1]}
    values |= {"adaptive_target": [0.5, 0.5, -1, 0.5, 0.25, 0.5], "status": [0, 0, 0, 0, 0, 1]}
    errors = [0.125, 0.125, 0.125, 0.125, 0, 0.125]
    inputs = make_inputs(face, 6, adaptive_decay=0.75, adaptive_error=errors, noise=0.9, **values)
    logits = np.log(np.float32([[4, 2, 1, 1]] * 6))
    # With u = 0.9, the first row draws token 1 of probability 1/4, and the fifth token 3 of 1/8.
    learnt = [0.75 * 0.125 + 0.25 * (0.25 - 0.5), 0.125, 0.125, 0.125, 0.25 * (0.125 - 0.25), 0.125]
    for out in (sampler(face)(logits, inputs), reference_step(logits, inputs, pad_token_id=PAD)):
        np.testing.assert_allclose(out["adaptive_error_RetainedState"], learnt, rtol=1e-6)


@pytest.mark.parametrize("captured", [False, True])
def test_random_states(captured: bool) -> None:
    """Rows of every kind at once, against the reference."""
    face = Interface(
        40, (), features=Features(filters=("mirostat", "adaptive_p")), captured=captured
    )
    rng = np.random.default_rng(9)
    for sequence in (1, 3):
        assert check_rows(face, *random_step(rng, face, 300, sequence)) <= 3


def run(
    step: Callable[..., dict[str, Array]], logits: Array, state: dict[str, Array], steps: int
) -> list[dict[str, Array]]:
    """`steps` steps from a prompt of two tokens with separate buffers, and the results of each."""
    outcomes = []
    for t in range(steps):
        result = step(logits[t], state)
        outcomes.append(result)
        state = state | {
            name.removesuffix("_RetainedState"): a
            for name, a in result.items()
            if name.endswith("State")
        }
        state |= {
            "input_ids": result["next_ids"],
            "input_lengths": np.ones_like(state["input_lengths"]),
        }
    return outcomes


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("filters", [(), tuple(EXTRA_PARAMETERS)])
def test_states_bound_in_place(filters: tuple[str, ...], captured: bool) -> None:
    """Same buffer in and out, over a run with rows that stop, against separate buffers and the reference."""
    face = Interface(320, (), features=Features(filters=filters), captured=captured)
    rng = np.random.default_rng(1)
    batch, steps, capacity = 5, 20, 24
    logits = (rng.normal(size=(steps, batch, 320)) * 3).astype(np.float32)
    extra: dict[str, Any] = {
        "no_repeat_ngram_size": 3,
        "dry_multiplier": 0.5,
        "penalty_last_n": [-1, -1, 4, 4, 0],
    }
    extra |= {"mirostat_tau": [0, 2, 3, 0, 1], "adaptive_target": [0.4, -1, 0.4, -1, 0.4]}
    extra = extra if filters else {}
    initial = make_inputs(
        face,
        batch,
        sequence=2,
        capacity=capacity,
        stops=75,
        input_ids=rng.integers(0, 320, (batch, 2)),
        input_lengths=[1, 2, 2, 1, 2],
        noise=rng.random((batch, capacity)),
        temperature=[0, 1, 1, 0.7, 2],
        top_k=[0, 5, 0, 0, 0],
        top_p=[1, 1, 0.8, 1, 1],
        repetition_penalty=1.2,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        min_length=6,
        max_length=[30, 30, 10, 30, 30],
        stop_ids=np.where(
            np.arange(batch)[:, None] == 2, -1, np.arange(0, 300, 4)
        ),  # row 2 reaches its max_length
        **extra,
    )
    separate = run(sampler(face), logits, initial, steps)
    reference = run(
        lambda logits, state: expected_step(face, logits, state), logits, initial, steps
    )
    for got, expected in zip(separate, reference, strict=True):
        for name in got.keys() - {"adjusted_logits"}:
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-4, err_msg=name)
        sampled = ~np.isnan(expected["adjusted_logits"]).any(-1)
        np.testing.assert_allclose(
            got["adjusted_logits"][sampled], expected["adjusted_logits"][sampled], rtol=1e-6
        )

    runner = session(face)
    states = {
        name: ort.OrtValue.ortvalue_from_numpy(initial[name].copy())
        for name in face.sampler.retained
    }
    ids, lengths = initial["input_ids"], initial["input_lengths"]
    scores = ort.OrtValue.ortvalue_from_shape_and_type(logits.shape[1:], np.float32)
    for t in range(steps):
        binding = runner.io_binding()
        scores.update_inplace(logits[t])
        binding.bind_ortvalue_output("adjusted_logits", scores)
        for name in (node.name for node in runner.get_inputs()):
            call = {"input_ids": ids, "input_lengths": lengths}
            if name == "logits":
                binding.bind_ortvalue_input(name, scores)
            elif name in states:
                binding.bind_ortvalue_input(name, states[name])
                binding.bind_ortvalue_output(f"{name}_RetainedState", states[name])
            else:
                binding.bind_cpu_input(name, call.get(name, initial.get(name)))
        binding.bind_output("next_ids")
        runner.run_with_iobinding(binding)
        ids, lengths = binding.get_outputs()[-1].numpy(), np.ones(batch, np.int32)
        np.testing.assert_array_equal(ids, separate[t]["next_ids"])
        for name in states:
            np.testing.assert_array_equal(
                states[name].numpy(), separate[t][f"{name}_RetainedState"], err_msg=name
            )
        np.testing.assert_array_equal(scores.numpy(), separate[t]["adjusted_logits"])
    assert set(states["status"].numpy()) >= {STOPPED, LENGTH}


@pytest.mark.parametrize("captured", [False, True])
def test_logprobs_are_those_of_the_model(captured: bool) -> None:
    """Raw log-softmax: penalties, temperature, filters and masks change the draw, not the report."""
    features = Features(logprobs=True, top_logprobs=3, logit_bias=True)
    face = Interface(4, (), features=features, captured=captured)
    logits = np.log(np.array([[4, 2, 1, 1]], np.float32)) + 50
    inputs = make_inputs(face, temperature=0, logit_bias_ids=1, logit_bias=9, repetition_penalty=3)
    result = sampler(face)(logits, inputs)
    assert result["next_ids"][0, 0] == 1
    np.testing.assert_allclose(result["logprobs"], np.log([[0.25]]), rtol=1e-5)
    np.testing.assert_allclose(result["top_logprobs"], np.log([[0.5, 0.25, 0.125]]), rtol=1e-5)
    assert result["top_logprob_ids"].tolist() == [[0, 1, 2]]


def processed(face: Interface) -> Interface:
    """With log-probabilities of what is drawn from."""
    features = replace(face.features, logprobs=True, logprobs_mode="processed_logprobs")
    return replace(face, features=features)


@pytest.mark.parametrize("captured", [False, True])
def test_processed_logprobs_are_those_of_the_draw(captured: bool) -> None:
    """By hand: a bias, a temperature and top-k change them in rows that draw; in greedy rows, the bias does."""
    face = processed(
        Interface(5, (), features=Features(top_logprobs=4, logit_bias=True), captured=captured)
    )
    logits = np.log(np.array([[4, 2, 1, 1, 1]], np.float32).repeat(3, 0)) + 50
    inputs = make_inputs(
        face,
        3,
        temperature=[0, 0.5, 1],
        top_k=[0, 2, 0],
        logit_bias_ids=1,
        logit_bias=np.float32(np.log(4)),
        noise=[[0] * 16, [0.1] * 16, [0.999] * 16],
    )
    result = sampler(face)(logits, inputs)
    assert result["next_ids"].tolist() == [[1], [0], [4]]
    whole = [8 / 15, 4 / 15, 1 / 15, 1 / 15]
    kept = [64 / 80, 16 / 80, 0, 0]
    with np.errstate(divide="ignore"):
        wanted = np.log([whole, kept, whole])
    np.testing.assert_allclose(result["top_logprobs"], wanted, rtol=1e-5)
    np.testing.assert_allclose(result["logprobs"], np.log([[8 / 15], [0.2], [1 / 15]]), rtol=1e-5)
    assert result["top_logprob_ids"].tolist() == [[1, 0, 2, 3], [1, 0, -1, -1], [1, 0, 2, 3]]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("vocab", [1000, 40])
def test_processed_logprobs(vocab: int, captured: bool) -> None:
    """Against the reference, with masks, penalties and every filter; of small vocabularies, all tokens are reported."""
    filters = tuple(EXTRA_PARAMETERS)
    features = replace(ALL_FEATURES, filters=filters, top_logprobs=min(vocab, 70))
    check_steps(processed(Interface(vocab, (), features=features, captured=captured)), 5, 60)


def test_processed_logprobs_are_the_logarithms_of_probs() -> None:
    """In rows that draw from candidates and from the vocabulary, with ties; alone as in a batch."""
    face = processed(interface(1000, Features(top_logprobs=20, probs=True)))
    rng = np.random.default_rng(4)
    logits = rng.integers(-4, 4, (6, 1000)).astype(np.float32)
    settings = {
        "temperature": [1, 0.7, 1.3, 1, 0.01, 2],
        "top_k": [20, 0, 300, 0, 0, 1],
        "top_p": [1, 0.3, 1, 1, 1, 1],
        "noise": rng.random((6, 16)).astype(np.float32),
    }
    inputs = make_inputs(face, 6, **settings)
    result = sampler(face)(logits, inputs)
    probs = result["probs"].astype(np.float64)
    drawn = np.take_along_axis(probs, result["next_ids"], 1)
    np.testing.assert_allclose(result["logprobs"], np.log(drawn), rtol=1e-5, atol=1e-6)
    order = np.argsort(-probs, axis=1, kind="stable")[:, :20]
    likeliest = np.take_along_axis(probs, order, 1)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(result["top_logprobs"], np.log(likeliest), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(result["top_logprob_ids"], np.where(likeliest > 0, order, -1))
    for row in range(6):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        own = sampler(face)(logits[row : row + 1], alone)
        for name in ("logprobs", "top_logprobs", "top_logprob_ids"):
            np.testing.assert_array_equal(own[name][0], result[name][row], err_msg=name)


def test_a_token_that_hardly_has_a_probability() -> None:
    """u = 0 draws the lowest id, whose weight may be no normal float32 number: 2**-126 takes its place."""
    face = processed(interface(3, Features(top_logprobs=3)))
    logits = np.float32([[-95, 0, -1]])
    result = sampler(face)(logits, make_inputs(face, temperature=1, noise=0.0))
    assert result["next_ids"].tolist() == [[0]]
    expected = -126 * np.log(2) - np.log(1 + np.exp(-1))
    np.testing.assert_allclose(result["logprobs"], [[expected]], rtol=1e-6)
    assert result["top_logprob_ids"].tolist() == [[1, 2, -1]]
    assert result["top_logprobs"][0, 2] == -np.inf


def test_small_log_probabilities_keep_their_digits() -> None:
    """(l - max) - log sum: if the maximum is large, its sum with the logarithm would lose them."""
    logits = np.float32([[4000, 3999.5, 3990, -1e35, -np.inf]])
    face = interface(5, Features(logprobs=True, top_logprobs=5))
    result = sampler(face)(logits, make_inputs(face, temperature=0))
    exact = logits - 4000.0 - np.log(np.exp(logits.astype(np.float64) - 4000).sum())
    np.testing.assert_allclose(result["logprobs"], exact[:, :1], rtol=1e-6)
    np.testing.assert_allclose(result["top_logprobs"], exact, rtol=1e-6)


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("captured", [False, True])
def test_rows_that_emit_nothing_report_nothing(captured: bool, mode: str) -> None:
    features = Features(logprobs=True, top_logprobs=2, probs=True, logprobs_mode=mode)
    face = Interface(4, (), features=features, captured=captured)
    logits = np.array([[1, 2, 3, 4], [1, np.nan, 3, 4], [1, 2, 3, 4]], np.float32)
    result = sampler(face)(logits, make_inputs(face, 3, emit=[False, True, True], status=[0, 0, 1]))
    assert result["next_ids"].tolist() == [[PAD]] * 3
    for name in ("logprobs", "top_logprobs", "probs"):
        assert not result[name].any(), name
    assert (result["top_logprob_ids"] == -1).all()


@pytest.mark.parametrize("pad", [0, 3])
def test_the_pad_token(pad: int) -> None:
    """Of rows that emit nothing. The graph is loaded here: it is not that of the other tests."""
    face = interface(4)
    session = opened(build_sampler(face, pad))
    feeds = {
        "logits": np.zeros((2, 4), np.float32),
        **make_inputs(face, 2, emit=[False, True], noise=0.3),
    }
    assert session.run(["next_ids"], feeds)[0].tolist() == [[pad], [1]]


def test_ties_of_top_logprobs_are_in_id_order() -> None:
    face = interface(1000, ALL_FEATURES)
    logits = np.round(np.random.default_rng(0).normal(size=(50, 1000))).astype(np.float32)
    ids = sampler(face)(logits, make_inputs(face, 50))["top_logprob_ids"]
    np.testing.assert_array_equal(ids, np.argsort(-logits, kind="stable", axis=1)[:, :3])


def test_the_distribution_of_greedy_and_random_rows() -> None:
    """A single 1 at the argmax; and whatever the vocabulary's padding, all that random rows may draw."""
    for vocab in (5, 300):
        face = interface(vocab, Features(probs=True))
        logits = np.tile(np.arange(vocab, dtype=np.float32) / vocab, (3, 1))
        probs = sampler(face)(logits, make_inputs(face, 3, temperature=[0, 1, 1], top_k=[0, 0, 2]))[
            "probs"
        ]
        weights = np.exp(logits[0].astype(np.float64))
        np.testing.assert_array_equal(probs[0], np.eye(vocab)[-1])
        np.testing.assert_allclose(probs[1], weights / weights.sum(), rtol=1e-6)
        np.testing.assert_allclose(probs[2, -2:], weights[-2:] / weights[-2:].sum(), rtol=1e-6)
        assert not probs[2, :-2].any()


@pytest.mark.ci
def test_every_output_alone() -> None:
    """Against the reference; an absent feature adds no output."""
    processed_mode = {"logprobs_mode": "processed_logprobs"}
    alone = [{"logprobs": True}, {"top_logprobs": 1}, {"top_logprobs": 7}, {"probs": True}, {}]
    alone += [{"logprobs": True, **processed_mode}, {"top_logprobs": 7, **processed_mode}]
    for vocab, features in zip(
        (1000, 7, 7, 1000, 7, 7, 7), (Features(**chosen) for chosen in alone), strict=True
    ):
        face = interface(vocab, features)
        logits, inputs = random_step(np.random.default_rng(vocab), face, 6, 1)
        check_rows(face, logits, inputs)
        assert [*sampler(face)(logits, inputs)] == face.sampler.output_names
