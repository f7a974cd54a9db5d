"""A package's tokenizer: text and chat messages to token ids, and token ids to text."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer as _Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from qsample.errors import PackageError, shown
from qsample.package.package import Package
from qsample.request.refusals import APPLY_CHAT_TEMPLATE, without_refused
from qsample.request.text.chat import ChatOptions, ChatTemplates, warn_of_unread

TOKENIZER_FILE: Final = "tokenizer.json"
# A text of more characters, or of more tokens, takes long. So it is encoded and decoded as a batch
# of one text, during which the library does not hold Python's lock. Shorter texts are not, because
# a batch makes the library print a warning in forks. `encode_batch_fast` computes no offsets: it
# takes a third of the time, and less memory.
LONG_TEXT: Final = 20_000
# The spellings of two bytes that continue a character: with byte fallback, and in byte-level
# vocabularies such as GPT-2's. In UTF-8, one of the two can follow the first byte of any character,
# and the first can follow every later byte.
_CONTINUATION_BYTES: Final = (("<0x80>", "Ģ"), ("<0xB0>", "°"))
# Composing (NFC, NFKC) makes a character of at most this number of characters: no character's
# canonical decomposition has more (https://unicode.org/reports/tr15/#Design_Goals).
_MAX_COMPOSED_CHARACTERS: Final = 4
# The normalizers and pre-tokenizers that remove no character.
_LOSSLESS_STEPS: Final = {
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "Prepend",
    "ByteLevel",
    "Metaspace",
    "Digits",
}


class Tokenizer:
    """A package's tokenizer.json and chat template.

    >>> tokenizer = Tokenizer.of(package)
    >>> tokenizer.decode(tokenizer.encode("In the beginning"))
    """

    def __init__(
        self,
        tokenizer: _Tokenizer,
        chat_templates: ChatTemplates | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """
        Args:
            tokenizer: the tokenizer of the tokenizers library, whose settings change.
            chat_templates: the chat templates; None without any.
            vocab_size: V, the number of tokens that the model reads and writes. The tokenizer may
                have more. None for all tokens.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        # Training code may have left truncation and padding in the file. Prompts are read whole.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._special = {
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        }
        self._chat_templates = chat_templates or ChatTemplates(None)

    @classmethod
    def of(cls, package: Package) -> Tokenizer | None:
        """The package's tokenizer, or None. Raises PackageError if it is damaged."""
        if not package.has(TOKENIZER_FILE):
            return None
        text = package.read_text(TOKENIZER_FILE)
        try:
            tokenizer = _Tokenizer.from_str(text)
        except BaseException as error:
            _raise_failure(f"cannot read {package.path / TOKENIZER_FILE}", error)
            raise
        return cls(tokenizer, ChatTemplates.of(package), package.interface.vocab_size)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text` for the model.

        Args:
            text: the text to encode.
            add_special_tokens: whether the tokenizer adds its special tokens, such as the
                beginning-of-text token.

        Raises ValueError for a text that is not valid Unicode, or has a token that the model lacks;
        PackageError for a damaged tokenizer.
        """
        ids = self.tokenize(text, add_special_tokens=add_special_tokens)
        if self._vocab_size is not None and max(ids, default=0) >= self._vocab_size:
            token = next(token for token in ids if token >= self._vocab_size)
            raise ValueError(
                f"a text has {shown(self._tokenizer.id_to_token(token))}, token {token} of the tokenizer, and the "
                f"model has {self._vocab_size} tokens, 0 to {self._vocab_size - 1}, so it cannot read that; leave it "
                "out of the text"
            )
        return ids

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, as `encode`; also those that the model lacks."""
        check_text("a text", text)
        try:
            if len(text) > LONG_TEXT:
                ids: list[int] = self._tokenizer.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )[0].ids
            else:
                ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            _raise_failure(f"{TOKENIZER_FILE} cannot encode {text!r:.80}", error)
            raise
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, by default without special tokens. Raises PackageError for a
        damaged tokenizer."""
        tokens = [int(token) for token in ids]
        try:
            if len(tokens) > LONG_TEXT:
                text: str = self._tokenizer.decode_batch(
                    [tokens], skip_special_tokens=skip_special_tokens
                )[0]
            else:
                text = self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            _raise_failure(f"{TOKENIZER_FILE} cannot decode {tokens!r:.80}", error)
            raise
        return text

    def to_json(self) -> str:
        """The contents of tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    @cached_property
    def num_ids(self) -> int:
        """The end of the range of ids that have a token."""
        return max(self.get_vocab().values(), default=-1) + 1

    @cached_property
    def completions(self) -> tuple[list[int], ...]:
        """Sequences of tokens. For any incomplete character at the end of a text, one of them
        completes it. () if the vocabulary has no tokens of bytes."""
        low_spellings, high_spellings = _CONTINUATION_BYTES
        low = self._byte_token(low_spellings)
        high = self._byte_token(high_spellings)
        if low is None or high is None:
            return ()
        return ([low], [low, low], [low, low, low], [high], [high, low], [high, low, low])

    def _byte_token(self, spellings: Sequence[str]) -> int | None:
        """The token of a byte: it decodes to U+FFFD. None if none of the spellings is such a
        token."""
        for spelling in spellings:
            token: int | None = self._tokenizer.token_to_id(spelling)
            if token is not None and self.decode([token]) == "\ufffd":
                return token
        return None

    def is_skipped(self, token: int, *, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` leaves `token` out in every text: a special token, or an id without a
        token."""
        if skip_special_tokens and token in self._special:
            return True
        return self._tokenizer.id_to_token(int(token)) is None

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The chat template, several templates by name, or None. As in transformers, another
        template may be set."""
        templates = dict(self._chat_templates.templates)
        if templates.keys() <= {"default"}:
            return templates.get("default")
        return templates

    @chat_template.setter
    def chat_template(self, value: str | Mapping[str, str] | None) -> None:
        self._chat_templates = ChatTemplates(
            value, self._chat_templates.special_tokens, self._chat_templates.text_only
        )

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Any] | None = None
    ) -> str:
        """The text of the template that `encode_chat` uses with these options. Raises ValueError
        without a template."""
        return self._chat_templates.source(chat_template, tools=tools is not None)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> list[int]:
        """Token ids of a conversation, up to the assistant's answer unless `options` say otherwise.
        Raises ValueError without a chat template, and if the messages do not fit it."""
        # The template itself writes the special tokens.
        return self.encode(self.render_chat(messages, options), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions | None = None,
        on_unread: Callable[[str], object] = warn_of_unread,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: the conversation.
            options: the options of the template.
            on_unread: a function that is called with the name of each thing that was given and that
                the template does not print, see `ChatTemplates.unread`. By default it warns.

        Raises ValueError, as `encode_chat` does.
        """
        text = self._chat_templates.render(messages, options)
        for name in self._chat_templates.unread(messages, options):
            on_unread(name)
        return text

    def characters_per_token(self) -> int | None:
        """The most characters of a text that a single token can stand for; None if there is no such
        bound. A bound exists if every character of a text ends up in a token. That is certain of a
        byte-level or byte-fallback BPE whose normalizer and pre-tokenizer remove nothing."""
        description = json.loads(self._tokenizer.to_str())
        model = description["model"]
        added_tokens = description["added_tokens"]
        vocabulary = model.get("vocab") or {}
        steps = _steps(description.get("normalizer")) + _steps(description.get("pre_tokenizer"))
        kinds = {step["type"] for step in steps}
        has_bytes = False
        if "ByteLevel" in kinds:
            has_bytes = all(piece in vocabulary for piece in ByteLevel.alphabet())
        if not has_bytes and model.get("byte_fallback"):
            has_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        # An added token that strips takes any number of blanks.
        strips_blanks = any(token["lstrip"] or token["rstrip"] for token in added_tokens)
        is_lossless = all(_is_lossless(step) for step in steps)
        if model["type"] != "BPE" or not has_bytes or strips_blanks or not is_lossless:
            return None
        texts = [*vocabulary, *(token["content"] for token in added_tokens)]
        longest = max(len(text) for text in texts)
        return longest * _MAX_COMPOSED_CHARACTERS if kinds & {"NFC", "NFKC"} else longest

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> Any:
        """A conversation, or a list of them, in the model's chat template; the arguments are
        transformers'.

        Args:
            conversation: the messages, or a list of conversations.
            tools, documents, chat_template, add_generation_prompt, continue_final_message: see
                `ChatOptions`.
            tokenize: False returns the text.
            kwargs: return_tensors, "np" for arrays [rows, tokens]; return_dict, False for the token
                ids only, without an attention_mask; and further variables of the template, such as
                enable_thinking.

        Raises ValueError if any of these is wrong.
        """
        kwargs = without_refused(APPLY_CHAT_TEMPLATE, kwargs)
        form = _ReturnForm(kwargs.pop("return_tensors", None), kwargs.pop("return_dict", True))
        options = ChatOptions(
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=kwargs,
        )
        is_batch = (
            isinstance(conversation, list | tuple)
            and len(conversation) > 0
            and isinstance(conversation[0], list | tuple)
        )
        chats = conversation if is_batch else [conversation]
        texts = [self.render_chat(chat, options) for chat in chats]
        if not tokenize:
            return texts if is_batch else texts[0]
        rows = [self.tokenize(text, add_special_tokens=False) for text in texts]
        return form.of_batch(rows) if is_batch else form.of_row(rows[0])


@dataclass(frozen=True, slots=True)
class _ReturnForm:
    """The form in which `apply_chat_template` returns token ids. Raises ValueError.

    Args:
        return_tensors: "np" for arrays [rows, tokens], None for lists.
        return_dict: whether an attention_mask goes with the token ids.
    """

    return_tensors: Any
    return_dict: Any

    def __post_init__(self) -> None:
        if self.return_tensors not in (None, "np"):
            raise ValueError(
                f'return_tensors is {shown(self.return_tensors)}; give "np", or None for lists'
            )

    def of_batch(self, rows: list[list[int]]) -> Any:
        """The token ids of several conversations."""
        if self.return_tensors is None:
            return self._with_mask(rows, [[1] * len(row) for row in rows])
        if len({len(row) for row in rows}) > 1:
            raise ValueError(
                "return_tensors needs conversations of the same length; leave it out for lists"
            )
        ids = np.array(rows, dtype=np.int64)
        return self._with_mask(ids, np.ones_like(ids))

    def of_row(self, row: list[int]) -> Any:
        """The token ids of a single conversation; an array has an axis of rows, too."""
        if self.return_tensors is not None:
            return self.of_batch([row])
        return self._with_mask(row, [1] * len(row))

    def _with_mask(self, ids: Any, mask: Any) -> Any:
        return {"input_ids": ids, "attention_mask": mask} if self.return_dict else ids


def _steps(description: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The parts of a normalizer or a pre-tokenizer, in order."""
    if description is None:
        return []
    if description["type"] != "Sequence":
        return [description]
    parts = description.get("normalizers") or description.get("pretokenizers") or []
    return [step for part in parts for step in _steps(part)]


def _is_lossless(step: dict[str, Any]) -> bool:
    """Whether a normalizer or a pre-tokenizer removes no character of a text; it may compose
    characters."""
    kind = step["type"]
    if kind == "Replace":
        old = step["pattern"].get("String")
        return old is not None and len(step["content"]) >= len(old)
    if kind in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return kind in _LOSSLESS_STEPS


def choose_tokenizer(own: Tokenizer | None, given: Any, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of a call.

    Args:
        own: the package's tokenizer, or None. It takes precedence.
        given: the caller's tokenizer: qsample's, transformers' or the tokenizers library's.
        vocab_size: the number of the model's token ids.

    Raises ValueError for anything else.
    """
    if given is None:
        return own
    if isinstance(given, Tokenizer):
        return own or given
    backend = getattr(given, "backend_tokenizer", given)
    if not isinstance(backend, _Tokenizer):
        if own is not None and callable(getattr(given, "decode", None)):
            return own
        raise ValueError(
            f"tokenizer is a {type(given).__name__}; give a fast tokenizer of transformers"
        )
    if own is not None:
        return own
    templates = ChatTemplates(
        getattr(given, "chat_template", None), getattr(given, "special_tokens_map", None)
    )
    copy = _Tokenizer.from_str(backend.to_str())  # Tokenizer changes its settings.
    return Tokenizer(copy, templates, vocab_size)


def warn_of_missing_rows(vocabulary: Mapping[str, int], vocab_size: int) -> None:
    """Warn of tokens that a model can neither read nor write.

    Args:
        vocabulary: every token of the tokenizer, and its id.
        vocab_size: V, the number of tokens of the model.
    """
    missing = sorted((token, text) for text, token in vocabulary.items() if token >= vocab_size)
    if missing:
        first, text = missing[0]
        warnings.warn(
            f"the model lacks {len(missing)} of the tokenizer's tokens, from {shown(text)} (id {first}) on: its ids "
            f"are 0 to {vocab_size - 1}. A text with such a token will be refused; give the model's own tokenizer if "
            "this is another one",
            stacklevel=3,
        )


def _raise_failure(what: str, error: BaseException) -> None:
    """Raise PackageError for a fault of a tokenizer.json: the Rust library raises a plain Exception
    for it, or panics with a BaseException. Return for anything else: a wrong argument, a
    KeyboardInterrupt."""
    is_of_an_argument = isinstance(error, OverflowError | TypeError)
    is_panic = type(error).__name__ == "PanicException"
    if is_panic or (isinstance(error, Exception) and not is_of_an_argument):
        text = " ".join(str(error).split())
        raise PackageError(f"{what}: {text:.300}; export the package again") from error


def check_text(what: str, text: str) -> None:
    """Raise ValueError if `text` cannot be written as UTF-8 for a tokenizer. what: the name
    of the text in the message."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has a lone surrogate at character {error.start} ({text[error.start]!a}), which is half of a "
            'character; decode the bytes again, or replace it: text.encode("utf-16", "surrogatepass").decode("utf-16", '
            '"replace")'
        ) from None
