"""What rows need of a captured graph: the lists that switch its parts off, as the contract says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import BATCH, EXTRA_PARAMETERS, HOST_AXES
from qsample.runtime.decode.inputs import ParameterRows
from qsample.runtime.decode.replay_rows import ReplayRows
from tests.helpers.reference import REPLAY_LISTS
from tests.sampler.test_draw import TO_PROCESS, TO_SEARCH

FEATURES = Features(filters=tuple(EXTRA_PARAMETERS), logit_bias=True, allowed_tokens=True)
INTERFACE = Interface(1000, (), features=FEATURES, captured=True)
GREEDY = {"temperature": 0.0}


def arrays(parameters: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in parameters.items()}


def lists(rows: ReplayRows, count: int) -> dict[str, list[int]]:
    """The lists of the first rows, as a prompt call gets them."""
    found = rows.of_rows(range(count))
    return {name: buffer.read()[: buffer.shape[0]].tolist() for name, buffer in found.items()}


def of_batch(rows: ReplayRows) -> list[list[int]]:
    found = rows.of_batch()
    return [found[name].read()[: found[name].shape[0]].tolist() for name in REPLAY_LISTS]


@pytest.mark.parametrize(("searched", "parameters"), TO_SEARCH)
def test_rows_that_need_a_search(searched: bool, parameters: dict[str, float]) -> None:
    rows = ReplayRows(INTERFACE, 3, "cpu", needed=False)
    rows.set(1, arrays({"temperature": 1.0, **parameters}))
    assert lists(rows, 3)["searched_rows"] == ([1] if searched else [])


@pytest.mark.parametrize(("needed", "parameters"), TO_PROCESS)
def test_parts_that_a_row_needs(needed: list[str], parameters: dict[str, float]) -> None:
    rows = ReplayRows(INTERFACE, 3, "cpu", needed=False)
    rows.set(0, arrays(GREEDY))
    rows.set(1, arrays({"temperature": 1.0, **parameters}))
    found = lists(rows, 3)
    assert [name for name in REPLAY_LISTS if found[name]] == needed
    for name in REPLAY_LISTS[:2]:
        assert found[name] == ([0, 1, 2] if name in needed else [])
    assert of_batch(rows) == [found[name] for name in REPLAY_LISTS]


@pytest.mark.parametrize(
    "parameters",
    [
        {"min_length": 3},
        {"logit_bias_ids": [-1, 7]},
        {"allowed_tokens": [-1] * 31 + [-2]},
        {"bad_words_ids": [[-1, -1], [-1, 0]]},
        {"no_repeat_ngram_size": 2},
    ],
)
def test_greedy_rows_with_other_logits_are_processed(parameters: dict[str, Any]) -> None:
    rows = ReplayRows(INTERFACE, 2, "cpu", needed=False)
    rows.set(1, arrays(GREEDY | parameters))
    assert rows.sizes == (2, 0, 0)
    rows.set(
        1, arrays({name: np.full_like(np.asarray(value), -1) for name, value in parameters.items()})
    )
    assert rows.sizes == (
        (2, 0, 0) if set(parameters) & {"min_length", "no_repeat_ngram_size"} else (0, 0, 0)
    )


def test_parameters_that_change_nothing_of_a_greedy_row() -> None:
    rows = ReplayRows(INTERFACE, 2, "cpu", needed=False)
    off = {"top_k": 3, "top_p": 0.5, "stop_ids": [5, 6], "max_length": 9, "penalty_last_n": 4}
    rows.set(0, arrays(GREEDY | off))
    assert rows.sizes == (0, 0, 0)


def test_a_row_with_a_grammar_is_processed_until_it_ends() -> None:
    rows = ReplayRows(INTERFACE, 2, "cpu", needed=False)
    rows.set(1, arrays(GREEDY))
    rows.set_grammar(1, True)
    assert rows.sizes == (2, 0, 0)
    rows.swap_rows(0, 1)
    rows.clear(1)
    assert rows.sizes == (2, 0, 0)
    rows.clear(0)
    assert rows.sizes == (0, 0, 0)
    rows.set(0, arrays(GREEDY))
    assert rows.sizes == (0, 0, 0), "the grammar was the row's before"


def test_rows_that_do_not_run_need_nothing() -> None:
    """Although the parameters of an idle row are those of a random row."""
    rows = ReplayRows(INTERFACE, 4, "cpu", needed=False)
    assert rows.sizes == (0, 0, 0)
    rows.set(2, arrays({"temperature": 1.0, "top_p": 0.9}))
    assert rows.sizes == (4, 4, 1)
    rows.clear(2)
    assert rows.sizes == (0, 0, 0)
    rows.set(2, arrays(GREEDY))
    assert rows.sizes == (0, 0, 0), "of a row's second use"


def test_a_later_change_of_one_parameter() -> None:
    rows = ReplayRows(INTERFACE, 2, "cpu", needed=False)
    rows.set(0, arrays({"temperature": 1.0, "top_k": 5, "top_p": 0.9}))
    assert rows.sizes == (2, 0, 0)
    rows.set(0, arrays({"top_k": 0}))
    assert rows.sizes == (2, 2, 1)
    rows.set(0, arrays({"temperature": 0.0}))
    assert rows.sizes == (0, 0, 0)


def test_a_graph_without_lists_gets_empty_lists() -> None:
    rows = ReplayRows(Interface(1000, ()), 2, "cpu")
    rows.set(1, arrays({"temperature": 1.0, "top_p": 0.5, "typical_p": 0.5}))
    rows.set_grammar(1, True)
    assert lists(rows, 2) == {name: [] for name in REPLAY_LISTS}
    assert rows.sizes == (0, 0, 0)


def test_a_graph_that_takes_no_empty_lists() -> None:
    rows = ReplayRows(INTERFACE, 3, "cpu")
    assert rows.sizes == (3, 3, 1)
    assert of_batch(rows) == [[0, 1, 2], [0, 1, 2], [0]]
    assert lists(rows, 2) == {
        "processed_rows": [0, 1],
        "vocabulary_rows": [0, 1],
        "searched_rows": [0],
    }
    assert lists(rows, 0) == {name: [] for name in REPLAY_LISTS}


def test_the_list_of_searched_rows_has_a_length_that_is_a_power_of_two() -> None:
    """A batch then needs few captures. A repeated row fills the list, and rows that leave shorten it."""
    rows = ReplayRows(INTERFACE, 11, "cpu", needed=False)
    addresses = {name: buffer.address for name, buffer in rows.of_batch().items()}
    sizes = []
    for slot in range(11):
        rows.set(slot, arrays({"temperature": 1.0, "top_p": 0.9}))
        found = rows.of_batch()
        assert {name: one.address for name, one in found.items()} == addresses  # that are captured
        values = found["searched_rows"].read()[: found["searched_rows"].shape[0]]
        assert set(values.tolist()) == set(range(slot + 1))
        sizes.append(rows.sizes)
        assert tuple(one.shape[0] for one in found.values()) == rows.sizes
    assert [size for *_, size in sizes] == [1, 2, 4, 4, 8, 8, 8, 8, 11, 11, 11]
    assert {size[:2] for size in sizes} == {(11, 11)}
    found["searched_rows"].write_at(slice(1), [7])
    assert of_batch(rows)[2][0] == 7, "an unchanged list is not written again"
    for slot in range(3, 11):
        rows.set(slot, arrays({"top_p": 1.0}))
    assert of_batch(rows)[2] == [0, 1, 2, 0]
    part = rows.of_rows(range(2, 5))
    assert part["searched_rows"].shape == (1,)
    assert part["searched_rows"].read()[:1].tolist() == [0]  # counted from the first of them
    assert part["processed_rows"].read()[:3].tolist() == [0, 1, 2]
    assert part["vocabulary_rows"].shape == (3,)


def test_the_lists_follow_rows_that_move_and_end() -> None:
    sizes = {**INTERFACE.sizes, BATCH: 3, **dict.fromkeys(HOST_AXES, 1)}
    rows = ParameterRows(INTERFACE, sizes, "cpu", narrow=True, needed=False)
    for row in (1, 2):
        rows.set(row, {"top_p": np.array(0.9, np.float32)})
    rows.swap_rows(1, 0)
    assert lists(rows.replay, 3)["searched_rows"] == [0, 2]
    rows.clear(0)
    assert lists(rows.replay, 3)["searched_rows"] == [2]
