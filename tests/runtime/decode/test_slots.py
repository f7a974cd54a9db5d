"""Slots: rows that start, are filled and stop separately, over memory that is bound once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.contract.tensors import BATCH, RUNNING, STOPPED
from qsample.contract.tensors import CAPACITY as ROW_CAPACITY
from qsample.ort.buffers import Buffer, HostBuffer, copy_on_device
from qsample.ort.rounding import RowCounts
from qsample.runtime import CausalLM, SamplingParams, load
from qsample.runtime.decode import slots as slots_module
from qsample.runtime.decode.prefix_file import PrefixPart
from qsample.runtime.decode.slots import NewestTokens, Slots, Snapshot
from tests.helpers import fake_reference
from tests.helpers.fake_images import ROWS
from tests.helpers.fake_package import POISON
from tests.helpers.requests import make_sequence, random_params, random_prompt
from tests.helpers.sessions import with_step_rows

CAPACITY = 64
FREE = SamplingParams(temperature=0.9, max_new_tokens=20, eos_token_id=())


def begin(
    slots: Slots,
    model: CausalLM,
    slot: int,
    prompt: list[int],
    params: SamplingParams,
    **options: Any,
) -> None:
    """Start a slot with its number as the seed."""
    sequence = make_sequence(model, prompt, params, slot, slots.capacity)
    slots.begin(slot, sequence.request.prompt, slot, sequence.request.parameters, **options)


def feed(slots: Slots, slot: int, prompt: list[int], chunk: int = 100, start: int = 0) -> None:
    for first in range(start, len(prompt), chunk):
        ids = np.array(prompt[first : first + chunk], dtype=np.int64)
        slots.prefill(slot, ids, emit=first + chunk >= len(prompt))


def start(
    slots: Slots, model: CausalLM, slot: int, prompt: list[int], params: SamplingParams
) -> None:
    """Start a slot, and read its whole prompt."""
    begin(slots, model, slot, prompt, params)
    feed(slots, slot, prompt)


def step(slots: Slots, count: int) -> None:
    for _ in range(count):
        slots.decode()


def new_tokens(slots: Slots, slot: int, prompt: list[int]) -> list[int]:
    snapshot = slots.read()
    return snapshot.tokens[slot, len(prompt) : snapshot.lengths[slot] + 1].tolist()


def expected(prompt: list[int], params: SamplingParams, seed: int) -> list[int]:
    return fake_reference.generate(prompt, params, seed, CAPACITY)[0]


@pytest.mark.parametrize("sampler", [True, False])
def test_a_row_that_joins_between_the_steps_of_others(
    sampler: bool, fake_model: Callable[..., CausalLM]
) -> None:
    """One row runs. A second is read a token at a time between the steps. A third replaces the first."""
    model = fake_model(sampler=sampler)
    slots = Slots(model.sessions, 3, CAPACITY)
    prompts = [[5, 6, 7], [9, 200, 31, 4, 5, 6, 7], [77, 78]]
    params = [
        FREE,
        SamplingParams(temperature=0.7, repetition_penalty=1.3, max_new_tokens=20, eos_token_id=()),
        FREE,
    ]
    start(slots, model, 0, prompts[0], params[0])
    begin(slots, model, 1, prompts[1], params[1])
    for index, token in enumerate(prompts[1]):
        slots.decode()
        slots.prefill(1, np.array([token]), emit=index == len(prompts[1]) - 1)
    assert new_tokens(slots, 1, prompts[1]) == expected(prompts[1], params[1], 1)[:1]
    slots.stop(0)
    assert new_tokens(slots, 0, prompts[0]) == expected(prompts[0], params[0], 0)[:8]
    step(slots, 5)
    start(slots, model, 0, prompts[2], params[2])
    step(slots, 30)
    assert new_tokens(slots, 1, prompts[1]) == expected(prompts[1], params[1], 1)
    assert new_tokens(slots, 0, prompts[2]) == expected(prompts[2], params[2], 0)
    assert slots.read().status.tolist() == [2, 2, STOPPED]


@pytest.mark.parametrize("sampler", [True, False])
def test_steps_over_some_rows(sampler: bool, fake_model: Callable[..., CausalLM]) -> None:
    """Random rows run, next to each other or not, and come and go. The other rows do not change."""
    generator = random.Random(7)
    model = fake_model(sampler=sampler)
    slots = Slots(with_step_rows(model.sessions, step=RowCounts(1)), 5, CAPACITY)
    half = [9, 8, 7, 6]
    begin(slots, model, 4, half, FREE)
    slots.prefill(4, np.array(half[:3]), emit=False)
    running: dict[int, tuple[list[int], SamplingParams]] = {}
    seen = set()
    for _ in range(60):
        slot = generator.randrange(4)
        if slot in running and generator.random() < 0.5:
            prompt, params = running.pop(slot)
            tokens = new_tokens(slots, slot, prompt)
            assert tokens == expected(prompt, params, slot)[: len(tokens)]
            slots.stop(slot)
        elif slot not in running:
            prompt, params = random_prompt(generator), random_params(generator)
            start(slots, model, slot, prompt, params)
            running[slot] = prompt, params
        if running:
            rows = range(min(running), max(running) + 1)
            seen.add(rows)
            before = {name: slots._state[name].read() for name in slots._state.inputs()}
            for _ in range(generator.randint(1, 3)):
                slots.decode(rows)
            for name, values in before.items():
                now = slots._state[name].read()
                for row in set(range(5)) - set(rows):
                    assert (name, row, now[row].tobytes()) == (name, row, values[row].tobytes())
    assert {len(rows) for rows in seen} == {1, 2, 3, 4}
    for _ in range(60):
        slots.decode(range(4))
    for slot, (prompt, params) in running.items():
        assert new_tokens(slots, slot, prompt) == expected(prompt, params, slot)
    slots.prefill(4, np.array(half[3:]), emit=True)
    for _ in range(20):
        slots.decode(range(4, 5))
    assert new_tokens(slots, 4, half) == expected(half, FREE, 4)


@pytest.mark.parametrize(
    ("counts", "rows", "step"),
    [
        (RowCounts(), range(2, 4), range(2, 4)),
        (RowCounts(2), range(3, 4), range(3, 5)),
        (RowCounts(2), range(4, 5), range(4, 6)),  # a row without a request
        (RowCounts(3), range(1, 3), range(1, 4)),
        (RowCounts(3), range(4), range(4)),
        (RowCounts(9), range(2, 3), range(6)),
        (RowCounts(2, 2), range(1, 4), range(1, 5)),
        (RowCounts(2, 2), range(4, 5), range(4, 6)),
        (None, range(2, 3), range(6)),
    ],
)
def test_rows_of_a_step(
    counts: RowCounts | None, rows: range, step: range, model: CausalLM
) -> None:
    sessions = with_step_rows(model.sessions, step=counts, batch=RowCounts(1, 2))
    slots = Slots(sessions, 5, CAPACITY)
    start(slots, model, rows[-1], [5, 6, 7], FREE)
    for _ in range(3):
        slots.decode(rows)
        (shape,) = {
            graph._buffers["input_ids"].shape
            for key, (graph,) in slots._bound.items()
            if step in key
        }
        assert shape == (len(step), 1)
    assert new_tokens(slots, rows[-1], [5, 6, 7]) == expected([5, 6, 7], FREE, rows[-1])[:4]


@pytest.mark.parametrize("sampler", [True, False])
def test_rows_that_are_moved(sampler: bool, fake_model: Callable[..., CausalLM]) -> None:
    """Any row is moved anywhere between any two steps. The tokens that its new slot held are continued in
    its old slot."""
    generator = random.Random(9)
    model = fake_model(sampler=sampler, logit_bias=True)
    slots = Slots(with_step_rows(model.sessions, step=RowCounts(1)), 5, CAPACITY)
    assert slots.narrows
    rows: dict[
        int, tuple[int, list[int], SamplingParams, bool]
    ] = {}  # slot → seed, prompt, parameters, whether it runs
    moves = 0
    for turn in range(40):
        slot = generator.randrange(5)
        if slot not in rows or not rows[slot][3] or generator.random() < 0.3:
            if slot in rows and rows[slot][3]:
                slots.stop(slot)
            held = rows[slot][1] if slot in rows else []
            prompt = (
                [*held, *random_prompt(generator, 6)]
                if len(held) < 20
                else random_prompt(generator)
            )
            bias = {generator.randrange(320): -1.0 for _ in range(generator.choice([0, 1, 9]))}
            params = replace(random_params(generator), logit_bias=bias)
            sequence = make_sequence(model, prompt, params, turn, CAPACITY)
            reused = len(held) if prompt[: len(held)] == held else 0
            slots.begin(slot, sequence.request.prompt, turn, sequence.request.parameters, reused)
            feed(slots, slot, prompt, start=reused)
            rows[slot] = turn, prompt, params, True
        idle = [one for one in range(5) if one not in rows or not rows[one][3]]
        source = generator.choice([one for one in rows if rows[one][3]])
        if idle and generator.random() < 0.7:
            target, moves = generator.choice(idle), moves + 1
            slots.move(source, target, len(rows[target][1]) if target in rows else 0)
            mine, other = rows.pop(source), rows.pop(target, None)
            rows |= {target: mine} | ({source: other} if other is not None else {})
        running = [one for one in rows if rows[one][3]]
        for _ in range(generator.randrange(3)):
            slots.decode(range(min(running), max(running) + 1))
        for one in running:
            seed, prompt, params, _ = rows[one]
            tokens = new_tokens(slots, one, prompt)
            assert (
                tokens == fake_reference.generate(prompt, params, seed, CAPACITY)[0][: len(tokens)]
            )
            if generator.random() < 0.3:
                slots.stop(one)
                rows[one] = seed, prompt, params, False
    assert moves > 8


def test_graphs_of_rows_used_longest_ago_are_dropped(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of prompts are dropped, too. Graphs in use stay, however many others there are."""
    monkeypatch.setattr(slots_module, "_MAX_BOUND_GRAPHS", 6)
    slots = Slots(with_step_rows(model.sessions, step=RowCounts(1)), 9, CAPACITY)
    bound: list[range] = []
    bind = slots._bind_batch
    monkeypatch.setattr(slots, "_bind_batch", lambda rows: bound.append(rows) or bind(rows))
    for slot in range(9):
        begin(slots, model, slot, [5, 6, 7], FREE)
        slots.prefill(slot, np.array([5, 6]), emit=False)
        slots.prefill(slot, np.array([7]), emit=True)
        assert len(slots._bound) <= 6
    for stop in range(2, 9):
        slots.decode(range(stop))
        slots.decode(range(1))
        slots.decode(range(1))
        assert len(slots._bound) <= 6
    assert bound.count(range(1)) == 2  # one a side
    assert new_tokens(slots, 0, [5, 6, 7]) == expected([5, 6, 7], FREE, 0)


