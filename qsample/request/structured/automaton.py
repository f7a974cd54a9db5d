"""Expressions become byte automata, and thoughts come before a form.

An expression is one of Rust's regex crate, and outlines_core determinises it. The result is
minimised by refining a partition of its states (Moore, "Gedanken-experiments on sequential
machines", 1956).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from qsample.contract.arrays import Array
from qsample.errors import ArgumentError
from qsample.request.grammar import invalid_grammar
from qsample.request.structured.not_regular import NEVER, NotRegularError, checked_length
from qsample.request.structured.state_graph import (
    Predecessors,
    distances_to,
    equal_rows,
    reachable,
)

NUM_BYTES: Final = 256
# The text that stands for every special token without a symbol of its text.
ANY_SPECIAL: Final = ""
MAX_BYTE_STATES: Final = 1 << 15
_NEWLINE: Final = ord("\n")
# The first bytes of UTF-8's characters of 2, 3 and 4 bytes, and the bytes after them.
_LEADING_BYTES: Final = (range(0xC2, 0xE0), range(0xE0, 0xF0), range(0xF0, 0xF5))
_CONTINUATION_BYTES: Final = range(0x80, 0xC0)
# The beginnings of outlines_core's messages about expressions that it cannot determinise.
_UNSUPPORTED_MESSAGES: Final = ("universal start state", "unsupported regex feature")
# The part of its message about a state without a way to an end.
_DEAD_END_MESSAGE: Final = "Found no transitions"
# Code points that are no characters, so that texts lack them. The first byte of the start mark is
# the one that outlines_core drops.
_START_MARK: Final = "s\U0010fffe\U0010fffe"
_END_MARK: Final = "\U0010ffff"
_NO_TEXT_REASON: Final = "no text matches its regular expression"


@dataclass(frozen=True, slots=True, eq=False)
class ByteAutomaton:
    """A finite automaton over bytes and special tokens. Its start is state 0.

    Attributes:
        transitions: [S, A] int32, the state after each symbol; -1 for none. The symbols are the 256
            bytes, and then the texts of special tokens.
        final: [S] bool, whether an answer may end in the state.
        late: [S] int32, the state that replaces a state after the budget of thoughts is spent.
        special_texts: the texts of the symbols from 256 on. `ANY_SPECIAL` stands for all tokens
            without bytes that have no symbol of their text.
        free: the state that allows every token from then on; -1 for none.
    """

    transitions: Array
    final: Array
    late: Array
    special_texts: tuple[str, ...] = ()
    free: int = -1


class Thoughts(NamedTuple):
    """The thoughts before an answer.

    Attributes:
        start: the text that begins thoughts, such as "<think>"; open thoughts may have none.
        end: the text that ends thoughts, such as "</think>".
        is_open: whether the answer begins inside the thoughts.
    """

    start: str
    end: str
    is_open: bool

    @classmethod
    def between(cls, start: str, end: str) -> Thoughts:
        """Thoughts between two texts. An empty start says that the prompt has begun the thoughts."""
        return cls(start, end, is_open=start == "")


def automaton_of(expression: str) -> ByteAutomaton:
    """The smallest automaton of an expression. It needs outlines_core.

    Args:
        expression: an expression of Rust's regex crate that the whole answer matches. Its brackets
            have to match, and it may not look around: an anchor in it matches nothing.

    Raises:
        InvalidGrammarError: the expression is invalid, or no text matches it.
        NotRegularError: the expression looks around, or its automaton is too large.
    """
    if expression == NEVER:
        raise invalid_grammar(_NO_TEXT_REASON)
    transitions, final = _read_index(_index_of(checked_length(expression)))
    states = len(transitions)
    if states > MAX_BYTE_STATES:
        raise NotRegularError(f"its automaton has {states} states, and may have {MAX_BYTE_STATES}")
    # Bytes that no state tells apart share a column until the end.
    first, byte_classes = equal_rows(transitions.T)
    transitions = np.ascontiguousarray(transitions[:, first])
    distances = distances_to(np.flatnonzero(final), transitions)
    keeps = (distances >= 0) & reachable(0, transitions)
    if not keeps[0]:
        raise invalid_grammar(_NO_TEXT_REASON)
    transitions = _renumbered(transitions, keeps)
    distances = distances[keeps]
    # Equivalent states have the same distance to the end.
    classes = _refined(distances, transitions)
    first, numbers = equal_rows(classes[:, None])
    merged = np.append(numbers, -1)[transitions[first]]
    return ByteAutomaton(
        transitions=np.ascontiguousarray(merged[:, byte_classes], np.int32),
        final=distances[first] == 0,
        late=np.arange(len(first), dtype=np.int32),
    )


def _index_of(expression: str) -> Any:
    """outlines_core's index of an expression over the single bytes. A mark comes before the
    expression and another after it.

    The marks evade three faults of outlines_core 0.2.14. It prefers the first alternative: of
    `a|ab` it keeps `a` alone. It drops a byte after a final state if the next state is not final:
    of `(abc)?` it keeps nothing. Here, only the end of the last mark is final. And it determinises
    searches that start anywhere, which takes exponential time for some counted repetitions. The
    empty alternative outranks later starts. It makes the first state final, so the first byte of
    the first mark is dropped, and `_start_of` finds the state after that mark.
    """
    from outlines_core import Index, Vocabulary

    # The vocabulary's stop token comes after the bytes.
    bytes_alone: Any = {bytes([byte]): [byte] for byte in range(NUM_BYTES)}
    try:
        return Index(
            f"(?:{_START_MARK}(?:{expression}){_END_MARK}|)", Vocabulary(NUM_BYTES, bytes_alone)
        )
    except ValueError as error:
        message = str(error)
        if any(part in message for part in _UNSUPPORTED_MESSAGES):
            raise NotRegularError("its regular expression has anchors or boundaries") from None
        if _DEAD_END_MESSAGE in message:
            raise NotRegularError("its regular expression has a dead end") from None
        raise invalid_grammar(message) from None


def _read_index(index: Any) -> tuple[Array, Array]:
    """The transitions [S, 256] int32 of an index, and whether each state is final [S]: whether the
    mark may follow. The start becomes state 0."""
    rows: dict[int, dict[int, int]] = index.get_transitions()
    start = _start_of(index, rows)
    finals = index.get_final_states()
    names = [start, *sorted((rows.keys() | finals) - {start})]
    number_of = {name: number for number, name in enumerate(names)}
    lengths = [len(row) for row in rows.values()]
    sources = np.repeat([number_of[name] for name in rows], lengths)
    symbols = np.fromiter(chain.from_iterable(rows.values()), np.int64, len(sources))
    targets = np.fromiter(
        chain.from_iterable(row.values() for row in rows.values()), np.int64, len(sources)
    )
    known = np.array(names)
    order = np.argsort(known)
    places = np.minimum(np.searchsorted(known, targets, sorter=order), len(names) - 1)
    numbers = order[places]
    is_step = (symbols < NUM_BYTES) & (known[numbers] == targets)
    # The last row stands for -1.
    transitions = np.full((len(names) + 1, NUM_BYTES), -1, np.int32)
    transitions[sources[is_step], symbols[is_step]] = numbers[is_step]
    ends = np.zeros(len(names) + 1, np.bool_)
    ends[[number_of[name] for name in finals]] = True
    after_mark = np.arange(len(names))
    for byte in _END_MARK.encode():
        after_mark = transitions[after_mark, byte]
    return transitions[:-1], ends[after_mark]


def _start_of(index: Any, rows: dict[int, dict[int, int]]) -> int:
    """The state after the start mark. No state leads to the first of the mark's states."""
    candidates = rows.keys() - {index.get_initial_state()}
    for row in rows.values():
        candidates.difference_update(row.values())
    starts = []
    for candidate in candidates:
        state: int | None = candidate
        for byte in _START_MARK.encode()[1:]:
            row = rows.get(state, {}) if state is not None else {}
            state = row.get(byte) if len(row) == 1 else None
        if state is not None:
            starts.append(state)
    if len(starts) != 1:
        raise invalid_grammar(_NO_TEXT_REASON)
    return starts[0]


