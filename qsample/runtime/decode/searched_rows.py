"""Which rows a captured graph has to search, known from their sampling parameters before a step.

A search costs in proportion to the rows in its list, and each length of the list is a captured graph of its own. So the
list of a batch is padded to a power of two.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from qsample.contract import CANDIDATES, SEARCHED, SEARCHED_ROWS
from qsample.interface import Interface
from qsample.ort.buffers import Buffer
from qsample.tensors import Array

_NUCLEI: Final = ("top_p", "typical_p")  # 1 is off
_READ: Final = ("temperature", "top_k", *_NUCLEI)


class SearchedRows:
    """The rows of a batch whose filters may keep more tokens than there are candidates; none if the graph takes no
    list."""

    def __init__(self, interface: Interface, count: int, device: str) -> None:
        """count: rows of the batch."""
        specs = [spec for spec in interface.parameters if spec.name in _READ]
        self._values = {spec.name: np.full(count, spec.off, spec.dtype) for spec in specs}
        self._captured, self._count = interface.captured, count
        # On the CPU, ONNX Runtime before 1.32 gives reductions over no rows a wrong shape.
        self._default = [0] if device == "cpu" and interface.captured else []
        self._batch, self._chunk = (Buffer.allocate(SEARCHED_ROWS, {SEARCHED: count}, device) for _ in range(2))
        self._written: list[int] = []

    def set(self, name: str, slots: int | slice, value: Any) -> None:
        """Note a parameter of some rows; one that makes no difference is passed over."""
        if name in self._values:
            self._values[name][slots] = value

    def swap_rows(self, one: int, other: int) -> None:
        for values in self._values.values():
            values[[one, other]] = values[[other, one]]

    @property
    def size(self) -> int:
        """The length of the list of the whole batch: 0, a power of two, or all rows."""
        needed = len(self._listed(range(self._count)))
        return min(1 << (needed - 1).bit_length(), self._count) if needed else 0

    def of_batch(self) -> Buffer:
        """The list of the whole batch, [size] int64, in memory that stays. A row may come twice."""
        rows = self._listed(range(self._count))
        rows += rows[:1] * (self.size - len(rows))
        if rows != self._written:
            self._batch.write_at(slice(len(rows)), rows)
            self._written = rows
        return self._batch.reshaped(len(rows))

    def of_rows(self, rows: range) -> Buffer:
        """The list of some rows alone, which count from 0 there; the memory is that of every such list."""
        chosen = self._listed(rows)
        if chosen:
            self._chunk.write_at(slice(len(chosen)), chosen)
        return self._chunk.reshaped(len(chosen))

    def _listed(self, rows: range) -> list[int]:
        return np.flatnonzero(self._needs_search()[rows.start : rows.stop]).tolist() or self._default

    def _needs_search(self) -> Array:
        """[B] bool. A greedy row draws nothing, and what a small top-k keeps is among the candidates."""
        temperature, top_k = self._values["temperature"], self._values["top_k"]
        beyond = top_k > CANDIDATES
        nucleus = np.any([self._values[name] < 1 for name in _NUCLEI if name in self._values], axis=0)
        needs: Array = (temperature > 0) & (beyond | (nucleus & (top_k <= 0)))
        return needs & self._captured
