"""Adapters of a batch: who waits for which, and tokens that no other adapter's row may continue from."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from qsample.runtime.adapters import Adapter
from qsample.runtime.decode import adapter_use
from qsample.runtime.decode.adapter_use import Marks, extended, unmarked
from qsample.runtime.decode.prefixes import Pieces
from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
from qsample.runtime.sequence import Sequence


def adapter(content: str, name: str = "any") -> Adapter:
    return Adapter(name, Path(name), content, {})


A, B, C = adapter("a"), adapter("b"), adapter("c")


def request(of: Adapter | None, prompt: list[int] | None = None) -> Sequence:
    parameters = {"max_length": np.array(99, dtype=np.int32)}
    return Sequence(np.array(prompt or [1, 2, 3], dtype=np.int64), parameters, 0, adapter=of)


def scheduler(max_loras: int, slots: int = 8) -> Scheduler:
    return Scheduler(slots, SchedulerConfig(Pieces(1), max_loras=max_loras))


def added(one: Scheduler, *wanted: Adapter | None) -> list[Sequence]:
    sequences = [request(of) for of in wanted]
    for sequence in sequences:
        one.add(sequence)
    return sequences


def admitted(one: Scheduler) -> list[Sequence]:
    return [admission.sequence for admission in one.admit()]


def test_rows_of_an_adapter_count_once_whatever_its_name() -> None:
    one = scheduler(2)
    rows = added(one, A, None, B, adapter("a", "another name of the same numbers"))
    assert admitted(one) == rows


def test_others_pass_a_row_that_waits_for_an_adapter_but_none_of_the_adapter_that_is_to_leave() -> None:
    one = scheduler(2)
    first, second = added(one, A, B)
    one.admit()
    waits, of_a, of_b, plain, also_waits = added(one, C, A, B, None, C)
    # A was given to a row longest ago: its next row comes after C's.
    assert admitted(one) == [of_b, plain]
    one.leave(second)
    assert admitted(one) == []
    one.leave(first)
    # Now B was given to a row longest ago, and A's row claims it.
    assert admitted(one) == [waits, also_waits]
    one.leave(waits)
    one.leave(of_b)
    assert admitted(one) == [of_a]
    assert one.waiting == 0


def test_everybody_gets_a_turn() -> None:
    chooses = random.Random(0)
    one, known = scheduler(2, slots=3), [adapter(str(number)) for number in range(5)]
    waiting: dict[Sequence, int] = {}
    running: list[Sequence] = []
    for step in range(3000):
        if len(waiting) < 6:
            (row,) = added(one, chooses.choice([*known, *[known[0]] * 20, *[known[1]] * 20, None]))
            waiting[row] = step
        if running and chooses.random() < 0.5:
            one.leave(running.pop(chooses.randrange(len(running))))
        for sequence in admitted(one):
            running.append(sequence)
            assert step - waiting.pop(sequence) < 60
        assert len({row.adapter.sha256 for row in running if row.adapter}) <= 2


@pytest.mark.parametrize("reuse_sampled", [False, True])
def test_no_beginning_crosses_adapters(reuse_sampled: bool) -> None:
    one = Scheduler(4, SchedulerConfig(Pieces(1), max_loras=2, reuse_sampled=reuse_sampled))
    for of, again in ((A, adapter("a")), (None, None), (B, adapter("b"))):
        one.add(first := request(of, [5, 6, 7]))
        (admission,) = one.admit()
        assert admission.copy.tokens == 0
        first.consumed, first.issued, first.sampled = 3, 3, [8, 9]
        one.leave(first)
        one.add(second := request(again, [5, 6, 7, 8, 9]))
        (admission,) = one.admit()
        assert admission.copy.tokens == (4 if reuse_sampled else 3)
        one.leave(second)


def test_the_tokens_that_a_slot_keeps_are_told_with_their_adapter() -> None:
    one = scheduler(2, slots=2)
    for of in (A, None):
        one.add(row := request(of, [5, 6, 7]))
        one.admit()
        row.consumed = 3
        slot = one.leave(row)
        assert slot is not None
        tokens, place, sha256 = one.to_store(slot)
        assert (tokens.tolist(), place, sha256) == ([5, 6, 7], None, of.sha256 if of else "")


def test_a_mark_is_never_that_of_another_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_use, "_MOST_MARKS", 2)
    marks, tokens = Marks(), np.array([1, 2**31 - 1], dtype=np.int64)
    seen = [marks.mark(tokens, one) for one in (A, B, C, A)]
    assert len({tuple(one.tolist()) for one in seen}) == 4  # A was forgotten
    assert all(unmarked(one).tolist() == tokens.tolist() for one in seen)
    assert [marks.adapter_of(one) for one in seen] == [None, None, "c", "a"]
    assert (marks.mark(tokens, None).tolist(), marks.adapter_of(tokens)) == (tokens.tolist(), "")
    assert marks.adapter_of(extended(seen[3], [4])) == "a"
    assert unmarked(extended(seen[3], [4])).tolist() == [1, 2**31 - 1, 4]
