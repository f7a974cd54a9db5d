"""Graphs of states beside plain searches."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from qsample.contract.arrays import Array
from qsample.request.structured import state_graph
from qsample.request.structured.state_graph import (
    Predecessors,
    distances_to,
    equal_rows,
    reachable,
)


def graphs() -> list[Array]:
    made = [np.full((1, 1), -1, np.int32), np.zeros((1, 2), np.int32)]
    for seed in range(40):
        rng = np.random.default_rng(seed)
        states, symbols = rng.integers(1, 12), rng.integers(1, 5)
        transitions = rng.integers(-1, states, (states, symbols))
        transitions[rng.random((states, symbols)) < 0.5] = -1
        made.append(transitions.astype(np.int32))
    return made


def fewest(transitions: Array, start: int, targets: set[int]) -> int:
    """A breadth-first search; -1 if there is no way."""
    waiting, seen = deque([(start, 0)]), {start}
    while waiting:
        state, steps = waiting.popleft()
        if state in targets:
            return steps
        for after in transitions[state].tolist():
            if after >= 0 and after not in seen:
                seen.add(after)
                waiting.append((after, steps + 1))
    return -1


@pytest.mark.parametrize("number", range(len(graphs())))
def test_distances_and_ways(number: int) -> None:
    transitions = graphs()[number]
    states = len(transitions)
    rng = np.random.default_rng(number)
    for count in (0, 1, states):
        targets = np.sort(rng.permutation(states)[:count])
        found = distances_to(targets, transitions)
        assert found.dtype == np.int32
        wanted = [fewest(transitions, state, set(targets.tolist())) for state in range(states)]
        assert found.tolist() == wanted
    for start in range(states):
        wanted = [fewest(transitions, start, {state}) >= 0 for state in range(states)]
        assert reachable(start, transitions).tolist() == wanted


@pytest.mark.parametrize("number", range(len(graphs())))
def test_predecessors(number: int) -> None:
    transitions = graphs()[number]
    states = len(transitions)
    predecessors = Predecessors(transitions)
    rng = np.random.default_rng(number)
    for count in (0, 1, 2, states):
        chosen = rng.permutation(states)[:count]
        wanted = sorted(
            source
            for source in range(states)
            for after in transitions[source].tolist()
            if after in chosen.tolist()
        )
        assert sorted(predecessors.of(chosen).tolist()) == wanted


def check_groups(rows: Array) -> None:
    first, group = equal_rows(rows)
    known: list[list[int]] = []
    for row, number in zip(rows.tolist(), group.tolist(), strict=True):
        if row not in known:
            known.append(row)
        assert known.index(row) == number, "groups come in the order of their first rows"
    assert [rows[one].tolist() for one in first] == known
    assert [rows.tolist().index(row) for row in known] == first.tolist()


def test_equal_rows() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        check_groups(
            rng.integers(-1, 3, (rng.integers(1, 30), rng.integers(1, 4))).astype(np.int32)
        )
    check_groups(np.array([[2, 1], [1, 2], [2, 1], [0, 0], [1, 2]]))


def test_rows_of_equal_hashes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger can find them."""

    class Alike:
        def integers(self, low: int, high: int, size: int) -> Array:
            return np.ones(size, np.int64)

    monkeypatch.setattr(state_graph.np.random, "default_rng", lambda seed: Alike())
    check_groups(np.array([[2, 1], [1, 2], [3, 0], [2, 1], [1, 2], [0, 3]]))
