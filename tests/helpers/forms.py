"""Forms of answers, and their tables over the tokens of a model, computed here from docs/contract.md, not by qsample.

A form is a finite automaton over characters. Its states are numbered from 0, where an answer begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from qsample.request.structured.tables import TokenGrammar

Array = np.ndarray
# Row 0 of the tables is for rows without a grammar, so the first state of a form is row 1.
START_ROW = 1
NOWHERE = -1


@dataclass
class Form:
    """A form of answers.

    Attributes:
        moves: the next state by character, for each state.
        ends: the states in which an answer may end.
        late: the states that a spent budget of thoughts replaces, and what replaces them.
    """

    moves: list[dict[str, int]] = field(default_factory=lambda: [{}])
    ends: set[int] = field(default_factory=set)
    late: dict[int, int] = field(default_factory=dict)

    def text(self, state: int, text: str) -> int:
        """Let a text follow a state; the state after it."""
        for character in text:
            if character not in self.moves[state]:
                self.moves.append({})
                self.moves[state][character] = len(self.moves) - 1
            state = self.moves[state][character]
        return state

    def repeat(self, state: int, characters: str) -> None:
        """Let any number of some characters follow a state, and leave it there."""
        for character in characters:
            self.moves[state][character] = state


def choice(*answers: str) -> Form:
    """One of some answers."""
    form = Form()
    form.ends = {form.text(0, answer) for answer in answers}
    return form


def person() -> Form:
    """JSON with a name of any length and an age."""
    form = Form()
    name = form.text(0, '{"name": "')
    form.repeat(name, "abcdefghijklmnopqrstuvwxyz ,;")
    age = form.text(name, '", "age": ')
    first_digit = form.text(age, "1")
    form.moves[age].update(dict.fromkeys("23456789", first_digit))
    form.repeat(first_digit, "0123456789")
    form.ends = {form.text(first_digit, "}")}
    return form


def thoughtful_choice(*answers: str) -> Form:
    """Thoughts up to a '#', and one of some answers."""
    form = Form()
    form.repeat(0, "abcdefghijklmnopqrstuvwxyz ,;:.")
    answer = form.text(0, "#")
    form.ends = {form.text(answer, one) for one in answers}
    form.moves.append({"#": answer})
    form.late = {0: len(form.moves) - 1}
    return form


def token_grammar(form: Form, texts: list[str]) -> TokenGrammar:
    """The tables of a form.

    Args:
        form: the form.
        texts: the text of each token; empty for tokens that no answer has.
    """
    num_states = len(form.moves)
    # The state after a token, by state and token.
    after = np.full((num_states, len(texts)), NOWHERE, np.int32)
    for token, text in enumerate(texts):
        for state in range(num_states if text else 0):
            after[state, token] = _state_after(form, state, text)
    columns, classes = np.unique(after, axis=1, return_inverse=True)
    transitions = np.zeros((START_ROW + num_states, columns.shape[1]), np.int32)
    transitions[START_ROW:] = np.where(columns == NOWHERE, NOWHERE, columns + START_ROW)
    late = np.arange(START_ROW + num_states, dtype=np.int32)
    for state, replacement in form.late.items():
        late[START_ROW + state] = START_ROW + replacement
    return TokenGrammar(
        classes=classes.reshape(-1).astype(np.int32),
        transitions=transitions,
        distances=_distances(form, columns),
        late=late,
        drafts=np.full(START_ROW + num_states, -1, np.int32),
    )


def _state_after(form: Form, state: int, text: str) -> int:
    for character in text:
        state = form.moves[state].get(character, NOWHERE)
        if state == NOWHERE:
            return NOWHERE
    return state


def _distances(form: Form, columns: Array) -> Array:
    """The number of tokens from each row to the end of the answer, the stop token included."""
    num_states = len(columns)
    unreached = num_states + 2
    distances = np.full(num_states, unreached)
    distances[list(form.ends)] = 1
    for _ in range(num_states):
        through = np.where(columns == NOWHERE, unreached, distances[columns])
        distances = np.minimum(distances, 1 + through.min(axis=1))
    assert (distances < unreached).all(), "a state has no way to the end in tokens"
    return np.append(0, distances).astype(np.int32)


def write_grammar(grammar: TokenGrammar, path: Path) -> Path:
    """Write tables as `qsample grammar` does."""
    tables = {
        "grammar_classes": grammar.classes[None],
        "grammar_transitions": grammar.transitions,
        "grammar_distances": grammar.distances,
        "grammar_maps": np.zeros_like(grammar.distances),
        "grammar_late": grammar.late,
        "grammar_drafts": grammar.drafts,
    }
    metadata = {"format": "qsample-grammar", "version": "1", "shortest": str(grammar.shortest)}
    save_file({name: np.ascontiguousarray(table) for name, table in tables.items()}, path, metadata)
    return path


def token_texts(package: Path) -> list[str]:
    """The text of each token of a package; empty for special tokens."""
    from qsample.runtime import load

    model = load(package)
    assert model.tokenizer is not None
    size = model.interface.vocab_size
    return [model.tokenizer.decode([token]) for token in range(size)]