def test_columns_that_no_row_needs_are_given_up(
    fake_model: Callable[..., CausalLM],
) -> None:
    """A step reads all columns of every row, even if the row that needed them has left long ago."""
    model = fake_model(logit_bias=True)
    slots = Slots(model.sessions, 3, CAPACITY)
    generator = random.Random(3)
    running: dict[int, tuple[list[int], SamplingParams]] = {}
    widths = []
    for turn, stops in enumerate((1, 200, 3, 90, 90, 1, 1, 30, 1, 7, 1, 1)):
        slot = turn % 3
        if slot in running:
            prompt, params = running.pop(slot)
            tokens = new_tokens(slots, slot, prompt)
            assert tokens == expected(prompt, params, slot)[: len(tokens)]
            slots.stop(slot)
        prompt = random_prompt(generator)
        params = SamplingParams(
            temperature=0.9,
            max_new_tokens=20,
            eos_token_id=tuple(range(310 - stops, 310)),
            logit_bias=dict.fromkeys(range(320 - stops, 320), -1.0),
        )
        start(slots, model, slot, prompt, params)
        running[slot] = prompt, params
        buffers = slots._parameters.buffers
        (shape,) = {buffers[name].shape for name in ("stop_ids", "logit_bias_ids", "logit_bias")}
        widths.append(shape[1])
        step(slots, 2)
    assert widths == [1, *[256] * 6, 32, 32, 32, 32, 32]  # few cost nothing
    step(slots, 20)
    for slot, (prompt, params) in running.items():
        assert new_tokens(slots, slot, prompt) == expected(prompt, params, slot)


