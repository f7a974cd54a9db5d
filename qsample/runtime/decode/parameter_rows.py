"""The sampling parameters of every row, where the graph reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from qsample.contract import BAD_WORD_LENGTH, BATCH, ROW_AXES, Axis, TensorSpec
from qsample.ort.buffers import Buffer
from qsample.runtime.decode.searched_rows import SearchedRows
from qsample.tensors import Array

_MANY: Final = 256  # columns, which a step does not notice


class ParameterRows:
    """One buffer a parameter, which every row has a part of.

    buffers: by name, of the parameter's dtype, [B], or [B, N] and [B, Q, L] if a row has several values; the widest row
    decides N, Q and L. What a row lacks is off, behind its values; in front of them along BAD_WORD_LENGTH.
    """

    def __init__(
        self,
        specs: Iterable[TensorSpec],
        sizes: Mapping[str, int],
        device: str,
        searched: SearchedRows,
        *,
        narrow: bool = True,
    ) -> None:
        """All off. sizes: of every named axis of the parameters. searched: is told of every value. narrow: give up
        columns, too, once no row has so many values: each step reads all of them."""
        self._specs = {spec.name: spec for spec in specs}
        self._sizes, self._device = dict(sizes), device
        self._searched, self._narrow = searched, narrow
        self._widths = {axis: [1] * self._sizes[BATCH] for axis in ROW_AXES}  # of each row
        self.buffers = {name: Buffer.of(self._off(spec), device) for name, spec in self._specs.items()}

    def set(self, name: str, row: int, values: Array) -> bool:
        """Replace a row's value, or its values, [n] or [q, l]. Returns whether that took other memory, because the
        widest row has become wider, or much narrower."""
        self._searched.set(name, row, values)
        if np.ndim(values) == 0:
            self.buffers[name].write_at(row, values)
            return False
        axes = [str(axis) for axis in self._specs[name].axes[1:]]
        resized = [self._fit(axis, row, width) for axis, width in zip(axes, np.shape(values), strict=True)]
        padded = np.full(self.buffers[name].shape[1:], self._specs[name].off, self._specs[name].dtype)
        padded[_place(axes, np.shape(values))] = values
        self.buffers[name].write_at(row, padded)
        return any(resized)

    def clear(self, rows: int | slice) -> None:
        """Turn everything off for some rows."""
        for name, spec in self._specs.items():
            self._searched.set(name, rows, spec.off)
            self.buffers[name].write_at(rows, spec.off or 0)
        for widths in self._widths.values():
            for row in range(len(widths))[rows] if isinstance(rows, slice) else (rows,):
                widths[row] = 1

    def swap_rows(self, one: int, other: int) -> None:
        """On the CPU."""
        self._searched.swap_rows(one, other)
        for buffer in self.buffers.values():
            buffer.swap_rows(one, other)
        for widths in self._widths.values():
            widths[one], widths[other] = widths[other], widths[one]

    def _fit(self, axis: str, row: int, width: int) -> bool:
        """Give the parameters with that axis the columns that all rows need, where `row` needs `width`: a power of two,
        so that it seldom happens, and fewer only where that is a quarter of many. Returns whether it is another number.
        """
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
                old, new = self.buffers[name].read(), self._off(spec)
                common = _place(spec.axes, [min(sizes) for sizes in zip(old.shape, new.shape, strict=True)])
                new[common] = old[common]
                self.buffers[name] = Buffer.of(new, self._device)
        return True

    def _off(self, spec: TensorSpec) -> Array:
        return np.full(spec.shape(self._sizes), spec.off or 0, dtype=spec.dtype)


def _place(axes: Sequence[Axis], shape: Sequence[int]) -> tuple[slice, ...]:
    """Where values of a shape lie in an array with room for more."""
    return tuple(
        slice(-size, None) if axis == BAD_WORD_LENGTH else slice(size) for axis, size in zip(axes, shape, strict=True)
    )
