"""The memory for the inputs of every row: parameters, random numbers and the tokens of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import (
    BAD_WORD_LENGTH,
    BATCH,
    HOST_AXES,
    INPUT_IDS,
    INPUT_LENGTHS,
    PHILOX_UNIFORM_SCALE,
    SEQUENCE,
    Axis,
)
from qsample.ort.buffers import Buffer
from qsample.ort.rounding import RowCounts
from qsample.runtime.decode.replay_rows import ReplayRows

# Philox4x32-10.
_LOW_WORD_MASK: Final = np.uint64(0xFFFFFFFF)
_WORD_BITS: Final = np.uint64(32)
_PHILOX_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_WEYL_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS: Final = 10
# A step over fewer columns than this takes no noticeable time.
_MIN_COLUMNS_TO_NARROW: Final = 256


class ParameterRows:
    """A buffer for each parameter, of which every row has a part.

    Attributes:
        buffers: the buffers by name, of the parameter's dtype, [B]; or [B, N] and [B, Q, L] if a row
            has several values. The widest row decides N, Q and L. The columns that a row lacks are
            off. They come after its values, but before them along BAD_WORD_LENGTH.
        replay: what the rows need of a captured graph.
    """

    def __init__(
        self,
        interface: Interface,
        sizes: Mapping[str, int],
        device: str,
        *,
        narrow: bool,
        needed: bool,
    ) -> None:
        """Turn all parameters off.

        Args:
            interface: the interface of the package.
            sizes: the size of every named axis.
            device: the device of the buffers.
            narrow: whether columns are given up when no row needs them. Each step reads all columns.
            needed: whether the graph takes no empty list of rows.
        """
        self._specs = {spec.name: spec for spec in interface.parameters}
        self._off = {
            name: np.array(spec.off or 0, spec.dtype) for name, spec in self._specs.items()
        }
        self._sizes = dict(sizes)
        self._device = device
        self._narrow = narrow
        # The number of columns that each row needs along each axis.
        self._widths = {axis: [1] * self._sizes[BATCH] for axis in HOST_AXES}
        self.replay = ReplayRows(interface, self._sizes[BATCH], device, needed=needed)
        self.buffers = {name: Buffer.of(self._all_off(name), device) for name in self._specs}

    def set(self, row: int, parameters: Mapping[str, Array]) -> bool:
        """Replace a row of some parameters, and return whether a buffer was replaced. parameters: the
        values by name, each a scalar, [n], or [q, l]."""
        self.replay.set(row, parameters)
        is_resized = False
        for name, values in parameters.items():
            shape = np.shape(values)
            if not shape:
                self.buffers[name].write_at(row, values)
                continue
            axes = self._specs[name].axes[1:]
            for axis, width in zip(axes, shape, strict=True):
                if self._fit(str(axis), row, width):
                    is_resized = True
            padded = np.full(self.buffers[name].shape[1:], self._off[name])
            padded[_columns(axes, shape)] = values
            self.buffers[name].write_at(row, padded)
        return is_resized

    def clear(self, row: int) -> None:
        """Turn all parameters of a row off."""
        self.replay.clear(row)
        for name, off in self._off.items():
            self.buffers[name].write_at(row, off)
        for widths in self._widths.values():
            widths[row] = 1

    def swap_rows(self, one: int, other: int) -> None:
        """Swap two rows; only on the CPU."""
        self.replay.swap_rows(one, other)
        for buffer in self.buffers.values():
            buffer.swap_rows(one, other)
        for widths in self._widths.values():
            widths[one], widths[other] = widths[other], widths[one]

    def _fit(self, axis: str, row: int, width: int) -> bool:
        """Give the parameters with an axis the columns that all rows need.

        The number of columns is a power of two, so that it seldom changes. It shrinks only if many
        columns shrink to a quarter or fewer.

        Args:
            axis: the name of the axis.
            row: the row that changes.
            width: the number of columns that the row needs.

        Returns:
            Whether the number of columns has changed.
        """
        if axis not in self._widths:
            return False
        widths = self._widths[axis]
        widths[row] = max(width, 1)
        needed = 1 << (max(widths) - 1).bit_length()
        current = self._sizes[axis]
        is_too_wide = self._narrow and current >= _MIN_COLUMNS_TO_NARROW and needed * 4 <= current
        if needed == current or (needed < current and not is_too_wide):
            return False
        self._sizes[axis] = needed
        for name, spec in self._specs.items():
            if axis in spec.axes:
                self._resize(name)
        return True

    def _resize(self, name: str) -> None:
        """Replace a buffer by one of the current sizes, with the values that fit there."""
        old = self.buffers[name].read()
        new = self._all_off(name)
        common_shape = np.minimum(old.shape, new.shape).tolist()
        common = _columns(self._specs[name].axes, common_shape)
        new[common] = old[common]
        self.buffers[name] = Buffer.of(new, self._device)

    def _all_off(self, name: str) -> Array:
        """The values of a parameter that is off in all rows."""
        return np.full(self._specs[name].shape(self._sizes), self._off[name])


def _columns(axes: Sequence[Axis], shape: Sequence[int]) -> tuple[slice, ...]:
    """The columns of values of a shape in a larger array."""
    return tuple(
        slice(-size, None) if axis == BAD_WORD_LENGTH else slice(size)
        for axis, size in zip(axes, shape, strict=True)
    )


class PromptInputs:
    """The memory for the token ids and lengths of a call over some rows. Each call writes it anew."""

    def __init__(
        self, rows: int, capacity: int, tokens: RowCounts, device: str, *, renewed: bool = False
    ) -> None:
        """Allocate the memory.

        Args:
            rows: the most rows of a call.
            capacity: the most tokens of a row.
            tokens: the numbers of tokens that a row can have in a call, padding included.
            device: the device of the inputs.
            renewed: whether each call gets other memory, because the call before it may still read.
        """
        self._token_counts = tokens
        self._device = device
        self._renewed = renewed
        self._ids = Buffer.allocate(INPUT_IDS, {BATCH: 1, SEQUENCE: rows * capacity}, device)
        self._lengths = Buffer.of(np.ones(rows, dtype=np.int32), device)

    def write(self, ids: Sequence[Array]) -> dict[str, Buffer]:
        """Write the tokens of each row.

        Args:
            ids: the token ids of each row, [n] int64.

        Returns:
            The inputs by name: the tokens with their padding, [rows, most tokens of a row], and their
            numbers.
        """
        rows = len(ids)
        lengths = [len(row) for row in ids]
        width = self._token_counts.cover(max(lengths))
        # Nothing reads the padding. It repeats a token of the row, so that it brings in no new NaN.
        padded = [np.pad(row, (0, width - len(row)), constant_values=row[0]) for row in ids]
        if self._renewed:
            return {
                INPUT_IDS.name: Buffer.of(np.stack(padded), self._device),
                INPUT_LENGTHS.name: Buffer.of(np.array(lengths, np.int32), self._device),
            }
        self._ids.write_at((0, slice(rows * width)), np.concatenate(padded))
        self._lengths.write_at(slice(rows), lengths)
        return {
            INPUT_IDS.name: self._ids.reshaped(rows, width),
            INPUT_LENGTHS.name: self._lengths.rows(0, rows),
        }

    def of_rows(self, rows: int) -> dict[str, Buffer]:
        """The inputs of a number of rows by name, with one token a row; the result of `write` replaces
        them."""
        return {
            INPUT_IDS.name: self._ids.reshaped(rows, 1),
            INPUT_LENGTHS.name: self._lengths.rows(0, rows),
        }


def uniforms(seed: int, count: int, stream: int = 0) -> Array:
    """Uniform random numbers of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
    2, 3", SC'11).

    Number t is (word t mod 4 of counter (t div 4, stream, 0, 0) >> 8) * 2**-24.

    Args:
        seed: the key: its lower and upper 32 bits.
        count: the number of numbers.
        stream: the second word of the counter.

    Returns:
        [count] float32 in [0, 1).
    """
    keys = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    zeros = np.zeros_like(blocks)
    words = [blocks, np.full_like(blocks, stream), zeros, zeros]
    for _ in range(_PHILOX_ROUNDS):
        products = [words[0] * _PHILOX_MULTIPLIERS[0], words[2] * _PHILOX_MULTIPLIERS[1]]
        words = [
            (products[1] >> _WORD_BITS) ^ words[1] ^ np.uint64(keys[0]),
            products[1] & _LOW_WORD_MASK,
            (products[0] >> _WORD_BITS) ^ words[3] ^ np.uint64(keys[1]),
            products[0] & _LOW_WORD_MASK,
        ]
        keys = [
            (key + step) & 0xFFFFFFFF for key, step in zip(keys, _PHILOX_WEYL_STEPS, strict=True)
        ]
    bits = np.stack(words, axis=1).ravel()[:count] >> np.uint64(8)
    result: Array = (bits * PHILOX_UNIFORM_SCALE).astype(np.float32)
    return result