def test_columns_move_with_their_row(model: CausalLM) -> None:
    """Another row in its old slot does not take them away."""
    slots = Slots(with_step_rows(model.sessions, step=RowCounts(1)), 3, CAPACITY)
    free = expected([5, 6, 7], FREE, 2)
    # It ends at the last of 290 stop tokens, and it does not sample the others first.
    others = [token for token in range(3, 319) if token not in free][:289]
    params = replace(FREE, eos_token_id=(*others, free[9]))
    start(slots, model, 2, [5, 6, 7], params)
    slots.move(2, 1, 0)
    start(slots, model, 2, [9], FREE)
    step(slots, 20)
    assert new_tokens(slots, 1, [5, 6, 7]) == free[: free.index(free[9]) + 1]
    assert new_tokens(slots, 2, [9]) == expected([9], FREE, 2)


@pytest.mark.parametrize("sampler", [True, False])
def test_prompts_read_in_one_run(sampler: bool, fake_model: Callable[..., CausalLM]) -> None:
    """Prompts of different lengths, in slots that hold longer rows and NaN, next to a row that runs and a
    prompt that is half read."""
    generator = random.Random(2)
    model = fake_model(sampler=sampler)
    slots = Slots(model.sessions, 5, CAPACITY)
    running, half = [5, 6, 7], [9, 8, 7, 6]
    start(slots, model, 0, running, FREE)
    begin(slots, model, 4, half, FREE)
    slots.prefill(4, np.array(half[:2]), emit=False)
    for turn, lengths in enumerate(((3, 9, 8), (1, 1, 1), (12, 1, 4))):
        for slot in (1, 2, 3):
            start(slots, model, slot, [8, POISON, *range(20, 50)], random_params(generator))
        slots.decode()
        prompts = [[generator.randrange(3, 290) for _ in range(n)] for n in lengths]
        params = [random_params(generator) for _ in prompts]
        for slot, (prompt, row_params) in enumerate(zip(prompts, params, strict=True), start=1):
            begin(slots, model, slot, prompt, row_params)
        slots.prefill(1, *map(np.array, prompts), emit=True)
        history = slots.read().tokens
        for slot, prompt in enumerate(prompts, start=1):
            assert history[slot, : len(prompt)].tolist() == prompt
            assert (history[slot, len(prompt) + 1 :] == prompt[0]).all()
        step(slots, 24)
        for slot, (prompt, row_params) in enumerate(zip(prompts, params, strict=True), start=1):
            assert new_tokens(slots, slot, prompt) == expected(prompt, row_params, slot), turn
    assert new_tokens(slots, 0, running) == expected(running, FREE, 0)
    slots.prefill(4, np.array(half[2:]), emit=True)
    step(slots, 20)
    assert new_tokens(slots, 4, half) == expected(half, FREE, 4)


