"""The text of tokens as they come: whole characters at a time, cut off before a stop string,
written to a file.

`tokenizers.decoders.DecodeStream` does not fit: if a prompt ends inside a character, or with
U+FFFD, it repeats the prompt. And it has no call for the end of a text, where an incomplete
character is left out.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol, TextIO
from weakref import WeakValueDictionary

import numpy as np

from qsample.errors import shown
from qsample.request.text.tokenizer import Tokenizer, check_text

# The most characters of all stop strings of a row. Each character takes a few hundred bytes of
# memory, once.
_MAX_STOP_CHARACTERS: Final = 65_536


def check_stop_strings(value: Any) -> tuple[str, ...]:
    """A string, or several, as a tuple; () for None. Raises ValueError, also for an empty
    string."""
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
    if characters > _MAX_STOP_CHARACTERS:
        raise ValueError(
            f"stop_strings has {characters} characters in {len(strings)} strings; give at most "
            f"{_MAX_STOP_CHARACTERS} in all"
        )
    for item in strings:
        check_text("a stop string", item)
    return tuple(dict.fromkeys(strings))


class _Automaton:
    """The automaton of Aho and Corasick (https://doi.org/10.1145/360825.360855) for stop strings.
    It does not change once it is made.

    A state is the longest end of the text that is the beginning of a stop string; this end is held
    back. State 0 is an empty end.

    Attributes:
        next: state → the next state by the next character.
        spelled: state → a stop string that begins with the held end.
        size: state → the number of characters of the held end.
        complete: state → the longest stop string with which the text ends; None for none.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.spelled = [""]
        self.size = [0]
        self.complete: list[str | None] = [None]
        # For each state, the state of the next shorter end that begins a stop string.
        self._shorter = [0]
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
        """Fill in `_shorter`, for short states first: each follows from the predecessor's."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            if self.complete[state] is None:
                self.complete[state] = self.complete[self._shorter[state]]
            for character, longer in self.next[state].items():
                self._shorter[longer] = self.follow(self._shorter[state], character)
                queue.append(longer)

    def follow(self, state: int, character: str) -> int:
        """The state after a character."""
        while state != 0 and character not in self.next[state]:
            state = self._shorter[state]
        return self.next[state].get(character, 0)


# The automata of the current rows. All answers to a request share one, as they have the same stop
# strings.
_AUTOMATA: Final[WeakValueDictionary[tuple[str, ...], _Automaton]] = WeakValueDictionary()


def _automaton(strings: tuple[str, ...]) -> _Automaton:
    automaton = _AUTOMATA.get(strings)
    if automaton is None:
        automaton = _Automaton(strings)
        _AUTOMATA[strings] = automaton
    return automaton


class StopStrings:
    r"""Finds the stop string that is complete first, however the text is cut into pieces.

    If several stop strings are complete with the same character, the longest counts. Text that may
    be the beginning of a stop string is held back until it is certain, unless the text ends with the
    stop string. The work for a character depends neither on the number of stop strings nor on the
    length of the text that is held back.

    Attributes:
        match: the stop string that was found; None before that.

    >>> stops = StopStrings(["\n\n"])
    >>> stops.put("one\n"), stops.put("\ntwo"), stops.match
    ('one', '', '\n\n')
    """

    def __init__(self, strings: Sequence[str], *, include_match: bool = False) -> None:
        """include_match: whether the text ends with the stop string, not before it."""
        self._automaton = _automaton(tuple(strings))
        self._include_match = include_match
        self._state = 0
        # Whether each character that is held back is hidden; empty if none is.
        self._hidden: list[bool] = []
        self.match: str | None = None

    @property
    def has_strings(self) -> bool:
        """Whether there are any stop strings."""
        return bool(self._automaton.next[0])

    def put_hidden(self, piece: str) -> str:
        """As `put`, for a piece that is compared with the stop strings, but is not in the text: a
        special token."""
        if not self._hidden:
            self._hidden = [False] * self._automaton.size[self._state]
        return self._put(piece, is_hidden=True)

    def put(self, piece: str) -> str:
        """The text that `piece` makes certain; "" after a stop string."""
        return self._put(piece, is_hidden=False)

    def _put(self, piece: str, *, is_hidden: bool) -> str:
        if self.match is not None:
            return ""
        automaton = self._automaton
        if not automaton.next[0]:
            return "" if is_hidden else piece
        if self._include_match:
            certain_text = self._put_included(piece)
            return "" if is_hidden else certain_text
        certain: list[str] = []
        for character in piece:
            before = self._state
            after = automaton.follow(before, character)
            self._state = after
            held_before = automaton.size[before]
            released = held_before + 1 - automaton.size[after]
            text = automaton.spelled[before][: min(released, held_before)]
            if released > held_before:
                text += character
            if self._hidden or is_hidden:
                self._hidden.append(is_hidden)
                text = self._shown(text)
            certain.append(text)
            self.match = automaton.complete[after]
            if self.match is not None:
                certain.append(
                    self._shown(automaton.spelled[after][: automaton.size[after] - len(self.match)])
                )
                self._state = 0
                break
        return "".join(certain)

    def _shown(self, released: str) -> str:
        """The characters of the beginning of the held text that are not hidden. They are held no
        longer."""
        if not self._hidden:
            return released
        hidden = self._hidden[: len(released)]
        self._hidden = self._hidden[len(released) :]
        if not any(self._hidden):
            self._hidden = []
        return "".join(
            character
            for character, is_hidden in zip(released, hidden, strict=True)
            if not is_hidden
        )

    def _put_included(self, piece: str) -> str:
        """`piece` up to the end of the stop string. Nothing has to be held back for that."""
        for end, character in enumerate(piece, start=1):
            self._state = self._automaton.follow(self._state, character)
            self.match = self._automaton.complete[self._state]
            if self.match is not None:
                return piece[:end]
        return piece

    def end(self) -> str:
        """The text that was held back, as no more text comes."""
        if self._include_match:
            return ""
        automaton = self._automaton
        held = automaton.spelled[self._state][: automaton.size[self._state]]
        self._state = 0
        return self._shown(held)


_REPLACEMENT_CHARACTER: Final = "\ufffd"  # An incomplete multi-byte character decodes to it.
# An incomplete character has at most this number of bytes. With byte fallback, each byte decodes to
# a separate U+FFFD.
_MAX_INCOMPLETE_BYTES: Final = 3
# The last tokens of a prompt, this number, decide how the first new token is spelled: with or
# without a space.
PROMPT_CONTEXT_TOKENS: Final = 8
# A new token is decoded with at most this number of tokens. Beyond that, the older half is dropped.
_MAX_DECODED_TOKENS: Final = 32


class IncrementalDecoder:
    """Turns tokens into text as they come; the pieces joined are the whole text.

    Text is held back while it may be an incomplete multi-byte character. Such a character has at
    most three bytes, so the work for any token is bounded. With byte fallback, a later byte token
    can make a whole run of byte tokens invalid; text that was already returned does not change.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """prompt: the tokens before the first new token; they are not repeated in the text.
        skip_special_tokens: whether special tokens have no text."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = [int(token) for token in prompt[-PROMPT_CONTEXT_TOKENS:]]
        # The part of the text of `_ids` that was returned, or belongs to the prompt; None until the
        # first token comes.
        self._returned: str | None = None
        # The number of `_ids` when nothing was held back.
        self._context_size = len(self._ids)
        # The number of tokens since the returned text decodes to another text.
        self._changed_tokens = 0

    def put(self, token: int) -> str:
        """The text that `token` makes certain; "" if it completes no character."""
        if self._tokenizer.is_skipped(token, skip_special_tokens=self._skip_special_tokens):
            return ""
        returned = self._decode(self._ids) if self._returned is None else self._returned
        self._ids.append(int(token))
        text = self._decode(self._ids)
        trailing = len(text) - len(text.rstrip(_REPLACEMENT_CHARACTER))
        held = min(trailing, _MAX_INCOMPLETE_BYTES)
        # With byte fallback, the first bytes of a character also make the bytes before it invalid,
        # until the character is complete.
        self._changed_tokens = 0 if text.startswith(returned) else self._changed_tokens + 1
        self._returned = returned
        if held > 0 and 0 < self._changed_tokens <= _MAX_INCOMPLETE_BYTES:
            return ""
        start = _returned_length(returned, text)
        end = len(text) - held
        if end > start:
            self._returned = text[:end]
            if held == 0:
                # The last tokens stay as context, because the spelling of a token can depend on the
                # token before.
                self._ids = self._ids[self._context_size :]
                self._returned = self._decode(self._ids)
                self._context_size = len(self._ids)
        if len(self._ids) > _MAX_DECODED_TOKENS:
            self._drop_older_tokens(len(text) - max(start, end))
        return text[start:end]

    def end(self) -> str:
        """The text that was held back, except a character whose last bytes are missing. U+FFFD
        remains if the tokens spell it, or spell bytes that are not valid text."""
        if self._returned is None:
            return ""
        text = self._without_incomplete(self._decode(self._ids))
        piece = text[_returned_length(self._returned, text) :]
        self._returned = text
        return piece

    def _without_incomplete(self, text: str) -> str:
        """`text`, the text of `_ids`, without a character at its end that further bytes could
        complete."""
        if text.endswith(_REPLACEMENT_CHARACTER):
            for rest in self._tokenizer.completions:
                completed = self._decode([*self._ids, *rest])
                if not completed.endswith(_REPLACEMENT_CHARACTER):
                    return completed[:-1]
        return text

    def _drop_older_tokens(self, held: int) -> None:
        """Forget all but the last tokens. held: the number of characters at the end that were not
        returned."""
        dropped = len(self._ids) - _MAX_DECODED_TOKENS // 2
        self._ids = self._ids[dropped:]
        self._context_size = max(0, self._context_size - dropped)
        text = self._decode(self._ids)
        self._returned = text[: max(0, len(text) - held)]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def _returned_length(returned: str, text: str) -> int:
    """The number of characters of `text` that are in `returned`, the text before a token."""
    if text.startswith(returned):
        return len(returned)
    whole = returned.rstrip(_REPLACEMENT_CHARACTER)
    if not text.startswith(whole):
        return len(whole)
    # A new token completes a character inside which the prompt ended.
    rest = text[len(whole) :].lstrip(_REPLACEMENT_CHARACTER)
    return min(len(returned), len(text) - len(rest))


class GeneratedText:
    """The text of a row as its tokens come, up to its first stop string or its stop token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
    ) -> None:
        """Begin a text.

        Args:
            tokenizer: the tokenizer of the model.
            prompt: the tokens before the first new token; see `IncrementalDecoder`.
            stop_strings: the texts that end the text.
            skip_special_tokens: whether special tokens have no text.
            include_stop_str_in_output: whether the text includes the stop string, or the stop
                token, that ends it; vLLM's name.
        """
        self._decoder = IncrementalDecoder(
            tokenizer, prompt, skip_special_tokens=skip_special_tokens
        )
        self._stops = StopStrings(stop_strings, include_match=include_stop_str_in_output)
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._includes_stop_token = include_stop_str_in_output
        self._pieces: list[str] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None before the end."""
        return self._stops.match

    @property
    def whole(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    def put(self, token: int, *, is_stop_token: bool = False) -> str:
        """The text that `token` makes certain. is_stop_token: whether the token ends the row."""
        if is_stop_token and not self._includes_stop_token:
            return ""
        if self._stops.has_strings and self._is_hidden(token):
            # As in transformers, stop strings may be special tokens, or have some in them.
            piece = self._stops.put_hidden(
                self._tokenizer.decode([token], skip_special_tokens=False)
            )
        else:
            piece = self._stops.put(self._decoder.put(token))
        self._pieces.append(piece)
        return piece

    def _is_hidden(self, token: int) -> bool:
        return self._tokenizer.is_skipped(token, skip_special_tokens=self._skip_special_tokens)

    def end(self) -> str:
        """The text that was held back, as no more tokens come."""
        piece = self._stops.put(self._decoder.end()) + self._stops.end()
        self._pieces.append(piece)
        return piece


class Streamer(Protocol):
    """Hugging Face's protocol of streamers, so that its streamers work, too. Values are NumPy
    arrays, not tensors."""

    def put(self, value: Any) -> None:
        """Take the prompt first, [1, n] int64; then every sampled token, [1] int64."""
        ...

    def end(self) -> None:
        """Take notice that no more tokens come."""
        ...


def check_streamer(streamer: object, rows: int) -> None:
    """Raise ValueError if `streamer` lacks the protocol's methods, or if there are several rows."""
    if rows != 1:
        raise ValueError(
            f"a streamer follows a single prompt, and {rows} were given; generate each on its own"
        )
    if not (callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))):
        raise ValueError(f"streamer is {shown(streamer)}; give an object with put(value) and end()")


class TextStreamer:
    """Writes text to a file object as soon as it is certain, whole characters at a time.

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
        """Make a streamer.

        Args:
            tokenizer: the tokenizer of the model.
            file: the file object to write to; by default standard output.
            skip_prompt: whether only the sampled tokens are written.
            skip_special_tokens: whether special tokens are left out.
            stop_strings: the texts before which the text ends, as `generate` cuts its texts.

        Raises ValueError without a tokenizer.
        """
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
        """Write the text that is certain. value: first the prompt's token ids, [1, n] or [n]; then
        the sampled token ids."""
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
        rest = ""
        if self._decoder is not None:
            rest = self._stops.put(self._decoder.end()) + self._stops.end()
        self._decoder = None
        self._stops = StopStrings(self._stop_strings)
        self._write(rest + "\n")

    def _write(self, text: str) -> None:
        if text:
            file = self._file or sys.stdout
            file.write(text)
            file.flush()
