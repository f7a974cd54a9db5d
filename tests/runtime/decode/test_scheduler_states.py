"""The scheduler with saved recurrent states and stored prefixes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface, KeyValueShape, RecurrentShape
from qsample.ort.batching import PromptCalls, StepRows
from qsample.ort.rounding import RowCounts
from qsample.runtime.decode.jobs import Admission, Copy, Read, Save
from qsample.runtime.decode.prefixes import Pieces
from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
from tests.runtime.decode.test_scheduler import add_and_admit, read_of, request


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def make_scheduler(slots: int, places: int = 8, **options: Any) -> Scheduler:
    chosen = {"interleave": False, "prefill_chunk_size": 4, "saved_states": places, **options}
    return Scheduler(slots, SchedulerConfig(Pieces(4), recurrent=True, **chosen))


def read_and_end(scheduler: Scheduler, *, answer: tuple[int, ...] = (7,)) -> list[Save]:
    """Read the prompts that are in slots, end the sequences, and return the saves."""
    saves: list[Save] = []
    while scheduler.prefilling:
        job = scheduler.next_job()
        assert isinstance(job, Read)
        saves += job.saves
    for sequence in scheduler.in_slots:
        sequence.progress.sampled = [*answer]
        scheduler.leave(sequence)
    return saves


def saved_lengths(saves: list[Save]) -> list[int]:
    return [save.tokens for save in saves]


@pytest.mark.parametrize(
    ("length", "saved"),
    [(3, []), (4, [4]), (5, [4]), (8, [4, 8]), (9, [8]), (11, [8]), (12, [8, 12]), (13, [12])],
)
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": None}, {"join_prompts": True}])
def test_states_are_saved_where_a_prompt_s_whole_pieces_end(
    length: int, saved: list[int], options: dict[str, Any]
) -> None:
    scheduler = make_scheduler(1, **options)
    add_and_admit(scheduler, [*range(length)])
    assert saved_lengths(read_and_end(scheduler)) == saved


def test_prompts_that_are_read_together_are_saved_each() -> None:
    scheduler = make_scheduler(3, prefill_chunk_size=12, join_prompts=True)
    first, second, third = add_and_admit(scheduler, [1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4])
    assert scheduler.next_job() == Read(
        (first, second, third), (range(4),) * 3, (), (Save(0, 4, 0), Save(1, 4, 1))
    )


@pytest.mark.parametrize(("answer", "reused"), [(3, 8), (4, 0)])
def test_a_row_that_has_all_its_tokens_goes_back_to_any_piece(answer: int, reused: int) -> None:
    """A row with caches of a window does so until the caches have forgotten a token, also for a sampled
    one."""
    scheduler = make_scheduler(2, places=0, whole_up_to=12, step_rows=RowCounts(2))
    add_and_admit(scheduler, [*range(9)])
    read_and_end(scheduler)
    scheduler.add(again := request([*range(9), 5]))
    assert scheduler.admit()[0].sequence.placement.tokens_reused == 8
    again.progress.sampled, again.placement.tokens_issued = [7], answer - 1  # steps that were begun
    scheduler.leave(again)
    scheduler.add(other := request([*range(8), 6, 6]))
    scheduler.admit()
    assert other.placement.tokens_reused == reused


def test_the_next_turn_continues_the_last() -> None:
    scheduler = make_scheduler(2)
    add_and_admit(scheduler, [*range(10)])
    assert read_and_end(scheduler) == [Save(0, 8, 0)]
    turn = request([*range(10), 7, 5, 5, 5])
    scheduler.add(turn)
    assert scheduler.admit()[0].copy == Copy(turn, 0, 8, 0)
    assert (turn.placement.slot, turn.placement.tokens_reused, turn.placement.tokens_read) == (
        0,
        8,
        8,
    )
    assert scheduler.next_job() == read_of(turn, (range(8, 12),), (), (Save(0, 12, 1),))


def test_states_are_saved_where_a_prompt_leaves_another() -> None:
    scheduler = make_scheduler(3)
    add_and_admit(scheduler, [*range(18)])
    assert saved_lengths(read_and_end(scheduler)) == [16]
    (second,) = add_and_admit(scheduler, [*range(9), *range(50, 60)])
    assert second.placement.tokens_reused == 0
    assert saved_lengths(read_and_end(scheduler)) == [8, 16]
    (third,) = add_and_admit(scheduler, [*range(9), *range(70, 80)])
    assert third.placement.tokens_reused == 8
    assert saved_lengths(read_and_end(scheduler)) == [16]


@pytest.mark.parametrize("attention", [True, False])
def test_keys_and_values_have_to_be_in_a_slot(attention: bool) -> None:
    scheduler = make_scheduler(1, attention=attention)
    for prompt, reused in (
        ([*range(10)], 0),
        ([50] * 10, 0),
        ([*range(10)], 0 if attention else 8),
    ):
        (sequence,) = add_and_admit(scheduler, prompt)
        assert sequence.placement.tokens_reused == reused
        read_and_end(scheduler)


@pytest.mark.parametrize("attention", [True, False])
def test_useful_states(attention: bool) -> None:
    scheduler = make_scheduler(2, attention=attention)
    for prompt in ([1] * 5, [2] * 5, [3] * 5):  # the third overwrites the first
        add_and_admit(scheduler, prompt)
        read_and_end(scheduler)
    assert [scheduler._is_held(tokens(*[prompt] * 4)) for prompt in (1, 2, 3)] == [
        not attention,
        True,
        True,
    ]
    (sequence,) = add_and_admit(scheduler, [2] * 4 + [5] * 5)  # it runs in the slot of the second
    assert (sequence.placement.slot, scheduler._is_held(tokens(*[2] * 4))) == (1, True)


def test_tokens_of_another_slot_are_copied_with_their_saved_states() -> None:
    scheduler = make_scheduler(2)
    (first,) = add_and_admit(scheduler, [*range(10)])
    while first.placement.tokens_read < 10:
        job = scheduler.next_job()
        assert isinstance(job, Read)
    (second,) = add_and_admit(scheduler, [*range(9), 60])  # while the first one runs
    assert (second.placement.slot, second.placement.tokens_reused) == (1, 0)
    assert scheduler.next_job() == read_of(second, (range(8, 10),), (Copy(second, 0, 8, 0),))


def test_a_row_that_waits_for_another_goes_no_step_back() -> None:
    """It has more tokens than it shares with the prompt that is read."""
    scheduler = make_scheduler(3)
    add_and_admit(scheduler, [*range(20)])
    read_and_end(scheduler)
    other, same = add_and_admit(scheduler, [*range(9), 50, 50, 50, 50], [*range(20)])
    assert (other.placement.tokens_reused, same.placement.tokens_reused) == (0, 16)
    saves = read_and_end(scheduler)
    assert same.placement.tokens_reused == 16
    assert saved_lengths(saves) == [8, 12]


@pytest.mark.parametrize(("in_states", "saved"), [(12, True), (13, False)])
def test_answers_are_saved_if_the_states_follow_them(in_states: int, saved: bool) -> None:
    scheduler = make_scheduler(1, reuse_sampled=True)
    add_and_admit(scheduler, [*range(10)])
    read_and_end(scheduler, answer=(7, 8, 9))
    save = scheduler.save_answer(0, lambda slot: in_states)
    assert save == (Save(0, 12, 1) if saved else None)
    (turn,) = add_and_admit(scheduler, [*range(10), 7, 8, 9, 5])
    assert turn.placement.tokens_reused == (12 if saved else 8)


def test_the_device_is_not_asked_if_answers_are_not_saved() -> None:
    def asked(slot: int) -> int:
        raise AssertionError

    for options in ({}, {"reuse_sampled": True, "places": 0}):
        scheduler = make_scheduler(1, **options)
        add_and_admit(scheduler, [*range(10)])
        read_and_end(scheduler)
        assert scheduler.save_answer(0, asked) is None
    scheduler = make_scheduler(1, reuse_sampled=True)
    (failed,) = add_and_admit(scheduler, [*range(10)])
    failed.placement.tokens_read = failed.placement.tokens_issued = 10
    scheduler.leave(failed, keep=False)
    assert scheduler.save_answer(0, asked) is None


def test_states_are_saved_where_a_waiting_prompt_leaves_the_running_one() -> None:
    scheduler = make_scheduler(2)
    add_and_admit(scheduler, [*range(14)], [*range(9), 50, 50, 50])
    assert scheduler.next_job() == read_of(scheduler.in_slots[0], (range(4),))
    assert read_and_end(scheduler)[0].tokens == 8


class StoredTokens(NamedTuple):
    tokens: np.ndarray
    adapter: str = ""


def admit_with_stored(scheduler: Scheduler, prompt: list[int], *stored: list[int]) -> Admission:
    scheduler.add(request(prompt))
    (admission,) = scheduler.admit(lambda: [StoredTokens(tokens(*held)) for held in stored])
    return admission


def test_the_longest_stored_prefix_is_loaded_if_no_slot_has_as_much() -> None:
    scheduler = Scheduler(2, SchedulerConfig(Pieces(4), tail_size=2))
    admission = admit_with_stored(scheduler, [*range(11)], [*range(4)], [*range(8)], [7] * 8)
    assert admission.stored is not None
    assert admission.stored.tokens.tolist() == [*range(8)]
    sequence = admission.sequence
    assert (admission.copy, admission.moved) == (Copy(sequence, 0, 8), None)
    assert (
        sequence.placement.slot,
        sequence.placement.tokens_reused,
        sequence.placement.tokens_read,
    ) == (0, 8, 8)
    read_and_end(scheduler)
    again = admit_with_stored(scheduler, [*range(8), 50], [*range(8)])  # slot 0 has as much
    assert (again.stored, again.copy) == (None, Copy(again.sequence, 0, 8))
    whole = admit_with_stored(
        scheduler, [*range(60, 70)], [*range(60, 72)]
    )  # a part of it, whatever comes after
    assert whole.copy.tokens == 8
    assert whole.stored is not None
    same = Scheduler(1, SchedulerConfig(Pieces(4), tail_size=2))
    assert admit_with_stored(same, [*range(8)], [*range(8)]).copy.tokens == 6, (
        "all but the last tokens of its last piece"
    )


def test_stored_states_are_loaded_only_after_their_whole_prefix() -> None:
    for prompt, loaded in (([*range(9)], 8), ([*range(8)], 0), ([*range(7), 50, 50], 0)):
        admission = admit_with_stored(make_scheduler(1), prompt, [*range(8)])
        assert admission.copy == Copy(admission.sequence, 0, loaded)
        assert (admission.stored is None) == (loaded == 0)


def test_stored_prefixes_are_listed_only_with_a_free_slot_and_a_request() -> None:
    def looked() -> list[StoredTokens]:
        raise AssertionError

    scheduler = make_scheduler(1)
    assert scheduler.admit(looked) == []
    add_and_admit(scheduler, [1, 2])
    scheduler.add(request([3]))
    assert scheduler.admit(looked) == []


def tokens_to_store(scheduler: Scheduler, prompt: list[int]) -> tuple[list[int], int | None]:
    (sequence,) = add_and_admit(scheduler, prompt)
    read_and_end(scheduler)
    kept, place = scheduler.to_store(0, sequence.identities)
    return kept.tolist(), place


def test_whole_pieces_are_stored_with_their_states() -> None:
    plain = Scheduler(1, SchedulerConfig(Pieces(4)))
    assert tokens_to_store(plain, [*range(11)]) == ([*range(8)], None)
    for prompt, places, wanted in (
        ([*range(11)], 8, ([*range(8)], 0)),
        ([*range(11)], 0, ([], None)),
        ([*range(3)], 8, ([], None)),
    ):
        assert tokens_to_store(make_scheduler(1, places), prompt) == wanted


def test_the_abilities_of_a_package() -> None:
    state = RecurrentShape(0, "conv_state", 0, (2, 3), "float32")
    of_a_window = (
        KeyValueShape(1, 8, 1, capacity=40),
        KeyValueShape(1, 8, 2, capacity=30),
        KeyValueShape(1, 8, 3),
    )
    for key_values, states, whole_up_to in [
        ((KeyValueShape(1, 8),), (), -1),
        ((), (state,), -1),
        (of_a_window, (), 30),
    ]:
        recurrent, attention = len(key_values) != 1, bool(key_values)
        interface = Interface(8, key_values, features=Features(max_loras=4), recurrent=states)
        sessions: Any = SimpleNamespace(
            interface=interface,
            prompts=PromptCalls(
                piece_size=16,
                late_piece_size=32,
                tail_size=2,
                joins_prompts=recurrent,
                ragged=not recurrent,
            ),
            rows=StepRows(step=RowCounts(3)),
        )
        assert SchedulerConfig.of(sessions, flush_every=5) == SchedulerConfig(
            pieces=Pieces(16, 32),
            tail_size=2,
            recurrent=recurrent,
            whole_up_to=whole_up_to,
            attention=attention,
            join_prompts=recurrent,
            ragged=not recurrent,
            step_rows=RowCounts(3),
            max_loras=4,
            flush_every=5,
        )
