"""The scheduler: order of arrival, kept prefixes, chunks between windows."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.runtime.decode.scheduler import (
    Chunk,
    Prompts,
    Scheduler,
    Window,
    joined_slots,
    shared_prefix,
)
from qsample.runtime.sequence import Sequence


def request(prompt: list[int], most: int = 10, *, guided: bool = False) -> Sequence:
    parameters = {"max_length": np.array(len(prompt) + most, dtype=np.int32)}
    return Sequence(np.array(prompt, dtype=np.int64), parameters, 0, guided)


def read(scheduler: Scheduler, wanted: Sequence) -> None:
    """Pretend that the whole prompt was fed and the first token sampled."""
    wanted.consumed, wanted.issued = len(wanted.prompt), 1


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


def test_first_come_first_served() -> None:
    scheduler = Scheduler(2)
    requests = [request([n, n]) for n in range(1, 6)]
    for one in requests:
        scheduler.add(one)
    assert scheduler.admit() == requests[:2]
    assert (scheduler.waiting, scheduler.admit()) == (3, [])
    slot = scheduler.leave(requests[1])
    assert scheduler.admit() == [requests[2]]
    assert requests[2].slot == slot
    assert scheduler.leave(requests[4]) is None  # from the queue
    scheduler.leave(requests[0])
    assert scheduler.admit() == [requests[3]]
    assert scheduler.waiting == 0
    assert [one.slot for one in scheduler.in_slots] == [slot, 0]


def test_a_prompt_goes_where_most_of_it_is_kept() -> None:
    scheduler = Scheduler(3)
    held = [request([1, 2, 3, 4]), request([1, 2, 9]), request([7])]
    for one in held:
        scheduler.add(one)
    scheduler.admit()
    slots = [one.slot for one in held]
    for one, new in zip(held, ([5, 6], [8], [3]), strict=True):
        read(scheduler, one)
        one.sampled = new
        scheduler.leave(one)
    for prompt, slot, reused in (
        ([1, 2, 3, 4, 5, 6, 7], slots[0], 5),  # token 6 was sampled, but never fed
        ([1, 2, 9], slots[1], 2),  # never the whole prompt: its last token has to be fed
        ([8, 8], slots[2], 0),  # nothing anywhere: the one that was left longest ago
    ):
        one = request(prompt)
        scheduler.add(one)
        assert scheduler.admit() == [one]
        assert (one.slot, one.reused, one.consumed) == (slot, reused, reused)


def test_what_is_kept_of_a_request_that_left_early() -> None:
    for consumed, issued, keep, kept in ((2, 0, True, 2), (4, 1, True, 0), (4, 1, False, 0), (0, 0, True, 0)):
        scheduler = Scheduler(1)
        first, second = request([1, 2, 3, 4]), request([1, 2, 3, 4, 5])
        for one in (first, second):
            scheduler.add(one)
        scheduler.admit()
        first.consumed, first.issued = consumed, issued
        scheduler.leave(first, keep=keep)
        scheduler.admit()
        assert second.reused == kept


def test_chunks_and_windows_take_turns() -> None:
    scheduler = Scheduler(3, flush_every=4, prefill_chunk_size=2)
    first, second = request([1]), request([2, 3, 4, 5, 6])
    for one in (first, second):
        scheduler.add(one)
    scheduler.admit()
    seen = []
    for _ in range(7):
        job = scheduler.next_job()
        assert job is not None
        if isinstance(job, Chunk):
            job.sequence.consumed, job.sequence.issued = job.end, int(job.last)
            seen.append((job.sequence, job.start, job.end, job.last))
        else:
            for one in job.sequences:
                one.issued = min(one.issued + job.steps, one.limit)
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
        ({3: 40, 4: 36}, 3, None, range(3, 5)),  # padding costs what a run costs
        ({3: 40, 4: 35}, 3, None, range(3, 4)),  # and here more
        ({0: 40, 1: 44, 2: 44}, 0, None, range(3)),
        ({0: 40, 1: 44, 2: 48}, 0, None, range(2)),  # the third would pad both of the others
        ({0: 8, 1: 8, 2: 8}, 0, 16, range(2)),
        ({0: 8, 1: 8}, 0, 15, range(1)),
        ({0: 300, 1: 300}, 0, None, range(1)),
        (dict.fromkeys(range(40), 16), 20, None, range(8, 40)),  # 512 tokens
    ],
)
def test_joined_slots(lengths: dict[int, int], slot: int, chunk: int | None, joined: range) -> None:
    assert joined_slots(lengths, slot, chunk) == joined


def test_whole_prompts_are_read_together() -> None:
    scheduler = Scheduler(4, prefill_chunk_size=8, join_prompts=True)
    kept, long, *short = (request(prompt) for prompt in ([9, 9], [5] * 9, [1, 2], [3, 4, 5], [6]))
    scheduler.add(kept)
    scheduler.admit()
    read(scheduler, kept)
    kept.sampled = [9, 8]
    scheduler.leave(kept)  # slot 0 holds 9, 9, 9 now
    again = request([9, 9, 7])
    for one in (long, *short, again):
        scheduler.add(one)
    scheduler.admit()
    # The slot that was left last comes last.
    assert [one.slot for one in (long, *short)] == [1, 2, 3, 0]
    assert scheduler.next_job() == Chunk(long, 0, 8)
    long.consumed = 8
    assert scheduler.next_job() == Chunk(long, 8, 9)
    read(scheduler, long)
    assert scheduler.next_job() == Window((long,), 1)
    assert scheduler.next_job() == Prompts((short[0], short[1]))


def test_a_prompt_that_goes_on_from_a_kept_one_is_read_alone() -> None:
    scheduler = Scheduler(2, join_prompts=True)
    first = request([1, 2, 3])
    scheduler.add(first)
    scheduler.admit()
    read(scheduler, first)
    first.sampled = [4, 5]
    scheduler.leave(first)
    goes_on, fresh = request([1, 2, 3, 4, 6]), request([7])
    for one in (goes_on, fresh):
        scheduler.add(one)
    scheduler.admit()
    assert scheduler.next_job() == Chunk(goes_on, 4, 5)
    read(scheduler, goes_on)
    scheduler.next_job()
    assert scheduler.next_job() == Chunk(fresh, 0, 1)


def test_every_prompt_first_without_interleaving() -> None:
    scheduler = Scheduler(2, prefill_chunk_size=1, interleave=False)
    for prompt in ([1, 2], [3]):
        scheduler.add(request(prompt))
    scheduler.admit()
    for kind in (Chunk, Chunk, Chunk, Window):
        job = scheduler.next_job()
        assert isinstance(job, kind)
        if isinstance(job, Chunk):
            job.sequence.consumed, job.sequence.issued = job.end, int(job.last)


def test_a_guided_request_makes_windows_of_one_step() -> None:
    scheduler = Scheduler(2, flush_every=8)
    free, guided = request([1]), request([2], guided=True)
    for one in (free, guided):
        scheduler.add(one)
    scheduler.admit()
    read(scheduler, free)
    guided.consumed = 1
    assert scheduler.next_job() == Window((free,), 8)
    read(scheduler, guided)
    assert scheduler.next_job() == Window((free, guided), 1)


def test_nothing_to_do() -> None:
    scheduler = Scheduler(2)
    assert scheduler.next_job() is None
    one = request([1], most=1)
    scheduler.add(one)
    scheduler.admit()
    read(scheduler, one)  # its only token is on the way
    assert scheduler.next_job() is None


def test_recurrent_states_are_not_gone_on_from() -> None:
    scheduler = Scheduler(1, keep_prefixes=False)
    first, second = request([1, 2, 3]), request([1, 2, 3, 4])
    scheduler.add(first)
    scheduler.admit()
    read(scheduler, first)
    first.sampled.append(9)
    scheduler.leave(first)
    scheduler.add(second)
    scheduler.admit()
    assert (second.slot, second.reused) == (0, 0)
