"""Token ids of documents enter; the windows that a model reads them in leave, each token scored once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qsample.tensors import Array


class Window(NamedTuple):
    """A part of a document that a model reads from an empty cache.

    ids: [n] int64, n >= 2. first: the tokens from here on are scored, 1 to n - 1; those before it are context.
    offset: the place of the first scored one among all that are scored.
    """

    ids: Array
    first: int
    offset: int

    @property
    def scored(self) -> int:
        return len(self.ids) - self.first


def cut_windows(documents: Sequence[Array], max_length: int, stride: int) -> list[Window]:
    """Windows of at most `max_length` tokens, each starting `stride` tokens behind the one before it, so that a scored
    token has at least max_length - stride tokens of context, or all that its document has.

    This is the sliding window of transformers' guide (https://huggingface.co/docs/transformers/perplexity): each token
    is scored once, by the first window that reaches it; the first of a document by none, and with
    stride = max_length the first of each window by none.

    documents: [n] int64 each. max_length: at least 2. stride: 1 to max_length.
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
