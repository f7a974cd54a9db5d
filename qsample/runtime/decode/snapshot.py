"""What a host has read of the rows of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qsample.contract import LENGTHS, TOKENS
from qsample.ort.buffers import Buffer, run_on_device
from qsample.ort.small_graphs import columns_behind
from qsample.tensors import Array


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a host sees of every row, copied.

    status, lengths: [B] int32. tokens: [B, T] int32; a row has lengths + 1 of them once it has sampled. outputs: the
    optional outputs of the last step, by name. newest: where not None, tokens is [B, newest], and its last column the
    token at position `lengths`.
    """

    status: Array
    lengths: Array
    tokens: Array
    outputs: Mapping[str, Array]
    newest: int | None = None

    def tokens_from(self, slot: int, position: int) -> list[int]:
        """A row's tokens from a position on, up to the newest one: at most `newest`, where that is not None."""
        end = int(self.lengths[slot]) + 1
        skipped = 0 if self.newest is None else end - self.newest
        if position < skipped and position < end:
            raise IndexError(
                f"the tokens from position {position} on are {end - position}, and {self.newest} were read"
            )
        tokens: list[int] = self.tokens[slot, position - skipped : end - skipped].tolist() if position < end else []
        return tokens


class NewestTokens:
    """Gathers the last tokens of each row where they are, so that no others are copied off a device."""

    def __init__(self, count: int, device: str) -> None:
        """count: rows."""
        self._count, self._device = count, device
        self._zero = Buffer.of(np.zeros(1, dtype=np.int32), device)
        self._made: dict[int, tuple[Buffer, Buffer]] = {}  # by their number: columns, and what is gathered there

    def read(self, states: Mapping[str, Buffer], count: int) -> Array:
        """[B, count] int32: each row's last tokens up to position `lengths`."""
        if count not in self._made:
            columns = Buffer.of(np.arange(1 - count, 1, dtype=np.int32)[None], self._device)
            self._made[count] = columns, Buffer.of(np.zeros((self._count, count), np.int32), self._device)
        columns, gathered = self._made[count]
        lengths = states[LENGTHS.name].reshaped(self._count, 1)
        inputs = {"x": states[TOKENS.name], "row": lengths, "column": columns, "zero": self._zero}
        run_on_device(columns_behind(), inputs, {"y": gathered})
        return gathered.read()
