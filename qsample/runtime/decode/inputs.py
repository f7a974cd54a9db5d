"""The memory for the inputs of every row: its parameters, its random numbers, the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import (
    BAD_WORD_LENGTH,
    BATCH,
    CANDIDATES,
    INPUT_IDS,
    INPUT_LENGTHS,
    PHILOX_UNIFORM_SCALE,
    ROW_AXES,
    SEARCHED,
    SEARCHED_ROWS,
    SEQUENCE,
    Axis,
)
from qsample.ort.buffers import Buffer
from qsample.ort.rounding import RowCounts

_MASK: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10
_MANY: Final = 256  # columns; a step does not notice
_NUCLEI: Final = ("top_p", "typical_p")  # 1 is off
_READ: Final = ("temperature", "top_k", *_NUCLEI)


class ParameterRows:
    """A buffer for each parameter, of which every row has a part.
    buffers: by name, of the parameter's dtype, [B], or [B, N] and [B, Q, L] if a row has several values; the widest row
    decides N, Q and L. Columns that a row lacks are off, after its values; before them along BAD_WORD_LENGTH. searched:
    the rows whose parameters need a search."""

    def __init__(
        self,
        interface: Interface,
        sizes: Mapping[str, int],
        device: str,
        *,
        narrow: bool,
        needed: bool,
    ) -> None:
        """Turn all parameters off. sizes: of every named axis. device: of the buffers. narrow: also give up columns
        when no row needs them: each step reads all of them. needed: the graph takes no empty list of searched rows."""
        self._specs = {spec.name: spec for spec in interface.parameters}
        self._off = {
            name: np.array(spec.off or 0, spec.dtype) for name, spec in self._specs.items()
        }
        self._sizes, self._device, self._narrow = dict(sizes), device, narrow
        self._widths = {axis: [1] * self._sizes[BATCH] for axis in ROW_AXES}  # of each row
        self.searched = SearchedRows(interface, self._sizes[BATCH], device, needed=needed)
        self.buffers = {name: Buffer.of(self._all_off(name), device) for name in self._specs}

    def set(self, row: int, parameters: Mapping[str, Array]) -> bool:
        """Replace a row's value, or [n] or [q, l] values, of each parameter. Returns whether a buffer was replaced."""
        self.searched.set(row, parameters)
        resized = False
        for name, values in parameters.items():
            shape = np.shape(values)
            if shape:
                axes = [str(axis) for axis in self._specs[name].axes[1:]]
                for axis, width in zip(axes, shape, strict=True):
                    resized |= self._fit(axis, row, width)
                padded = np.full(self.buffers[name].shape[1:], self._off[name])
                padded[_place(axes, shape)] = values
                values = padded
            self.buffers[name].write_at(row, values)
        return resized

    def clear(self, row: int) -> None:
        """Turn everything off for a row."""
        self.searched.set(row, self._off)
        for name, off in self._off.items():
            self.buffers[name].write_at(row, off)
        for widths in self._widths.values():
            widths[row] = 1

    def swap_rows(self, one: int, other: int) -> None:
        """On the CPU."""
        self.searched.swap_rows(one, other)
        for buffer in self.buffers.values():
            buffer.swap_rows(one, other)
        for widths in self._widths.values():
            widths[one], widths[other] = widths[other], widths[one]

    def _fit(self, axis: str, row: int, width: int) -> bool:
        """Give the parameters with that axis the columns that all rows need, if `row` needs `width`: a power of two, so
        that it seldom happens, and fewer only if that is a quarter of many. Returns whether the number has changed."""
        if axis not in self._widths:
            return False
        widths = self._widths[axis]
        widths[row] = max(width, 1)
        needed, there = 1 << (max(widths) - 1).bit_length(), self._sizes[axis]
        too_wide = self._narrow and there >= _MANY and needed * 4 <= there
        if needed == there or (needed < there and not too_wide):
            return False
        self._sizes[axis] = needed
        for name, spec in self._specs.items():
            if axis in spec.axes:
                old, new = self.buffers[name].read(), self._all_off(name)
                common = _place(
                    spec.axes, [min(sizes) for sizes in zip(old.shape, new.shape, strict=True)]
                )
                new[common] = old[common]
                self.buffers[name] = Buffer.of(new, self._device)
        return True

    def _all_off(self, name: str) -> Array:
        return np.full(self._specs[name].shape(self._sizes), self._off[name])


def _place(axes: Sequence[Axis], shape: Sequence[int]) -> tuple[slice, ...]:
    """The place of values of a shape in an array with room for more."""
    return tuple(
        slice(-size, None) if axis == BAD_WORD_LENGTH else slice(size)
        for axis, size in zip(axes, shape, strict=True)
    )


