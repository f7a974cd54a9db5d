"""The parameters of every row: columns that come and go, and rows that move and end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import BATCH, HOST_AXES
from qsample.runtime.decode.inputs import ParameterRows

INTERFACE = Interface(1000, (), features=Features(filters=("bad_words_ids",), logit_bias=True))


def parameter_rows(rows: int = 2, *, narrow: bool = True) -> ParameterRows:
    sizes = {**INTERFACE.sizes, BATCH: rows, **dict.fromkeys(HOST_AXES, 1)}
    return ParameterRows(INTERFACE, sizes, "cpu", narrow=narrow, needed=True)


def values(rows: ParameterRows, name: str) -> Any:
    return rows.buffers[name].read().tolist()


def ints(*numbers: Any) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_all_parameters_are_off_at_first() -> None:
    rows = parameter_rows()
    assert set(rows.buffers) == {spec.name for spec in INTERFACE.parameters}
    for spec in INTERFACE.parameters:
        buffer = rows.buffers[spec.name]
        assert buffer.dtype == spec.dtype
        assert buffer.shape == (2, *[1] * (len(spec.axes) - 1))
        assert (buffer.read() == (spec.off or 0)).all(), spec.name
    assert values(rows, "top_p") == [1, 1]
    assert values(rows, "stop_ids") == [[-1], [-1]]


def test_a_row_is_written_alone() -> None:
    rows = parameter_rows()
    assert not rows.set(1, {"temperature": np.float32(0.5), "stop_ids": ints(7)})
    assert values(rows, "temperature") == [1, 0.5]
    assert values(rows, "stop_ids") == [[-1], [7]]


def test_columns_are_a_power_of_two_and_those_that_a_row_lacks_are_off() -> None:
    rows = parameter_rows()
    assert rows.set(0, {"stop_ids": ints(1, 2, 3)})
    assert values(rows, "stop_ids") == [[1, 2, 3, -1], [-1] * 4]
    kept = rows.buffers["stop_ids"]
    assert not rows.set(1, {"stop_ids": ints(4, 5, 6, 7)})
    assert rows.buffers["stop_ids"] is kept
    assert values(rows, "stop_ids") == [[1, 2, 3, -1], [4, 5, 6, 7]]
    # The next write of a row leaves nothing of the one before, and fewer columns than that keep their memory.
    assert not rows.set(1, {"stop_ids": ints(9)})
    assert values(rows, "stop_ids") == [[1, 2, 3, -1], [9, -1, -1, -1]]
    assert rows.set(1, {"stop_ids": ints(1, 2, 3, 4, 5)})
    assert values(rows, "stop_ids") == [[1, 2, 3] + [-1] * 5, [1, 2, 3, 4, 5, -1, -1, -1]]


def test_words_are_padded_in_front() -> None:
    """Of several words of several tokens; each axis has a width of its own."""
    rows = parameter_rows()
    assert rows.set(0, {"bad_words_ids": ints([-1, 4], [5, 6])})
    assert values(rows, "bad_words_ids") == [[[-1, 4], [5, 6]], [[-1, -1]] * 2]
    assert rows.set(1, {"bad_words_ids": ints([7, 8, 9])})
    assert values(rows, "bad_words_ids") == [
        [[-1, -1, -1, 4], [-1, -1, 5, 6]],
        [[-1, 7, 8, 9], [-1] * 4],
    ]


def test_parameters_of_one_axis_have_the_same_columns() -> None:
    rows = parameter_rows()
    assert rows.set(
        0, {"logit_bias_ids": ints(5, 6), "logit_bias": np.array([1.5, -2], np.float32)}
    )
    assert values(rows, "logit_bias_ids") == [[5, 6], [-1, -1]]
    assert values(rows, "logit_bias") == [[1.5, -2], [0, 0]]


@pytest.mark.parametrize(
    ("narrow", "first", "then", "left"),
    [
        (True, 256, 64, 64),
        (True, 256, 65, 256),  # no quarter
        (True, 200, 1, 1),  # 256 columns
        (True, 128, 1, 128),  # few columns cost nothing
        (False, 256, 1, 256),
    ],
)
def test_many_columns_that_no_row_needs_are_given_up(
    narrow: bool, first: int, then: int, left: int
) -> None:
    rows = parameter_rows(narrow=narrow)
    many = np.arange(first, dtype=np.int32)
    rows.set(0, {"stop_ids": many})
    rows.set(1, {"stop_ids": many})
    # One of the two still needs them.
    assert not rows.set(0, {"stop_ids": many[:then]})
    before = rows.buffers["stop_ids"].shape[1]
    assert rows.set(1, {"stop_ids": many[:then]}) == (left != before)
    assert rows.buffers["stop_ids"].shape == (2, left)
    for row in values(rows, "stop_ids"):
        assert row == [*range(then), *[-1] * (left - then)]


def test_a_row_that_ends_needs_no_columns() -> None:
    rows = parameter_rows()
    many = np.arange(256, dtype=np.int32)
    rows.set(0, {"stop_ids": many, "temperature": np.float32(0.5)})
    rows.clear(0)
    assert values(rows, "temperature") == [1, 1]
    assert values(rows, "stop_ids") == [[-1] * 256] * 2
    assert rows.set(1, {"stop_ids": ints(5)})
    assert values(rows, "stop_ids") == [[-1], [5]]


def test_rows_move_with_their_columns() -> None:
    rows = parameter_rows(3)
    many = np.arange(256, dtype=np.int32)
    rows.set(0, {"stop_ids": many, "temperature": np.float32(0.5)})
    rows.swap_rows(0, 2)
    assert values(rows, "temperature") == [1, 1, 0.5]
    assert values(rows, "stop_ids")[2] == many.tolist()
    assert not rows.set(0, {"stop_ids": ints(5)})
    assert rows.set(2, {"stop_ids": ints(6)})
    assert values(rows, "stop_ids") == [[5], [-1], [6]]
