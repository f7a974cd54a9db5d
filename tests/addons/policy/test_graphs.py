"""The components of ONNX workflows, from the text of their contracts; the sampler against the float64 reference."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.addons.policy.graphs import build_state_update, build_termination, build_token_sampler
from qsample.contract.arrays import Array
from tests.helpers.reference import philox_uniform, pick
from tests.helpers.reference_filters import distribution
from tests.helpers.sampler_cases import opened

OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "counter": 0,
    "active": True,
    "done": False,
}
DTYPES = {
    "temperature": "float32",
    "top_p": "float32",
    "min_p": "float32",
    "active": "bool",
    "done": "bool",
}


@functools.cache
def sampler(vocab: int, **options: bool) -> ort.InferenceSession:
    return opened(build_token_sampler(vocab, **options))


def sample(
    logits: Array, *, positions: bool = False, control_flow: bool = True, **given: Any
) -> tuple[Array, Array]:
    """Tokens and counters; a value that is not given is off."""
    session = sampler(logits.shape[-1], positions=positions, control_flow=control_flow)
    rows = {
        name: np.broadcast_to(
            np.asarray(given.pop(name, value), DTYPES.get(name, "int64")), logits.shape[:1]
        ).copy()
        for name, value in OFF.items()
    }
    assert not given
    token, counter = session.run(
        ["token", "next_counter"], {"logits": logits.astype(np.float32), **rows}
    )
    return token, counter


def random_rows(rng: np.random.Generator, vocab: int, batch: int) -> tuple[Array, dict[str, Array]]:
    logits = rng.normal(size=(batch, vocab)) * rng.choice([0.01, 1, 5, 30], (batch, 1))
    logits[rng.random(logits.shape) < rng.choice([0, 0.3, 0.99])] = -np.inf
    logits[:, rng.integers(vocab)] = np.where(np.isfinite(logits).any(1), logits[:, 0], 1.0)
    logits[~np.isfinite(logits).any(1), 0] = 0.0
    given = {
        "temperature": rng.choice([0, 0.7, 1, 3], batch).astype(np.float32),
        "top_k": rng.choice([0, 1, 5, 64, 65, vocab + 9, 2**40], batch),
        "top_p": rng.choice([1, 0.95, 0.3], batch).astype(np.float32),
        "min_p": rng.choice([0, 0.05, 0.9], batch).astype(np.float32),
        "seed": rng.integers(-(2**63), 2**63 - 1, batch),
        "counter": rng.choice([0, 1, 7, 4095, 2**31 - 1], batch),
    }
    return logits.astype(np.float32), given


@pytest.mark.parametrize("control_flow", [True, False])
@pytest.mark.parametrize("vocab", [3, 200, 1000])
def test_tokens_are_those_of_the_reference(vocab: int, control_flow: bool) -> None:
    rng, near = np.random.default_rng(vocab), 0
    for _ in range(12):
        logits, given = random_rows(rng, vocab, 5)
        tokens, counters = sample(logits, control_flow=control_flow, **given)
        np.testing.assert_array_equal(counters, given["counter"] + 1)
        for row in range(5):
            own: dict[str, Any] = {name: values[row] for name, values in given.items()}
            if own["temperature"] == 0 or own["top_k"] == 1:
                assert tokens[row] == np.argmax(logits[row]), "the first of the largest"
                continue
            own["top_k"] = min(own["top_k"], vocab)
            probs = distribution(logits[row], own)
            expected, margin = pick(
                probs, logits[row], own, philox_uniform(int(own["seed"]), int(own["counter"]))
            )
            assert probs[tokens[row]] > 0
            if tokens[row] != expected:
                assert margin < 1e-5
                near += 1
    assert near <= 1


def test_rows_that_are_not_enabled_keep_their_counter() -> None:
    logits = np.random.default_rng(0).normal(size=(4, 50))
    active, done = [True, False, True, False], [False, False, True, True]
    tokens, counters = sample(logits, counter=[9, 9, 9, 9], seed=5, active=active, done=done)
    alone, _ = sample(logits[:1], counter=9, seed=5)
    assert tokens.tolist() == [alone[0], -1, -1, -1]
    assert counters.tolist() == [10, 9, 9, 9]


def test_counters_of_any_size_have_numbers_of_their_own() -> None:
    """With equal logits, the token is the number times the vocabulary."""
    counters = [0, 2**31, 2**31 + 1, 2**40 + 3, 2**62]
    logits = np.zeros((len(counters), 4096))
    tokens, after = sample(logits, seed=7, counter=counters)
    assert len(set(tokens.tolist())) == len(counters)
    assert after.tolist() == [counter + 1 for counter in counters]
    assert tokens[0] == int(philox_uniform(7, 0) * 4096)
    extremes, _ = sample(logits[:2], seed=[2**63 - 1, -(2**63)], counter=[2**63 - 2, 2**62])
    assert ((extremes >= 0) & (extremes < 4096)).all()


def test_invalid_logits_give_no_token() -> None:
    logits = np.zeros((4, 20))
    logits[0, 3], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    tokens, counters = sample(logits, temperature=[1, 0, 1, 0])
    assert tokens.tolist() == [-1, -1, -1, 0]
    assert counters.tolist() == [1, 1, 1, 1]


def test_a_masked_token_is_never_drawn() -> None:
    """Under a wide distribution whose float32 sum falls short of 1, at every edge of the random numbers."""
    vocab = 50_000
    weights = np.arange(1, vocab + 1, dtype=np.float64) ** -1.5
    logits = np.log(np.random.default_rng(1).permutation(weights))
    logits[[0, 7, vocab - 1]] = -np.inf
    tokens = np.concatenate(
        [sample(np.tile(logits, (50, 1)), seed=range(s, s + 50))[0] for s in range(0, 1000, 50)]
    )
    assert np.isfinite(logits[tokens]).all()


def test_the_last_position_counts() -> None:
    logits = np.random.default_rng(2).normal(size=(3, 4, 60))
    whole, _ = sample(logits, positions=True, seed=[1, 2, 3], counter=4)
    last, _ = sample(logits[:, -1], seed=[1, 2, 3], counter=4)
    np.testing.assert_array_equal(whole, last)


def test_the_first_axis_is_called_batch_and_no_other_tensor_is_there() -> None:
    for model in (build_token_sampler(30), build_termination(), build_state_update()):
        for value in (*model.graph.inputs, *model.graph.outputs):
            if value.name not in ("iteration", "continue"):
                assert value.shape is not None
                assert str(value.shape[0]) == "batch", value.name
    names = [value.name for value in build_token_sampler(30).graph.inputs]
    assert names == ["logits", *OFF]
    captured = build_token_sampler(30, control_flow=False)
    assert not {node.op_type for node in captured.graph.all_nodes()} & {"If", "Loop"}


def run(model: ir.Model, **inputs: Any) -> list[Array]:
    session = opened(model)
    return list(session.run(None, {name: np.asarray(value) for name, value in inputs.items()}))


def test_termination() -> None:
    done, active, going = run(
        build_termination(),
        tokens=[5, 6, 7, 8, 5, 9],
        eos_ids=[[5, 1], [1, 6], [7, 7], [1, 1], [5, 5], [9, 1]],
        eos_lengths=[1, 1, 0, 2, 2, 2],
        iteration=[3],
        max_iterations=[9, 9, 9, 4, 9, 9],
        active=[True, True, True, True, False, True],
    )
    assert active.tolist() == [False, True, True, False, False, False], (
        "beyond eos_lengths nothing ends a row"
    )
    assert done.tolist() == [not value for value in active]
    assert going.tolist() == [True]
    empty = {
        "eos_ids": np.zeros((1, 0), np.int64),
        "eos_lengths": [0],
        "iteration": [0],
        "max_iterations": [1],
    }
    assert [
        value.tolist() for value in run(build_termination(), tokens=[1], active=[True], **empty)
    ] == [
        [True],
        [False],
        [False],
    ]


def test_state_update() -> None:
    (after,) = run(
        build_state_update(), current=[[1], [2], [3]], update=[[4], [5], [6]], active=[True, False, True],
        done=[False, False, True],
    )  # fmt: skip
    assert after.tolist() == [[4], [2], [3]]