@pytest.mark.parametrize("sampler", [True, False])
def test_a_prompt_continues_the_tokens_in_the_cache(
    sampler: bool, fake_model: Callable[..., CausalLM]
) -> None:
    model = fake_model(sampler=sampler)
    slots = Slots(model.sessions, 2, CAPACITY)
    first = [9, 200, 31, 4]
    start(slots, model, 1, first, FREE)
    for _ in range(25):  # the row ends, and idle rows write past their end
        slots.decode()
    whole = [*first, *new_tokens(slots, 1, first)]
    penalised = SamplingParams(
        repetition_penalty=1.4, presence_penalty=0.3, max_new_tokens=15, eos_token_id=()
    )
    for reused in (1, 3, len(whole) - 1):
        for prompt in (whole[: reused + 1], [*whole[:reused], 44, 45, 46]):
            begin(slots, model, 1, prompt, penalised, reused=reused)
            feed(slots, 1, prompt, 2, reused)
            row = slots.read().tokens[1]
            assert row[: len(prompt)].tolist() == prompt
            assert (row[len(prompt) + 1 :] == prompt[0]).all()
            step(slots, 20)
            assert new_tokens(slots, 1, prompt) == expected(prompt, penalised, 1)
            whole_again = [*prompt, *new_tokens(slots, 1, prompt)]
            # Put the longer history back for the next case.
            begin(slots, model, 1, whole, FREE, reused=min(reused, len(whole_again) - 1))
            feed(slots, 1, whole, start=min(reused, len(whole_again) - 1))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("sampler", [True, False])
