"""What a step commits: lengths, status, tokens and counts; rows that wait, finish, stall or have invalid logits."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from qsample.contract import INVALID_LOGITS, LENGTH, RUNNING, STALLED, STOPPED
from tests.helpers.reference import reference_step
from tests.helpers.sampler_cases import PAD, eager, exported, interface, make_inputs, session

FACE = interface(320)  # that of tests/helpers/tiny_models.py: one trace serves all
LOGITS = np.arange(320, dtype=np.float32)[None]  # greedy: 319


def step(**values: object) -> dict[str, np.ndarray]:
    return eager(FACE)(LOGITS, make_inputs(FACE, temperature=0, **values))


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({}, RUNNING),
        ({"stop_ids": 319}, STOPPED),
        ({"max_length": 2}, LENGTH),
        ({"max_length": 3}, RUNNING),
        ({"stop_ids": 319, "max_length": 2}, STOPPED),  # a stop id takes precedence
        ({"lengths": 14}, LENGTH),  # 15 tokens and the sampled one fill a capacity of 16
        ({"lengths": 13}, RUNNING),
        ({"status": STALLED}, RUNNING),  # a stalled row runs in a graph with control flow
    ],
)
def test_status(values: dict[str, int], status: int) -> None:
    assert step(**values)["status_RetainedState"][0] == status


@pytest.mark.parametrize("status", [STOPPED, LENGTH, INVALID_LOGITS])
def test_finished_row_commits_nothing(status: int) -> None:
    inputs = make_inputs(FACE, temperature=0, status=status, lengths=3, tokens=[[5, 6, 7] + [5] * 13], input_ids=9)
    result = eager(FACE)(LOGITS, inputs)
    assert result["next_ids"][0, 0] == PAD
    for name in ("lengths", "status", "tokens", "output_counts"):
        np.testing.assert_array_equal(result[f"{name}_RetainedState"], inputs[name])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 7, 319])
def test_invalid_logits_commit_nothing(value: float, index: int) -> None:
    logits = LOGITS.copy()
    logits[0, index] = value
    if value == -np.inf:
        logits[:] = value
    inputs = make_inputs(FACE, lengths=3, tokens=[[5, 6, 7] + [5] * 13], input_ids=9)
    result = eager(FACE)(logits, inputs)
    assert result["next_ids"][0, 0] == PAD
    assert result["status_RetainedState"][0] == INVALID_LOGITS
    for name in ("lengths", "tokens", "output_counts"):
        np.testing.assert_array_equal(result[f"{name}_RetainedState"], inputs[name])


def test_u_is_that_of_the_position() -> None:
    """A row of 3 tokens that gets 2 more draws with noise[5]."""
    noise = np.full((1, 16), 0.1)
    noise[0, 5] = 0.9
    face = interface(4)
    inputs = make_inputs(face, sequence=2, lengths=3, noise=noise)
    assert eager(face)(np.zeros((1, 4), np.float32), inputs)["next_ids"][0, 0] == 3


def test_chunks_and_batch_do_not_change_the_tokens() -> None:
    """A prompt at once, in chunks, alone or beside others: the same token, decided by its position's u."""
    rng = np.random.default_rng(0)
    logits, noise = rng.normal(size=(1, 320)).astype(np.float32), rng.random((1, 16))
    prompt = [[3, 1, 4, 1, 5, 9]]
    whole = eager(FACE)(logits, make_inputs(FACE, sequence=6, input_ids=prompt, noise=noise, repetition_penalty=1.5))
    state = make_inputs(FACE, noise=noise)
    for begin, end in ((0, 2), (2, 5), (5, 6)):
        call = make_inputs(
            FACE,
            sequence=end - begin,
            input_ids=[prompt[0][begin:end]],
            emit=end == 6,
            repetition_penalty=1.5,
            **{name: state[name] for name in ("lengths", "status", "tokens", "output_counts", "noise")},
        )
        result = eager(FACE)(logits, call)
        state |= {name: result[f"{name}_RetainedState"] for name in ("lengths", "status", "tokens", "output_counts")}
    np.testing.assert_array_equal(result["next_ids"], whole["next_ids"])
    np.testing.assert_array_equal(state["tokens"], whole["tokens_RetainedState"])

    crowd = {name: np.repeat(array, 3, 0) for name, array in call.items()}
    crowd["temperature"][:] = [0, 1, 1]
    crowd["top_p"][:] = [1, 1, 0.5]
    beside = eager(FACE)(np.concatenate([logits + 1, logits, -logits]), crowd)
    assert beside["next_ids"][1] == whole["next_ids"][0]


def run(step_: object, logits: np.ndarray, state: dict[str, np.ndarray], steps: int) -> list[np.ndarray]:
    """`steps` steps from a two-token prompt with separate buffers; every step's next_ids and states."""
    outcomes = []
    for t in range(steps):
        result = step_(logits[t], state)  # type: ignore[operator]
        outcomes.append(result)
        state = state | {n: result[f"{n}_RetainedState"] for n in ("lengths", "status", "tokens", "output_counts")}
        state = state | {"input_ids": result["next_ids"], "input_lengths": np.ones_like(state["input_lengths"])}
    return outcomes


def test_states_bound_in_place() -> None:
    """Same buffer in and out, over a whole run with rows that stop, against separate buffers and the reference."""

    rng = np.random.default_rng(1)
    batch, steps, capacity = 5, 20, 24
    logits = (rng.normal(size=(steps, batch, 320)) * 3).astype(np.float32)
    initial = make_inputs(
        FACE,
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
        stop_ids=np.where(np.arange(batch)[:, None] == 2, -1, np.arange(0, 300, 4)),  # row 2 reaches its max_length
    )
    separate = run(exported(FACE), logits, initial, steps)
    reference = run(lambda l, s: reference_step(l, s, pad_token_id=PAD), logits, initial, steps)
    for got, expected in zip(separate, reference, strict=True):
        for name in got.keys() - {"adjusted_logits"}:
            np.testing.assert_array_equal(got[name], expected[name], err_msg=name)
        sampled = ~np.isnan(expected["adjusted_logits"]).any(-1)
        np.testing.assert_allclose(got["adjusted_logits"][sampled], expected["adjusted_logits"][sampled], rtol=1e-6)

    runner = session(FACE)
    names = ("lengths", "status", "tokens", "output_counts")
    states = {name: ort.OrtValue.ortvalue_from_numpy(initial[name].copy()) for name in names}
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
        for name in names:
            np.testing.assert_array_equal(states[name].numpy(), separate[t][f"{name}_RetainedState"], err_msg=name)
        np.testing.assert_array_equal(scores.numpy(), separate[t]["adjusted_logits"])
    assert set(states["status"].numpy()) >= {STOPPED, LENGTH}
