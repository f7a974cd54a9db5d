"""Text of tokens that come one by one, whole characters at a time.

`tokenizers.decoders.DecodeStream` does not fit: where a prompt ends inside a character, or with U+FFFD, it repeats the
prompt, and it has no call for the end, where an incomplete character becomes U+FFFD.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from qsample.runtime.text.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"  # what an incomplete multi-byte character decodes to
_CONTEXT: Final = 8  # prompt tokens that decide how the first new one is spelled, with or without a space


class IncrementalDecoder:
    """Turns tokens into text as they come; the pieces joined are the whole text.

    A piece is held back while it ends inside a multi-byte character. (With byte fallback, a later byte token can make a
    whole run of them invalid; text that was given out before stays as it was.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        """prompt: the tokens before the first new one; they are not repeated in the text."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = [int(token) for token in prompt[-_CONTEXT:]]
        self._known = len(self._ids)  # tokens whose text was given out

    def put(self, token: int) -> str:
        """The text that `token` completes; "" where it completes none yet."""
        self._ids.append(int(token))
        text = self._pending()
        if text.endswith(_REPLACEMENT) or not text:
            return ""
        # The tokens given out last stay as context: how a token is spelled can depend on the one before.
        self._ids = self._ids[self._known :] if self._known < len(self._ids) else self._ids
        self._known = len(self._ids)
        return text

    def end(self) -> str:
        """What was held back; incomplete characters become U+FFFD."""
        text = self._pending()
        self._known = len(self._ids)
        return text

    def _pending(self) -> str:
        before, text = self._decode(self._ids[: self._known]), self._decode(self._ids)
        if not text.startswith(before):  # a new token completes a character that the prompt ended inside
            before = before.rstrip(_REPLACEMENT)
        return text[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
