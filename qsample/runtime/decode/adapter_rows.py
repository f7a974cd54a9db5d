"""The memory of the LoRA adapters that the rows of a batch use.

The matrices of the adapters lie one below the other, as the graph takes them. A call is bound to as many as its rows
need, none at best: products with nothing cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface, adapter_ids, adapter_names, ranks_axis
from qsample.contract.tensors import ADAPTER, BATCH
from qsample.ort.buffers import Buffer
from qsample.runtime.adapters import Adapter

_NOBODY = -1  # the number of no adapter
_Ends = tuple[tuple[str, int], ...]


class AdapterRows:
    """A place for each of up to `Features.max_loras` adapters, numbered from 1, and the number of each row's adapter.

    No method may be called while a graph runs.
    """

    def __init__(self, interface: Interface, rows: int, device: str) -> None:
        """rows: of the batch. device: of the buffers."""
        self._interface, self._device = interface, device
        self._places: list[Adapter | None] = [None] * interface.features.max_loras
        self._number_of_row = [0] * rows
        # Captured graphs read the same memory at every step: all of it.
        self._all = interface.features.max_loras * interface.features.max_lora_rank if interface.captured else None
        self._ends = [dict.fromkeys(interface.adapter_kinds, 0)] * (len(self._places) + 1)
        self._buffers: dict[str, Buffer] = {}
        if interface.adapters:
            self._buffers[ADAPTER.name] = Buffer.allocate(ADAPTER, {BATCH: rows}, device)
            for kind in interface.adapter_kinds:
                self._allocate(kind, self._all or 0)

    def begin(self, row: int, number: int) -> None:
        """Let a row use the adapter in a place; 0 = none."""
        if self._places:
            self._number_of_row[row] = number
            self._buffers[ADAPTER.name].write_at(row, number)

    def stop(self, rows: int | slice) -> None:
        """Let rows use no adapter."""
        for row in range(len(self._number_of_row))[rows] if isinstance(rows, slice) else (rows,):
            self.begin(row, 0)

    def swap_rows(self, one: int, other: int) -> None:
        """Let two rows use each other's adapters."""
        numbers = self._number_of_row[one], self._number_of_row[other]
        self.begin(one, numbers[1])
        self.begin(other, numbers[0])

    def used(self, rows: range) -> bool:
        """Whether some of these rows use an adapter."""
        return any(self._number_of_row[rows.start : rows.stop])

    def key(self, rows: range) -> _Ends:
        """Identifies the memory that a call over `rows` is bound to."""
        if not self._places:
            return ()
        if self._all is not None:
            return tuple((kind, self._all) for kind in self._interface.adapter_kinds)
        return tuple(self._ends[max(self._number_of_row[rows.start : rows.stop])].items())

    def inputs(self, rows: range) -> dict[str, Buffer]:
        """The inputs of a call over `rows`, by name."""
        if not self._places:
            return {}
        bound = {ADAPTER.name: self._buffers[ADAPTER.name].rows(rows.start, len(rows))}
        ends = dict(self.key(rows))
        for kind in self._interface.adapter_kinds:
            for name in self._names(kind):
                bound[name] = self._buffers[name].rows(0, ends[kind])
        return bound

    def put(self, number: int, adapter: Adapter) -> None:
        """Write an adapter into a place that no row uses. Those in later places move if it has other ranks than the
        adapter that was there."""
        self._places[number - 1] = adapter
        before, after = self._ends, self._cumulated()
        self._ends = after
        for kind in self._interface.adapter_kinds:
            ids = adapter_ids(kind).name
            first, last = number - 1, number
            if after[-1][kind] > self._buffers[ids].shape[0]:
                self._allocate(kind, len(self._places) * self._interface.features.max_lora_rank)
                first, last = 0, len(self._places)
            elif after[number][kind] != before[number][kind]:
                last = len(self._places)
            for place in range(first, last):
                self._write(kind, place, after[place][kind], after[place + 1][kind])
            self._buffers[ids].write_at(slice(after[-1][kind], None), _NOBODY)

    def _write(self, kind: str, place: int, start: int, stop: int) -> None:
        """Write what the adapter in a place has for a kind of layers to the ranks from `start` to `stop`."""
        resident = self._places[place]
        if resident is None or start == stop:
            return
        self._buffers[adapter_ids(kind).name].write_at(slice(start, stop), place + 1)
        for target in self._interface.adapters:
            if target.kind != kind:
                continue
            for name, matrix in zip(adapter_names(target.path), _of(resident.matrices, target.path), strict=True):
                filled = start + (0 if matrix is None else len(matrix))
                if matrix is not None:
                    self._buffers[name].write_at(slice(start, filled), matrix)
                self._buffers[name].write_at(slice(filled, stop), 0)

    def _cumulated(self) -> list[dict[str, int]]:
        """Of each number of places, from 0 on, the number of ranks in each kind of layers."""
        ranks = [{} if adapter is None else adapter.ranks for adapter in self._places]
        kinds = self._interface.adapter_kinds
        return [{kind: sum(own.get(kind, 0) for own in ranks[:end]) for kind in kinds} for end in range(len(ranks) + 1)]

    def _names(self, kind: str) -> list[str]:
        own = [adapter_names(target.path) for target in self._interface.adapters if target.kind == kind]
        return [adapter_ids(kind).name, *(name for pair in own for name in pair)]

    def _allocate(self, kind: str, ranks: int) -> None:
        """Make the memory of a kind of layers."""
        sizes = {ranks_axis(kind): ranks}
        specs = {spec.name: spec for spec in self._interface.adapter_inputs}
        for name in self._names(kind):
            self._buffers[name] = Buffer.allocate(specs[name], sizes, self._device)
        self._buffers[adapter_ids(kind).name].write_at(slice(None), _NOBODY)


def _of(matrices: Mapping[str, tuple[Array, Array]], path: str) -> tuple[Array | None, Array | None]:
    return matrices.get(path, (None, None))
