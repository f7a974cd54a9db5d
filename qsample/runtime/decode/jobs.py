"""What the device does next: parts of prompts and decode steps, and what is copied between them. No tensors here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qsample.runtime.decode.saved_states import Save
from qsample.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Copy:
    """The first `tokens` tokens of `sequence`, which the slot `source` holds, for its own slot. place: where the
    recurrent states after them were saved; None = the slot is there now."""

    sequence: Sequence
    source: int
    tokens: int
    place: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pieces of a prompt, one after another, each for one call. copies: what comes before them. saves: what comes at
    their ends."""

    sequence: Sequence
    pieces: tuple[range, ...]
    copies: tuple[Copy, ...] = ()
    saves: tuple[Save, ...] = ()

    @property
    def end(self) -> int:
        return self.pieces[-1].stop

    @property
    def last(self) -> bool:
        """Whether the first token is sampled after it."""
        return self.end == len(self.sequence.prompt)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The whole prompts of `sequences`, in adjacent slots, for one call that samples the first token of each. saves:
    what comes after it."""

    sequences: tuple[Sequence, ...]
    saves: tuple[Save, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """`steps` decode steps without a read between them, for the rows of `sequences`."""

    sequences: tuple[Sequence, ...]
    steps: int

    @property
    def rows(self) -> range:
        """From the first of these to the last one."""
        return span_of(map(slot_of, self.sequences))


@dataclass(frozen=True, slots=True)
class Move:
    """The row of `source` goes to the free slot `target`, and the first `kept` tokens of that one to `source`."""

    source: int
    target: int
    kept: int


def slot_of(sequence: Sequence) -> int:
    """Of a sequence that has one."""
    assert sequence.slot is not None
    return sequence.slot


def span_of(slots: Iterable[int]) -> range:
    """From the first of some slots to the last one."""
    ordered = sorted(slots)
    return range(ordered[0], ordered[-1] + 1)
