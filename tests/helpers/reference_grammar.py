"""Grammars of docs/contract.md in plain Python: the tokens that a row may draw, and its state after a token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Array = np.ndarray
Row = Mapping[str, Array]
TABLES = ("classes", "transitions", "distances", "maps", "late", "drafts")
TABLE_NAMES = frozenset(f"grammar_{name}" for name in TABLES)


def state_in_time(row: Row, total: int) -> int:
    """The state before a token at position `total`, or the state that replaces it from the deadline on."""
    state = int(row["grammar_state"])
    return int(row["grammar_late"][state]) if total >= row["grammar_deadline"] else state


def after_token(row: Row, state: int, token: int) -> int:
    """The state after a token; -1 if there is none."""
    token_class = row["grammar_classes"][row["grammar_maps"][state], token]
    return int(row["grammar_transitions"][state, token_class])


def forbidden(row: Row, vocab: int, capacity: int, total: int) -> list[int]:
    """The tokens that a row may not draw at position `total`."""
    state = state_in_time(row, total)
    left = max(1, min(int(row["max_length"]), capacity) - total)
    stops = {int(token) for token in row["stop_ids"] if token >= 0}
    tokens = []
    for token in range(vocab):
        if token in stops:
            if row["grammar_distances"][state] not in (0, 1):
                tokens.append(token)
            continue
        following = after_token(row, state, token)
        if following < 0 or row["grammar_distances"][following] >= left:
            tokens.append(token)
    return tokens


def next_state(row: Row, total: int, token: int) -> int:
    """The value of grammar_state after a row has drawn a token at position `total`."""
    following = after_token(row, state_in_time(row, total), token)
    return int(row["grammar_state"]) if following < 0 else following


def drafted(row: Row, total: int, most: int) -> list[int]:
    """The guesses of a grammar for the tokens from position `total` on."""
    changed, ids = dict(row), []
    for place in range(total, total + most):
        state = state_in_time(changed, place)
        draft = int(row["grammar_drafts"][state])
        if draft < 0:
            break
        ids.append(draft)
        following = after_token(row, state, draft)
        if following < 0:
            break
        changed["grammar_state"] = np.int32(following)
    return ids


def random_tables(
    rng: np.random.Generator, vocab: int, states: int = 12, classes: int = 6, maps: int = 3
) -> dict[str, Array]:
    """Tables whose entries are drawn at random, except for the first state, of rows without a grammar."""
    transitions = rng.integers(-1, states, (states, classes))
    transitions[rng.random((states, classes)) < 0.3] = -1
    transitions[0] = 0
    distances = rng.choice([-1, 0, 1, 1, 2, 3, 9], states)
    distances[0] = 0
    late = np.where(rng.random(states) < 0.5, np.arange(states), rng.integers(0, states, states))
    late[0] = 0
    drafts = np.where(rng.random(states) < 0.5, -1, rng.integers(0, vocab, states))
    drafts[0] = -1
    tables = {
        "classes": rng.integers(0, classes, (maps, vocab)),
        "transitions": transitions,
        "distances": distances,
        "maps": rng.integers(0, maps, states),
        "late": late,
        "drafts": drafts,
    }
    return {f"grammar_{name}": table.astype(np.int32) for name, table in tables.items()}
