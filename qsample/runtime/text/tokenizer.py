"""A package's tokenizer: text and chat messages to token ids, and token ids to text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from tokenizers import Tokenizer as _Tokenizer

from qsample.errors import PackageError
from qsample.package import Package
from qsample.runtime.text.chat import ChatTemplate

TOKENIZER_FILE: Final = "tokenizer.json"


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
