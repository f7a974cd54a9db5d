"""The scheduler's decisions: who gets which slot, and what the device runs next. No tensors here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from qsample.runtime.adapters import Adapter
from qsample.runtime.decode.prefix_file import PrefixFile
from qsample.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Copy:
    """The first `tokens` tokens of `sequence` go from the slot `source` to its slot. place: of the saved recurrent
    states after them; by default the source's."""

    sequence: Sequence
    source: int
    tokens: int
    place: int | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that got a slot.
    copy: the beginning of its prompt, held by a slot, maybe the same. moved: another slot, to get the tokens that its
    slot kept so far, and their number. stored: has the beginning of its prompt in place of a slot: all of
    `copy.tokens`. adapter: to be written to the sequence's place for adapters, unless it is there."""

    sequence: Sequence
    copy: Copy
    moved: tuple[int, int] | None
    stored: PrefixFile | None = None
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """The states of `slot` after the first `tokens` tokens of its row, for a place."""

    slot: int
    tokens: int
    place: int


@dataclass(frozen=True, slots=True)
class Read:
    """Pieces of a prompt in order, each for a separate call; or the last piece of each of several sequences in adjacent
    slots, for a single call. copies: to be made before. saves: to be made at the ends of the pieces."""

    sequences: tuple[Sequence, ...]
    pieces: tuple[range, ...]
    copies: tuple[Copy, ...] = ()
    saves: tuple[Save, ...] = ()

    @property
    def last(self) -> bool:
        """Whether the first token is sampled at its end."""
        return self.pieces[-1].stop == len(self.sequences[-1].prompt)


@dataclass(frozen=True, slots=True)
class Window:
    """`steps` decode steps without a read between them. counts: the tokens that each row samples if it still runs."""

    sequences: tuple[Sequence, ...]
    steps: int
    counts: tuple[int, ...] = field(default=(), compare=False)

    @property
    def rows(self) -> range:
        """From the first of these to the last."""
        return span_of(map(slot_of, self.sequences))


@dataclass(frozen=True, slots=True)
class Move:
    """The row of `source` goes to the free slot `target`, and the first `kept` tokens of that slot to `source`."""

    source: int
    target: int
    kept: int


def slot_of(sequence: Sequence) -> int:
    """The slot of a sequence that is in one."""
    assert sequence.slot is not None
    return sequence.slot


def span_of(slots: Iterable[int]) -> range:
    """From the first of some slots to the last."""
    ordered = sorted(slots)
    return range(ordered[0], ordered[-1] + 1)
