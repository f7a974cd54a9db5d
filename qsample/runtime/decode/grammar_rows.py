"""The grammars of a batch: the places of their states in the graph's tables, and the memory of these
tables.

Row 0 of the tables is the state of rows without a grammar. Every other grammar has consecutive rows,
and a row of its own in `grammar_classes`. A grammar stays after its last answer, because the next
request often has the same; it makes room when another one needs its place.

A table grows to the next power of two if its grammars need more. Its memory is then another, so a
captured graph has to be captured anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import (
    CLASS_MAPS,
    GRAMMAR_AXES,
    GRAMMAR_CLASSES,
    GRAMMAR_DISTANCES,
    GRAMMAR_DRAFTS,
    GRAMMAR_LATE,
    GRAMMAR_MAPS,
    GRAMMAR_STATES,
    GRAMMAR_TRANSITIONS,
    TOKEN_CLASSES,
)
from qsample.ort.buffers import Buffer
from qsample.request.structured.tables import FREE_ROW, START_ROW, TokenGrammar


@dataclass(slots=True)
class _Place:
    """The place of a grammar in the tables.

    Attributes:
        grammar: the grammar.
        start: the row of its first state. Its own row for the free state is left out.
        class_map: its row of `grammar_classes`.
        users: the number of rows of the batch that follow it.
    """

    grammar: TokenGrammar
    start: int
    class_map: int
    users: int = 0

    @property
    def stop(self) -> int:
        """The row after its last state."""
        return self.start + _num_own_states(self.grammar)


def _num_own_states(grammar: TokenGrammar) -> int:
    """The number of states without the free state."""
    return len(grammar.transitions) - START_ROW


class GrammarRows:
    """The memory of the grammars that the rows of a batch follow. No method may be called while a
    graph runs."""

    def __init__(self, interface: Interface, rows: int, device: str) -> None:
        """Allocate the memory for no grammar; none for packages that take no grammars.

        Args:
            interface: the interface of the package.
            rows: the number of rows of the batch.
            device: the device of the tables.
        """
        self._device = device
        self._specs = {spec.name: spec for spec in interface.grammar_tables}
        self._sizes = {**interface.sizes, **dict.fromkeys(GRAMMAR_AXES, 1)}
        # By the grammar's key; the grammar used longest ago comes first.
        self._places: dict[str, _Place] = {}
        self._key_of_row: list[str | None] = [None] * rows
        self._buffers: dict[str, Buffer] = {}
        for name in self._specs:
            self._buffers[name] = Buffer.of(self._filled(name), device)

    @property
    def inputs(self) -> Mapping[str, Buffer]:
        """The tables by name."""
        return self._buffers

    @property
    def resident(self) -> int:
        """The number of grammars in the tables."""
        return len(self._places)

    def begin(self, row: int, grammar: TokenGrammar | None) -> bool:
        """Let a row follow a grammar, or none. Returns whether a table has got other memory."""
        self.end(row)
        if grammar is None:
            return False
        place = self._places.pop(grammar.key, None)
        is_resized = False
        if place is None:
            is_resized = self._make_room(grammar)
            place = self._free_place(grammar)
            self._write(place)
        self._places[grammar.key] = place
        place.users += 1
        self._key_of_row[row] = grammar.key
        return is_resized

    def end(self, row: int) -> None:
        """Note that a row follows no grammar any more."""
        key = self._key_of_row[row]
        if key is not None:
            self._places[key].users -= 1
            self._key_of_row[row] = None

    def start_state(self, row: int) -> int:
        """The first state of a row."""
        key = self._key_of_row[row]
        return FREE_ROW if key is None else self._places[key].start

    def swap_rows(self, one: int, other: int) -> None:
        """Let two rows follow each other's grammars."""
        keys = self._key_of_row
        keys[one], keys[other] = keys[other], keys[one]

    def _make_room(self, grammar: TokenGrammar) -> bool:
        """Remove grammars that no row follows, and enlarge the tables, until a grammar has a place.
        Returns whether a table has got other memory."""
        unused = [key for key, place in self._places.items() if not place.users]
        while unused and not self._fits(grammar):
            del self._places[unused.pop(0)]
        if self._fits(grammar):
            return False
        states_end = max((place.stop for place in self._places.values()), default=START_ROW)
        needed = {
            GRAMMAR_STATES: states_end + _num_own_states(grammar),
            TOKEN_CLASSES: grammar.transitions.shape[1],
            CLASS_MAPS: len(self._places) + 1,
        }
        for axis, size in needed.items():
            self._enlarge(axis, size)
        return True

    def _fits(self, grammar: TokenGrammar) -> bool:
        """Whether a grammar has a place in the tables of the present size."""
        return (
            grammar.transitions.shape[1] <= self._sizes[TOKEN_CLASSES]
            and len(self._places) < self._sizes[CLASS_MAPS]
            and self._gap(_num_own_states(grammar)) is not None
        )

    def _gap(self, states: int) -> int | None:
        """The first of so many consecutive rows that no grammar has; None if there are none."""
        start = START_ROW
        for place in sorted(self._places.values(), key=lambda place: place.start):
            if start + states <= place.start:
                return start
            start = place.stop
        return start if start + states <= self._sizes[GRAMMAR_STATES] else None

    def _free_place(self, grammar: TokenGrammar) -> _Place:
        """A place for a grammar that fits."""
        start = self._gap(_num_own_states(grammar))
        assert start is not None
        used = {place.class_map for place in self._places.values()}
        class_map = next(number for number in range(len(used) + 1) if number not in used)
        return _Place(grammar, start, class_map)

    def _enlarge(self, axis: str, size: int) -> None:
        """Give the tables at least `size` entries along an axis. Their content stays."""
        if size <= self._sizes[axis]:
            return
        self._sizes[axis] = 1 << (size - 1).bit_length()
        for name, spec in self._specs.items():
            if axis in spec.axes:
                old = self._buffers[name].read()
                new = self._filled(name)
                new[tuple(slice(length) for length in old.shape)] = old
                self._buffers[name] = Buffer.of(new, self._device)

    def _filled(self, name: str) -> Array:
        """A table of the present size without a grammar."""
        spec = self._specs[name]
        table: Array = np.full(spec.shape(self._sizes), spec.off, spec.dtype)
        return table

    def _write(self, place: _Place) -> None:
        """Write a grammar to its place."""
        grammar = place.grammar
        offset = place.start - START_ROW
        transitions = grammar.transitions[START_ROW:]
        width = self._sizes[TOKEN_CLASSES] - transitions.shape[1]
        padded = np.pad(_moved(transitions, offset), ((0, 0), (0, width)), constant_values=-1)
        rows = slice(place.start, place.stop)
        values: dict[str, Array] = {
            GRAMMAR_TRANSITIONS.name: padded,
            GRAMMAR_DISTANCES.name: grammar.distances[START_ROW:],
            GRAMMAR_MAPS.name: np.full(len(transitions), place.class_map, np.int32),
            GRAMMAR_LATE.name: _moved(grammar.late[START_ROW:], offset),
            GRAMMAR_DRAFTS.name: grammar.drafts[START_ROW:],
        }
        for name in values.keys() & self._buffers.keys():
            self._buffers[name].write_at(rows, values[name])
        self._buffers[GRAMMAR_CLASSES.name].write_at(place.class_map, grammar.classes)


def _moved(states: Array, offset: int) -> Array:
    """Numbers of states after a move of the grammar; the free state and -1 stay."""
    moved: Array = np.where(states >= START_ROW, states + offset, states).astype(np.int32)
    return moved
