"""Text of tokens that come one by one, whole characters at a time.

`tokenizers.decoders.DecodeStream` does not fit: where a prompt ends inside a character, or with U+FFFD, it repeats the
prompt, and it has no call for the end, where an incomplete character becomes U+FFFD.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from qsample.runtime.text.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"  # what an incomplete multi-byte character decodes to
_INCOMPLETE: Final = 3  # most bytes of a character that is not complete, each a U+FFFD of its own with byte fallback
_CONTEXT: Final = 8  # prompt tokens that decide how the first new one is spelled, with or without a space
_MOST_TOKENS: Final = 32  # decoded for one new token: beyond that, all but the last half are forgotten


class IncrementalDecoder:
    """Turns tokens into text as they come; the pieces joined are the whole text.

    Text is held back while it may be an incomplete multi-byte character, which is three bytes at most, so the work for
    a token is bounded whatever the tokens are. (With byte fallback, a later byte token can make a whole run of them
    invalid; text that was given out before stays as it was.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        """prompt: the tokens before the first new one; they are not repeated in the text."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = [int(token) for token in prompt[-_CONTEXT:]]
        self._given = self._decode(self._ids)  # what was given out of the text of `_ids`, the prompt's included
        self._context = len(self._ids)  # tokens that were there when nothing was held back
        self._changes = 0  # tokens since text that was given out decodes to something else

    def put(self, token: int) -> str:
        """The text that `token` makes certain; "" where it completes none yet."""
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
                # The tokens given out last stay as context: how a token is spelled can depend on the one before.
                self._ids = self._ids[self._context :]
                self._given, self._context = self._decode(self._ids), len(self._ids)
        if len(self._ids) > _MOST_TOKENS:
            self._forget(len(text) - max(start, end))
        return text[start:end]

    def end(self) -> str:
        """What was held back; incomplete characters become U+FFFD."""
        text = self._decode(self._ids)
        piece, self._given = text[self._known(text) :], text
        return piece

    def _known(self, text: str) -> int:
        """How many characters of `text` were given out."""
        if text.startswith(self._given):
            return len(self._given)
        whole = self._given.rstrip(_REPLACEMENT)
        if not text.startswith(whole):
            return len(whole)
        # A new token completes a character that the prompt ended inside.
        rest = text[len(whole) :].lstrip(_REPLACEMENT)
        return min(len(self._given), len(text) - len(rest))

    def _forget(self, held: int) -> None:
        """Drop the older tokens. held: characters at the end that were not given out."""
        dropped = len(self._ids) - _MOST_TOKENS // 2
        self._ids, self._context = self._ids[dropped:], max(0, self._context - dropped)
        text = self._decode(self._ids)
        self._given = text[: max(0, len(text) - held)]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
