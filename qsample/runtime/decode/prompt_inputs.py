"""The next tokens of prompts, where a call reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qsample.contract import BATCH, INPUT_IDS, INPUT_LENGTHS, SEQUENCE
from qsample.ort.buffers import Buffer
from qsample.tensors import Array


class PromptInputs:
    """Memory for the ids and lengths of one call over some rows; each call writes it anew."""

    def __init__(self, rows: int, capacity: int, least_width: int, device: str) -> None:
        """rows: most of a call. least_width: tokens of a call, padding included."""
        self._least_width = least_width
        self._ids = Buffer.allocate(INPUT_IDS, {BATCH: 1, SEQUENCE: rows * capacity}, device)
        self._lengths = Buffer.of(np.ones(rows, dtype=np.int32), device)

    def write(self, ids: Sequence[Array]) -> Buffer:
        """Write the tokens of each row, [n] int64. Returns them with their padding, [rows, most tokens of a row]."""
        lengths = [len(row) for row in ids]
        width = max(*lengths, self._least_width)
        # Nothing reads the padding. It repeats a token of the row, which brings in no NaN that is not there anyway.
        padded = [np.pad(row, (0, width - len(row)), constant_values=row[0]) for row in ids]
        self._ids.write_at((0, slice(len(ids) * width)), np.concatenate(padded))
        self._lengths.write_at(slice(len(ids)), lengths)
        return self._ids.reshaped(len(ids), width)

    def of_rows(self, rows: int) -> dict[str, Buffer]:
        """The inputs of so many rows by name; of the ids, what `write` returns takes the place."""
        return {INPUT_IDS.name: self._ids.reshaped(rows, 1), INPUT_LENGTHS.name: self._lengths.rows(0, rows)}
