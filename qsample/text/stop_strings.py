"""Cuts text off before its first stop string, while the text comes in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakValueDictionary

from qsample.errors import shown
from qsample.text.tokenizer import check_text

_MOST_CHARACTERS: Final = 65_536  # of all stop strings of a row; each takes a few hundred bytes of memory, once


def check_stop_strings(value: Any) -> tuple[str, ...]:
    """`value` as a tuple: a string, or several, none of them empty; None = none. Raises ValueError."""
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(isinstance(item, str) and item for item in strings):
        raise ValueError(f"stop_strings is {shown(value)}; give a string that is not empty, or a list of them")
    characters = sum(map(len, strings))
    if characters > _MOST_CHARACTERS:
        raise ValueError(
            f"stop_strings has {characters} characters in {len(strings)} strings; give at most {_MOST_CHARACTERS} in "
            "all"
        )
    for item in strings:
        check_text("a stop string", item)
    return tuple(dict.fromkeys(strings))


class _Automaton:
    """Aho and Corasick's (https://doi.org/10.1145/360825.360855); it does not change once it is made.

    A state is the longest end of the text that begins a stop string: the first `size` characters of `spelled`, which
    are held back. State 0 is an empty text. complete: the longest stop string that the text then ends with.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.spelled, self.size = [""], [0]
        self.complete: list[str | None] = [None]
        self._shorter = [0]  # the next longest such end
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for size, character in enumerate(string, start=1):
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.spelled.append(string)
                self.size.append(size)
                self._shorter.append(0)
                self.complete.append(None)
            state = self.next[state][character]
        self.complete[state] = string

    def _link(self) -> None:
        """Fill in `_shorter`, short states first, because each follows from that of its predecessor."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            self.complete[state] = self.complete[state] or self.complete[self._shorter[state]]
            for character, longer in self.next[state].items():
                self._shorter[longer] = self.follow(self._shorter[state], character)
                queue.append(longer)

    def follow(self, state: int, character: str) -> int:
        while state and character not in self.next[state]:
            state = self._shorter[state]
        return self.next[state].get(character, 0)


# Of the current rows: all answers to a request have the same stop strings.
_AUTOMATA: Final[WeakValueDictionary[tuple[str, ...], _Automaton]] = WeakValueDictionary()


def _automaton(strings: tuple[str, ...]) -> _Automaton:
    found = _AUTOMATA.get(strings)
    if found is None:
        found = _AUTOMATA[strings] = _Automaton(strings)
    return found


class StopStrings:
    r"""Finds the stop string that is complete first, however the text is cut into pieces.

    Of several that are complete with the same character, the longest counts. Text that may begin a stop string is held
    back until it is known not to. The work for a character depends neither on how many stop strings there are nor on
    how much text is held back.

    match: the stop string, once it is complete.

    >>> stops = StopStrings(["\n\n"])
    >>> stops.put("one\n"), stops.put("\ntwo"), stops.match
    ('one', '', '\n\n')
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._automaton = _automaton(tuple(strings))
        self._state = 0
        self.match: str | None = None

    def put(self, piece: str) -> str:
        """The text that `piece` makes certain; "" after a stop string."""
        if self.match is not None:
            return ""
        automaton = self._automaton
        if not automaton.next[0]:
            return piece
        certain: list[str] = []
        for character in piece:
            before, self._state = self._state, automaton.follow(self._state, character)
            count = automaton.size[before] + 1 - automaton.size[self._state]
            certain.append(automaton.spelled[before][: min(count, automaton.size[before])])
            if count > automaton.size[before]:
                certain.append(character)
            self.match = automaton.complete[self._state]
            if self.match is not None:
                certain.append(automaton.spelled[self._state][: automaton.size[self._state] - len(self.match)])
                self._state = 0
                break
        return "".join(certain)

    def end(self) -> str:
        """The text that was held back, as no more text comes."""
        held, self._state = self._automaton.spelled[self._state][: self._automaton.size[self._state]], 0
        return held
