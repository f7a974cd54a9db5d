"""Text enters, token ids leave, and back, piece by piece: `Tokenizer`, `IncrementalDecoder` and `GeneratedText`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from tokenizers import Tokenizer as _Tokenizer

from qsample.errors import PackageError
from qsample.package import Package
from qsample.runtime.text.chat import ChatTemplate
from qsample.runtime.text.stop_strings import StopStrings

TOKENIZER_FILE: Final = "tokenizer.json"
_REPLACEMENT: Final = "\ufffd"  # what an incomplete multi-byte character decodes to
_CONTEXT: Final = 8  # prompt tokens that decide how the first new one is spelled, with or without a space


class Tokenizer:
    """A package's tokenizer.json and chat template.

    >>> tokenizer = Tokenizer.of(package)
    >>> tokenizer.decode(tokenizer.encode("In the beginning"))
    """

    def __init__(self, tokenizer: _Tokenizer, chat_template: ChatTemplate | None = None) -> None:
        self._tokenizer = tokenizer
        # A prompt is taken as it is, whatever the training code left in the file.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._chat_template = chat_template

    @classmethod
    def of(cls, package: Package) -> Tokenizer | None:
        """The package's tokenizer; None where it was exported without one.

        Raises PackageError where the file cannot be read, or knows more tokens than the model.
        """
        if not package.has(TOKENIZER_FILE):
            return None
        path = package.file(TOKENIZER_FILE)
        try:
            tokenizer = _Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises plain Exception
            raise PackageError(f"cannot read {path}: {error}; export the package again") from error
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        if size > package.interface.vocab_size:
            raise PackageError(
                f"{path} has {size} tokens and the model {package.interface.vocab_size}; export the model with its own "
                "tokenizer"
            )
        return cls(tokenizer, ChatTemplate.of(package))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the beginning-of-text token and the like if the tokenizer adds them."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens)
        return text

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant answers. Raises ValueError without a chat template."""
        if self._chat_template is None:
            raise ValueError(
                "the package has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
                "give plain text, or export the model with a tokenizer that has one"
            )
        # The template spells the special tokens out.
        return self.encode(self._chat_template.render(messages), add_special_tokens=False)


class IncrementalDecoder:
    """Turns tokens into text as they come; the pieces joined are the whole text.

    A piece is held back while it ends inside a multi-byte character. (A byte-fallback tokenizer spoils a whole run of
    byte tokens when a later one makes it invalid; what was given out before stays as it was.)
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


class GeneratedText:
    """The text of one row as its tokens come, cut off before its first stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop_strings: Sequence[str] = ()) -> None:
        """prompt: as for `IncrementalDecoder`."""
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._stops = StopStrings(stop_strings)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    def put(self, token: int) -> str:
        """The text that `token` makes certain."""
        return self._stops.put(self._decoder.put(token))

    def end(self) -> str:
        """What was held back."""
        return self._stops.put(self._decoder.end()) + self._stops.end()
