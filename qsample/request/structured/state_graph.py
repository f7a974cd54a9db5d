"""The states of an automaton as a graph: equal rows, reachable states, and distances to states."""

from __future__ import annotations

from typing import Final

import numpy as np

from qsample.contract.arrays import Array

_HASH_SEED: Final = 0


def equal_rows(rows: Array) -> tuple[Array, Array]:
    """Groups of equal rows, in the order of their first rows.

    Args:
        rows: [N, K] integers.

    Returns:
        The first row of each group [U], and the group of each row [N].
    """
    rng = np.random.default_rng(_HASH_SEED)
    weights = rng.integers(1, 1 << 62, rows.shape[1]).astype(np.uint64)
    hashes = rows.astype(np.uint64) @ weights
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    # Rows with equal hashes may differ: a stranger can find such rows.
    if (rows != rows[first[inverse]]).any():
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[inverse.reshape(-1)]


class Predecessors:
    """The states before each state."""

    def __init__(self, transitions: Array) -> None:
        """
        Args:
            transitions: [S, A] int32, the next states; -1 for none.
        """
        sources, symbols = np.nonzero(transitions >= 0)
        targets = transitions[sources, symbols]
        order = np.argsort(targets, kind="stable")
        self._sources = sources[order]
        self._starts = np.searchsorted(targets[order], np.arange(len(transitions) + 1))

    def of(self, states: Array) -> Array:
        """The states with a transition to one of the states. A state may come more than once."""
        starts = self._starts[states]
        lengths = self._starts[states + 1] - starts
        ends = np.cumsum(lengths)
        # The place of the first predecessor of each state, counted back from its place in the result.
        shifts = np.repeat(starts - (ends - lengths), lengths)
        sources: Array = self._sources[np.arange(len(shifts)) + shifts]
        return sources


def distances_to(targets: Array, transitions: Array) -> Array:
    """The fewest transitions from each state to a target.

    Args:
        targets: the numbers of the targets.
        transitions: [S, A] int32, the next states; -1 for none.

    Returns:
        [S] int32; -1 for a state that reaches no target.
    """
    predecessors = Predecessors(transitions)
    distances = np.full(len(transitions), -1, np.int32)
    frontier = targets
    distance = 0
    while len(frontier) > 0:
        distances[frontier] = distance
        before = predecessors.of(frontier)
        frontier = np.unique(before[distances[before] < 0])
        distance += 1
    return distances


def reachable(start: int, transitions: Array) -> Array:
    """Whether transitions lead from a start to each state.

    Args:
        start: the number of the start.
        transitions: [S, A] int32, the next states; -1 for none.

    Returns:
        [S] bool.
    """
    # The last place stands for -1, and counts as seen.
    seen = np.zeros(len(transitions) + 1, np.bool_)
    seen[-1] = True
    frontier = np.array([start])
    while len(frontier) > 0:
        seen[frontier] = True
        after = transitions[frontier]
        frontier = np.unique(after[~seen[after]])
    return seen[:-1]
