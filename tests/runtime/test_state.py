"""Buffers, row views, and the two ways to keep state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsample.contract import BATCH, CAPACITY, LENGTHS, NOISE, SAMPLER_STATES, STALLED, TOKENS, TensorSpec
from qsample.errors import QsampleError
from qsample.runtime import CausalLM
from qsample.runtime.decode_loop import DecodeLoop
from qsample.runtime.inputs import parameter_arrays
from qsample.runtime.state import Buffer, RetainedState
from qsample.sampling_params import SamplingParams
from tests.runtime.fake_package import fake_interface

SIZES = fake_interface().sizes | {BATCH: 3, CAPACITY: 12}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int64", "bool"])
def test_every_dtype_of_the_contract_has_memory(dtype: str) -> None:
    buffer = Buffer.allocate(TensorSpec("x", dtype, (BATCH, CAPACITY), ""), SIZES, "cpu")
    assert (buffer.shape, buffer.dtype, buffer.address) == ((3, 12), dtype, buffer.owner.data_ptr())
    width = {"float16": 2, "bfloat16": 2, "int64": 8, "bool": 1}.get(dtype, 4)
    assert buffer.owner.tensor_size_in_bytes() == 36 * width
    assert [buffer.row(i).address - buffer.address for i in range(3)] == [0, 12 * width, 24 * width]
    assert buffer.row(2).shape == (1, 12)


def test_of_copies() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    buffer = Buffer.of(array, "cpu")
    array[:] = 0
    assert buffer.read().tolist() == [[0, 1, 2], [3, 4, 5]]


def state(model: CausalLM, *, in_place: bool) -> RetainedState:
    specs = dict.fromkeys((*SAMPLER_STATES, *model.interface.cache_states), "cpu")
    made = RetainedState(specs, SIZES, in_place=in_place)
    made.start(model.sessions.initial_state, [4, 5, 6], 12)
    return made


def test_the_starting_state(model: CausalLM) -> None:
    made = state(model, in_place=True)
    for spec in (*SAMPLER_STATES, *model.interface.cache_states):
        value = made.read(spec.name)
        assert value.shape == spec.shape(SIZES)
        assert (value == 0).all() == (spec is not NOISE)
    assert len(np.unique(made.read("noise"))) > 30


def test_in_place_is_one_set_of_buffers_and_otherwise_two(model: CausalLM) -> None:
    for in_place in (True, False):
        made = state(model, in_place=in_place)
        same = [made.inputs()[LENGTHS.name].address == made.outputs()["lengths_RetainedState"].address]
        same.append(made.inputs()[TOKENS.name].address == made.outputs()["tokens_RetainedState"].address)
        assert same == [in_place, in_place]
        assert "noise_RetainedState" not in made.outputs()
        before = made.inputs()[LENGTHS.name].address
        written = made.outputs()["lengths_RetainedState"].address
        made.flip()
        assert made.inputs()[LENGTHS.name].address == written
        made.flip()
        assert made.inputs()[LENGTHS.name].address == before


def test_a_row_is_written_where_it_is_read(model: CausalLM) -> None:
    made = state(model, in_place=False)
    assert made.inputs(1)["past_key_values.0.key"].address == made.outputs(1)["present.0.key"].address


# The loop underneath generate().


def loop(model: CausalLM, rows: int, **options: Any) -> DecodeLoop:
    params = [SamplingParams(temperature=0.9, max_new_tokens=20, eos_token_id=())] * rows
    arrays = parameter_arrays(model.interface, params, [3] * rows, 64, ())
    return DecodeLoop(model.sessions, arrays, list(range(rows)), 64, **options)


@pytest.mark.parametrize("sampler", [True, False])
def test_nothing_is_bound_again_after_the_first_steps(
    sampler: bool, fake_model: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    for in_place in (True, False):
        made = loop(fake_model(sampler=sampler), 2, in_place=in_place)
        made.prefill([np.array([5, 6, 7]), np.array([8, 9, 10])])
        made.decode(), made.decode()
        with monkeypatch.context() as patch:
            patch.setattr(Buffer, "bind_input", lambda *_: pytest.fail("bound again"))
            patch.setattr(Buffer, "allocate", lambda *_: pytest.fail("allocated again"))
            patch.setattr(Buffer, "of", lambda *_: pytest.fail("allocated again"))
            for _ in range(6):
                made.decode()


def test_retained_tokens_are_the_whole_history(model: CausalLM) -> None:
    made = loop(model, 2)
    prompts = [np.array([5, 6, 7]), np.array([8, 9, 10])]
    steps = list(made.run(prompts))
    tokens = made._state.read("tokens")
    for row, prompt in enumerate(prompts):
        new = [int(step.tokens[row]) for step in steps]
        assert tokens[row, :23].tolist() == [*prompt, *new]
        assert (tokens[row, 23:] == prompt[0]).all()
    assert made._state.read("lengths").tolist() == [22, 22]
    counts = made._state.read("output_counts")
    assert counts.sum(axis=1).tolist() == [20, 20]


def test_a_row_that_ended_stays_as_it_was(model: CausalLM) -> None:
    params = [SamplingParams(temperature=0, max_new_tokens=n, eos_token_id=()) for n in (2, 9)]
    arrays = parameter_arrays(model.interface, params, [3, 3], 64, ())
    made = DecodeLoop(model.sessions, arrays, [0, 1], 64)
    made.prefill([np.array([5, 6, 7]), np.array([8, 9, 10])])
    made.decode()
    ended = {name: made._state.read(name)[0] for name in ("lengths", "status", "tokens", "output_counts")}
    for _ in range(5):
        assert made.decode().emitted.tolist() == [False, True]
    for name, value in ended.items():
        assert (made._state.read(name)[0] == value).all(), name


def test_a_graph_that_never_ends_its_rows_is_an_error(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made = loop(model, 1)
    monkeypatch.setattr(made._state, "read", lambda name: np.zeros(1, dtype=np.int32))
    with pytest.raises(QsampleError, match="rows still run after 64 steps"):
        list(made.run([np.array([5, 6, 7])]))


def test_a_stalled_row_says_what_to_do(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made = loop(model, 1)
    monkeypatch.setattr(made._state, "read", lambda name: np.array([STALLED], dtype=np.int32))
    with pytest.raises(QsampleError, match="use a portable package"):
        made.prefill([np.array([5, 6, 7])])