def _renumbered(transitions: Array, keeps: Array) -> Array:
    """The transitions among the states that stay.

    Args:
        transitions: [S, A] int32.
        keeps: [S] bool, whether a state stays.
    """
    numbers = np.where(keeps, np.cumsum(keeps) - 1, -1)
    return np.append(numbers, -1)[transitions[keeps]].astype(np.int32)


def _refined(classes: Array, transitions: Array) -> Array:
    """The coarsest refinement of classes whose states agree in the class after each symbol.

    Args:
        classes: [S] int32, from 0.
        transitions: [S, A] int32, the next states; -1 for none.
    """
    predecessors = Predecessors(transitions)
    # The last place stands for the class after a missing transition.
    padded = np.append(classes, -1).astype(np.int64)
    classes = padded[:-1]
    num_classes = int(classes.max()) + 1
    changed = np.arange(len(classes))
    while len(changed) > 0:
        # States of a block whose next states kept their numbers still agree with each other, and
        # differ from the block's states whose next states have new numbers.
        affected = np.unique(predecessors.of(changed))
        signatures = np.column_stack([classes[affected], padded[transitions[affected]]])
        first, groups = equal_rows(signatures)
        blocks = classes[affected[first]]
        sizes = np.bincount(groups, minlength=len(first))
        num_affected = np.bincount(classes[affected], minlength=num_classes)
        has_rest = np.bincount(classes, minlength=num_classes) > num_affected
        # The rest of a block keeps its number, or else its largest group.
        order = np.lexsort((-sizes, blocks))
        is_largest = np.ones(len(order), np.bool_)
        is_largest[1:] = blocks[order[1:]] != blocks[order[:-1]]
        new = order[~is_largest | has_rest[blocks[order]]]
        numbers = blocks.copy()
        numbers[new] = num_classes + np.arange(len(new))
        num_classes += len(new)
        updated = numbers[groups]
        changed = affected[updated != classes[affected]]
        classes[affected] = updated
    return classes


