"""What a host has read of the rows of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