def test_a_row_continues_from_a_copy(
    sampler: bool,
    on_device: bool,
    fake_model: Callable[..., CausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row that runs, is half read, or has ended is copied to a slot that holds NaN. Both rows then
    continue independently."""
    if on_device:
        monkeypatch.setattr(
            HostBuffer,
            "copy_row",
            lambda self, source, target, _: copy_on_device(self.rows(source), self.rows(target)),
        )
    model = fake_model(sampler=sampler)
    slots = Slots(model.sessions, 3, CAPACITY)
    prompt = [9, 200, 31, 4, 5, 6]
    penalised = SamplingParams(
        repetition_penalty=1.4, presence_penalty=0.3, max_new_tokens=15, eos_token_id=()
    )
    for steps, read, tokens in ((0, 6, 4), (3, 6, 5), (30, 6, 3), (0, 4, 4), (1, 5, 2)):
        start(slots, model, 2, [8, POISON, *range(20, 50)], FREE)
        begin(slots, model, 0, prompt, FREE)
        slots.prefill(0, np.array(prompt[:read]), emit=read == 6)
        step(slots, steps)
        own = [*prompt[:tokens], 44, 45]
        begin(slots, model, 2, own, penalised)
        slots.copy(0, 2, np.array(own[:tokens]))
        row = slots.read().tokens[2]
        assert row.tolist() == own[:tokens] + [own[0]] * (CAPACITY - tokens)
        feed(slots, 2, own, start=tokens)
        if read < 6:
            slots.prefill(0, np.array(prompt[read:]), emit=True)
        step(slots, 20)
        assert new_tokens(slots, 2, own) == expected(own, penalised, 2)
        assert new_tokens(slots, 0, prompt) == expected(prompt, FREE, 0)


def test_one_token_at_the_end_of_the_capacity(model: CausalLM) -> None:
    """It is padded to two, which just fit."""
    slots = Slots(model.sessions, 2, 6)
    params = SamplingParams(temperature=0.9, max_new_tokens=1, eos_token_id=())
    sequence = make_sequence(model, [5, 6, 7, 8, 9], params, 1, 6)
    slots.begin(1, sequence.request.prompt, 1, sequence.request.parameters)
    slots.prefill(1, sequence.request.prompt[:4], emit=False)
    slots.prefill(1, sequence.request.prompt[4:], emit=True)
    snapshot = slots.read()
    wanted = fake_reference.generate([5, 6, 7, 8, 9], params, 1, 6)[0]
    assert (snapshot.tokens[1].tolist(), snapshot.lengths[1]) == ([5, 6, 7, 8, 9, *wanted], 5)


def test_a_slot_forgets_its_last_row(model: CausalLM) -> None:
    """A slot that held NaN, other penalties, stop ids and a longer history changes no token of the next
    row."""
    generator = random.Random(1)
    slots = Slots(model.sessions, 2, CAPACITY)
    for _ in range(12):
        start(slots, model, 1, [5, POISON, *range(10, 20)], random_params(generator))
        slots.decode()
        prompt, params = random_prompt(generator), random_params(generator)
        begin(slots, model, 1, prompt, params)
        feed(slots, 1, prompt, 3)
        step(slots, params.max_new_tokens or 0)
        assert new_tokens(slots, 1, prompt) == expected(prompt, params, 1)


@pytest.mark.parametrize("sampler", [True, False])
@pytest.mark.parametrize("wide", ["stops", "biases"])
def test_a_row_that_runs_keeps_its_stop_ids_and_biases_when_another_brings_more(
    wide: str, sampler: bool, fake_model: Callable[..., CausalLM]
) -> None:
    """Both decide what the running rows sample after that."""
    model = fake_model(logit_bias=True, sampler=sampler)
    slots = Slots(model.sessions, 4, CAPACITY)
    prompt = [5, 6, 7]
    free = expected(prompt, FREE, 0)
    stop = next(n for n in range(5, 20) if free[n] not in free[:n])  # the first time that it comes
    rows = [
        SamplingParams(temperature=0.9, max_new_tokens=20, eos_token_id=(free[stop],)),
        SamplingParams(temperature=0, max_new_tokens=8, eos_token_id=(), logit_bias={20: 1e4}),
        # Its stop id is the token that it would always sample, but must not.
        SamplingParams(
            temperature=0,
            min_new_tokens=6,
            max_new_tokens=8,
            eos_token_id=(30,),
            logit_bias={30: 1e4},
        ),
    ]
    brings_more = {
        "stops": SamplingParams(temperature=0.9, max_new_tokens=9, eos_token_id=range(200, 219)),
        "biases": SamplingParams(
            temperature=0.9, max_new_tokens=9, logit_bias=dict.fromkeys(range(60, 67), 3.0)
        ),
    }[wide]
    for slot, params in enumerate(rows):
        start(slots, model, slot, prompt, params)
    slots.decode()
    before = {
        name: slots._parameters.buffers[name].read()[:3]
        for name in ("stop_ids", "logit_bias_ids", "logit_bias")
    }
    begin(slots, model, 3, [8, 9], brings_more)
    for name, values in before.items():
        now = slots._parameters.buffers[name].read()[:3]
        assert (now[:, : values.shape[1]] == values).all(), name
        assert (now[:, values.shape[1] :] == slots._parameters._specs[name].off).all(), name
    feed(slots, 3, [8, 9])
    step(slots, 20)
    assert new_tokens(slots, 0, prompt) == free[: stop + 1]
    assert new_tokens(slots, 1, prompt) == [20] * 8
    held_back = new_tokens(slots, 2, prompt)
    assert held_back == expected(prompt, rows[2], 2)
    assert (30 in held_back[:6], held_back[6:]) == (False, [30])
    assert new_tokens(slots, 3, [8, 9]) == expected([8, 9], brings_more, 3)


@pytest.mark.parametrize("sampler", [True, False])
def test_nothing_is_bound_again_after_the_first_steps(
    sampler: bool, fake_model: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fake_model(sampler=sampler)
    slots = Slots(model.sessions, 2, CAPACITY)
    for slot, prompt in enumerate(([5, 6, 7], [8, 9, 10])):
        start(slots, model, slot, prompt, FREE)
    slots.decode(), slots.decode()
    for way in ("allocate", "of"):
        monkeypatch.setattr(Buffer, way, lambda *_: pytest.fail("allocated again"))
    monkeypatch.setattr(Buffer, "bind_input", lambda *_: pytest.fail("bound again"))
    for _ in range(6):
        slots.decode()
        slots.read()


def test_requests_that_come_and_go_allocate_nothing(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = Slots(model.sessions, 2, CAPACITY)

    def one(prompt: list[int]) -> None:
        begin(slots, model, 1, prompt, FREE)
        feed(slots, 1, prompt, 2)
        slots.decode()
        slots.stop(1)

    one([5, 6, 7]), one([5, 6, 7])
    for way in ("allocate", "of"):
        monkeypatch.setattr(Buffer, way, lambda *_: pytest.fail("allocated again"))
    for _ in range(5):
        one([9, 10, 11, 12, 13])


def test_retained_tokens_are_the_whole_history(model: CausalLM) -> None:
    slots = Slots(model.sessions, 2, CAPACITY)
    prompts = [[5, 6, 7], [8, 9, 10]]
    for slot, prompt in enumerate(prompts):
        start(slots, model, slot, prompt, FREE)
    step(slots, 25)
    snapshot = slots.read()
    for slot, prompt in enumerate(prompts):
        assert snapshot.tokens[slot, :23].tolist() == [*prompt, *expected(prompt, FREE, slot)]
        assert (snapshot.tokens[slot, 23:] == prompt[0]).all()
    assert snapshot.lengths.tolist() == [22, 22]
    assert slots._state["output_counts"].read().sum(axis=1).tolist() == [20, 20]


def test_a_row_that_ended_stays_as_it_was(model: CausalLM) -> None:
    slots = Slots(model.sessions, 2, CAPACITY)
    for slot, (prompt, count) in enumerate((([5, 6, 7], 2), ([8, 9, 10], 9))):
        start(
            slots,
            model,
            slot,
            prompt,
            SamplingParams(temperature=0, max_new_tokens=count, eos_token_id=()),
        )
    slots.decode()
    names = ("lengths", "status", "tokens", "output_counts")
    ended = {name: slots._state[name].read()[0] for name in names}
    for _ in range(5):
        slots.decode()
        assert slots.read().status.tolist() == [2, RUNNING]
    for name, value in ended.items():
        assert (slots._state[name].read()[0] == value).all(), name


def test_the_newest_tokens_of_a_snapshot() -> None:
    status, lengths, tokens = np.zeros(2), np.array([5, 2]), np.arange(20).reshape(2, 10)
    whole = Snapshot(status, lengths, tokens)
    assert [whole.tokens_from(0, position) for position in (3, 5, 6, 9)] == [[3, 4, 5], [5], [], []]
    assert whole.tokens_from(1, 0) == [10, 11, 12]
    newest = Snapshot(status, lengths, tokens[:, 4:7], 3)
    assert [newest.tokens_from(0, position) for position in (3, 5, 6)] == [[4, 5, 6], [6], []]
    with pytest.raises(IndexError, match="from position 2 on are 4, and 3 were read"):
        newest.tokens_from(0, 2)


def test_the_newest_tokens_are_gathered_for_each_row(model: CausalLM) -> None:
    slots = Slots(model.sessions, 2, CAPACITY)
    for slot, prompt in enumerate(([5, 6, 7], [8, 9, 10, 11, 12])):
        start(slots, model, slot, prompt, FREE)
    slots.decode()
    whole = slots.read(newest=2)
    assert (whole.newest, whole.tokens.shape) == (None, (2, CAPACITY)), (
        "they are in the host's memory anyway"
    )
    gather = NewestTokens(2, "cpu")
    for count in (3, 2, 3):
        found = gather.read(slots._state.inputs(), count)
        rows = zip(whole.tokens.tolist(), whole.lengths, strict=True)
        assert found.tolist() == [row[length + 1 - count : length + 1] for row, length in rows]


@pytest.mark.slow
def test_states_that_are_unloaded_are_loaded_elsewhere(exported: Callable[..., Path]) -> None:
    model = load(exported("qwen3_5_text", logprobs=True), ctx_len=CAPACITY)
    slots = Slots(model.sessions, 2, CAPACITY, saved_states=1)
    prompt = [*range(20, 40)]
    start(slots, model, 0, prompt, FREE)
    states = slots.unload(0, 0, 20)
    sizes = {
        spec.name: spec.shape({BATCH: 1, ROW_CAPACITY: 20})[1:]
        for spec in model.interface.cache_states
    }
    assert {name: array.shape for name, array in states.items()} == sizes
    slots.saved.save(0, 0)
    slots.decode()
    newer, saved = slots.unload(0, 0, 20), slots.unload(0, 0, 20, place=0)
    recurrent = {spec.name for spec in model.interface.recurrent}
    assert recurrent
    for name, values in states.items():
        np.testing.assert_array_equal(saved[name], values)
        assert (newer[name].tobytes() == values.tobytes()) == (name not in recurrent)
    first = {
        name: values if name not in recurrent else values * 0
        for name, values in slots.unload(0, 0, 16).items()
    }
    last = PrefixPart(12, 20, slots.unload(0, 12, 24, place=0))
    slots.load(1, [last, PrefixPart(0, 12, first)])
    for name, values in slots.unload(1, 0, 20).items():
        np.testing.assert_array_equal(values, states[name])


@pytest.mark.parametrize("options", [{}, {"image": ROWS}], ids=["text", "images"])
def test_states_that_are_unloaded_do_not_change_with_the_slot(
    options: dict[str, Any], fake_model: Callable[..., CausalLM]
) -> None:
    """They are copies: a file of a prefix is written after its slot has got another prompt."""
    model = fake_model(**options)
    slots = Slots(model.sessions, 2, CAPACITY)
    first, second = [*range(20, 30)], [*range(60, 75)]
    start(slots, model, 0, first, FREE)
    for begin_at, end in ((0, 10), (3, 7)):
        states = slots.unload(0, begin_at, end)
        kept = {name: values.copy() for name, values in states.items()}
        start(slots, model, 0, second, FREE)
        step(slots, 3)
        for name, values in states.items():
            np.testing.assert_array_equal(values, kept[name])
            assert not np.array_equal(slots.unload(0, begin_at, end)[name], values)
        start(slots, model, 0, first, FREE)


@pytest.mark.slow
def test_recurrent_states_that_are_unloaded_do_not_change_with_the_slot(
    exported: Callable[..., Path],
) -> None:
    model = load(exported("lfm2", include_sampler=False), ctx_len=CAPACITY)
    slots = Slots(model.sessions, 2, CAPACITY, saved_states=1)
    start(slots, model, 0, [*range(20, 30)], FREE)
    slots.saved.save(0, 0)
    states, saved = slots.unload(0, 0, 10), slots.unload(0, 0, 10, place=0)
    kept = {name: values.copy() for name, values in states.items()}
    start(slots, model, 0, [*range(60, 75)], FREE)
    slots.saved.save(0, 0)
    for name in kept:
        np.testing.assert_array_equal(states[name], kept[name])
        np.testing.assert_array_equal(saved[name], kept[name])
        assert not np.array_equal(slots.unload(0, 0, 10)[name], kept[name])


def test_without_guesses_the_other_parameters_count(fake_model: Callable[..., CausalLM]) -> None:
    """Where a processor rounds several tokens otherwise than one, guesses are left out."""
    able = fake_model(num_speculative_tokens=4)
    unable = CausalLM(able.package, replace(able.sessions, guesses=False))
    params = SamplingParams(
        temperature=3.0, max_new_tokens=8, eos_token_id=(), prompt_lookup_num_tokens=4
    )
    wanted = fake_model().generate([5, 6], replace(params, prompt_lookup_num_tokens=0), seed=1)
    greedy = unable.generate([5, 6], replace(params, temperature=0.0), seed=1)
    for model in (able, unable):
        assert model.generate([5, 6], params, seed=1).token_ids == wanted.token_ids
    assert greedy.token_ids != wanted.token_ids
