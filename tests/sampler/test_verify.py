"""Several places of a row in one step: the tokens, outputs and states are those of steps of one token, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnxruntime as ort
import pytest

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import EXTRA_PARAMETERS, FILTER_ORDERS
from qsample.sampler.verify import build_verifier
from tests.helpers.sampler_cases import PAD, opened, random_step, sampler

Array = np.ndarray
GUESSES = 4
FILTERS = tuple(EXTRA_PARAMETERS)
EVERYTHING = Features(logit_bias=True, allowed_tokens=True, logprobs=True, top_logprobs=3, filters=FILTERS)
RETAINED = "_RetainedState"


@functools.cache
def verifier(face: Interface) -> ort.InferenceSession:
    return opened(build_verifier(face, PAD))


def one_by_one(
    face: Interface, logits: Array, inputs: Mapping[str, Array]
) -> list[tuple[dict[str, Array], dict[str, Array]]]:
    """The results of each step and the inputs of the next. logits: [steps, B, V]."""
    steps, state = [], dict(inputs)
    for row in logits:
        result = sampler(face)(row, state)
        state = state | {name.removesuffix(RETAINED): array for name, array in result.items() if RETAINED in name}
        state |= {"input_ids": result["next_ids"], "input_lengths": np.ones_like(inputs["input_lengths"])}
        steps.append((result, state))
    return steps


def layout(guesses: Array, ids: Array) -> dict[str, Array]:
    """What `guess` gives `verify`. guesses: [B, g], -1 after the last of each row. ids: [B, S]."""
    count = (guesses >= 0).sum(1)
    pairs = [(row, column) for row, most in enumerate(count) for column in range(most + 1)]
    places = [
        [pairs.index((row, min(column, most))) for column in range(guesses.shape[1] + 1)]
        for row, most in enumerate(count)
    ]
    rows, columns = np.array(pairs).T
    return {
        "step_ids": np.concatenate([ids, np.maximum(guesses, 0)], 1),
        "step_rows": rows,
        "step_columns": columns,
        "step_places": np.array(places),
        "step_guesses": np.pad(guesses, ((0, 0), (0, 1)), constant_values=-1),
    }


def check(face: Interface, rng: np.random.Generator, rows: int = 12) -> int:
    """Compare a random step. Returns how many tokens it gave beyond one a row."""
    plain = face.without_guesses()
    sequence = int(rng.choice([1, 1, 1, 2]))
    logits, inputs = random_step(rng, plain, rows, sequence)
    most = GUESSES if sequence == 1 else 0
    logits = np.stack([logits, *(rng.permuted(logits, axis=1) * rng.choice([1, 0.5]) for _ in range(most))])
    logits[rng.random(logits.shape[:2]) < 0.05, 3] = rng.choice([np.nan, np.inf])
    if sequence == 1:
        inputs["input_lengths"][:] = 1
    steps = one_by_one(plain, logits.astype(np.float32), inputs)

    drawn = np.concatenate([result["next_ids"] for result, _ in steps], 1)[:, :most]
    guesses = np.where(rng.random(drawn.shape) < 0.8, drawn, rng.integers(0, face.vocab_size, drawn.shape))
    count = rng.integers(0, most + 1, rows)
    if "mirostat_tau" in inputs:
        count[inputs["mirostat_tau"] > 0] = 0  # as `guess` has it
    guesses[np.arange(most) >= count[:, None]] = -1
    given = layout(guesses[:, : max(count, default=0)], inputs["input_ids"])
    at = (given["step_columns"], given["step_rows"])
    session = verifier(face)
    names = [output.name for output in session.get_outputs()]
    feeds = {**inputs, **given, "logits": logits[at].astype(np.float32)}
    got = dict(
        zip(names, session.run(names, {value.name: feeds[value.name] for value in session.get_inputs()}), strict=True)
    )

    more = 0
    for row in range(rows):
        last, kept = 0, []
        while True:
            result, _ = steps[last]
            if inputs["status"][row] == 0 and inputs["emit"][row] and result["status_RetainedState"][row] != 3:
                kept.append(last)
            goes_on = kept[-1:] == [last] and result["status_RetainedState"][row] == 0 and last < count[row]
            if not (goes_on and result["next_ids"][row, 0] == guesses[row, last]):
                break
            last += 1
        for name in (name for name in names if RETAINED in name):
            np.testing.assert_array_equal(got[name][row], steps[last][0][name][row], err_msg=name)
        assert got["num_new"][row] == len(kept)
        assert got["num_draft_tokens"][row] == count[row]
        for name, ordinary in (
            ("new_ids", "next_ids"),
            ("logprobs", "logprobs"),
            ("top_logprobs", "top_logprobs"),
            ("top_logprob_ids", "top_logprob_ids"),
        ):
            if name in names:
                wanted = np.stack([steps[step][0][ordinary][row] for step in kept] or [steps[0][0][ordinary][row]])
                found = got[name][row][: max(len(kept), 1)]
                np.testing.assert_array_equal(found, wanted.reshape(found.shape), err_msg=name)
                rest = got[name][row][max(len(kept), 1) :]
                assert (rest == {"new_ids": PAD, "top_logprob_ids": -1}.get(name, 0)).all(), name
        newest = steps[kept[-1]][0]["next_ids"][row] if kept else [PAD]
        assert got["next_ids"][row].tolist() == list(newest)
        more += max(len(kept) - 1, 0)
    return more


FACES = [
    Interface(300, (), features=replace(features, num_speculative_tokens=GUESSES))
    for features in (Features(), EVERYTHING, replace(EVERYTHING, seed=True, filter_order=FILTER_ORDERS[1]))
]


def test_as_one_by_one() -> None:
    rng = np.random.default_rng(1)
    assert sum(check(FACES[0], rng) for _ in range(6)) > 20


@pytest.mark.ci
@pytest.mark.parametrize("face", FACES[1:], ids=["everything", "seed"])
def test_with_all_features(face: Interface) -> None:
    rng = np.random.default_rng(1)
    assert sum(check(face, rng) for _ in range(10)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("face", FACES, ids=["plain", "everything", "seed"])
def test_many_as_one_by_one(face: Interface) -> None:
    rng = np.random.default_rng(2)
    assert sum(check(face, rng) for _ in range(500)) > 1000