def with_thoughts(automaton: ByteAutomaton | None, thoughts: Thoughts) -> ByteAutomaton:
    """An automaton of answers that think first.

    Thoughts are any text up to the first `end`. After it come at most two line feeds and the form;
    a form that may begin with a line feed follows at once. An answer whose thoughts are not open
    begins with `start`, or it has no thoughts. `start` and `end` are bytes, or a special token of
    that text.

    Args:
        automaton: the automaton of the form, from `automaton_of`; None if any text may follow the
            thoughts. Then the answer may end inside its thoughts, too.
        thoughts: the texts around thoughts.

    Raises:
        ArgumentError: the end of thoughts is empty, or the start of thoughts that are not open.
    """
    if thoughts.end == "":
        raise ArgumentError("the end of thoughts is empty; give the text that ends the model's")
    if thoughts.start == "" and not thoughts.is_open:
        raise ArgumentError("the start of thoughts is empty; give the text that begins the model's")
    return _ThinkingAutomaton(automaton, thoughts).built()


class _ThinkingAutomaton:
    """Builds the automaton of `with_thoughts`. Its states are, in this order: the beginning of the
    answer, the thoughts, their late copy, both inside a character, two line feeds, and the form or
    the free state."""

    def __init__(self, form: ByteAutomaton | None, thoughts: Thoughts) -> None:
        self._is_free = form is None
        self._thoughts = thoughts
        self._start = thoughts.start.encode()
        self._end = thoughts.end.encode()
        special_texts = [thoughts.start, thoughts.end]
        if thoughts.start == "":
            special_texts = [thoughts.end]
        if form is None:
            special_texts.append(ANY_SPECIAL)
        self._special_texts = tuple(dict.fromkeys(special_texts))
        # The first text. Without a start, it is the end, and no token starts open thoughts.
        self._start_symbol = NUM_BYTES
        self._end_symbol = NUM_BYTES + self._special_texts.index(thoughts.end)

        num_symbols = NUM_BYTES + len(self._special_texts)
        num_form_states = 1 if form is None else len(form.transitions)
        self._thought = 1 if thoughts.is_open else len(self._start)
        self._late_thought = self._thought + len(self._end)
        # State i waits for i + 1 further bytes of a character.
        self._character = self._late_thought + len(self._end)
        self._late_character = self._character + len(_LEADING_BYTES)
        self._line_feed = self._late_character + len(_LEADING_BYTES)
        self._form = self._line_feed + 2
        num_states = self._form + num_form_states
        self._transitions = np.full((num_states, num_symbols), -1, np.int32)
        self._final = np.zeros(num_states, np.bool_)
        self._late = np.arange(num_states, dtype=np.int32)
        if form is None:
            self._transitions[self._form] = self._form
            self._final[self._form] = True
        else:
            rows = np.where(form.transitions >= 0, form.transitions + self._form, -1)
            self._transitions[self._form :, :NUM_BYTES] = rows
            self._final[self._form :] = form.final

    def built(self) -> ByteAutomaton:
        """The automaton, without states that cannot be reached."""
        exit_state = self._add_line_feeds()
        self._add_thoughts(exit_state)
        self._add_characters()
        self._add_late_thoughts(exit_state)
        if self._thoughts.is_open:
            self._open()
        else:
            self._add_beginning()
        return self._trimmed()

    def _add_line_feeds(self) -> int:
        """Add the states of the line feeds before the form. Returns the state after thoughts."""
        if self._is_free or self._transitions[self._form, _NEWLINE] >= 0:
            return self._form
        for count in (1, 0):
            state = self._line_feed + count
            next_state = self._form if count == 1 else state + 1
            self._transitions[state] = self._transitions[self._form]
            self._transitions[state, _NEWLINE] = next_state
            self._final[state] = self._final[self._form]
        return self._line_feed

    def _add_thoughts(self, exit_state: int) -> None:
        """Add the states of thoughts: state i has matched i bytes of the end (Knuth, Morris and
        Pratt, "Fast pattern matching in strings", 1977)."""
        # The state that the matched bytes without the first lead to.
        fallback = 0
        for matched, byte in enumerate(self._end):
            state = self._thought + matched
            row = self._transitions[state]
            if matched == 0:
                row[:NUM_BYTES] = self._thought
                for index, leading in enumerate(_LEADING_BYTES):
                    row[leading.start : leading.stop] = self._character + index
            else:
                row[:NUM_BYTES] = self._transitions[self._thought + fallback, :NUM_BYTES]
                fallback = int(row[byte]) - self._thought
            row[byte] = exit_state if matched + 1 == len(self._end) else state + 1
            if self._is_free:
                row[NUM_BYTES:] = self._thought
            row[self._end_symbol] = exit_state
            self._late[state] = self._late_thought + matched
            self._final[state] = self._is_free

    def _add_characters(self) -> None:
        """Add the states inside a character of several bytes. Late thoughts complete it first."""
        for index in range(len(_LEADING_BYTES)):
            state = self._character + index
            late_state = self._late_character + index
            continuation = slice(_CONTINUATION_BYTES.start, _CONTINUATION_BYTES.stop)
            # Bytes that are no text lead where they lead from the beginning of a character.
            self._transitions[state] = self._transitions[self._thought]
            self._transitions[state, continuation] = self._thought if index == 0 else state - 1
            self._transitions[late_state, continuation] = (
                self._late_thought if index == 0 else late_state - 1
            )
            self._late[state] = late_state
            self._final[state] = self._is_free

    def _add_late_thoughts(self, exit_state: int) -> None:
        """Add the late copy of thoughts, which only allows the rest of the end."""
        for matched, byte in enumerate(self._end):
            state = self._late_thought + matched
            is_last = matched + 1 == len(self._end)
            self._transitions[state, byte] = exit_state if is_last else state + 1
        self._transitions[self._late_thought, self._end_symbol] = exit_state

    def _open(self) -> None:
        """Make state 0 the beginning of open thoughts, where a special token may start them."""
        self._transitions[0] = self._transitions[self._thought]
        self._late[0] = self._late_thought
        self._final[0] = self._is_free
        if self._start_symbol != self._end_symbol:
            self._transitions[0, self._start_symbol] = self._thought

    def _add_beginning(self) -> None:
        """Add the states of an answer that begins with its form or the start of its thoughts:
        state i has matched i bytes of the start."""
        form_state = self._form
        for matched, byte in enumerate(self._start):
            row = self._transitions[matched]
            if form_state >= 0:
                row[:] = self._transitions[form_state]
                self._final[matched] = self._final[form_state]
                form_state = int(row[byte])
            is_last = matched + 1 == len(self._start)
            row[byte] = self._thought if is_last else matched + 1
        self._transitions[0, self._start_symbol] = self._thought

    def _trimmed(self) -> ByteAutomaton:
        edges = np.column_stack([self._transitions, self._late])
        leads_on = distances_to(np.flatnonzero(self._final), self._transitions) >= 0
        keeps = reachable(0, edges) & leads_on
        numbers = np.where(keeps, np.cumsum(keeps) - 1, -1)
        return ByteAutomaton(
            transitions=_renumbered(self._transitions, keeps),
            final=self._final[keeps],
            late=numbers[self._late[keeps]].astype(np.int32),
            special_texts=self._special_texts,
            free=int(numbers[self._form]) if self._is_free else -1,
        )
