"""The text of tokens as they come: whole characters at a time, cut off before a stop string, written to a file.

`tokenizers.decoders.DecodeStream` does not fit: if a prompt ends inside a character, or with U+FFFD, it repeats the
prompt, and it has no call for the end, at which an incomplete character becomes U+FFFD.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, Protocol, TextIO

import numpy as np

from qsample.errors import shown
from qsample.text.stop_strings import StopStrings, check_stop_strings
from qsample.text.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"  # an incomplete multi-byte character decodes to it
_INCOMPLETE: Final = 3  # most bytes of an incomplete character, each a U+FFFD of its own with byte fallback
_CONTEXT: Final = 8  # prompt tokens that decide how the first new token is spelled, with or without a space
_MOST_TOKENS: Final = 32  # decoded for a new token: beyond that, all but the last half are forgotten


class IncrementalDecoder:
    """Turns tokens into text as they come; the pieces joined are the whole text.

    Text is held back while it may be an incomplete multi-byte character, which is three bytes at most, so the work for
    a token is bounded whatever the tokens are. (With byte fallback, a later byte token can make a whole run of them
    invalid; text that was already returned stays as it was.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        """prompt: the tokens before the first new token; they are not repeated in the text."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = [int(token) for token in prompt[-_CONTEXT:]]
        self._given = self._decode(self._ids)  # the part of the text of `_ids` that was returned, or is of the prompt
        self._context = len(self._ids)  # its length when nothing was held back
        self._changes = 0  # tokens since the returned text decodes to another text

    def put(self, token: int) -> str:
        """The text that `token` makes certain; "" if it completes no character."""
        if self._tokenizer.is_skipped(token, skip_special_tokens=self._skip_special_tokens):
            return ""
        self._ids.append(int(token))
        text = self._decode(self._ids)
        held = min(len(text) - len(text.rstrip(_REPLACEMENT)), _INCOMPLETE)
        # Byte fallback: the first bytes of a character make those before it invalid, too, until it is complete.
        self._changes = 0 if text.startswith(self._given) else self._changes + 1
        if held and 0 < self._changes <= _INCOMPLETE:
            return ""
        start, end = self._known(text), len(text) - held
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
        """The text that was held back; incomplete characters become U+FFFD."""
        text = self._decode(self._ids)
        piece, self._given = text[self._known(text) :], text
        return piece

    def _known(self, text: str) -> int:
        """The number of characters of `text` that were returned."""
        if text.startswith(self._given):
            return len(self._given)
        whole = self._given.rstrip(_REPLACEMENT)
        if not text.startswith(whole):
            return len(whole)
        # A new token completes a character that the prompt ended inside.
        rest = text[len(whole) :].lstrip(_REPLACEMENT)
        return min(len(self._given), len(text) - len(rest))

    def _forget(self, held: int) -> None:
        """Drop the older tokens. held: characters at the end that were not returned."""
        dropped = len(self._ids) - _MOST_TOKENS // 2
        self._ids, self._context = self._ids[dropped:], max(0, self._context - dropped)
        text = self._decode(self._ids)
        self._given = text[: max(0, len(text) - held)]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


class GeneratedText:
    """The text of a row as its tokens come, cut off before its first stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop_strings: Sequence[str] = ()) -> None:
        """prompt: as for `IncrementalDecoder`."""
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._stops = StopStrings(stop_strings)
        self._pieces: list[str] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None = the text has not ended."""
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
    """Hugging Face's streamer protocol, so that their streamers work, too. Values are NumPy arrays, not tensors."""

    def put(self, value: Any) -> None:
        """First the prompt, [1, n] int64; then every sampled token, [1] int64."""
        ...

    def end(self) -> None:
        """No token comes any more."""
        ...


def check_streamer(streamer: object, rows: int) -> None:
    """Raise ValueError if `streamer` lacks the protocol's methods, or there are several rows."""
    if rows != 1:
        raise ValueError(f"a streamer follows a single prompt, and {rows} were given; generate each on its own")
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
        """Write to `file`.

        Args:
            tokenizer: of the model.
            file: None = standard output.
            skip_prompt: write the sampled tokens only.
            skip_special_tokens: leave special tokens out.
            stop_strings: write the sampled tokens up to the first of them, as `generate(stop_strings=...)` cuts its
                texts.

        Raises ValueError without a tokenizer.
        """
        if tokenizer is None:
            raise ValueError("a TextStreamer needs a tokenizer, and the package has none; stream token ids instead")
        self._tokenizer = tokenizer
        self._file = file
        self._skip_prompt = skip_prompt
        self._skip_special_tokens = skip_special_tokens
        self._stop_strings = check_stop_strings(stop_strings)
        self._stops = StopStrings(self._stop_strings)
        self._decoder: IncrementalDecoder | None = None

    def put(self, value: Any) -> None:
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
        rest = self._stops.put(self._decoder.end()) + self._stops.end() if self._decoder is not None else ""
        self._decoder, self._stops = None, StopStrings(self._stop_strings)
        self._write(rest + "\n")

    def _write(self, text: str) -> None:
        if text:
            file = self._file or sys.stdout
            file.write(text)
            file.flush()
