"""The places of grammars in the tables of a batch, against tables that are put together by hand."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.request.structured.tables import TokenGrammar
from qsample.runtime.decode import grammar_rows
from qsample.runtime.decode.grammar_rows import GrammarRows

VOCAB = 9
INTERFACE = Interface(VOCAB, (), features=Features(grammars=True, num_speculative_tokens=2))
WITHOUT_DRAFTS = Interface(VOCAB, (), features=Features(grammars=True))


def grammar(seed: int, states: int, classes: int) -> TokenGrammar:
    """Random tables with some states, of which the first is the free state."""
    rng = np.random.default_rng(seed)
    transitions = rng.integers(-1, states, (states, classes))
    transitions[:, 0] = -1
    transitions[0] = 0
    drafts = rng.integers(-1, VOCAB, states)
    drafts[0] = -1
    distances = rng.integers(1, 9, states)
    distances[0] = 0
    late = rng.integers(1, states, states)
    late[0] = 0
    tables = (rng.integers(0, classes, VOCAB), transitions, distances, late, drafts)
    return TokenGrammar(*(table.astype(np.int32) for table in tables))


def walk(tables: dict[str, np.ndarray], state: int, tokens: list[int]) -> list[tuple[int, ...]]:
    """What the tables say of the states that tokens lead to: (distance, draft, may go on by each token)."""
    seen = []
    for token in tokens:
        classes = tables["grammar_classes"][tables["grammar_maps"][state]]
        row = tables["grammar_transitions"][state][classes]
        drafts = tables.get("grammar_drafts")
        draft = -9 if drafts is None else int(drafts[state])
        seen.append((int(tables["grammar_distances"][state]), draft, *(row >= 0).tolist()))
        if row[token] < 0:
            break
        state = int(row[token])
    return seen


def own_tables(of: TokenGrammar, *, drafts: bool = True) -> dict[str, np.ndarray]:
    tables = {
        "grammar_classes": of.classes[None],
        "grammar_transitions": of.transitions,
        "grammar_distances": of.distances,
        "grammar_maps": np.zeros_like(of.distances),
        "grammar_late": of.late,
    }
    return tables | ({"grammar_drafts": of.drafts} if drafts else {})


def check(rows: GrammarRows, row: int, of: TokenGrammar, *, drafts: bool = True) -> None:
    """A row finds its grammar in the tables, state by state."""
    tables = {name: buffer.read() for name, buffer in rows.inputs.items()}
    rng = np.random.default_rng(0)
    start = rows.start_state(row)
    offset = start - 1
    for _ in range(20):
        tokens = rng.integers(0, VOCAB, 12).tolist()
        assert walk(tables, start, tokens) == walk(own_tables(of, drafts=drafts), 1, tokens)
    stop = start + len(of.transitions) - 1
    assert (tables["grammar_transitions"][start:stop, of.transitions.shape[1] :] == -1).all()
    late = tables["grammar_late"][start : start + len(of.late) - 1]
    assert (late == np.where(of.late[1:] > 0, of.late[1:] + offset, 0)).all()


def check_free(rows: GrammarRows) -> None:
    """The first row stays the state of rows without a grammar."""
    tables = {name: buffer.read() for name, buffer in rows.inputs.items()}
    assert not tables["grammar_transitions"][0].any()
    assert tables["grammar_distances"][0] == tables["grammar_late"][0] == 0


def test_grammars_come_and_go() -> None:
    """Random rows begin and end with ten grammars of several sizes; every row that follows one finds it."""
    rng = np.random.default_rng(1)
    rows = GrammarRows(INTERFACE, 5, "cpu")
    known = [
        grammar(seed, int(rng.integers(2, 40)), int(rng.integers(2, 12))) for seed in range(10)
    ]
    followed: dict[int, TokenGrammar] = {}
    for _ in range(150):
        row = int(rng.integers(5))
        if rng.random() < 0.3:
            rows.end(row)
            followed.pop(row, None)
            rows.begin(row, None)
            assert rows.start_state(row) == 0
        else:
            followed[row] = known[int(rng.integers(10))]
            rows.begin(row, followed[row])
        if rng.random() < 0.2:
            rows.swap_rows(0, 3)
            swapped = {row: followed[row] for row in (0, 3) if row in followed}
            for one, other in ((0, 3), (3, 0)):
                followed.pop(one, None)
                if other in swapped:
                    followed[one] = swapped[other]
        for row, of in followed.items():
            check(rows, row, of)
        check_free(rows)
    assert rows.resident <= 10


def test_equal_grammars_share_a_place() -> None:
    rows = GrammarRows(INTERFACE, 3, "cpu")
    assert rows.begin(0, grammar(1, 20, 5))
    assert not rows.begin(1, grammar(1, 20, 5))
    assert rows.start_state(0) == rows.start_state(1) == 1
    assert rows.resident == 1


def test_a_grammar_stays_until_its_place_is_needed() -> None:
    rows = GrammarRows(INTERFACE, 2, "cpu")
    rows.begin(0, grammar(1, 20, 5))
    rows.end(0)
    memory = rows.inputs["grammar_transitions"].address
    assert not rows.begin(1, grammar(2, 18, 4))  # in the place of the first
    assert rows.resident == 1
    assert rows.inputs["grammar_transitions"].address == memory
    check(rows, 1, grammar(2, 18, 4))


def test_a_followed_grammar_keeps_its_place() -> None:
    rows = GrammarRows(INTERFACE, 2, "cpu")
    rows.begin(0, grammar(1, 20, 5))
    assert rows.begin(1, grammar(2, 60, 9))  # larger tables, in other memory
    check(rows, 0, grammar(1, 20, 5))
    check(rows, 1, grammar(2, 60, 9))


def test_the_table_of_transitions_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars of many states beside one of many classes: it waits, and then the table shrinks along the other axis."""
    monkeypatch.setattr(grammar_rows, "MAX_TRANSITIONS_BYTES", 4 * 256 * 16)
    rows = GrammarRows(INTERFACE, 4, "cpu")
    long = [grammar(seed, 100, 4) for seed in (1, 2)]
    wide = grammar(3, 20, 100)
    assert rows.takes(long)
    assert not rows.takes([*long, wide])
    for row, of in enumerate(long):
        rows.begin(row, of)
    assert not rows.takes([wide])
    assert rows.takes([grammar(4, 20, 4)])
    rows.end(0)
    assert not rows.takes([wide])
    rows.end(1)
    assert rows.takes([wide])
    assert rows.begin(2, wide)
    assert rows.inputs["grammar_transitions"].shape == (32, 128)
    check(rows, 2, wide)
    assert not rows.takes([long[0]])
    rows.end(2)
    assert rows.begin(0, long[0])
    check(rows, 0, long[0])


def test_tables_without_drafts() -> None:
    rows = GrammarRows(WITHOUT_DRAFTS, 1, "cpu")
    rows.begin(0, grammar(1, 20, 5))
    assert "grammar_drafts" not in rows.inputs
    check(rows, 0, grammar(1, 20, 5), drafts=False)


@pytest.mark.parametrize("features", [Features(), Features(allowed_tokens=True)])
def test_packages_without_grammars(features: Features) -> None:
    rows = GrammarRows(Interface(VOCAB, (), features=features), 2, "cpu")
    assert not rows.begin(0, None)
    rows.swap_rows(0, 1)
    rows.end(1)
    assert rows.inputs == {}
