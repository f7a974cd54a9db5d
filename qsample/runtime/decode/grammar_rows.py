"""The grammars of a batch: the places of their states in the graph's tables, and the memory of these
tables.

Row 0 of the tables is the state of rows without a grammar. Every other grammar has consecutive rows,
and a row of its own in `grammar_classes`. A grammar stays after its last answer, because the next
request often has the same; it makes room when another one needs its place.

The table of transitions is as wide as the grammar with most classes, so a few grammars of many states
and one of many classes would fill the memory. Its size has a limit, and a request waits while its
grammar would exceed that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

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
from qsample.request.structured.tables import FREE_ROW, MAX_TABLE_BYTES, START_ROW, TokenGrammar

# The largest table of transitions. Any grammar fits alone, with both sizes rounded up.
MAX_TRANSITIONS_BYTES: Final = 4 * MAX_TABLE_BYTES
_STATE_BYTES: Final = 4


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


def _num_classes(grammar: TokenGrammar) -> int:
    return int(grammar.transitions.shape[1])


class GrammarLayout:
    """The places of grammars, without their memory.

    Attributes:
        sizes: the size of each axis of the tables, a power of two.
        places: the places by the keys of their grammars; the grammar used longest ago comes first.
    """

    def __init__(self) -> None:
        self.sizes = dict.fromkeys(GRAMMAR_AXES, 1)
        self.places: dict[str, _Place] = {}

    def copy(self) -> GrammarLayout:
        """The same layout, to try changes."""
        other = GrammarLayout()
        other.sizes = dict(self.sizes)
        other.places = {key: replace(place) for key, place in self.places.items()}
        return other

    @property
    def transitions_bytes(self) -> int:
        """The size of the table of transitions."""
        return self.sizes[GRAMMAR_STATES] * self.sizes[TOKEN_CLASSES] * _STATE_BYTES

    def add(self, grammar: TokenGrammar) -> _Place:
        """Give a grammar a place, if it has none, and count a further row that follows it. Grammars
        that no row follows make room, and then the tables grow."""
        place = self.places.pop(grammar.key, None)
        if place is None:
            unused = [key for key, other in self.places.items() if other.users == 0]
            while unused and not self._fits(grammar):
                del self.places[unused.pop(0)]
            place = _Place(grammar, self._gap(grammar), self._free_map())
            self._resize(place)
        self.places[grammar.key] = place
        place.users += 1
        return place

    def _fits(self, grammar: TokenGrammar) -> bool:
        """Whether a grammar has a place in the tables of the present size."""
        return (
            _num_classes(grammar) <= self.sizes[TOKEN_CLASSES]
            and len(self.places) < self.sizes[CLASS_MAPS]
            and self._gap(grammar) + _num_own_states(grammar) <= self.sizes[GRAMMAR_STATES]
        )

    def _gap(self, grammar: TokenGrammar) -> int:
        """The first of so many consecutive rows that no grammar has."""
        start = START_ROW
        for place in sorted(self.places.values(), key=lambda place: place.start):
            if start + _num_own_states(grammar) <= place.start:
                return start
            start = place.stop
        return start

    def _free_map(self) -> int:
        """The first row of `grammar_classes` that no grammar has."""
        used = {place.class_map for place in self.places.values()}
        return next(number for number in range(len(used) + 1) if number not in used)

    def _resize(self, new: _Place) -> None:
        """Give the tables the sizes that all places need, a new one included. They shrink only if the
        table of transitions would exceed its limit."""
        places = [*self.places.values(), new]
        needed = {
            GRAMMAR_STATES: max(place.stop for place in places),
            TOKEN_CLASSES: max(_num_classes(place.grammar) for place in places),
            CLASS_MAPS: 1 + max(place.class_map for place in places),
        }
        rounded = {axis: 1 << (size - 1).bit_length() for axis, size in needed.items()}
        before = self.sizes
        self.sizes = {axis: max(size, before[axis]) for axis, size in rounded.items()}
        if self.transitions_bytes > MAX_TRANSITIONS_BYTES:
            self.sizes = rounded


class GrammarRows:
    """The memory of the grammars that the rows of a batch follow. No method but `takes` may be called
    while a graph runs."""

    def __init__(self, interface: Interface, rows: int, device: str) -> None:
        """Allocate the memory for no grammar; none for packages that take no grammars.

        Args:
            interface: the interface of the package.
            rows: the number of rows of the batch.
            device: the device of the tables.
        """
        self._device = device
        self._specs = {spec.name: spec for spec in interface.grammar_tables}
        self._fixed_sizes = interface.sizes
        self._layout = GrammarLayout()
        self._key_of_row: list[str | None] = [None] * rows
        self._buffers: dict[str, Buffer] = {}
        self._allocate()

    @property
    def inputs(self) -> Mapping[str, Buffer]:
        """The tables by name."""
        return self._buffers

    @property
    def resident(self) -> int:
        """The number of grammars in the tables."""
        return len(self._layout.places)

    def takes(self, grammars: Sequence[TokenGrammar]) -> bool:
        """Whether further rows may follow grammars, next to the grammars that rows follow now."""
        layout = self._layout.copy()
        for grammar in grammars:
            layout.add(grammar)
        return layout.transitions_bytes <= MAX_TRANSITIONS_BYTES

    def begin(self, row: int, grammar: TokenGrammar | None) -> bool:
        """Let a row follow a grammar, or none. Returns whether the tables have got other memory."""
        self.end(row)
        if grammar is None:
            return False
        is_new = grammar.key not in self._layout.places
        before = self._layout.sizes
        place = self._layout.add(grammar)
        self._key_of_row[row] = grammar.key
        if self._layout.sizes != before:
            self._allocate()
            return True
        if is_new:
            self._write(place)
        return False

    def end(self, row: int) -> None:
        """Note that a row follows no grammar any more."""
        key = self._key_of_row[row]
        if key is not None:
            self._layout.places[key].users -= 1
            self._key_of_row[row] = None

    def start_state(self, row: int) -> int:
        """The first state of a row."""
        key = self._key_of_row[row]
        return FREE_ROW if key is None else self._layout.places[key].start

    def swap_rows(self, one: int, other: int) -> None:
        """Let two rows follow each other's grammars."""
        keys = self._key_of_row
        keys[one], keys[other] = keys[other], keys[one]

    def _allocate(self) -> None:
        """Give the tables memory of the layout's sizes, with all its grammars."""
        sizes = {**self._fixed_sizes, **self._layout.sizes}
        for name, spec in self._specs.items():
            table = np.full(spec.shape(sizes), spec.off, spec.dtype)
            self._buffers[name] = Buffer.of(table, self._device)
        for place in self._layout.places.values():
            self._write(place)

    def _write(self, place: _Place) -> None:
        """Write a grammar to its place."""
        grammar = place.grammar
        offset = place.start - START_ROW
        transitions = grammar.transitions[START_ROW:]
        width = self._layout.sizes[TOKEN_CLASSES] - transitions.shape[1]
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
