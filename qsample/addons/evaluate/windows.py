"""Documents as token ids → the windows in which a model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qsample.contract.arrays import Array


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
