"""The scheduler's decisions: who gets which slot, and what the device runs next. No tensors here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from qsample.runtime.adapters import Adapter
from qsample.runtime.decode.prefix_file import PrefixFile
from qsample.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Copy:
    """A beginning of a prompt that is copied from a slot to the slot of a sequence.

    Attributes:
        sequence: the sequence that gets the tokens.
        source: the slot that has the tokens.
        tokens: the number of tokens, from the start of the prompt.
        saved_place: the place of the saved recurrent states after these tokens; None for the
            states of the source.
    """

    sequence: Sequence
    source: int
    tokens: int
    saved_place: int | None = None


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The first `tokens` tokens that a slot kept, which go to the slot `target`."""

    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that got a slot.

    Attributes:
        sequence: the sequence.
        copy: the beginning of its prompt that a slot holds; the source may be the slot of the
            sequence itself.
        moved: the tokens that the slot kept so far, if another slot gets them.
        stored: a prefix that has the first `copy.tokens` tokens in place of a slot; None without.
        adapter: the adapter to write to the sequence's place for adapters; None if it is there, or
            the sequence has none.
    """

    sequence: Sequence
    copy: Copy
    moved: KeptTokens | None
    stored: PrefixFile | None = None
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """The states of `slot` after the first `tokens` tokens of its row go to a place for saved
    states."""

    slot: int
    tokens: int
    place: int


@dataclass(frozen=True, slots=True)
class Read:
    """Prompt tokens to read: either several pieces of the prompt of one sequence, in order, each in
    a separate call; or the last piece of each of several sequences, all in a single call.

    Attributes:
        sequences: the sequences; if there are several, they are in adjacent slots.
        pieces: the ranges of prompt tokens; if there are several sequences, one for each.
        copies: the copies to make before.
        saves: the states to save at the ends of pieces.
    """

    sequences: tuple[Sequence, ...]
    pieces: tuple[range, ...]
    copies: tuple[Copy, ...] = ()
    saves: tuple[Save, ...] = ()

    @property
    def last(self) -> bool:
        """Whether the first new token of each sequence is sampled at the end."""
        return self.pieces[-1].stop == len(self.sequences[-1].request.prompt)

    @property
    def ends(self) -> tuple[int, ...]:
        """The number of prompt tokens of each sequence that are read in the end."""
        if len(self.sequences) == 1:
            return (self.pieces[-1].stop,)
        return tuple(piece.stop for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Window:
    """Decode steps without a read between them.

    Attributes:
        sequences: the sequences that run.
        steps: the number of steps.
        counts: the number of tokens that each sequence samples if it still runs.
    """

    sequences: tuple[Sequence, ...]
    steps: int
    counts: tuple[int, ...] = field(default=(), compare=False)

    @property
    def rows(self) -> range:
        """The slots from the first of the sequences to the last."""
        return span_of(map(slot_of, self.sequences))


@dataclass(frozen=True, slots=True)
class Move:
    """The row of `source` goes to the free slot `target`, and the first `kept` tokens of that slot
    go to `source`."""

    source: int
    target: int
    kept: int


def slot_of(sequence: Sequence) -> int:
    """The slot of a sequence that is in one."""
    slot = sequence.placement.slot
    assert slot is not None
    return slot


def span_of(slots: Iterable[int]) -> range:
    """The slots from the first to the last of some slots."""
    ordered = sorted(slots)
    return range(ordered[0], ordered[-1] + 1)
