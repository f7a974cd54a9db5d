"""Adapters of a batch: the order in which rows get places, tokens that only rows of the same adapter
continue from, and the memory of the matrices, whatever was loaded before."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from qsample.contract.interface import (
    AdapterTarget,
    Features,
    Interface,
    adapter_ids,
    adapter_names,
)
from qsample.ort.buffers import Buffer
from qsample.runtime.adapters import Adapter
from qsample.runtime.decode import adapter_use
from qsample.runtime.decode.adapter_use import AdapterRows, Marks
from qsample.runtime.decode.jobs import Admission
from qsample.runtime.decode.prefixes import Pieces
from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
from qsample.runtime.sequence import Sequence, SequenceRequest


def adapter(content: str, name: str = "any") -> Adapter:
    return Adapter(name, Path(name), content, {})


A, B, C = adapter("a"), adapter("b"), adapter("c")


def request(of: Adapter | None, prompt: list[int] | None = None) -> Sequence:
    parameters = {"max_length": np.array(99, dtype=np.int32)}
    ids = np.array(prompt or [1, 2, 3], dtype=np.int64)
    return Sequence(SequenceRequest(ids, parameters, 0, adapter=of))


def make_scheduler(max_loras: int, slots: int = 8) -> Scheduler:
    return Scheduler(slots, SchedulerConfig(Pieces(1), max_loras=max_loras))


def add_requests(scheduler: Scheduler, *wanted: Adapter | None) -> list[Sequence]:
    sequences = [request(of) for of in wanted]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def places_and_writes(admissions: list[Admission]) -> list[tuple[int, Adapter | None]]:
    """The place of each admitted sequence, and the adapter to write there."""
    return [
        (admission.sequence.placement.adapter_place, admission.adapter) for admission in admissions
    ]


def test_rows_of_an_adapter_share_its_place_whatever_its_name() -> None:
    scheduler = make_scheduler(2)
    add_requests(scheduler, A, None, B, adapter("a", "another name of the same numbers"))
    assert places_and_writes(scheduler.admit()) == [(1, A), (0, None), (2, B), (1, None)]


def test_the_idle_adapter_that_was_used_longest_ago_gives_its_place() -> None:
    scheduler = make_scheduler(2)
    rows = add_requests(scheduler, A, B)
    scheduler.admit()
    for row in rows:
        scheduler.leave(row)
    add_requests(scheduler, A)
    assert places_and_writes(scheduler.admit()) == [(1, None)]
    add_requests(scheduler, C)
    assert places_and_writes(scheduler.admit()) == [(2, C)]


def test_rows_pass_a_row_that_waits_for_an_adapter_unless_their_adapter_has_to_leave() -> None:
    scheduler = make_scheduler(2)
    first, second = add_requests(scheduler, A, B)
    scheduler.admit()
    waits, of_a, of_b, plain, also_waits = add_requests(scheduler, C, A, B, None, C)
    # A was given to a row longest ago: its next row comes after C's.
    assert [admission.sequence for admission in scheduler.admit()] == [of_b, plain]
    scheduler.leave(second)
    assert scheduler.admit() == []
    scheduler.leave(first)
    # Now B was given to a row longest ago, and A's row claims it.
    admissions = scheduler.admit()
    assert [admission.sequence for admission in admissions] == [waits, also_waits]
    assert places_and_writes(admissions) == [(1, C), (1, None)]
    scheduler.leave(waits)
    scheduler.leave(of_b)
    assert places_and_writes(scheduler.admit()) == [(2, A)]
    assert (scheduler.waiting, of_a.placement.adapter_place) == (0, 2)


def test_every_request_gets_a_slot_in_the_end() -> None:
    chooses = random.Random(0)
    scheduler, known = make_scheduler(2, slots=3), [adapter(str(number)) for number in range(5)]
    held: dict[int, Adapter] = {}
    waiting: dict[Sequence, int] = {}
    running: list[Sequence] = []
    for step in range(3000):
        if len(waiting) < 6:
            (row,) = add_requests(
                scheduler, chooses.choice([*known, *[known[0]] * 20, *[known[1]] * 20, None])
            )
            waiting[row] = step
        if running and chooses.random() < 0.5:
            scheduler.leave(running.pop(chooses.randrange(len(running))))
        for admission in scheduler.admit():
            sequence = admission.sequence
            assert step - waiting.pop(sequence) < 60
            if admission.adapter is not None:
                assert all(
                    other.placement.adapter_place != sequence.placement.adapter_place
                    for other in running
                )
                held[sequence.placement.adapter_place] = admission.adapter
            assert sequence.request.adapter is held.get(sequence.placement.adapter_place)
            running.append(sequence)
    assert len(held) == 2


@pytest.mark.parametrize("reuse_sampled", [False, True])
def test_prompts_of_different_adapters_share_no_beginning(reuse_sampled: bool) -> None:
    scheduler = Scheduler(4, SchedulerConfig(Pieces(1), max_loras=2, reuse_sampled=reuse_sampled))
    for of, again in ((A, adapter("a")), (None, None), (B, adapter("b"))):
        scheduler.add(first := request(of, [5, 6, 7]))
        (admission,) = scheduler.admit()
        assert admission.copy.tokens == 0
        first.placement.tokens_read, first.placement.tokens_issued, first.progress.sampled = (
            3,
            3,
            [8, 9],
        )
        scheduler.leave(first)
        scheduler.add(second := request(again, [5, 6, 7, 8, 9]))
        (admission,) = scheduler.admit()
        assert admission.copy.tokens == (4 if reuse_sampled else 3)
        scheduler.leave(second)


def test_tokens_to_store_have_no_marks() -> None:
    scheduler = make_scheduler(2, slots=2)
    for of in (A, None):
        scheduler.add(row := request(of, [5, 6, 7]))
        scheduler.admit()
        row.placement.tokens_read = 3
        slot = scheduler.leave(row)
        assert slot is not None
        tokens, place = scheduler.to_store(slot, row.identities)
        assert (tokens.tolist(), place) == ([5, 6, 7], None)


def test_two_adapters_never_have_the_same_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_use, "_MAX_MARKS", 2)
    # Texts, and identities of image tokens. The sum of a mark and the last one would be the id 1 with
    # that mark.
    marks, tokens = (
        Marks(),
        np.array([0, 1, 2**31 - 1, -1, -(2**63), 1 - (1 << 32)], dtype=np.int64),
    )
    seen = [tokens, *(marks.mark(tokens, adapter) for adapter in (A, B, C, A))]
    assert len(np.unique(np.stack(seen))) == 5 * len(tokens)  # A was forgotten
    assert all(((marked < 0) == (tokens < 0)).all() for marked in seen)
    assert (marks.mark(tokens, None) == tokens).all()


TARGETS = AdapterTarget("0.q", 3, 4), AdapterTarget("1.q", 3, 4), AdapterTarget("0.down", 5, 2)
ROWS, PLACES, RANK = 4, 3, 4


def make_adapter(rng: np.random.Generator) -> Adapter:
    """An adapter of some of the layers, with a random rank in each."""
    changed = [target for target in TARGETS if rng.random() < 0.7] or [TARGETS[0]]
    matrices = {}
    for target in changed:
        rank = int(rng.integers(1, RANK + 1))
        a, b = (
            rng.normal(size=(rank, target.in_features)),
            rng.normal(size=(rank, target.out_features)),
        )
        matrices[target.path] = a.astype(np.float32), b.astype(np.float32)
    return Adapter("a", Path(), str(rng.random()), matrices)


def memory_of(buffer: Buffer) -> np.ndarray:
    """The numbers that a graph bound to the buffer reads."""
    whole = buffer.owner.numpy().reshape(-1)
    first = (buffer.address - buffer.owner.data_ptr()) // whole.itemsize
    return whole[first : first + int(np.prod(buffer.shape))].reshape(buffer.shape)


def adapter_product(inputs: dict[str, np.ndarray], row: int, target: AdapterTarget) -> np.ndarray:
    """A^T B of the adapter of a row, as the graph computes it."""
    a, b = (inputs[name] for name in adapter_names(target.path))
    own = inputs[adapter_ids(target.kind).name] == inputs["adapter"][row]
    return np.asarray((a * own[:, None]).astype(np.float64).T @ b)


@pytest.mark.parametrize("captured", [False, True])
def test_rows_meet_the_matrices_of_their_adapters_after_random_loads(captured: bool) -> None:
    rng = np.random.default_rng(5)
    features = Features(max_loras=PLACES, max_lora_rank=RANK)
    memory = AdapterRows(
        Interface(9, (), features=features, captured=captured, adapters=TARGETS), ROWS, "cpu"
    )
    held: list[Adapter | None] = [None] * PLACES
    of_row = [0] * ROWS
    keys = set()
    for _ in range(300):
        row, place = int(rng.integers(ROWS)), int(rng.integers(PLACES))
        action = rng.random()
        if action < 0.3 and place + 1 not in of_row:
            held[place] = make_adapter(rng)
            memory.put(place + 1, held[place])  # type: ignore[arg-type]
        elif action < 0.6 and held[place] is not None:
            of_row[row] = place + 1
            memory.begin(row, place + 1)
        elif action < 0.8:
            of_row[row] = 0
            memory.begin(row, 0)
        else:
            other = int(rng.integers(ROWS))
            of_row[row], of_row[other] = of_row[other], of_row[row]
            memory.swap_rows(row, other)
        start = int(rng.integers(ROWS))
        rows = range(start, int(rng.integers(start + 1, ROWS + 1)))
        inputs = {name: memory_of(buffer) for name, buffer in memory.inputs(rows).items()}
        keys.add(memory.key(rows))
        assert tuple(
            (kind, len(inputs[adapter_ids(kind).name])) for kind in ("q", "down")
        ) == memory.key(rows)
        for index, row in enumerate(rows):
            adapter = held[of_row[row] - 1] if of_row[row] else None
            for target in TARGETS:
                a, b = adapter.matrices.get(target.path, (None, None)) if adapter else (None, None)
                wanted = (
                    np.zeros((target.in_features, target.out_features))
                    if a is None
                    else a.astype(float).T @ b
                )
                np.testing.assert_allclose(
                    adapter_product(inputs, index, target), wanted, atol=1e-6
                )
        if not captured and not any(of_row[row] for row in rows):
            assert memory.key(rows) == (("q", 0), ("down", 0))
    assert len(keys) == (1 if captured else len(keys))
    assert captured or len(keys) > 10


def test_a_package_without_adapters_has_no_adapter_inputs() -> None:
    memory = AdapterRows(Interface(9, ()), ROWS, "cpu")
    memory.begin(0, 0)
    memory.swap_rows(0, 1)
    assert memory.inputs(range(2)) == {}
    assert memory.key(range(2)) == ()
