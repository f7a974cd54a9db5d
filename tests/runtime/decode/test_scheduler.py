"""The scheduler: order of arrival, pieces, kept prefixes and copies of them, chunks between windows."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.ort.rounding import RowCounts
from qsample.request.structured.tables import TokenGrammar
from qsample.runtime.adapters import Adapter
from qsample.runtime.decode import scheduler as scheduler_module
from qsample.runtime.decode.jobs import Admission, Copy, KeptTokens, Move, Read, Window
from qsample.runtime.decode.prefix_file import PrefixFile
from qsample.runtime.decode.prefixes import Pieces
from qsample.runtime.decode.scheduler import SchedulerConfig, joined_slots
from qsample.runtime.sequence import Sequence, SequenceRequest


class Scheduler(scheduler_module.Scheduler):
    """A scheduler that cuts prompts anywhere, unless a test says otherwise."""

    def __init__(self, slots: int, *, piece_size: int = 1, **options: Any) -> None:
        super().__init__(slots, SchedulerConfig(Pieces(piece_size), **options))


def admit(scheduler: scheduler_module.Scheduler) -> list[Sequence]:
    return [admission.sequence for admission in scheduler.admit()]


def read_of(sequence: Sequence, pieces: tuple[range, ...], *rest: Any) -> Read:
    return Read((sequence,), pieces, *rest)


def request(prompt: list[int], most: int = 10, **options: Any) -> Sequence:
    """A sequence of at most `most` new tokens. options: further fields of `SequenceRequest`."""
    parameters = {"max_length": np.array(len(prompt) + most, dtype=np.int32)}
    ids = np.array(prompt, dtype=np.int64)
    return Sequence(SequenceRequest(ids, parameters, 0, **options))


def add_and_admit(scheduler: Scheduler, *prompts: list[int], **options: Any) -> list[Sequence]:
    """Add requests that all get slots at once."""
    sequences = [request(prompt, **options) for prompt in prompts]
    for one in sequences:
        scheduler.add(one)
    assert admit(scheduler) == sequences
    return sequences


def pretend_read(wanted: Sequence, *sampled: int) -> None:
    """Pretend that the whole prompt was read, and that these tokens were sampled and read."""
    wanted.placement.tokens_read, wanted.placement.tokens_issued, wanted.progress.sampled = (
        len(wanted.request.prompt),
        1,
        [*sampled],
    )


def add_running(scheduler: Scheduler, *prompts: list[int]) -> list[Sequence]:
    """Add requests that get slots, have sampled a token, and run for long."""
    sequences = add_and_admit(scheduler, *prompts, most=1000)
    for one in sequences:
        pretend_read(one, 99)
    return sequences


def test_first_come_first_served() -> None:
    scheduler = Scheduler(2)
    requests = [request([n, n]) for n in range(1, 6)]
    for one in requests:
        scheduler.add(one)
    assert admit(scheduler) == requests[:2]
    assert (scheduler.waiting, admit(scheduler)) == (3, [])
    slot = scheduler.leave(requests[1])
    assert admit(scheduler) == [requests[2]]
    assert requests[2].placement.slot == slot
    assert scheduler.leave(requests[4]) is None  # from the queue
    scheduler.leave(requests[0])
    assert admit(scheduler) == [requests[3]]
    assert scheduler.waiting == 0
    assert [one.placement.slot for one in scheduler.in_slots] == [slot, 0]


@pytest.mark.parametrize("reuse_sampled", [False, True])
def test_a_prompt_gets_the_slot_that_keeps_most_of_it(reuse_sampled: bool) -> None:
    scheduler = Scheduler(3, reuse_sampled=reuse_sampled)
    held = add_and_admit(scheduler, [1, 2, 3, 4], [1, 2, 9], [7])
    slots = [one.placement.slot for one in held]
    for one, new in zip(held, ([5, 6], [8], [3]), strict=True):
        pretend_read(one, *new)
        scheduler.leave(one)
    for prompt, slot, reused in (
        # Token 5 was sampled; token 6, too, but it was never fed.
        ([1, 2, 3, 4, 5, 6, 7], slots[0], 5 if reuse_sampled else 4),
        ([1, 2, 9], slots[1], 2),  # never the whole prompt: its last token has to be fed
        ([8, 8], slots[2], 0),  # no slot has any of it: the slot left longest ago
    ):
        (one,) = add_and_admit(scheduler, prompt)
        assert (one.placement.slot, one.placement.tokens_reused, one.placement.tokens_read) == (
            slot,
            reused,
            reused,
        )


def test_slots_in_use_are_close_together_where_a_step_may_be_over_some() -> None:
    scheduler = Scheduler(6, step_rows=RowCounts(2))

    def admit(prompt: list[int]) -> Admission:
        scheduler.add(request(prompt))
        (admission,) = scheduler.admit()
        pretend_read(admission.sequence, 99)
        return admission

    def held(one: Admission) -> tuple[int | None, int, int]:
        return one.sequence.placement.slot, one.copy.source, one.copy.tokens

    first = [admit([n] * 9).sequence for n in range(1, 7)]
    assert [one.placement.slot for one in first] == list(range(6))
    for slot in (4, 0, 5, 1, 3):
        scheduler.leave(first[slot])
    # Slot 2 runs. Of the slots beside it, slot 1 was left before slot 3. Slots 4 and 0 were left before
    # both, but are further off.
    second = admit([8])
    assert held(second) == (1, 1, 0)
    # The tokens of slot 1 go to slot 4, which was left longest ago.
    assert second.moved == KeptTokens(4, 9)
    # The tokens of slot 5 are copied, and slot 5 keeps them. Slot 0 is now the slot left longest ago.
    third = admit([6] * 5 + [7])
    assert (held(third), third.moved) == ((0, 5, 5), None)
    fourth = admit([2] * 9)
    assert held(fourth) == (3, 4, 8)
    assert fourth.moved == KeptTokens(5, 9)
    # Slot 3 now has all tokens of slot 4, so slot 4 gives way next.
    fifth = admit([4] * 9)
    assert (held(fifth), fifth.moved) == ((4, 5, 8), None)
    scheduler.leave(first[2])
    assert Window((second.sequence, third.sequence), 1).rows == range(2)


def steps_until_a_move(scheduler: Scheduler, most: int = 100) -> tuple[int, Move | None]:
    """Run windows of one step, each of which samples a token of every row that runs. Returns their number,
    and the move after them."""
    for count in range(most):
        if (move := scheduler.next_move()) is not None:
            return count, move
        window = scheduler.next_job()
        assert isinstance(window, Window)
    return most, None


def test_a_row_far_from_the_others_is_moved_once_it_has_cost_as_much() -> None:
    scheduler = Scheduler(6, step_rows=RowCounts(1))
    ones = add_running(scheduler, *([n] * size for n, size in enumerate((200, 9, 9, 9, 9, 64))))
    assert steps_until_a_move(scheduler) == (100, None)  # slots 0 to 5 all run
    for slot in (1, 4, 3, 2):
        scheduler.leave(ones[slot])
    # The last row has fewer tokens: 64 and the sampled ones. The tokens that slot 1 keeps are copied there
    # and back. The move saves four rows in each step, and copying a token takes 1/32 of a row.
    tokens = 64 + ones[5].placement.tokens_issued + 2 * 9
    count, move = steps_until_a_move(scheduler)
    assert count == pytest.approx(tokens / 32 / 4, abs=2)
    assert move == Move(source=5, target=1, kept=9)
    assert [one.placement.slot for one in (ones[0], ones[5])] == [0, 1]
    assert scheduler.next_move() is None
    assert steps_until_a_move(scheduler) == (100, None)
    # The tokens that slot 1 kept are in slot 5, and give way as early as they would have in slot 1.
    again = request([1] * 9)
    scheduler.add(again)
    assert scheduler.admit()[0].copy == Copy(again, source=5, tokens=8)
    assert again.placement.slot == 2


@pytest.mark.parametrize(
    ("sizes", "move", "saved"),
    [
        ({0: 2000, 4: 9000, 5: 9000}, Move(source=0, target=3, kept=9), 3),
        ({0: 9000, 1: 9000, 5: 2000}, Move(source=5, target=2, kept=9), 3),
        (
            {0: 2000, 3: 500, 4: 9000, 5: 1500},
            Move(source=0, target=2, kept=9),
            2,
        ),  # a row inside would save none
        ({0: 3000, 1: 9000, 5: 2000, 2: 9000}, Move(source=5, target=3, kept=9), 2),
        ({1: 300, 5: 9000}, Move(source=1, target=4, kept=9), 3),
        (
            {0: 500, 1: 9000, 7: 1000},
            Move(source=7, target=2, kept=9),
            5,
        ),  # dearer, but it saves more than the first
    ],
)
def test_the_move_that_costs_least_for_what_it_saves(
    sizes: dict[int, int], move: Move, saved: int
) -> None:
    scheduler = Scheduler(8, step_rows=RowCounts(1))
    for one in add_running(scheduler, *([n] * sizes.get(n, 9) for n in range(8))):
        if one.placement.slot not in sizes:
            scheduler.leave(one)
    count, found = steps_until_a_move(scheduler, 1000)
    assert found == move
    assert count == pytest.approx((sizes[move.source] + count + 2 * 9) / 32 / saved, abs=2)


def test_rows_stay_where_a_step_is_over_all() -> None:
    for counts in (None, RowCounts(6)):
        scheduler = Scheduler(6, step_rows=counts)
        for one in add_running(scheduler, *([n] * 9 for n in range(6))):
            if one.placement.slot not in (0, 5):
                scheduler.leave(one)
        assert steps_until_a_move(scheduler) == (100, None)


@pytest.mark.parametrize("step_rows", [None, RowCounts(), RowCounts(2, 2), RowCounts(3)])
@pytest.mark.parametrize("running", [1, 2, 4])
def test_conversations_that_take_turns_are_not_forgotten(
    step_rows: RowCounts | None, running: int
) -> None:
    """There are slots for all of them, and each turn continues the turn before it, wherever steps are
    cheap."""
    generator = random.Random(3)
    scheduler = Scheduler(10, step_rows=step_rows)
    turns: dict[int, list[int]] = {number: [number] for number in range(1, 9)}
    in_slots: list[tuple[int, Sequence]] = []
    for _ in range(200):
        if len(in_slots) == running:
            number, one = in_slots.pop(generator.randrange(running))
            one.progress.sampled = [99]
            scheduler.leave(one)
        number = generator.choice(
            [one for one in turns if one not in [busy for busy, _ in in_slots]]
        )
        before = len(turns[number])
        turns[number].append(number)
        (one,) = add_and_admit(scheduler, turns[number])
        assert one.placement.tokens_reused == (before if before > 1 else 0)
        pretend_read(one)
        in_slots.append((number, one))


def test_two_rows_are_as_cheap_as_one_where_a_step_has_two() -> None:
    """Slots 2 and 4 are no further off than slot 3 would be, so their tokens decide."""
    scheduler = Scheduler(5, step_rows=RowCounts(3))
    for number, one in enumerate(add_running(scheduler, *([n] * 9 for n in range(1, 6)))):
        if number != 2:
            scheduler.leave(one)
    again = request([5] * 9)
    scheduler.add(again)
    assert scheduler.admit()[0].copy == Copy(again, source=4, tokens=8)
    assert again.placement.slot == 4


def test_tokens_kept_of_a_request_that_left_early() -> None:
    for consumed, issued, keep, kept in (
        (2, 0, True, 2),
        (4, 1, True, 0),
        (4, 1, False, 0),
        (0, 0, True, 0),
    ):
        scheduler = Scheduler(1)
        first, second = request([1, 2, 3, 4]), request([1, 2, 3, 4, 5])
        for one in (first, second):
            scheduler.add(one)
        scheduler.admit()
        first.placement.tokens_read, first.placement.tokens_issued = consumed, issued
        scheduler.leave(first, keep=keep)
        scheduler.admit()
        assert second.placement.tokens_reused == kept


def test_chunks_and_windows_take_turns() -> None:
    scheduler = Scheduler(3, flush_every=4, prefill_chunk_size=2)
    first, second = add_and_admit(scheduler, [1], [2, 3, 4, 5, 6])
    seen = []
    for _ in range(7):
        job = scheduler.next_job()
        assert job is not None
        if isinstance(job, Read):
            seen.append((job.sequences[0], job.pieces[0].start, job.pieces[-1].stop, job.last))
        else:
            seen.append((job.sequences, job.steps))
    assert seen == [
        (first, 0, 1, True),
        ((first,), 4),
        (second, 0, 2, False),
        ((first,), 4),
        (second, 2, 4, False),
        ((first,), 1),  # nine of ten were issued
        (second, 4, 5, True),
    ]


@pytest.mark.parametrize(
    ("lengths", "slot", "chunk", "joined"),
    [
        ({0: 8, 1: 8, 2: 8}, 0, None, range(3)),
        ({0: 8, 1: 8, 2: 8}, 2, None, range(3)),  # neighbours on both sides
        ({0: 8, 2: 8}, 0, None, range(1)),  # a gap
        ({0: 8, 1: 7, 2: 8}, 0, None, range(1)),  # another length
        ({2: 40, 3: 40, 4: 39}, 3, None, range(2, 4)),
        ({0: 8, 1: 8, 2: 8}, 0, 16, range(2)),
        ({0: 8, 1: 8}, 0, 15, range(1)),
        ({0: 8, 1: 8}, 0, 1, range(1)),
        ({0: 64, 1: 64}, 0, None, range(2)),
        ({0: 65, 1: 65}, 0, None, range(1)),  # more than a piece
        (dict.fromkeys(range(40), 16), 20, None, range(8, 40)),  # 512 tokens
    ],
)
def test_joined_slots(lengths: dict[int, int], slot: int, chunk: int | None, joined: range) -> None:
    assert sorted(joined_slots(lengths, slot, 64, chunk)) == sorted(joined)


@pytest.mark.parametrize(
    ("lengths", "slot", "chunk", "joined"),
    [
        ({0: 8, 1: 7, 2: 1}, 1, None, range(3)),
        ({0: 8, 2: 8}, 0, None, range(1)),  # a gap
        ({0: 8, 1: 7, 2: 2, 3: 1}, 0, 17, range(3)),
        ({0: 8, 1: 10, 2: 2}, 2, 17, range(1, 3)),
        ({0: 8, 1: 10, 2: 2}, 1, 9, range(1, 2)),  # more than a chunk, alone
    ],
)
def test_any_tails_are_joined_if_calls_are_ragged(
    lengths: dict[int, int], slot: int, chunk: int | None, joined: range
) -> None:
    assert joined_slots(lengths, slot, 64, chunk, ragged=True) == joined


def test_tails_behind_different_beginnings_are_read_together() -> None:
    scheduler = Scheduler(4, prefill_chunk_size=16, piece_size=8, join_prompts=True, ragged=True)
    long, *others = add_and_admit(scheduler, [5] * 19, [1, 2, 3], [*range(9)], [6])
    assert scheduler.next_job() == read_of(long, (range(8), range(8, 16)))
    assert scheduler.next_job() == Read((long, others[0]), (range(16, 19), range(3)))
    assert [
        (one.placement.tokens_read, one.placement.tokens_issued) for one in (long, *others)
    ] == [
        (19, 1),
        (3, 1),
        (0, 0),
        (0, 0),
    ]
    assert scheduler.next_job() == Window((long, others[0]), 1)
    assert scheduler.next_job() == read_of(others[1], (range(8), range(8, 9)))
    scheduler.next_job()
    assert scheduler.next_job() == read_of(others[2], (range(1),))
    # A prompt whose beginning can be copied waits for the copy.
    scheduler = Scheduler(3, piece_size=8, join_prompts=True, ragged=True, interleave=False)
    first, same, other = add_and_admit(scheduler, [*range(8), 7, 7], [*range(8), 8], [9])
    assert scheduler.next_job() == read_of(first, (range(8), range(8, 10)))
    assert scheduler.next_job() == Read((same, other), (range(8, 9), range(1)), (Copy(same, 0, 8),))


def test_whole_prompts_are_read_together() -> None:
    scheduler = Scheduler(4, prefill_chunk_size=8, piece_size=8, join_prompts=True)
    long, *short = add_and_admit(scheduler, [5] * 9, [1, 2, 3], [3, 4, 5], [6])
    assert scheduler.next_job() == read_of(long, (range(8),))
    assert scheduler.next_job() == read_of(long, (range(8, 9),))
    assert scheduler.next_job() == Window((long,), 1)
    assert scheduler.next_job() == Read((short[0], short[1]), (range(3), range(3)))


def test_chunks_are_whole_pieces() -> None:
    for asked, ends in (
        (None, [11]),
        (1, [4, 8, 11]),
        (4, [4, 8, 11]),
        (7, [4, 8, 11]),
        (8, [8, 11]),
        (12, [11]),
    ):
        scheduler = Scheduler(1, prefill_chunk_size=asked, piece_size=4)
        (one,) = add_and_admit(scheduler, [*range(11)])
        seen = []
        while (start := one.placement.tokens_read) < 11:
            job = scheduler.next_job()
            assert isinstance(job, Read)
            cut = Pieces(4).cut(one.request.prompt, 0, 11)
            assert job.pieces == tuple(
                piece for piece in cut if start <= piece.start < one.placement.tokens_read
            )
            seen.append(one.placement.tokens_read)
        assert seen == ends, asked


def test_the_beginning_in_another_slot_is_copied() -> None:
    scheduler = Scheduler(4, piece_size=4, tail_size=2, join_prompts=True)
    first, same, longer, other = add_and_admit(
        scheduler, [*range(11)], [*range(11)], [*range(9), 0, 0, 0], [*range(4)]
    )
    assert scheduler.next_job() == read_of(first, Pieces(4).cut(first.request.prompt, 0, 11))
    scheduler.next_job()
    # All but the last two tokens, because their last pieces end alike.
    assert scheduler.next_job() == read_of(same, (range(9, 11),), (Copy(same, 0, 9),))
    scheduler.leave(first, keep=False)
    scheduler.next_job()
    assert scheduler.next_job() == read_of(longer, (range(8, 12),), (Copy(longer, 1, 8),))
    for one in (same, longer):
        one.progress.sampled = [5, 6]
        scheduler.leave(one)
    assert scheduler.next_job() == read_of(
        other, (range(2, 4),), (Copy(other, 1, 2),)
    )  # from a slot that is free


def test_a_prompt_that_is_being_read_is_copied_as_far_as_it_is() -> None:
    scheduler = Scheduler(2, piece_size=4, prefill_chunk_size=4)
    first, second = add_and_admit(scheduler, [*range(11)], [*range(11)])
    assert scheduler.next_job() == read_of(first, (range(4),))
    scheduler.leave(first)
    assert scheduler.next_job() == read_of(second, (range(4, 8),), (Copy(second, 0, 4),))


def test_short_prompts_that_are_the_same_are_read_once() -> None:
    scheduler = Scheduler(3, piece_size=16, tail_size=2, join_prompts=True)
    first, same, other = add_and_admit(scheduler, [*range(9)], [*range(9)], [*range(1, 10)])
    assert scheduler.next_job() == read_of(first, (range(9),))
    scheduler.next_job()
    assert scheduler.next_job() == read_of(same, (range(7, 9),), (Copy(same, 0, 7),))
    scheduler.next_job()
    assert scheduler.next_job() == read_of(other, (range(9),))
    scheduler = Scheduler(2, piece_size=16, tail_size=2, join_prompts=True)
    assert scheduler.next_job() is None
    assert scheduler_module._RUN_COST_TOKENS == 4
    short = add_and_admit(
        scheduler, [*range(6)], [*range(6)]
    )  # a run of its own would cost more than it saves
    assert scheduler.next_job() == Read(tuple(short), (range(6), range(6)))


def test_recurrent_states_are_copied_at_the_end_of_the_common_beginning() -> None:
    scheduler = Scheduler(4, piece_size=4, tail_size=2, recurrent=True, interleave=False)
    prompts = [*range(14)], [*range(14)], [*range(9), 0], [7] * 9
    first, same, shorter, other = add_and_admit(scheduler, *prompts)
    assert scheduler.next_job() == read_of(first, Pieces(4).cut(first.request.prompt, 0, 8))
    assert scheduler.next_job() == read_of(first, (range(8, 12),), (Copy(shorter, 0, 8),))
    assert scheduler.next_job() == read_of(first, (range(12, 14),), (Copy(same, 0, 12),))
    assert scheduler.next_job() == read_of(same, (range(12, 14),))
    assert scheduler.next_job() == read_of(shorter, (range(8, 10),))
    assert scheduler.next_job() == read_of(other, Pieces(4).cut(other.request.prompt, 0, 9))


def test_a_prompt_that_continues_kept_tokens_is_read_separately() -> None:
    scheduler = Scheduler(2, piece_size=2, join_prompts=True)
    (first,) = add_and_admit(scheduler, [1, 2, 3])
    pretend_read(first, 4, 5)
    scheduler.leave(first)
    goes_on, fresh = add_and_admit(scheduler, [1, 2, 3], [7])
    assert scheduler.next_job() == read_of(goes_on, (range(2, 3),))
    scheduler.next_job()
    assert scheduler.next_job() == read_of(fresh, (range(1),))


def test_every_prompt_is_read_first_without_interleaving() -> None:
    scheduler = Scheduler(2, prefill_chunk_size=1, interleave=False)
    add_and_admit(scheduler, [1, 2], [3])
    for kind in (Read, Read, Read, Window):
        assert isinstance(scheduler.next_job(), kind)


def test_a_guided_request_makes_windows_of_one_step() -> None:
    scheduler = Scheduler(2, flush_every=8)
    (free,), (guided,) = add_and_admit(scheduler, [1]), add_and_admit(scheduler, [2], guided=True)
    pretend_read(free)
    guided.placement.tokens_read = 1
    assert scheduler.next_job() == Window((free,), 8)
    pretend_read(guided)
    assert scheduler.next_job() == Window((free, guided), 1)


def test_no_job_is_left() -> None:
    scheduler = Scheduler(2)
    assert scheduler.next_job() is None
    (one,) = add_and_admit(scheduler, [1], most=1)
    pretend_read(one)  # its only token is on the way
    assert scheduler.next_job() is None


def test_a_stored_prefix_is_for_requests_of_its_adapter() -> None:
    base = PrefixFile(Path("base"), np.arange(4), 0, {}, "")
    stored = [base, replace(base, path=Path("longer"), tokens=np.arange(8), adapter="its sha256")]
    scheduler = Scheduler(2, max_loras=1)
    plain = request([*range(9)])
    adapted = request([*range(9)], adapter=Adapter("a", Path("a"), "its sha256", {}))
    for one in (plain, adapted):
        scheduler.add(one)
    admissions = scheduler.admit(lambda: stored)
    assert [(one.stored, one.copy.tokens) for one in admissions] == [(base, 4), (stored[1], 8)]


def test_recurrent_states_that_were_not_saved_are_not_reused() -> None:
    scheduler = Scheduler(1, recurrent=True)
    (first,) = add_and_admit(scheduler, [1, 2, 3])
    pretend_read(first, 9)
    scheduler.leave(first)
    (second,) = add_and_admit(scheduler, [1, 2, 3, 4])
    assert (second.placement.slot, second.placement.tokens_reused) == (0, 0)


@pytest.mark.parametrize(("size", "steps"), [(10, 1), (28, 1), (29, 2), (59, 2), (60, 3)])
def test_a_small_move_is_made_once_the_steps_cost_as_much(size: int, steps: int) -> None:
    """A step saves a row, as much as 32 tokens. At n steps, the row has its prompt, a token and n more, which are
    copied, and twice the token of slot 1."""
    scheduler = Scheduler(3, step_rows=RowCounts(1))
    _, between, _ = add_running(scheduler, [1] * 200, [2], [3] * size)
    scheduler.leave(between)
    assert steps_until_a_move(scheduler) == (steps, Move(source=2, target=1, kept=1))


@pytest.mark.parametrize(("shared", "together"), [(3, True), (4, True), (5, False)])
def test_a_copy_of_few_tokens_is_dearer_than_to_read_them(shared: int, together: bool) -> None:
    """A run costs as much as four tokens."""
    scheduler = Scheduler(2, piece_size=8, join_prompts=True, ragged=True, reuse_sampled=True)
    rows = add_and_admit(scheduler, [*range(shared), 50], [*range(shared), 60])
    job = scheduler.next_job()
    assert isinstance(job, Read)
    assert [*job.sequences] == (rows if together else rows[:1])


@pytest.mark.parametrize(("passed", "admitted"), [(255, True), (256, False)])
def test_so_many_requests_are_passed_by_a_later_one(passed: int, admitted: bool) -> None:
    scheduler = Scheduler(2, max_loras=1)
    one, other = (Adapter(name, Path(name), name, {}) for name in "ab")
    add_and_admit(scheduler, [1], adapter=one)
    for _ in range(passed):
        scheduler.add(request([1], adapter=other))
    scheduler.add(plain := request([2]))
    assert admit(scheduler) == [plain] * admitted
    assert scheduler.waiting == passed + (not admitted)


def test_requests_wait_in_order_for_a_grammar_that_has_no_room() -> None:
    """Later ones with a grammar wait behind it, and those without one do not."""
    scheduler = Scheduler(4)
    small, large = (TokenGrammar(*[np.zeros((1, 1), np.int32)] * 5) for _ in range(2))
    rows = [request([1], grammar=grammar) for grammar in (small, large, small, None)]
    for row in rows:
        scheduler.add(row)
    for takes, places in ((lambda given: given[-1] is small, (0, 3)), (lambda given: True, (1, 2))):
        admissions = scheduler.admit(takes_grammars=takes)
        assert [one.sequence for one in admissions] == [rows[place] for place in places]
