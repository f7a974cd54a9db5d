"""What a job says about its slots and pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qsample.runtime.decode.jobs import Read, Window, slot_of, span_of


def sequence(prompt_length: int, slot: int | None = 0) -> Any:
    return SimpleNamespace(
        request=SimpleNamespace(prompt=range(prompt_length)), placement=SimpleNamespace(slot=slot)
    )


@pytest.mark.parametrize(
    ("lengths", "pieces", "ends", "last"),
    [
        ([9], [range(4)], (4,), False),
        ([9], [range(4), range(4, 8)], (8,), False),
        ([9], [range(4), range(4, 9)], (9,), True),
        ([9], [range(8, 9)], (9,), True),
        ([9, 4], [range(5, 9), range(4)], (9, 4), True),
        ([9, 4, 2], [range(5, 9), range(1, 4), range(2)], (9, 4, 2), True),
    ],
)
def test_where_a_read_ends(
    lengths: list[int], pieces: list[range], ends: tuple[int, ...], last: bool
) -> None:
    read = Read(tuple(map(sequence, lengths)), tuple(pieces))
    assert read.ends == ends
    assert read.last is last


@pytest.mark.parametrize(
    ("slots", "span"), [([0], range(1)), ([3], range(3, 4)), ([4, 1, 2], range(1, 5))]
)
def test_the_rows_from_the_first_slot_to_the_last(slots: list[int], span: range) -> None:
    assert span_of(slots) == span
    assert span_of(iter(slots)) == span
    sequences = tuple(sequence(1, slot) for slot in slots)
    assert Window(sequences, 1).rows == span
    assert [slot_of(one) for one in sequences] == slots


def test_windows_are_equal_whatever_their_counts() -> None:
    one = sequence(1)
    assert Window((one,), 2, (1,)) == Window((one,), 2, (2,))
    assert Window((one,), 2) != Window((one,), 3)