class SearchedRows:
    """The rows of a batch whose filters may keep more tokens than the candidates; none if the graph takes no list. A
    captured graph has to search them, and they are known from their parameters before a step. A search costs in
    proportion to the rows in its list, and each length of the list is a separate captured graph. So the list of a batch
    is padded to a power of two."""

    def __init__(
        self, interface: Interface, count: int, device: str, *, needed: bool = True
    ) -> None:
        """count: rows of the batch. device: of the list. needed: the graph takes no empty list."""
        specs = [spec for spec in interface.parameters if spec.name in _READ and interface.captured]
        self._values = {spec.name: np.full(count, spec.off, spec.dtype) for spec in specs}
        self._count = count
        # On the CPU, ONNX Runtime before 1.32 gives reductions over no rows a wrong shape.
        self._default = [0] if needed and interface.captured else []
        self._batch, self._chunk = (
            Buffer.allocate(SEARCHED_ROWS, {SEARCHED: count}, device) for _ in range(2)
        )
        self._written: list[int] = []
        self._empty = self._batch.reshaped(0)

    def set(self, row: int, parameters: Mapping[str, Array]) -> None:
        """Note parameters of a row; values that make no difference are ignored."""
        for name, values in self._values.items():
            if name in parameters:
                values[row] = parameters[name]

    def swap_rows(self, one: int, other: int) -> None:
        for values in self._values.values():
            values[[one, other]] = values[[other, one]]

    @property
    def size(self) -> int:
        """The length of the list of the whole batch: 0, a power of two, or all rows."""
        if not self._values:
            return 0
        needed = len(self._listed(range(self._count)))
        return min(1 << (needed - 1).bit_length(), self._count) if needed else 0

    def of_batch(self) -> Buffer:
        """The list of the whole batch, [size] int64, in memory that stays. A row may come twice."""
        if not self._values:
            return self._empty
        rows = self._listed(range(self._count))
        rows += rows[:1] * (self.size - len(rows))
        if rows != self._written:
            self._batch.write_at(slice(len(rows)), rows)
            self._written = rows
        return self._batch.reshaped(len(rows))

    def of_rows(self, rows: range) -> Buffer:
        """The list of some rows alone, counted from 0; all such lists share the memory."""
        chosen = self._listed(rows)
        if chosen:
            self._chunk.write_at(slice(len(chosen)), chosen)
        return self._chunk.reshaped(len(chosen))

    def _listed(self, rows: range) -> list[int]:
        """A greedy row draws nothing, and the tokens that a small top-k keeps are among the candidates."""
        if not self._values:
            return []
        part = {name: values[rows.start : rows.stop] for name, values in self._values.items()}
        nucleus = np.any([part[name] < 1 for name in _NUCLEI if name in part], axis=0)
        beyond = (part["top_k"] > CANDIDATES) | (nucleus & (part["top_k"] <= 0))
        return np.flatnonzero((part["temperature"] > 0) & beyond).tolist() or list(self._default)


class PromptInputs:
    """Memory for the ids and lengths of a call over some rows; each call writes it anew."""

    def __init__(
        self, rows: int, capacity: int, tokens: RowCounts, device: str, *, renewed: bool = False
    ) -> None:
        """rows: most of a call. tokens: the numbers that a row can have in a call, padding included. renewed: each call
        gets other memory, because the call before it may still read."""
        self._tokens, self._device, self._renewed = tokens, device, renewed
        self._ids = Buffer.allocate(INPUT_IDS, {BATCH: 1, SEQUENCE: rows * capacity}, device)
        self._lengths = Buffer.of(np.ones(rows, dtype=np.int32), device)

    def write(self, ids: Sequence[Array]) -> dict[str, Buffer]:
        """Write the tokens of each row, [n] int64. Returns the inputs by name: the tokens with their padding, [rows,
        most tokens of a row], and their numbers."""
        lengths = [len(row) for row in ids]
        width = self._tokens.cover(max(lengths))
        # Nothing reads the padding. It repeats a token of the row, so that it brings in no new NaN.
        padded = [np.pad(row, (0, width - len(row)), constant_values=row[0]) for row in ids]
        if self._renewed:
            arrays = {
                INPUT_IDS.name: np.stack(padded),
                INPUT_LENGTHS.name: np.array(lengths, np.int32),
            }
            return {name: Buffer.of(array, self._device) for name, array in arrays.items()}
        self._ids.write_at((0, slice(len(ids) * width)), np.concatenate(padded))
        self._lengths.write_at(slice(len(ids)), lengths)
        written = self.of_rows(len(ids))
        return written | {INPUT_IDS.name: self._ids.reshaped(len(ids), width)}

    def of_rows(self, rows: int) -> dict[str, Buffer]:
        """The inputs of this number of rows by name; the result of `write` replaces the ids."""
        return {
            INPUT_IDS.name: self._ids.reshaped(rows, 1),
            INPUT_LENGTHS.name: self._lengths.rows(0, rows),
        }


def uniforms(seed: int, count: int, stream: int = 0) -> Array:
    """[count] float32 in [0, 1): number t is (word t mod 4 of counter (t div 4, stream, 0, 0) >> 8) * 2**-24.
    Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11); its key is the seed's lower and
    upper 32 bits."""
    keys = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    words = [blocks, *(np.full_like(blocks, word) for word in (stream, 0, 0))]
    for _ in range(_ROUNDS):
        products = [words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]]
        words = [
            (products[1] >> _HALF) ^ words[1] ^ np.uint64(keys[0]),
            products[1] & _MASK,
            (products[0] >> _HALF) ^ words[3] ^ np.uint64(keys[1]),
            products[0] & _MASK,
        ]
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, _WEYL, strict=True)]
    bits = np.stack(words, axis=1).ravel()[:count] >> np.uint64(8)
    result: Array = (bits * PHILOX_UNIFORM_SCALE).astype(np.float32)
    return result
