"""A byte automaton and a vocabulary become the tables that a graph walks, and a file of them.

The automaton is folded over the trie of the vocabulary. The bytes of a node map each state to the
state after them, and nodes whose bytes do this alike share their work and their class.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsample.checks import as_path
from qsample.contract.arrays import Array
from qsample.errors import PackageError, QsampleError
from qsample.package.disk.scratch import ScratchFolder
from qsample.package.disk.space import full_disk_named
from qsample.package.disk.tensor_file import read_header, write_tensors
from qsample.package.disk.untrusted import open_plain
from qsample.request.grammar import invalid_grammar
from qsample.request.structured.automaton import ANY_SPECIAL, NUM_BYTES, ByteAutomaton
from qsample.request.structured.not_regular import NotRegularError
from qsample.request.structured.state_graph import distances_to, equal_rows, reachable
from qsample.request.structured.vocabulary import TokenVocabulary

MAX_TABLE_BYTES: Final = 16 << 20
_MAX_FOLD_BYTES: Final = 64 << 20
_MAX_CHUNK_ELEMENTS: Final = 1 << 24
_MAX_FILE_BYTES: Final = 64 << 20
_FORMAT: Final = "qsample-grammar"
_VERSION: Final = "1"
_REMEDY: Final = "make it again with `qsample grammar`"
_CLASSES: Final = "grammar_classes"
_TRANSITIONS: Final = "grammar_transitions"
_DISTANCES: Final = "grammar_distances"
_MAPS: Final = "grammar_maps"
_LATE: Final = "grammar_late"
_DRAFTS: Final = "grammar_drafts"
_TENSORS: Final = (_CLASSES, _TRANSITIONS, _DISTANCES, _MAPS, _LATE, _DRAFTS)
FREE_ROW: Final = 0
START_ROW: Final = 1
# The column of a node whose bytes no state allows, and the column of the root.
_DEAD_COLUMN: Final = 0
_ROOT_COLUMN: Final = 1


@dataclass(frozen=True, eq=False)
class TokenGrammar:
    """The tables of a form over the tokens of a model.

    A row of the tables is a state. Row 0 is the free state, which allows every token, and row 1 is
    the start of an answer.

    Attributes:
        classes: [V] int32, the class of each token. No state but the free one allows class 0.
        transitions: [X, Y] int32, the state after a token of each class; -1 = not allowed.
        distances: [X] int32, the fewest tokens from a state to the end of an answer, the stop token
            included, so that an answer may end at 1. 0: an answer may end here, and a limit may cut
            it off. -1: an answer may not end here, and a limit may cut it off.
        late: [X] int32, the state that replaces a state after the budget of thoughts is spent.
        drafts: [X] int32, a token that is a good guess; -1 for none.
    """

    classes: Array
    transitions: Array
    distances: Array
    late: Array
    drafts: Array

    @classmethod
    def of_tokens(cls, allowed: Collection[int], vocab_size: int) -> TokenGrammar:
        """The tables for answers of some tokens in any order, which may end at any place.

        Args:
            allowed: the tokens.
            vocab_size: V.
        """
        classes = np.zeros(vocab_size, np.int32)
        classes[list(allowed)] = 1
        return cls(
            classes=classes,
            transitions=np.array([[FREE_ROW, FREE_ROW], [-1, START_ROW]], np.int32),
            distances=np.zeros(2, np.int32),
            late=np.array([FREE_ROW, START_ROW], np.int32),
            drafts=np.full(2, -1, np.int32),
        )

    @property
    def shortest(self) -> int:
        """The number of tokens of the shortest answer, the stop token included; 0 if a limit may
        cut an answer off."""
        return int(self.distances[START_ROW])

    @property
    def has_thoughts(self) -> bool:
        """Whether answers may begin with thoughts, whose number of tokens a budget can limit."""
        return bool((self.late != np.arange(len(self.late))).any())

    @cached_property
    def without_stop(self) -> TokenGrammar:
        """The tables for rows without a stop token: their distances do not count one. Such a row
        has no token left where an answer is complete and nothing may follow."""
        return replace(
            self, distances=np.where(self.distances > 0, self.distances - 1, self.distances)
        )

    def is_over(self, tokens: Sequence[int], room: int, budget: int) -> bool:
        """Whether an answer without a stop token is complete after tokens, and no token may follow.

        Args:
            tokens: the tokens of the answer.
            room: the number of tokens that may follow at most; at least 1 in any case, as in the
                graph.
            budget: the number of tokens from which on late states replace states.
        """
        state = START_ROW
        for number, token in enumerate(tokens):
            state = self._state_at(state, number, budget)
            state = int(self.transitions[state, self.classes[token]])
            if state < 0:
                return False
        state = self._state_at(state, len(tokens), budget)
        following = self.transitions[state]
        goes_on = (following >= 0) & (self.distances[following] < max(room, 1))
        return bool(self.distances[state] == 0 and not goes_on.any())

    def _state_at(self, state: int, number: int, budget: int) -> int:
        """A state after so many tokens, or the late state that replaces it."""
        return int(self.late[state]) if number >= budget else state

    @cached_property
    def key(self) -> str:
        """A hash that is equal for equal tables."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The tables as a safetensors file."""
        tensors = {
            _CLASSES: self.classes[None],
            _TRANSITIONS: self.transitions,
            _DISTANCES: self.distances,
            _MAPS: np.zeros_like(self.distances),
            _LATE: self.late,
            _DRAFTS: self.drafts,
        }
        metadata = {"format": _FORMAT, "version": _VERSION, "shortest": str(self.shortest)}
        file = BytesIO()
        write_tensors(file, metadata, tensors)
        return file.getvalue()

    def save(self, path: str | Path) -> None:
        """Write the tables to a file, in place of a file of that name.

        Args:
            path: the path of the file, in a folder that exists.

        Raises:
            PackageError: the disk is full, or the folder cannot be written to.
        """
        path = as_path("path", path)
        content = self.to_bytes()
        try:
            with (
                ScratchFolder(path.parent) as scratch,
                full_disk_named(path.parent, len(content), "the grammar"),
            ):
                written = scratch.new / path.name
                written.write_bytes(content)
                written.replace(path)
        except OSError as error:
            raise PackageError(
                f"cannot write {path}: {error if error.strerror is None else error.strerror}; choose another path"
            ) from error

    @classmethod
    def from_bytes(cls, content: bytes, name: str = "the grammar") -> TokenGrammar:
        """The tables of a file's content.

        Args:
            content: the content of the file.
            name: the name of the file for messages.

        Raises:
            QsampleError: the content is damaged, or of another format.
        """
        try:
            return _parsed(content)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise QsampleError(
                f"{name} is damaged, or not a grammar ({error!s:.200}); {_REMEDY}"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> TokenGrammar:
        """The tables of a file.

        Args:
            path: the path of a file that `qsample grammar` or `save` wrote.

        Raises:
            QsampleError: the file cannot be read, is damaged, or of another format.
        """
        file_path = as_path("path", path)
        try:
            with open_plain(file_path) as file:
                content = file.read(_MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            raise QsampleError(
                f"cannot read the grammar {path}: {getattr(error, 'strerror', '') or error}; "
                "give a file that `qsample grammar` wrote"
            ) from error
        if len(content) > _MAX_FILE_BYTES:
            raise QsampleError(
                f"{path} has more than {_MAX_FILE_BYTES} bytes, and is not a grammar; {_REMEDY}"
            )
        return cls.from_bytes(content, str(path))


def _parsed(content: bytes) -> TokenGrammar:
    """The tables of a file's content. Raises ValueError, KeyError or TypeError."""
    header, start = read_header(BytesIO(content))
    metadata = header.pop("__metadata__", {})
    if metadata.get("format") != _FORMAT or metadata.get("version") != _VERSION:
        raise ValueError("its format is another one")
    if set(header) != set(_TENSORS):
        raise ValueError("it lacks tensors, or has other tensors")
    tensors = {name: _tensor(content, start, header[name], name) for name in _TENSORS}
    sizes = sum(tensor.nbytes for tensor in tensors.values())
    if start + sizes != len(content):
        raise ValueError("it is cut off, or too long")
    _check_tensors(tensors)
    grammar = TokenGrammar(
        classes=tensors[_CLASSES][0],
        transitions=tensors[_TRANSITIONS],
        distances=tensors[_DISTANCES],
        late=tensors[_LATE],
        drafts=tensors[_DRAFTS],
    )
    if metadata.get("shortest") != str(grammar.shortest):
        raise ValueError("the length of its shortest answer is not the distance of its start")
    return grammar


def _tensor(content: bytes, start: int, entry: Mapping[str, Any], name: str) -> Array:
    """A tensor of a file's content, in memory of its own."""
    shape = entry["shape"]
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *shape]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{name} has sizes that are no numbers")
    if entry["dtype"] != "I32":
        raise ValueError(f"{name} is {entry['dtype']!r:.20}; it may be I32")
    if end - begin != 4 * math.prod(shape) or start + end > len(content):
        raise ValueError(f"{name} is not where it should be")
    return np.frombuffer(content, "<i4", math.prod(shape), start + begin).reshape(shape).copy()


def _check_tensors(tensors: Mapping[str, Array]) -> None:
    """Raise ValueError if shapes or numbers of tables do not fit each other."""
    transitions = tensors[_TRANSITIONS]
    classes = tensors[_CLASSES]
    _check_shapes(tensors)
    num_rows = transitions.shape[0]
    ranges = {
        _CLASSES: (0, transitions.shape[1] - 1),
        _TRANSITIONS: (-1, num_rows - 1),
        _DISTANCES: (-1, num_rows),
        _MAPS: (0, 0),
        _LATE: (0, num_rows - 1),
        _DRAFTS: (-1, classes.shape[1] - 1),
    }
    for name, (least, most) in ranges.items():
        tensor = tensors[name]
        if tensor.min() < least or tensor.max() > most:
            raise ValueError(f"{name} has numbers outside {least} to {most}")

    if transitions[FREE_ROW].any() or (transitions[START_ROW:, 0] >= 0).any():
        raise ValueError("its free state or its class 0 is not as it should be")
    free = (tensors[_DISTANCES][FREE_ROW], tensors[_LATE][FREE_ROW], tensors[_DRAFTS][FREE_ROW])
    if free != (0, 0, -1):
        raise ValueError("its free state is not as it should be")
    rows = np.arange(START_ROW, num_rows)
    drafts = tensors[_DRAFTS][START_ROW:]
    after_drafts = transitions[rows, classes[0, drafts]]
    if (after_drafts[drafts >= 0] < 0).any():
        raise ValueError("a draft is a token that its state does not allow")


def _check_shapes(tensors: Mapping[str, Array]) -> None:
    """Raise ValueError if the shapes of tables do not fit each other."""
    transitions = tensors[_TRANSITIONS]
    classes = tensors[_CLASSES]
    if transitions.ndim != 2 or transitions.shape[0] <= START_ROW or transitions.shape[1] < 1:
        raise ValueError("its transitions are not a table of two rows or more")
    if transitions.nbytes > MAX_TABLE_BYTES:
        raise ValueError(f"its transitions have more than {MAX_TABLE_BYTES} bytes")
    if classes.ndim != 2 or classes.shape[0] != 1 or classes.shape[1] < 1:
        raise ValueError("its classes are not a row")
    for name in (_DISTANCES, _MAPS, _LATE, _DRAFTS):
        if tensors[name].shape != transitions.shape[:1]:
            raise ValueError(f"{name} does not have a number for each state")


def token_grammar(automaton: ByteAutomaton, vocabulary: TokenVocabulary) -> TokenGrammar:
    """The tables of an automaton over a vocabulary.

    Args:
        automaton: the automaton, in which every state leads to an end.
        vocabulary: the tokens of the model.

    Raises:
        InvalidGrammarError: no text of this model's tokens follows the form.
        NotRegularError: the tables are too large.
    """
    columns, token_columns = _fold(automaton, vocabulary)
    # [S, C] int32: the state of the automaton after a token of each column.
    transitions = np.ascontiguousarray(columns.T)
    kept = _useful_states(automaton, transitions)
    # The row of each state; the last place stands for -1.
    row_of = np.full(len(transitions) + 1, -1, np.int32)
    row_of[kept] = START_ROW + np.arange(len(kept))
    if automaton.free >= 0:
        row_of[automaton.free] = FREE_ROW
    rows = row_of[transitions[kept]]

    first, column_classes = equal_rows(np.vstack([np.full(len(kept), -1), rows.T]))
    # The first group is the one of the added column.
    num_classes = len(first)
    table_bytes = 4 * (START_ROW + len(kept)) * num_classes
    if table_bytes > MAX_TABLE_BYTES:
        raise NotRegularError(
            f"its tables have {table_bytes} bytes, and may have {MAX_TABLE_BYTES}"
        )
    table = np.zeros((START_ROW + len(kept), num_classes), np.int32)
    table[START_ROW:, 0] = -1
    table[START_ROW:, 1:] = rows[:, first[1:] - 1]
    classes = column_classes[1:][token_columns].astype(np.int32)

    late = np.zeros(len(table), np.int32)
    late[START_ROW:] = row_of[automaton.late[kept]]
    # The late state of a state may have no way out in tokens; such a state stays.
    is_stuck = late < 0
    late[is_stuck] = np.flatnonzero(is_stuck)
    grammar = TokenGrammar(
        classes=classes,
        transitions=table,
        distances=_distances(automaton, kept, table),
        late=late,
        drafts=np.full(len(table), -1, np.int32),
    )
    _add_drafts(grammar, automaton, vocabulary, row_of)
    return grammar


def _fold(automaton: ByteAutomaton, vocabulary: TokenVocabulary) -> tuple[Array, Array]:
    """The states after each token.

    Returns:
        The distinct columns [C, S] int32 with the state after a token from each state, -1 for none;
        and the column of each token [V].
    """
    columns = _Columns(automaton.transitions[:, :NUM_BYTES])
    token_columns = np.full(vocabulary.size, _DEAD_COLUMN)
    level_columns = np.array([_ROOT_COLUMN])
    for level in vocabulary.levels:
        level_columns = columns.after(level_columns[level.parents], level.last_bytes)
        token_columns[level.token_ids] = level_columns[level.token_nodes]

    special_columns = {}
    for number, text in enumerate(automaton.special_texts):
        special = automaton.transitions[:, NUM_BYTES + number]
        special_columns[text] = columns.number_of(special)
    if ANY_SPECIAL in special_columns:
        has_bytes = np.zeros(vocabulary.size, np.bool_)
        for level in vocabulary.levels:
            has_bytes[level.token_ids] = True
        token_columns[~has_bytes] = special_columns[ANY_SPECIAL]
    for text, column in special_columns.items():
        token_columns[list(vocabulary.special_ids.get(text, ()))] = column

    is_used = np.bincount(token_columns) > 0
    places = np.cumsum(is_used) - 1
    return columns.states(np.flatnonzero(is_used)), places[token_columns]


class _Columns:
    """The distinct maps from the states of an automaton to the states after some bytes.

    A map is a column, in which the number of states stands for none. A byte after a column gives
    another column, and is computed once.
    """

    def __init__(self, transitions: Array) -> None:
        """
        Args:
            transitions: [S, 256] int32, the next states; -1 for none.
        """
        self._num_states = len(transitions)
        self._dtype = np.dtype(np.int16 if self._num_states < 1 << 15 else np.int32)
        first, self._byte_classes = equal_rows(transitions.T)
        self._num_byte_classes = len(first)
        # [K, S + 1]: the last place stands for none.
        steps = np.full((len(first), self._num_states + 1), self._num_states, self._dtype)
        steps[:, :-1] = self._with_none(transitions[:, first].T)
        self._steps = steps.reshape(-1)
        self._number_of: dict[bytes, int] = {}
        self._columns = np.empty((256, self._num_states), self._dtype)
        self._after = np.full((256, self._num_byte_classes), -1, np.int32)
        self._numbered(np.full((1, self._num_states), self._num_states, self._dtype))
        self._after[_DEAD_COLUMN] = _DEAD_COLUMN
        self._numbered(np.arange(self._num_states, dtype=self._dtype)[None])

    def after(self, columns: Array, last_bytes: Array) -> Array:
        """The columns after bytes.

        Args:
            columns: [N], the numbers of columns.
            last_bytes: [N], a byte after each of them.
        """
        pairs = columns * self._num_byte_classes + self._byte_classes[last_bytes]
        after: Array = self._after.reshape(-1)[pairs]
        is_missing = np.zeros(self._after.size, np.bool_)
        is_missing[pairs[after < 0]] = True
        missing = np.flatnonzero(is_missing)
        if len(missing) == 0:
            return after
        chunk = max(1, _MAX_CHUNK_ELEMENTS // self._num_states)
        for begin in range(0, len(missing), chunk):
            self._compute(missing[begin : begin + chunk])
        computed: Array = self._after.reshape(-1)[pairs]
        return computed

    def _compute(self, pairs: Array) -> None:
        """Compute the columns of pairs of a column and a class of bytes."""
        columns = pairs // self._num_byte_classes
        byte_classes = pairs % self._num_byte_classes
        offsets = byte_classes * (self._num_states + 1)
        computed = self._steps[offsets[:, None] + self._columns[columns]]
        numbers = np.full(len(pairs), _DEAD_COLUMN)
        is_alive = (computed != self._num_states).any(axis=1)
        numbers[is_alive] = self._numbered(computed[is_alive])
        self._after[columns, byte_classes] = numbers

    def _numbered(self, columns: Array) -> list[int]:
        """The number of each column; a column that is new gets the next number."""
        numbers = []
        for column in columns:
            number = self._number_of.setdefault(column.tobytes(), len(self._number_of))
            if number == len(self._columns):
                self._grow()
            self._columns[number] = column
            numbers.append(number)
        return numbers

    def _grow(self) -> None:
        """Make room for twice as many columns."""
        if 2 * self._columns.nbytes > _MAX_FOLD_BYTES:
            raise NotRegularError("its tokens lead to too many different states")
        self._columns = np.concatenate([self._columns, np.empty_like(self._columns)])
        self._after = np.concatenate([self._after, np.full_like(self._after, -1)])

    def number_of(self, states: Array) -> int:
        """The number of a column.

        Args:
            states: [S] int32, the state after each state; -1 for none.
        """
        return self._numbered(self._with_none(states[None]))[0]

    def states(self, columns: Array) -> Array:
        """The states [N, S] int32 of columns; -1 for none."""
        states: Array = self._columns[columns].astype(np.int32)
        states[states == self._num_states] = -1
        return states

    def _with_none(self, states: Array) -> Array:
        """States in which the number of states stands for none."""
        with_none: Array = np.where(states >= 0, states, self._num_states).astype(self._dtype)
        return with_none


def _useful_states(automaton: ByteAutomaton, transitions: Array) -> Array:
    """The numbers of the states that an answer of tokens may pass; the start comes first.

    Args:
        automaton: the automaton.
        transitions: [S, C] int32, the states after tokens.
    """
    leads_on = distances_to(np.flatnonzero(automaton.final), transitions) >= 0
    if not leads_on[0]:
        raise invalid_grammar("no text of this model's tokens follows it")
    if automaton.free >= 0:
        # The row of the free state is there in all tables.
        leads_on[automaton.free] = False
    edges = np.column_stack([transitions, automaton.late])
    edges[~np.append(leads_on, False)[edges]] = -1
    kept = reachable(0, edges) & leads_on
    return np.flatnonzero(kept)


def _distances(automaton: ByteAutomaton, kept: Array, table: Array) -> Array:
    """The distances of all rows."""
    final = automaton.final[kept]
    if automaton.free >= 0:
        return np.append(0, np.where(final, 0, -1)).astype(np.int32)
    ends = START_ROW + np.flatnonzero(final)
    distances = distances_to(ends, table) + 1
    distances[FREE_ROW] = 0
    return distances.astype(np.int32)


def _add_drafts(
    grammar: TokenGrammar, automaton: ByteAutomaton, vocabulary: TokenVocabulary, row_of: Array
) -> None:
    """Write the drafts of a grammar.

    Args:
        grammar: the grammar.
        automaton: its automaton.
        vocabulary: its vocabulary.
        row_of: [S + 1], the row of each state of the automaton; -1 for a state without a row.
    """
    is_allowed = automaton.transitions >= 0
    is_forced = (is_allowed.sum(axis=1) == 1) & is_allowed[:, :NUM_BYTES].any(axis=1)
    is_forced &= ~automaton.final
    forced_bytes = np.argmax(is_allowed, axis=1)

    states = np.flatnonzero(is_forced & (row_of[:-1] >= START_ROW))
    rows = row_of[states]
    nodes = np.zeros(len(states), np.int64)
    for level in vocabulary.levels:
        last_bytes = forced_bytes[states]
        nodes = level.children(nodes, last_bytes)
        states = automaton.transitions[states, last_bytes]
        has_token = nodes >= 0
        has_token &= (row_of[states] >= 0) & (level.tokens[nodes] >= 0)
        grammar.drafts[rows[has_token]] = level.tokens[nodes[has_token]]
        goes_on = (nodes >= 0) & is_forced[states]
        states = states[goes_on]
        rows = rows[goes_on]
        nodes = nodes[goes_on]
        if len(rows) == 0:
            break

    # A state that allows a single token, and no end, drafts it.
    num_tokens = np.bincount(grammar.classes, minlength=grammar.transitions.shape[1])
    num_allowed = (grammar.transitions >= 0) @ num_tokens
    may_end = np.append(True, np.zeros(len(num_allowed) - 1, np.bool_))
    kept = np.flatnonzero(row_of[:-1] >= START_ROW)
    may_end[row_of[kept]] = automaton.final[kept]
    for row in np.flatnonzero((num_allowed == 1) & ~may_end):
        is_class_allowed = grammar.transitions[row] >= 0
        grammar.drafts[row] = np.flatnonzero(is_class_allowed[grammar.classes])[0]
