"""Texts in every form that a caller may give → the token ids of each document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qsample.contract.arrays import Array
from qsample.errors import QsampleError, shown
from qsample.package.package import Package
from qsample.request.text.tokenizer import TOKENIZER_FILE, Tokenizer


def documents_of(text: Any, packages: Sequence[Package]) -> list[Array]:
    """The token ids of each document, [n] int64 in [0, V).

    Args:
        text: a document, or a list of documents; each is a text or token ids.
        packages: the packages that read the documents.

    Raises ValueError if there is nothing to read, QsampleError if the packages would read different
    tokens in a text.
    """
    documents = [text] if isinstance(text, str) or _is_ids(text) else text
    if not isinstance(documents, Sequence) or not all(
        isinstance(document, str) or _is_ids(document) for document in documents
    ):
        raise ValueError(f"text is {shown(text)}; give a text, token ids, or a list of either")
    if not any(len(document) > 0 for document in documents):
        raise ValueError("text is empty; give a document of at least 2 tokens")
    tokenizer = None
    if any(isinstance(document, str) for document in documents):
        tokenizer = _shared_tokenizer(packages)
    vocab_size = packages[0].interface.vocab_size
    return [_token_ids(document, tokenizer, vocab_size) for document in documents]


def _is_ids(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(item, int | np.integer) for item in value)
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
    """The tokenizer that all packages share. Raises QsampleError if a package has none, or has
    another tokenizer."""
    tokenizers = []
    for package in packages:
        tokenizer = Tokenizer.of(package)
        if tokenizer is None:
            raise QsampleError(
                f"{package.path} has no tokenizer, and a text was given; export the model with its tokenizer, or give "
                "token ids, in Python"
            )
        tokenizers.append(tokenizer)
        first_file = packages[0].manifest.files[TOKENIZER_FILE]
        file = package.manifest.files[TOKENIZER_FILE]
        if file.sha256 != first_file.sha256 and tokenizer.get_vocab() != tokenizers[0].get_vocab():
            raise QsampleError(
                f"{package.path} has another tokenizer than {packages[0].path}: the same tokens mean other texts to "
                "them; give packages of one model, or of models that share a tokenizer"
            )
    return tokenizers[0]
