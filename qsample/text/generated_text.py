"""The text of tokens as they come: whole characters at a time, cut off before a stop string, written to a file.

`tokenizers.decoders.DecodeStream` does not fit: if a prompt ends inside a character, or with U+FFFD, it repeats the
prompt, and it has no call for the end, at which an incomplete character is left out.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol, TextIO
from weakref import WeakValueDictionary

import numpy as np

from qsample.errors import shown
from qsample.text.tokenizer import Tokenizer, check_text

_MOST_CHARACTERS: Final = (
    65_536  # of all stop strings of a row; each takes a few hundred bytes of memory, once
)


def check_stop_strings(value: Any) -> tuple[str, ...]:
    """A string, or several, as a tuple; () for None. Raises ValueError, also for an empty string."""
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(
        isinstance(item, str) and item for item in strings
    ):
        raise ValueError(
            f"stop_strings is {shown(value)}; give a string that is not empty, or a list of them"
        )
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
    """Aho and Corasick's (https://doi.org/10.1145/360825.360855); it does not change once it is made. A state is the
    longest end of the text that begins a stop string: the first `size` characters of `spelled`, held back. State 0 is
    an empty text. complete: the longest stop string that the text then ends with."""

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
        """Fill in `_shorter`, short states first, because each follows from its predecessor's."""
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
    r"""Finds the stop string that is complete first, however the text is cut into pieces: `match`, None before that.

    Of several that are complete with the same character, the longest counts. Text that may begin a stop string is held
    back until it is known not to. The work for a character depends neither on the number of stop strings nor on the
    length of the text that is held back.

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
                certain.append(
                    automaton.spelled[self._state][: automaton.size[self._state] - len(self.match)]
                )
                self._state = 0
                break
        return "".join(certain)

    def end(self) -> str:
        """The text that was held back, as no more text comes."""
        held, self._state = (
            self._automaton.spelled[self._state][: self._automaton.size[self._state]],
            0,
        )
        return held


_REPLACEMENT: Final = "\ufffd"  # an incomplete multi-byte character decodes to it
_INCOMPLETE: Final = (
    3  # most bytes of an incomplete character, each a separate U+FFFD with byte fallback
)
PROMPT_CONTEXT: Final = (
    8  # prompt tokens that decide how the first new token is spelled, with or without a space
)
_MOST_TOKENS: Final = (
    32  # decoded for a new token: beyond that, all but the last half are forgotten
)


class IncrementalDecoder:
    """Turns tokens into text as they come; the pieces joined are the whole text. Text is held back while it may be an
    incomplete multi-byte character, of three bytes at most, so the work for any token is bounded. With byte fallback, a
    later byte token can make a whole run of them invalid; text that was already returned stays as it was."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """prompt: the tokens before the first new token; they are not repeated in the text."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = [int(token) for token in prompt[-PROMPT_CONTEXT:]]
        # The part of the text of `_ids` that was returned, or is of the prompt; None until the first token comes.
        self._given: str | None = None
        self._context = len(self._ids)  # its length when nothing was held back
        self._changes = 0  # tokens since the returned text decodes to another text

    def put(self, token: int) -> str:
        """The text that `token` makes certain; "" if it completes no character."""
        if self._tokenizer.is_skipped(token, skip_special_tokens=self._skip_special_tokens):
            return ""
        given = self._decode(self._ids) if self._given is None else self._given
        self._ids.append(int(token))
        text = self._decode(self._ids)
        held = min(len(text) - len(text.rstrip(_REPLACEMENT)), _INCOMPLETE)
        # Byte fallback: the first bytes of a character make those before it invalid, too, until it is complete.
        self._changes = 0 if text.startswith(given) else self._changes + 1
        self._given = given
        if held and 0 < self._changes <= _INCOMPLETE:
            return ""
        start, end = _known(given, text), len(text) - held
        if end > start:
            self._given = text[:end]
            if not held:
                # The last tokens stay as context: the spelling of a token can depend on the token before.
                self._ids = self._ids[self._context :]
                self._given, self._context = self._decode(self._ids), len(self._ids)
        if len(self._ids) > _MOST_TOKENS:
            self._forget(len(text) - max(start, end))
        return text[start:end]

    def end(self) -> str:
        """The text that was held back, except a character whose last bytes are missing. U+FFFD remains where the tokens
        spell it, or bytes that are no text."""
        if self._given is None:
            return ""
        text = self._without_incomplete(self._decode(self._ids))
        piece, self._given = text[_known(self._given, text) :], text
        return piece

    def _without_incomplete(self, text: str) -> str:
        """`text`, of `_ids`, without an incomplete character at its end: one that further bytes complete."""
        if text.endswith(_REPLACEMENT):
            for rest in self._tokenizer.completions:
                completed = self._decode([*self._ids, *rest])
                if not completed.endswith(_REPLACEMENT):
                    return completed[:-1]
        return text

    def _forget(self, held: int) -> None:
        """Drop the older tokens. held: characters at the end that were not returned."""
        dropped = len(self._ids) - _MOST_TOKENS // 2
        self._ids, self._context = self._ids[dropped:], max(0, self._context - dropped)
        text = self._decode(self._ids)
        self._given = text[: max(0, len(text) - held)]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def _known(given: str, text: str) -> int:
    """The number of characters of `text` that are in `given`, the text before a token."""
    if text.startswith(given):
        return len(given)
    whole = given.rstrip(_REPLACEMENT)
    if not text.startswith(whole):
        return len(whole)
    # A new token completes a character that the prompt ended inside.
    rest = text[len(whole) :].lstrip(_REPLACEMENT)
    return min(len(given), len(text) - len(rest))


