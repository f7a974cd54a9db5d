"""The scheduler with what is kept besides the slots' tokens: saved recurrent states, and prefixes from elsewhere."""

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
from tests.runtime.decode.test_scheduler import admitted, chunk, request


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def scheduler(slots: int, places: int = 8, **options: Any) -> Scheduler:
    chosen = {"interleave": False, "prefill_chunk_size": 4, "saved_states": places, **options}
    return Scheduler(slots, SchedulerConfig(Pieces(4), recurrent=True, **chosen))


def run(one: Scheduler, *, answer: tuple[int, ...] = (7,)) -> list[Save]:
    """Read the prompts that are in slots, end them, and return what was saved."""
    saves: list[Save] = []
    while one.prefilling:
        job = one.next_job()
        assert isinstance(job, Read)
        saves += job.saves
    for sequence in one.in_slots:
        sequence.progress.sampled = [*answer]
        one.leave(sequence)
    return saves


def ends(saves: list[Save]) -> list[int]:
    return [save.tokens for save in saves]


@pytest.mark.parametrize(
    ("length", "saved"),
    [(3, []), (4, [4]), (5, [4]), (8, [4, 8]), (9, [8]), (11, [8]), (12, [8, 12]), (13, [12])],
)
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": None}, {"join_prompts": True}])
def test_states_are_saved_where_a_prompt_s_whole_pieces_end(
    length: int, saved: list[int], options: dict[str, Any]
) -> None:
    one = scheduler(1, **options)
    admitted(one, [*range(length)])
    assert ends(run(one)) == saved


def test_prompts_that_are_read_together_are_saved_each() -> None:
    one = scheduler(3, prefill_chunk_size=12, join_prompts=True)
    first, second, third = admitted(one, [1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4])
    assert one.next_job() == Read(
        (first, second, third), (range(4),) * 3, (), (Save(0, 4, 0), Save(1, 4, 1))
    )


@pytest.mark.parametrize(("answer", "reused"), [(3, 8), (4, 0)])
def test_a_row_that_has_all_its_tokens_goes_back_to_any_piece(answer: int, reused: int) -> None:
    """With caches of a window: until they have forgotten a token, be it for one that was sampled."""
    one = scheduler(2, places=0, whole_up_to=12, step_rows=RowCounts(2))
    admitted(one, [*range(9)])
    run(one)
    one.add(again := request([*range(9), 5]))
    assert one.admit()[0].sequence.placement.tokens_reused == 8
    again.progress.sampled, again.placement.tokens_issued = [7], answer - 1  # steps that were begun
    one.leave(again)
    one.add(other := request([*range(8), 6, 6]))
    one.admit()
    assert other.placement.tokens_reused == reused


def test_the_next_turn_goes_on_from_the_last() -> None:
    one = scheduler(2)
    admitted(one, [*range(10)])
    assert run(one) == [Save(0, 8, 0)]
    turn = request([*range(10), 7, 5, 5, 5])
    one.add(turn)
    assert one.admit()[0].copy == Copy(turn, 0, 8, 0)
    assert (turn.placement.slot, turn.placement.tokens_reused, turn.placement.tokens_read) == (
        0,
        8,
        8,
    )
    assert one.next_job() == chunk(turn, (range(8, 12),), (), (Save(0, 12, 1),))


def test_where_a_prompt_leaves_another_one_is_saved_for_a_third() -> None:
    one = scheduler(3)
    admitted(one, [*range(18)])
    assert ends(run(one)) == [16]
    (second,) = admitted(one, [*range(9), *range(50, 60)])
    assert second.placement.tokens_reused == 0
    assert ends(run(one)) == [8, 16]
    (third,) = admitted(one, [*range(9), *range(70, 80)])
    assert third.placement.tokens_reused == 8
    assert ends(run(one)) == [16]


@pytest.mark.parametrize("attention", [True, False])
def test_keys_and_values_have_to_be_in_a_slot(attention: bool) -> None:
    one = scheduler(1, attention=attention)
    for prompt, reused in (
        ([*range(10)], 0),
        ([50] * 10, 0),
        ([*range(10)], 0 if attention else 8),
    ):
        (sequence,) = admitted(one, prompt)
        assert sequence.placement.tokens_reused == reused
        run(one)


@pytest.mark.parametrize("attention", [True, False])
def test_which_states_are_of_use(attention: bool) -> None:
    one = scheduler(2, attention=attention)
    for prompt in ([1] * 5, [2] * 5, [3] * 5):  # the third overwrites the first
        admitted(one, prompt)
        run(one)
    assert [one._is_held(tokens(*[prompt] * 4)) for prompt in (1, 2, 3)] == [
        not attention,
        True,
        True,
    ]
    (sequence,) = admitted(one, [2] * 4 + [5] * 5)  # it runs in the slot of the second
    assert (sequence.placement.slot, one._is_held(tokens(*[2] * 4))) == (1, True)


def test_what_another_slot_holds_is_copied_with_the_states_that_were_saved() -> None:
    one = scheduler(2)
    (first,) = admitted(one, [*range(10)])
    while first.placement.tokens_read < 10:
        job = one.next_job()
        assert isinstance(job, Read)
    (second,) = admitted(one, [*range(9), 60])  # while the first one runs
    assert (second.placement.slot, second.placement.tokens_reused) == (1, 0)
    assert one.next_job() == chunk(second, (range(8, 10),), (Copy(second, 0, 8, 0),))


