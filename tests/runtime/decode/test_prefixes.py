"""Beginnings of prompts: their cuts, the tokens that two share, and the states that are saved, used and given away."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsample.runtime.decode.prefixes import LATE, Pieces, SavedStates, reusable_prefix, shared_prefix
from qsample.runtime.decode.scheduler import Copy, Read, Save, Scheduler, SchedulerConfig
from tests.runtime.decode.test_scheduler import admitted, chunk, request

CPU = Pieces(64, late=256)


@pytest.mark.parametrize("pieces", [Pieces(1), Pieces(4), CPU])
@pytest.mark.parametrize("start", [0, 3, 64, 1000, LATE, LATE + 1])
@pytest.mark.parametrize("tokens", [1, 64, 1999])
def test_pieces_cover_a_prompt_and_are_counted_from_its_start(pieces: Pieces, start: int, tokens: int) -> None:
    whole, cut = pieces.cut(0, start + tokens), pieces.cut(start, start + tokens)
    assert [token for piece in cut for token in piece] == list(range(start, start + tokens))
    assert {piece.stop for piece in cut} == {piece.stop for piece in whole if piece.stop > start}
    assert all(pieces.begin(piece.start) == piece.start for piece in whole)


def test_pieces_are_longer_far_into_a_prompt() -> None:
    assert [len(piece) for piece in CPU.cut(LATE - 128, LATE + 512)] == [64, 64, 256, 256]
    assert [CPU.begin(token) for token in (63, LATE - 1, LATE, LATE + 255, LATE + 256)] == [0, 960, 1024, 1024, 1280]


@pytest.mark.parametrize(
    ("start", "tokens", "end"), [(0, 1, 64), (0, 64, 64), (0, 127, 64), (0, 128, 128), (70, 128, 192)]
)
def test_a_chunk_is_whole_pieces_and_at_least_one(start: int, tokens: int, end: int) -> None:
    assert CPU.end(start, tokens) == end


@pytest.mark.parametrize(
    ("start", "tokens", "end"),
    [(LATE, 1, LATE + 256), (LATE - 64, 128, LATE), (LATE - 64, 320, LATE + 256), (LATE, 511, LATE + 256)],
)
def test_a_late_chunk_too(start: int, tokens: int, end: int) -> None:
    assert CPU.end(start, tokens) == end


@pytest.mark.parametrize(
    ("kept", "prompt", "shared"),
    [
        ([], [1, 2], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1, 5, 3], [1, 2], 1),
    ],
)
def test_shared_prefix(kept: list[int], prompt: list[int], shared: int) -> None:
    assert shared_prefix(np.array(kept, dtype=np.int64), np.array(prompt, dtype=np.int64)) == shared


@pytest.mark.parametrize(
    ("start", "end", "cut"),
    [
        (0, 4, [range(4)]),
        (0, 1, [range(1)]),
        (0, 9, [range(4), range(4, 8), range(8, 9)]),
        (4, 9, [range(4, 8), range(8, 9)]),
        (6, 9, [range(6, 8), range(8, 9)]),
        (6, 8, [range(6, 8)]),
    ],
)
def test_pieces(start: int, end: int, cut: list[range]) -> None:
    assert Pieces(4).cut(start, end) == tuple(cut)


@pytest.mark.parametrize(
    ("held", "prompt", "whole", "tail"),
    [
        ([], [1, 2], 0, 0),
        ([1, 2, 3], [1, 2, 3, 4, 5], 0, 0),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], 4, 4),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], 4, 4),
        ([1, 2, 3, 4, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8], 4, 4),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6], 4, 4),  # it was read as part of a longer piece
        ([1, 2, 3], [1, 2, 3], 0, 1),  # and here the pieces end alike
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], 4, 4),
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7], 4, 5),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8], 4, 6),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4], 0, 2),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 4, 4),  # its last piece has one token
        ([1], [1], 0, 0),
    ],
)
def test_reusable_prefix(held: list[int], prompt: list[int], whole: int, tail: int) -> None:
    arrays = np.array(held, dtype=np.int64), np.array(prompt, dtype=np.int64)
    assert reusable_prefix(*arrays, Pieces(4), None) == whole
    assert reusable_prefix(*arrays, Pieces(4), 2) == tail


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def anything(beginning: np.ndarray) -> bool:
    return True


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
        sequence.sampled = [*answer]
        one.leave(sequence)
    return saves


def ends(saves: list[Save]) -> list[int]:
    return [save.tokens for save in saves]


def test_the_one_used_longest_ago_is_given_away() -> None:
    saved = SavedStates(2)
    first, second, third = tokens(1), tokens(1, 2), tokens(1, 2, 3)
    assert [saved.add(one, anything) for one in (first, second)] == [0, 1]
    assert saved.add(first, anything) is None  # it is there already, and used
    assert saved.add(third, anything) == 1
    assert [saved.use(one) for one in (first, second, third)] == [0, None, 1]
    assert saved.add(second, lambda one: len(one) != 3) == 1  # of no use to anybody, though used last
    assert [saved.longest(tokens(1, 2, 3, 4), most) for most in (0, 1, 2, 3)] == [0, 1, 2, 2]
    assert saved.longest(tokens(2, 1), 2) == 0
    assert SavedStates(0).add(first, anything) is None


def test_what_is_saved_is_a_copy() -> None:
    saved, beginning = SavedStates(1), tokens(1, 2)
    saved.add(beginning, anything)
    beginning[0] = 9
    assert saved.use(tokens(1, 2)) == 0


@pytest.mark.parametrize(
    ("length", "saved"), [(3, []), (4, [4]), (5, [4]), (8, [4, 8]), (9, [8]), (11, [8]), (12, [8, 12]), (13, [12])]
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
    assert one.next_job() == Read((first, second, third), (range(4),), (), (Save(0, 4, 0), Save(1, 4, 1)))


def test_the_next_turn_goes_on_from_the_last() -> None:
    one = scheduler(2)
    admitted(one, [*range(10)])
    assert run(one) == [Save(0, 8, 0)]
    turn = request([*range(10), 7, 5, 5, 5])
    one.add(turn)
    assert one.admit()[0].copy == Copy(turn, 0, 8, 0)
    assert (turn.slot, turn.reused, turn.consumed) == (0, 8, 8)
    assert one.next_job() == chunk(turn, (range(8, 12),), (), (Save(0, 12, 1),))


def test_where_a_prompt_leaves_another_one_is_saved_for_a_third() -> None:
    one = scheduler(3)
    admitted(one, [*range(18)])
    assert ends(run(one)) == [16]
    (second,) = admitted(one, [*range(9), *range(50, 60)])
    assert second.reused == 0
    assert ends(run(one)) == [8, 16]
    (third,) = admitted(one, [*range(9), *range(70, 80)])
    assert third.reused == 8
    assert ends(run(one)) == [16]


@pytest.mark.parametrize("attention", [True, False])
def test_keys_and_values_have_to_be_in_a_slot(attention: bool) -> None:
    one = scheduler(1, attention=attention)
    for prompt, reused in (([*range(10)], 0), ([50] * 10, 0), ([*range(10)], 0 if attention else 8)):
        (sequence,) = admitted(one, prompt)
        assert sequence.reused == reused
        run(one)


@pytest.mark.parametrize("attention", [True, False])
def test_which_states_are_of_use(attention: bool) -> None:
    one = scheduler(2, attention=attention)
    for prompt in ([1] * 5, [2] * 5, [3] * 5):  # the third overwrites the first
        admitted(one, prompt)
        run(one)
    assert [one._is_held(tokens(*[prompt] * 4)) for prompt in (1, 2, 3)] == [not attention, True, True]
    (sequence,) = admitted(one, [2] * 4 + [5] * 5)  # it runs in the slot of the second
    assert (sequence.slot, one._is_held(tokens(*[2] * 4))) == (1, True)


def test_what_another_slot_holds_is_copied_with_the_states_that_were_saved() -> None:
    one = scheduler(2)
    (first,) = admitted(one, [*range(10)])
    while first.consumed < 10:
        job = one.next_job()
        assert isinstance(job, Read)
    (second,) = admitted(one, [*range(9), 60])  # while the first one runs
    assert (second.slot, second.reused) == (1, 0)
    assert one.next_job() == chunk(second, (range(8, 10),), (Copy(second, 0, 8, 0),))


def test_a_row_that_waits_for_another_goes_no_step_back() -> None:
    """What it has is more than what it shares with the one that is read."""
    one = scheduler(3)
    admitted(one, [*range(20)])
    run(one)
    other, same = admitted(one, [*range(9), 50, 50, 50, 50], [*range(20)])
    assert (other.reused, same.reused) == (0, 16)
    saves = run(one)
    assert same.reused == 16
    assert ends(saves) == [8, 12]


@pytest.mark.parametrize(("in_states", "saved"), [(12, True), (13, False)])
def test_answers_are_saved_where_the_row_stands_behind_them(in_states: int, saved: bool) -> None:
    one = scheduler(1, reuse_sampled=True)
    admitted(one, [*range(10)])
    run(one, answer=(7, 8, 9))
    save = one.save_answer(0, lambda slot: in_states)
    assert save == (Save(0, 12, 1) if saved else None)
    (turn,) = admitted(one, [*range(10), 7, 8, 9, 5])
    assert turn.reused == (12 if saved else 8)


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
    failed.consumed = failed.issued = 10
    one.leave(failed, keep=False)
    assert one.save_answer(0, asked) is None