class GeneratedText:
    """The text of a row as its tokens come, cut off before its first stop string."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop_strings: Sequence[str] = ()
    ) -> None:
        """prompt: as for `IncrementalDecoder`."""
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._stops = StopStrings(stop_strings)
        self._pieces: list[str] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None before the end."""
        return self._stops.match

    @property
    def whole(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    def put(self, token: int) -> str:
        """The text that `token` makes certain."""
        self._pieces.append(self._stops.put(self._decoder.put(token)))
        return self._pieces[-1]

    def end(self) -> str:
        """The text that was held back, as no more tokens come."""
        self._pieces.append(self._stops.put(self._decoder.end()) + self._stops.end())
        return self._pieces[-1]


class Streamer(Protocol):
    """Hugging Face's streamer protocol, so that its streamers work, too. Values are NumPy arrays, not tensors."""

    def put(self, value: Any) -> None:
        """First the prompt, [1, n] int64; then every sampled token, [1] int64."""
        ...

    def end(self) -> None:
        """No token comes any more."""
        ...


def check_streamer(streamer: object, rows: int) -> None:
    """Raise ValueError if `streamer` lacks the protocol's methods, or there are several rows."""
    if rows != 1:
        raise ValueError(
            f"a streamer follows a single prompt, and {rows} were given; generate each on its own"
        )
    if not (callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))):
        raise ValueError(f"streamer is {shown(streamer)}; give an object with put(value) and end()")


class TextStreamer:
    """Writes text to a file object as soon as it is certain; characters of several tokens come whole.

    >>> model.generate("In the beginning", streamer=TextStreamer(model.tokenizer))
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        file: TextIO | None = None,
        *,
        skip_prompt: bool = False,
        skip_special_tokens: bool = True,
        stop_strings: str | Sequence[str] | None = None,
    ) -> None:
        """Write to `file`, by default standard output.
        skip_prompt: write the sampled tokens only. skip_special_tokens: leave special tokens out. stop_strings: write
        the sampled tokens up to the first of them, as `generate` cuts its texts. Raises ValueError without a
        tokenizer."""
        if tokenizer is None:
            raise ValueError(
                "a TextStreamer needs a tokenizer, and the package has none; stream token ids instead"
            )
        self._tokenizer = tokenizer
        self._file = file
        self._skip_prompt = skip_prompt
        self._skip_special_tokens = skip_special_tokens
        self._stop_strings = check_stop_strings(stop_strings)
        self._stops = StopStrings(self._stop_strings)
        self._decoder: IncrementalDecoder | None = None

    def put(self, value: Any) -> None:
        """Write the text that is certain. value: the prompt's token ids first, [1, n] or [n]; then those sampled."""
        tokens = [int(token) for token in np.asarray(value).reshape(-1)]
        if self._decoder is not None:
            self._write("".join(self._stops.put(self._decoder.put(token)) for token in tokens))
            return
        self._decoder = IncrementalDecoder(
            self._tokenizer,
            tokens if self._skip_prompt else (),
            skip_special_tokens=self._skip_special_tokens,
        )
        if not self._skip_prompt:
            self._write("".join(self._decoder.put(token) for token in tokens))

    def end(self) -> None:
        """Write the text that was held back, and a newline; the streamer can then be used again."""
        rest = (
            self._stops.put(self._decoder.end()) + self._stops.end()
            if self._decoder is not None
            else ""
        )
        self._decoder, self._stops = None, StopStrings(self._stop_strings)
        self._write(rest + "\n")

    def _write(self, text: str) -> None:
        if text:
            file = self._file or sys.stdout
            file.write(text)
            file.flush()
