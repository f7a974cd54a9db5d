"""Grammars of a few answers, worked out here and not by qsample: tables of docs/contract.md, and files of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qsample.request.structured.tables import TokenGrammar

Array = np.ndarray
Tables = dict[str, Array]
# The safetensors name of int32.
INT32 = "I32"
FREE = 0
START = 1


@dataclass(frozen=True)
class GrammarFile:
    """A file of tables and what it holds."""

    path: Path
    tables: Tables

    @property
    def token_grammar(self) -> TokenGrammar:
        """The tables as `generate` of the runtime takes them."""
        return TokenGrammar(
            classes=self.tables["grammar_classes"][0],
            transitions=self.tables["grammar_transitions"],
            distances=self.tables["grammar_distances"],
            late=self.tables["grammar_late"],
            drafts=self.tables["grammar_drafts"],
        )


def choice_tables(vocab_size: int, answers: Sequence[Sequence[int]]) -> Tables:
    """The tables of a choice among answers of token ids, none of them the beginning of another.

    Every beginning of an answer is a state, every token of an answer a class. Class 0 has all other tokens.
    """
    found = {tuple(answer[:length]) for answer in answers for length in range(len(answer) + 1)}
    # The empty beginning comes first.
    beginnings = sorted(found)
    state_of = {beginning: START + place for place, beginning in enumerate(beginnings)}
    tokens = sorted({token for answer in answers for token in answer})
    class_of = {token: 1 + place for place, token in enumerate(tokens)}
    num_states = START + len(beginnings)

    classes = np.zeros((1, vocab_size), np.int32)
    for token, number in class_of.items():
        classes[0, token] = number
    transitions = np.full((num_states, 1 + len(tokens)), -1, np.int32)
    transitions[FREE] = FREE
    drafts = np.full(num_states, -1, np.int32)
    for beginning in beginnings[1:]:
        before = state_of[beginning[:-1]]
        transitions[before, class_of[beginning[-1]]] = state_of[beginning]
        drafts[before] = beginning[-1]
    distances = np.zeros(num_states, np.int32)
    for beginning, state in state_of.items():
        ways = [len(a) - len(beginning) for a in answers if tuple(a[: len(beginning)]) == beginning]
        # The stop token is one more.
        distances[state] = 1 + min(ways)
    return {
        "grammar_classes": classes,
        "grammar_transitions": transitions,
        "grammar_distances": distances,
        "grammar_maps": np.zeros(num_states, np.int32),
        "grammar_late": np.arange(num_states, dtype=np.int32),
        "grammar_drafts": drafts,
    }


def write_tables(path: Path, tables: Tables) -> GrammarFile:
    """Write tables as `qsample grammar` does, in the format safetensors."""
    shortest = str(tables["grammar_distances"][START])
    header: dict[str, object] = {
        "__metadata__": {"version": "1", "format": "qsample-grammar", "shortest": shortest}
    }
    content = b""
    for name, table in sorted(tables.items()):
        begin = len(content)
        content += table.astype("<i4").tobytes()
        header[name] = {
            "dtype": INT32,
            "shape": list(table.shape),
            "data_offsets": [begin, len(content)],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # The numbers begin at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return GrammarFile(path, tables)