def test_a_row_that_waits_for_another_goes_no_step_back() -> None:
    """What it has is more than what it shares with the one that is read."""
    one = scheduler(3)
    admitted(one, [*range(20)])
    run(one)
    other, same = admitted(one, [*range(9), 50, 50, 50, 50], [*range(20)])
    assert (other.placement.tokens_reused, same.placement.tokens_reused) == (0, 16)
    saves = run(one)
    assert same.placement.tokens_reused == 16
    assert ends(saves) == [8, 12]


@pytest.mark.parametrize(("in_states", "saved"), [(12, True), (13, False)])
def test_answers_are_saved_where_the_row_stands_behind_them(in_states: int, saved: bool) -> None:
    one = scheduler(1, reuse_sampled=True)
    admitted(one, [*range(10)])
    run(one, answer=(7, 8, 9))
    save = one.save_answer(0, lambda slot: in_states)
    assert save == (Save(0, 12, 1) if saved else None)
    (turn,) = admitted(one, [*range(10), 7, 8, 9, 5])
    assert turn.placement.tokens_reused == (12 if saved else 8)


def test_nobody_is_asked_where_answers_are_read_again() -> None:
    def asked(slot: int) -> int:
        raise AssertionError

    for options in ({}, {"reuse_sampled": True, "places": 0}):
        one = scheduler(1, **options)
        admitted(one, [*range(10)])
        run(one)
        assert one.save_answer(0, asked) is None
    one = scheduler(1, reuse_sampled=True)
    (failed,) = admitted(one, [*range(10)])
    failed.placement.tokens_read = failed.placement.tokens_issued = 10
    one.leave(failed, keep=False)
    assert one.save_answer(0, asked) is None


def test_a_prompt_that_runs_is_left_where_another_one_leaves_it() -> None:
    one = scheduler(2)
    admitted(one, [*range(14)], [*range(9), 50, 50, 50])
    assert one.next_job() == chunk(one.in_slots[0], (range(4),))
    assert run(one)[0].tokens == 8


class Elsewhere(NamedTuple):
    tokens: np.ndarray
    adapter: str = ""


def admitted_with(one: Scheduler, prompt: list[int], *stored: list[int]) -> Admission:
    one.add(request(prompt))
    (admission,) = one.admit(lambda: [Elsewhere(tokens(*held)) for held in stored])
    return admission


def test_the_longest_prefix_from_elsewhere_is_loaded_if_no_slot_has_as_much() -> None:
    one = Scheduler(2, SchedulerConfig(Pieces(4), tail_size=2))
    admission = admitted_with(one, [*range(11)], [*range(4)], [*range(8)], [7] * 8)
    assert admission.stored is not None
    assert admission.stored.tokens.tolist() == [*range(8)]
    sequence = admission.sequence
    assert (admission.copy, admission.moved) == (Copy(sequence, 0, 8), None)
    assert (
        sequence.placement.slot,
        sequence.placement.tokens_reused,
        sequence.placement.tokens_read,
    ) == (0, 8, 8)
    run(one)
    again = admitted_with(one, [*range(8), 50], [*range(8)])  # slot 0 has as much
    assert (again.stored, again.copy) == (None, Copy(again.sequence, 0, 8))
    whole = admitted_with(
        one, [*range(60, 70)], [*range(60, 72)]
    )  # a part of it, whatever comes after
    assert whole.copy.tokens == 8
    assert whole.stored is not None
    same = Scheduler(1, SchedulerConfig(Pieces(4), tail_size=2))
    assert admitted_with(same, [*range(8)], [*range(8)]).copy.tokens == 6, (
        "all but the last tokens of its last piece"
    )


def test_states_from_elsewhere_are_those_of_a_whole_prefix() -> None:
    for prompt, loaded in (([*range(9)], 8), ([*range(8)], 0), ([*range(7), 50, 50], 0)):
        admission = admitted_with(scheduler(1), prompt, [*range(8)])
        assert admission.copy == Copy(admission.sequence, 0, loaded)
        assert (admission.stored is None) == (loaded == 0)


def test_nothing_is_looked_for_elsewhere_without_a_free_slot_and_a_request() -> None:
    def looked() -> list[Elsewhere]:
        raise AssertionError

    one = scheduler(1)
    assert one.admit(looked) == []
    admitted(one, [1, 2])
    one.add(request([3]))
    assert one.admit(looked) == []


def stored_of(one: Scheduler, prompt: list[int]) -> tuple[list[int], int | None]:
    (sequence,) = admitted(one, prompt)
    run(one)
    kept, place = one.to_store(0, sequence.identities)
    return kept.tolist(), place


def test_whole_pieces_are_stored_with_their_states() -> None:
    plain = Scheduler(1, SchedulerConfig(Pieces(4)))
    assert stored_of(plain, [*range(11)]) == ([*range(8)], None)
    for prompt, places, wanted in (
        ([*range(11)], 8, ([*range(8)], 0)),
        ([*range(11)], 0, ([], None)),
        ([*range(3)], 8, ([], None)),
    ):
        assert stored_of(scheduler(1, places), prompt) == wanted


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
