"""The adapters of a batch: the graph's places for adapters, their memory, and the marks of tokens.

Keys, values and states depend on the adapter. So tokens are compared with the mark of their adapter
in their upper bits: beginnings that were read with different adapters have no token in common.
Identities of image tokens are negative and use all bits. A mark flips some of these bits, so that an
image has other identities with each adapter, and none of them is the identity of a text token.

The matrices of the adapters lie one below the other, as the graph takes them. A call is bound only to
the ranks that its rows need. Without adapters it is bound to no ranks, and the products cost next to
nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface, adapter_ids, adapter_names, ranks_axis
from qsample.contract.tensors import ADAPTER, BATCH
from qsample.ort.buffers import Buffer
from qsample.runtime.adapters import Adapter

_TOKEN_BITS: Final = 32
_NO_ADAPTER: Final = -1  # in the list of the adapter of each rank
# An adapter that is forgotten gets a new mark, so that its tokens are read again.
_MAX_MARKS: Final = 1024


class Marks:
    """A number for the content of each adapter, never the same for two; 0 without an adapter."""

    def __init__(self) -> None:
        # The mark of each sha256; the mark used longest ago comes first.
        self._marks: dict[str, int] = {}
        self._last_mark = 0

    def mark(self, tokens: Array, adapter: Adapter | None) -> Array:
        """Mark tokens that are read with an adapter. tokens: identities, [n] int64."""
        if adapter is None:
            return tokens
        mark = self._marks.pop(adapter.sha256, None)
        if mark is None:
            self._last_mark += 1
            mark = self._last_mark
        self._marks[adapter.sha256] = mark
        if len(self._marks) > _MAX_MARKS:
            del self._marks[next(iter(self._marks))]
        return tokens ^ (mark << _TOKEN_BITS)


@dataclass(frozen=True, slots=True)
class TakenPlace:
    """A place for an adapter that a row has taken, and whether the adapter has to be written there."""

    place: int
    is_new: bool


class AdapterPlaces:
    """The graph's places for adapters, numbered from 1; 0 is none.

    An adapter keeps its place until another one needs it. Of the places without rows, the one used
    longest ago is given away. If all have rows, the one used longest ago takes no further row, so
    that the waiting sequence gets it.
    """

    def __init__(self, count: int) -> None:
        # The sha256 of the adapter in each place; the place used longest ago comes first.
        self._sha256_of_place: dict[int, str] = dict.fromkeys(range(1, count + 1), "")
        self._rows: Counter[int] = Counter()  # the number of rows that use each place

    def take(self, adapter: Adapter | None, claimed: dict[int, str]) -> TakenPlace | None:
        """Take a place for a row; None if the row has to wait.

        Args:
            adapter: the adapter of the row; without one, the place is 0.
            claimed: the places that waiting rows before this row need, each with the sha256 of the
                row's adapter. A place is added if this row has to wait for it.
        """
        if adapter is None:
            return TakenPlace(0, is_new=False)
        place = self._place_of(adapter)
        if place is not None:
            if place in claimed:
                return None
            return self._use(place, adapter, is_new=False)
        if adapter.sha256 in claimed.values():
            return None
        unclaimed = [place for place in self._sha256_of_place if place not in claimed]
        for place in unclaimed:
            if self._rows[place] == 0:
                return self._use(place, adapter, is_new=True)
        if unclaimed:
            claimed[unclaimed[0]] = adapter.sha256
        return None

    def leave(self, place: int) -> None:
        """Note that a row with an adapter in `place` has ended."""
        self._rows[place] -= 1

    def _place_of(self, adapter: Adapter) -> int | None:
        """The place that has an adapter, or None."""
        for place, sha256 in self._sha256_of_place.items():
            if sha256 == adapter.sha256:
                return place
        return None

    def _use(self, place: int, adapter: Adapter, *, is_new: bool) -> TakenPlace:
        """Make `place` the one that was used last."""
        del self._sha256_of_place[place]
        self._sha256_of_place[place] = adapter.sha256
        self._rows[place] += 1
        return TakenPlace(place, is_new)


class AdapterRows:
    """The memory of up to `Features.max_loras` adapters, numbered from 1 (0 = none), and the number of
    each row's adapter. No method may be called while a graph runs."""

    def __init__(self, interface: Interface, rows: int, device: str) -> None:
        """Allocate the memory; none for packages without adapters.

        Args:
            interface: the interface of the package.
            rows: the number of rows of the batch.
            device: the device of the buffers.
        """
        self._device = device
        self._adapters: list[Adapter | None] = [None] * interface.features.max_loras
        self._number_of_row = [0] * rows
        self._max_ranks = interface.features.max_loras * interface.features.max_lora_rank
        # A captured graph reads the same memory at every step: all of it.
        self._captured = interface.captured
        self._specs = {spec.name: spec for spec in interface.adapter_inputs}
        # Of each kind of layers, the names of the two matrices of each layer's path.
        self._layers: dict[str, dict[str, tuple[str, str]]] = {
            kind: {} for kind in interface.adapter_kinds
        }
        for target in interface.adapters:
            self._layers[target.kind][target.path] = adapter_names(target.path)
        # `_ends[n][kind]` is the number of ranks that the first n places have in a kind of layers.
        self._ends = [dict.fromkeys(self._layers, 0)] * (len(self._adapters) + 1)
        self._buffers: dict[str, Buffer] = {}
        if self._layers:
            self._buffers[ADAPTER.name] = Buffer.allocate(ADAPTER, {BATCH: rows}, device)
        for kind in self._layers:
            self._allocate(kind, self._max_ranks if self._captured else 0)

    def begin(self, row: int, number: int) -> None:
        """Let a row use the adapter with a number; 0 = none."""
        if self._adapters:
            self._number_of_row[row] = number
            self._buffers[ADAPTER.name].write_at(row, number)

    def swap_rows(self, one: int, other: int) -> None:
        """Let two rows use each other's adapters."""
        number_of_one = self._number_of_row[one]
        number_of_other = self._number_of_row[other]
        self.begin(one, number_of_other)
        self.begin(other, number_of_one)

    def used(self, rows: range) -> bool:
        """Whether some of these rows use an adapter."""
        return any(self._number_of_row[rows.start : rows.stop])

    def key(self, rows: range) -> tuple[tuple[str, int], ...]:
        """The number of ranks of each kind of layers to which a call over `rows` is bound."""
        if not self._adapters:
            return ()
        if self._captured:
            return tuple((kind, self._max_ranks) for kind in self._layers)
        last = max(self._number_of_row[rows.start : rows.stop])
        return tuple(self._ends[last].items())

    def inputs(self, rows: range) -> dict[str, Buffer]:
        """The inputs of a call over `rows`, by name."""
        if not self._adapters:
            return {}
        bound = {ADAPTER.name: self._buffers[ADAPTER.name].rows(rows.start, len(rows))}
        for kind, end in self.key(rows):
            for name in self._names(kind):
                bound[name] = self._buffers[name].rows(0, end)
        return bound

    def put(self, number: int, adapter: Adapter) -> None:
        """Write an adapter to a place that no row uses. Adapters in later places move if the number of
        ranks changes there."""
        self._adapters[number - 1] = adapter
        ends_before = self._ends
        self._ends = [self._ranks(end) for end in range(len(self._adapters) + 1)]
        for kind in self._layers:
            ids = self._buffers[adapter_ids(kind).name]
            ends = [end[kind] for end in self._ends]
            first = number - 1
            last = number
            if ends[-1] > ids.shape[0]:
                ids = self._allocate(kind, self._max_ranks)
                first = 0
                last = len(self._adapters)
            elif ends[number] != ends_before[number][kind]:
                last = len(self._adapters)
            for place in range(first, last):
                resident = self._adapters[place]
                if resident is not None and ends[place] < ends[place + 1]:
                    ids.write_at(slice(ends[place], ends[place + 1]), place + 1)
                    self._write(resident, kind, ends[place], ends[place + 1])
            ids.write_at(slice(ends[-1], None), _NO_ADAPTER)

    def _ranks(self, places: int) -> dict[str, int]:
        """The number of ranks that the first `places` places have in each kind of layers."""
        adapters = [adapter for adapter in self._adapters[:places] if adapter is not None]
        ranks = [adapter.ranks for adapter in adapters]
        return {kind: sum(of_adapter.get(kind, 0) for of_adapter in ranks) for kind in self._layers}

    def _write(self, adapter: Adapter, kind: str, start: int, stop: int) -> None:
        """Write the matrices of a kind of layers to the ranks from `start` to `stop`, and zeros after
        them."""
        for path, names in self._layers[kind].items():
            matrices = adapter.matrices.get(path, ())
            filled = start + (len(matrices[0]) if matrices else 0)
            for name, matrix in zip(names, matrices, strict=False):
                self._buffers[name].write_at(slice(start, filled), matrix)
            for name in names:
                self._buffers[name].write_at(slice(filled, stop), 0)

    def _names(self, kind: str) -> list[str]:
        """The names of the inputs of a kind of layers."""
        names = [adapter_ids(kind).name]
        for pair in self._layers[kind].values():
            names.extend(pair)
        return names

    def _allocate(self, kind: str, ranks: int) -> Buffer:
        """Allocate the memory of a kind of layers, and return the memory of its adapters' numbers."""
        for name in self._names(kind):
            self._buffers[name] = Buffer.allocate(
                self._specs[name], {ranks_axis(kind): ranks}, self._device
            )
        ids = self._buffers[adapter_ids(kind).name]
        ids.write_at(slice(None), _NO_ADAPTER)
        return ids
