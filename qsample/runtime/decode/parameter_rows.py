"""The sampling parameters of every row, where the graph reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from qsample.contract import TensorSpec
from qsample.runtime.session.buffers import Buffer
from qsample.tensors import Array


class ParameterRows:
    """One buffer a parameter, which every row has a part of.

    buffers: by name, of the parameter's dtype, [B], or [B, N] where a row has several values; N grows with the widest
    row that was given.
    """

    def __init__(self, specs: Iterable[TensorSpec], sizes: Mapping[str, int], device: str) -> None:
        """All off. sizes: of every named axis of the parameters."""
        self._specs = {spec.name: spec for spec in specs}
        self._sizes, self._device = dict(sizes), device
        self.buffers = {name: Buffer.of(self._off(spec), device) for name, spec in self._specs.items()}

    def set(self, name: str, row: int, values: Array) -> bool:
        """Replace a row's value, or its values, [n]. Returns whether that took other memory, for a wider row."""
        if np.ndim(values) == 0:
            self.buffers[name].write_at(row, values)
            return False
        wider = len(values) > self.buffers[name].shape[1]
        if wider:
            self._widen(str(self._specs[name].axes[1]), len(values))
        padded = np.full(self.buffers[name].shape[1], self._specs[name].off, self._specs[name].dtype)
        padded[: len(values)] = values
        self.buffers[name].write_at(row, padded)
        return wider

    def clear(self, rows: int | slice) -> Mapping[str, Any]:
        """Turn everything off for some rows. Returns the value that each parameter has then."""
        values = {name: spec.off for name, spec in self._specs.items()}
        for name, off in values.items():
            self.buffers[name].write_at(rows, off)
        return values

    def _widen(self, axis: str, width: int) -> None:
        """Give the parameters with that axis at least `width` columns: a power of two, so that it seldom happens."""
        self._sizes[axis] = 1 << (width - 1).bit_length()
        for name, spec in self._specs.items():
            if axis in spec.axes:
                old, wide = self.buffers[name].read(), self._off(spec)
                wide[:, : old.shape[1]] = old
                self.buffers[name] = Buffer.of(wide, self._device)

    def _off(self, spec: TensorSpec) -> Array:
        return np.full(spec.shape(self._sizes), spec.off, dtype=spec.dtype)
