"""What the rows of a batch need of a captured graph.

Such a graph takes lists of rows, `REPLAY_ROWS` of the contract, and an empty list switches a part
of it off. The parameters of the rows tell before a step which parts they need. Each length of a
list is captured as a graph of its own, so there are few lengths: the first two lists have all rows
or none, and the list of the searched rows, whose cost grows with its length, a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import (
    CANDIDATES,
    PROCESSED_ROWS,
    SEARCHED,
    SEARCHED_ROWS,
    VOCABULARY_ROWS,
)
from qsample.ort.buffers import Buffer

# A row with any of these does not take the largest of the model's logits.
_CHANGE_LOGITS: Final = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_length",
    "logit_bias_ids",
    "allowed_tokens",
    "bad_words_ids",
    "no_repeat_ngram_size",
    "dry_multiplier",
)
# The filters that may keep more tokens than the candidates. 1 switches them off.
_NUCLEUS_FILTERS: Final = ("top_p", "typical_p")


@dataclass(frozen=True, slots=True)
class _Need:
    """What a row needs: each part includes the parts before it.

    Attributes:
        processed: more than the largest of the model's logits.
        vocabulary: a draw from more than the candidates.
        searched: a search of the vocabulary.
    """

    processed: bool = False
    vocabulary: bool = False
    searched: bool = False


class ReplayRows:
    """The lists of a batch, in memory that stays."""

    def __init__(
        self, interface: Interface, count: int, device: str, *, needed: bool = True
    ) -> None:
        """Begin with rows that need nothing.

        Args:
            interface: the interface of the package.
            count: the number of rows of the batch.
            device: the device of the lists.
            needed: whether the graph takes no empty list.
        """
        self._off: dict[str, Any] = {}
        if interface.captured:
            self._off = {spec.name: spec.off for spec in interface.parameters}
        self._count = count
        # On the CPU, ONNX Runtime before 1.32 gives reductions over no rows a wrong shape.
        self._takes_no_empty_list = needed and interface.captured
        # The parameters of each row that runs, and whether it follows a grammar.
        self._parameters: list[dict[str, Any]] = [{} for _ in range(count)]
        self._has_grammar = [False] * count
        self._needs = [_Need()] * count
        self._every_row = Buffer.of(np.arange(count), device)
        self._searched = Buffer.allocate(SEARCHED_ROWS, {SEARCHED: count}, device)
        self._searched_of_prompts = Buffer.allocate(SEARCHED_ROWS, {SEARCHED: count}, device)
        self._written: list[int] = []  # the rows in `_searched`

    def set(self, row: int, parameters: Mapping[str, Array]) -> None:
        """Note parameters of a row that runs."""
        known = {name: values for name, values in parameters.items() if name in self._off}
        self._parameters[row].update(known)
        self._needs[row] = self._need(row)

    def set_grammar(self, row: int, follows: bool) -> None:
        """Note whether a row follows a grammar."""
        self._has_grammar[row] = follows
        self._needs[row] = self._need(row)

    def clear(self, row: int) -> None:
        """Note that a row has ended."""
        self._parameters[row] = {}
        self._has_grammar[row] = False
        self._needs[row] = _Need()

    def swap_rows(self, one: int, other: int) -> None:
        """Swap two rows."""
        lists: tuple[list[Any], ...] = (self._parameters, self._has_grammar, self._needs)
        for values in lists:
            values[one], values[other] = values[other], values[one]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The lengths of the lists of the whole batch, in the order of `REPLAY_ROWS`."""
        if not self._off:
            return 0, 0, 0
        rows = range(self._count)
        return (*self._switches(rows), self._padded_size(len(self._searched_rows(rows))))

    def of_batch(self) -> dict[str, Buffer]:
        """The lists of the whole batch by name, see `write`."""
        self.write()
        return self._lists(range(self._count), self._searched.reshaped(len(self._written)))

    def write(self) -> None:
        """Write the list of the searched rows of the whole batch, if it has changed. Padding
        repeats a row."""
        if not self._off:
            return
        rows = self._searched_rows(range(self._count))
        rows += rows[:1] * (self._padded_size(len(rows)) - len(rows))
        if rows != self._written:
            self._searched.write_at(slice(len(rows)), rows)
            self._written = rows

    def of_rows(self, rows: range) -> dict[str, Buffer]:
        """The lists of only some rows, counted from 0, by name; all such lists share the memory."""
        searched = self._searched_rows(rows)
        if searched:
            self._searched_of_prompts.write_at(slice(len(searched)), searched)
        return self._lists(rows, self._searched_of_prompts.reshaped(len(searched)))

    def _lists(self, rows: range, searched: Buffer) -> dict[str, Buffer]:
        processed, vocabulary = self._switches(rows)
        return {
            PROCESSED_ROWS.name: self._every_row.reshaped(processed),
            VOCABULARY_ROWS.name: self._every_row.reshaped(vocabulary),
            SEARCHED_ROWS.name: searched,
        }

    def _switches(self, rows: range) -> tuple[int, int]:
        """The lengths of the first two lists of some rows."""
        needs = self._needs[rows.start : rows.stop]
        count = len(needs)
        processed = self._takes_no_empty_list or any(need.processed for need in needs)
        vocabulary = self._takes_no_empty_list or any(need.vocabulary for need in needs)
        return count * processed, count * vocabulary

    def _padded_size(self, rows: int) -> int:
        """The length of the list of searched rows that has `rows` rows without padding."""
        return min(1 << (rows - 1).bit_length(), self._count) if rows > 0 else 0

    def _searched_rows(self, rows: range) -> list[int]:
        """The rows to search, counted from the first of `rows`."""
        needs = self._needs[rows.start : rows.stop]
        searched = [number for number, need in enumerate(needs) if need.searched]
        is_filled = self._takes_no_empty_list and len(needs) > 0
        return searched or [0] * is_filled

    def _need(self, row: int) -> _Need:
        """What a row that runs needs."""
        given = {**self._off, **self._parameters[row]}
        if not self._off:
            return _Need()
        if given["temperature"] == 0:
            changes = [
                np.any(np.asarray(given[name]) != self._off[name])
                for name in _CHANGE_LOGITS
                if name in given
            ]
            return _Need(processed=self._has_grammar[row] or any(changes))
        top_k = int(given["top_k"])
        # The tokens that a small top-k keeps are among the candidates.
        vocabulary = not 0 < top_k <= CANDIDATES
        has_nucleus = any(given[name] < 1 for name in _NUCLEUS_FILTERS if name in given)
        searched = vocabulary and (top_k > 0 or has_nucleus)
        return _Need(processed=True, vocabulary=vocabulary, searched=searched)
