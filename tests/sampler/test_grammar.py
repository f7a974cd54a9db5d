"""Grammars in the graph: a small automaton worked out by hand, at each of its edges, in both kinds of graph."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import INVALID_LOGITS, LENGTH, RUNNING, STOPPED
from qsample.sampler import grammar
from qsample.sampler.tensor import Tensor, Tensors
from tests.helpers.computed import computed
from tests.helpers.reference_grammar import after_token, drafted, random_tables, state_in_time
from tests.helpers.sampler_cases import PAD, Array, make_inputs, sampler

VOCAB = 8
# The stop token of a row.
STOP = 7
INF = float("inf")
OFF_DEADLINE = 2**31 - 1

# Tokens 0 to 6 are the classes 1 a, 2 b, 2 b, 0, 0, 3 c, 0; the second map has 3 c for tokens 0 and 3.
CLASSES = np.int32([[1, 2, 2, 0, 0, 3, 0, 0], [3, 0, 0, 3, 0, 0, 0, 0]])
# 1 -a-> 2, 1 -b-> 3, 2 -b-> 3, 3 -c-> 4, 4 (uses the second map) -c-> 5; 5 may end; 6 is late for 1.
NONE = -1
TRANSITIONS = np.int32(
    [
        [0, 0, 0, 0],
        [NONE, 2, 3, NONE],
        [NONE, NONE, 3, NONE],
        [NONE, NONE, NONE, 4],
        [NONE, NONE, NONE, 5],
        [NONE, NONE, NONE, 5],
        [NONE, NONE, NONE, 5],
    ]
)
DISTANCES = np.int32([0, 4, 4, 3, 2, 1, 2])
MAPS = np.int32([0, 0, 0, 0, 1, 1, 0])
LATE = np.int32([0, 6, 2, 3, 4, 5, 6])
TABLES = {
    "grammar_classes": CLASSES,
    "grammar_transitions": TRANSITIONS,
    "grammar_distances": DISTANCES,
    "grammar_maps": MAPS,
    "grammar_late": LATE,
}
FACES = [
    Interface(VOCAB, (), features=Features(grammars=True, probs=True), captured=captured)
    for captured in (False, True)
]
both_graphs = pytest.mark.parametrize("face", FACES, ids=["control-flow", "captured"])


def step(face: Interface, logits: Array, rows: int = 1, **values: object) -> dict[str, Array]:
    given = {"stop_ids": [[STOP]] * rows, "lengths": 3, "temperature": 0.0, **TABLES, **values}
    stops = np.shape(given["stop_ids"])[1]
    return sampler(face)(logits.astype(np.float32), make_inputs(face, rows, stops=stops, **given))


def allowed(face: Interface, state: int, **values: object) -> list[int]:
    """The tokens that a row in a state may draw."""
    result = step(face, np.zeros((1, VOCAB)), grammar_state=state, temperature=1.0, **values)
    return np.flatnonzero(result["probs"][0]).tolist()


@both_graphs
@pytest.mark.parametrize(
    ("state", "tokens"),
    [
        (0, [*range(VOCAB)]),
        (1, [0, 1, 2]),
        (2, [1, 2]),
        (3, [5]),
        (4, [0, 3]),
        (5, [0, 3, STOP]),
        (6, [5]),
    ],
)
def test_the_tokens_of_a_state(face: Interface, state: int, tokens: list[int]) -> None:
    assert allowed(face, state) == tokens


@both_graphs
def test_the_state_moves_with_the_token(face: Interface) -> None:
    state, taken = 1, []
    for token in (0, 2, 5, 3, 0, STOP):
        logits = np.zeros((1, VOCAB))
        logits[0, token] = 5
        result = step(face, logits, grammar_state=state)
        assert result["next_ids"][0, 0] == token
        state = int(result["grammar_state_RetainedState"][0])
        taken.append(state)
    assert taken == [2, 3, 4, 5, 5, 5]
    assert result["status_RetainedState"] == STOPPED


@both_graphs
def test_a_row_enters_no_state_that_it_cannot_leave_in_time(face: Interface) -> None:
    """The row has 4 tokens. From state 1, token 0 needs four more after it, tokens 1 and 2 need three."""
    assert allowed(face, 1, max_length=4 + 5) == [0, 1, 2]
    assert allowed(face, 1, max_length=4 + 4) == [1, 2]
    assert allowed(face, 1, capacity=4 + 4) == [1, 2]
    # Only stop tokens are left in time where the answer may end.
    assert allowed(face, 5, max_length=4 + 2) == [0, 3, STOP]
    assert allowed(face, 5, max_length=4 + 1) == [STOP]
    assert allowed(face, 0, max_length=4 + 1) == [*range(VOCAB)]
    # A prompt that fills the buffer gives one token.
    assert allowed(face, 0, lengths=15, capacity=16) == [*range(VOCAB)]


@both_graphs
def test_distances_without_a_promise(face: Interface) -> None:
    """0 may end or be cut off; -1 may not end, but be cut off."""
    for distance, tokens in ((0, [1, 2, STOP]), (-1, [1, 2])):
        distances = DISTANCES.copy()
        distances[[2, 3]] = distance
        assert allowed(face, 2, grammar_distances=distances, max_length=5) == tokens


@both_graphs
@pytest.mark.parametrize(
    ("deadline", "tokens"), [(OFF_DEADLINE, [0, 1, 2]), (5, [0, 1, 2]), (4, [5]), (0, [5])]
)
def test_the_deadline(face: Interface, deadline: int, tokens: list[int]) -> None:
    """A row with 4 tokens: from as many on, another state takes the place of its state."""
    assert allowed(face, 1, grammar_deadline=deadline) == tokens
    result = step(face, np.arange(VOCAB)[None], grammar_state=1, grammar_deadline=deadline)
    assert result["grammar_state_RetainedState"] == (3 if 0 in tokens else 5)


@both_graphs
def test_stop_tokens_of_a_row(face: Interface) -> None:
    """Those of the row count, whatever the tables say of them: several, token 0, none."""
    assert allowed(face, 5, stop_ids=[[4]]) == [0, 3, 4]
    assert allowed(face, 5, stop_ids=[[6, STOP]]) == [0, 3, 6, STOP]
    assert allowed(face, 5, stop_ids=[[-1, 2]]) == [0, 2, 3]
    assert allowed(face, 5, stop_ids=[[-1]]) == [0, 3]
    assert allowed(face, 5, stop_ids=[[0]]) == [0, 3]
    assert allowed(face, 1, stop_ids=[[0]]) == [1, 2]
    assert allowed(face, 1, stop_ids=[[0, STOP]]) == [1, 2]
    assert allowed(face, 5, stop_ids=[[0, STOP]]) == [0, 3, STOP]
    assert allowed(face, 1, stop_ids=[[-1, -1]]) == [0, 1, 2]
    assert allowed(face, 0, stop_ids=[[0, 3]]) == [*range(VOCAB)]


@both_graphs
def test_min_length_still_keeps_the_stop_away(face: Interface) -> None:
    assert allowed(face, 5, min_length=5) == [0, 3]
    assert allowed(face, 5, min_length=4) == [0, 3, STOP]


@both_graphs
def test_rows_with_and_without_grammars(face: Interface) -> None:
    logits = np.zeros((4, VOCAB))
    logits[:, 6] = 5
    logits[:, 4] = 4
    logits[:, 1] = 3
    result = step(
        face,
        logits,
        4,
        grammar_state=[0, 1, 1, 0],
        status=[0, 0, 0, 1],
        emit=[True, True, False, True],
    )
    assert result["next_ids"].ravel().tolist() == [6, 1, PAD, PAD]
    # A row that emits nothing stays in its state, although the state allows token 0.
    assert result["grammar_state_RetainedState"].tolist() == [0, 3, 1, 0]


@both_graphs
def test_no_token_left_and_invalid_logits(face: Interface) -> None:
    """A row without an allowed token is invalid, and so is a row whose forbidden tokens have NaN."""
    dead = TRANSITIONS.copy()
    dead[1] = NONE
    result = step(face, np.zeros((1, VOCAB)), grammar_state=1, grammar_transitions=dead)
    assert result["status_RetainedState"] == INVALID_LOGITS
    assert result["grammar_state_RetainedState"] == 1
    for wrong in (np.nan, INF):
        logits = np.zeros((2, VOCAB))
        logits[0, 6] = wrong
        result = step(face, logits, 2, grammar_state=[1, 1])
        assert result["status_RetainedState"].tolist() == [INVALID_LOGITS, RUNNING]


@both_graphs
def test_whole_answers_end_in_time(face: Interface) -> None:
    """Random rows of every length from the shortest on: each stops, and what it wrote follows the automaton."""
    rng = np.random.default_rng(0)
    for limit in range(4, 10):
        inputs = make_inputs(
            face, 1, capacity=24, grammar_state=1, stop_ids=[[STOP]], max_length=1 + limit, **TABLES
        )
        tokens: list[int] = []
        while not inputs["status"][0]:
            inputs["noise"] = rng.random((1, 24)).astype(np.float32)
            result = sampler(face)(rng.normal(size=(1, VOCAB)).astype(np.float32), inputs)
            tokens += result["next_ids"][0].tolist()
            for name in ("lengths", "status", "tokens", "output_counts", "grammar_state"):
                inputs[name] = result[f"{name}_RetainedState"]
            inputs["input_ids"] = result["next_ids"]
        assert inputs["status"][0] == STOPPED != LENGTH
        assert len(tokens) <= limit
        state = 1
        for token in tokens[:-1]:
            state = TRANSITIONS[state, CLASSES[MAPS[state], token]]
        assert state == 5


@both_graphs
def test_a_mask_and_a_grammar(face: Interface) -> None:
    """Both count, in rows that have both, either or none."""
    masked = Interface(
        VOCAB,
        (),
        features=Features(grammars=True, allowed_tokens=True, probs=True),
        captured=face.captured,
    )
    result = step(
        masked,
        np.zeros((4, VOCAB)),
        4,
        temperature=1.0,
        grammar_state=[0, 1, 1, 0],
        allowed_tokens=[[-1], [-1], [0b101], [0b11000]],
    )
    drawn = [np.flatnonzero(row).tolist() for row in result["probs"]]
    assert drawn == [[*range(VOCAB)], [0, 1, 2], [0, 2], [3, 4]]


def test_guesses_of_grammars_and_the_states_after_them() -> None:
    """Against Python loops over rows of random tables, some of which pass their deadline on the way."""
    rng, rows, most, longest = np.random.default_rng(5), 40, 5, 0
    tables = random_tables(rng, 20)
    drafts, transitions = tables["grammar_drafts"], tables["grammar_transitions"]
    drafts[1:] = np.where(rng.random(11) < 0.9, rng.integers(0, 20, 11), -1)
    transitions[1:] = np.where(rng.random((11, 6)) < 0.9, rng.integers(1, 12, (11, 6)), -1)
    lengths = rng.integers(0, 9, rows).astype(np.int32)
    state = rng.integers(0, 12, rows).astype(np.int32)
    deadline = lengths + rng.integers(0, 6, rows).astype(np.int32)
    names = ["grammar_state", "grammar_deadline", "lengths", "input_lengths", "input_ids", *tables]

    def function(guesses: Tensor, *tensors: Tensor) -> Tensors:
        inputs = dict(zip(names, tensors, strict=True))
        return *grammar.drafts(inputs, most), grammar.states_along(inputs, guesses)

    given = [
        {**tables, "grammar_state": state[row], "grammar_deadline": deadline[row]}
        for row in range(rows)
    ]
    wanted = [drafted(row, int(n) + 1, most) for row, n in zip(given, lengths, strict=True)]
    guesses = np.array([row + [-1] * (most - len(row)) for row in wanted])
    one, ids = np.ones(rows, np.int32), rng.integers(0, 20, (rows, 1))
    found, count, along = computed(
        function, guesses, state, deadline, lengths, one, ids, *tables.values()
    )
    assert found.tolist() == guesses.tolist()
    assert count.tolist() == [len(row) for row in wanted]
    assert along.shape == (rows, most + 1)
    for row, tokens in enumerate(wanted):
        for place, token in enumerate([*tokens, -1]):
            assert along[row, place] == given[row]["grammar_state"]
            longest = max(longest, place)
            before = state_in_time(given[row], int(lengths[row]) + 1 + place)
            given[row]["grammar_state"] = np.int32(after_token(given[row], before, token))
            if given[row]["grammar_state"] < 0:  # not allowed: it is never drawn
                break
    assert longest == most
