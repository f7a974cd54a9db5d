"""Texts in every form that a caller may give, as token ids; and the windows that a model reads them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from qsample.contract.arrays import Array
from qsample.errors import QsampleError, shown
from qsample.package.package import Package
from qsample.text.tokenizer import TOKENIZER_FILE, Tokenizer


def documents_of(text: Any, packages: Sequence[Package]) -> list[Array]:
    """The token ids, [n] int64 in [0, V), of each document (a text or token ids), for all `packages`. Raises ValueError
    if nothing is left to read, QsampleError if the packages would read different tokens in a text."""
    documents = [text] if isinstance(text, str) or _is_ids(text) else text
    if not isinstance(documents, Sequence) or not all(
        isinstance(one, str) or _is_ids(one) for one in documents
    ):
        raise ValueError(f"text is {shown(text)}; give a text, token ids, or a list of either")
    if not any(len(one) for one in documents):
        raise ValueError("text is empty; give a document of at least 2 tokens")
    tokenizer = (
        _shared_tokenizer(packages) if any(isinstance(one, str) for one in documents) else None
    )
    vocab_size = packages[0].interface.vocab_size
    return [_token_ids(one, tokenizer, vocab_size) for one in documents]


def _is_ids(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(one, int | np.integer) for one in value)
    )


def _token_ids(document: Any, tokenizer: Tokenizer | None, vocab_size: int) -> Array:
    if isinstance(document, str):
        assert tokenizer is not None
        return np.array(tokenizer.encode(document), np.int64)
    ids = np.asarray(document)
    if ids.dtype.kind not in "iu" or ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size:
        raise ValueError(
            f"text has token ids {shown(document)}; give integers from 0 to {vocab_size - 1}"
        )
    return ids.astype(np.int64)


def _shared_tokenizer(packages: Sequence[Package]) -> Tokenizer:
    """The tokenizer of all packages. Raises QsampleError if a package lacks it, or has another."""
    tokenizers = []
    for package in packages:
        tokenizer = Tokenizer.of(package)
        if tokenizer is None:
            raise QsampleError(
                f"{package.path} has no tokenizer, and a text was given; export the model with its tokenizer, or give "
                "token ids, in Python"
            )
        tokenizers.append(tokenizer)
        files = (one.manifest.files[TOKENIZER_FILE].sha256 for one in (packages[0], package))
        if len(set(files)) > 1 and tokenizer.get_vocab() != tokenizers[0].get_vocab():
            raise QsampleError(
                f"{package.path} has another tokenizer than {packages[0].path}: the same tokens mean other texts to "
                "them; give packages of one model, or of models that share a tokenizer"
            )
    return tokenizers[0]


class Window(NamedTuple):
    """A part of a document that a model reads from an empty cache. `ids`: [n] int64, n >= 2. Tokens from `first` on (1
    to n - 1) are scored, after their context. `offset`: the place of the first scored token among all scored tokens."""

    ids: Array
    first: int
    offset: int

    @property
    def scored(self) -> int:
        return len(self.ids) - self.first


def cut_windows(documents: Sequence[Array], max_length: int, stride: int) -> list[Window]:
    """Windows of at most `max_length` tokens (at least 2) of documents, [n] int64 each. Each begins `stride` tokens (1
    to max_length) after the last. So a scored token has at least max_length - stride tokens of context, or all that its
    document has.

    This is the sliding window of transformers' guide (https://huggingface.co/docs/transformers/perplexity): each token
    is scored once, by the first window that reaches it; the first of a document by none, and with stride = max_length
    the first of each window by none.
    """
    windows: list[Window] = []
    offset = 0
    for ids in documents:
        scored_to = 0
        for begin in range(0, len(ids), stride):
            end = min(begin + max_length, len(ids))
            first = max(scored_to - begin, 1)
            if end - begin > first:
                windows.append(Window(ids[begin:end], first, offset))
                offset += end - begin - first
            scored_to = end
            if end == len(ids):
                break
    return windows
