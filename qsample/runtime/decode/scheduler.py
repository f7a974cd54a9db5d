"""Which sequence gets which slot, and what the device does next. No tensors here.

A sequence waits, is admitted to a slot, has its prompt read in chunks, and runs until it ends. The slot that it leaves
keeps its tokens in the cache; the next sequence gets the slot that keeps the longest beginning of its prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from qsample.runtime.sequence import Sequence
from qsample.tensors import Array

# What a run of the graph costs beside its tokens, in tokens: at 0.6 B parameters 2 with int4 weights, 13 with float32.
_RUN: Final = 4
# A run of more tokens reads none of them faster, and takes more memory.
_MOST_JOINED: Final = 512


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a prompt, [start, end), for one call. last: the first token is sampled after it."""

    sequence: Sequence
    start: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == len(self.sequence.prompt)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The whole prompts of `sequences`, in adjacent slots, for one call that samples the first token of each."""

    sequences: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """`steps` decode steps without a read between them, for the rows of `sequences`."""

    sequences: tuple[Sequence, ...]
    steps: int


class Scheduler:
    """First come, first served.

    interleave: take turns between one prompt chunk and one window, so that running rows are not held up for longer than
    a chunk; otherwise every prompt in a slot is read before any row decodes. keep_prefixes: a prompt that begins like
    what a free slot holds goes on from there; recurrent states cannot, because they are those of the slot's last token.
    join_prompts: read whole prompts of adjacent slots in one run where that is cheaper.
    """

    def __init__(
        self,
        slots: int,
        flush_every: int = 1,
        prefill_chunk_size: int | None = None,
        *,
        interleave: bool = True,
        keep_prefixes: bool = True,
        join_prompts: bool = False,
    ) -> None:
        self._kept: list[Array] = [np.empty(0, dtype=np.int64)] * slots  # tokens in each free slot's cache
        self._free = list(range(slots))  # the one that was left longest ago first
        self._waiting: deque[Sequence] = deque()
        self._in_slots: list[Sequence] = []  # those in slots, first come first
        self._flush_every = flush_every
        self._chunk_size = prefill_chunk_size
        self._interleave = interleave
        self._keep_prefixes = keep_prefixes
        self._join_prompts = join_prompts
        self._chunk_was_last = False

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def in_slots(self) -> list[Sequence]:
        """Sequences in slots, first come first."""
        return list(self._in_slots)

    @property
    def prefilling(self) -> list[Sequence]:
        """Sequences in slots whose prompt is not read yet, first come first."""
        return [sequence for sequence in self._in_slots if sequence.consumed < len(sequence.prompt)]

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Give free slots to those who waited longest. Their `consumed` is what the slot's cache holds already."""
        admitted = []
        while self._waiting and self._free:
            sequence = self._waiting.popleft()
            # Not the whole prompt: the last token has to be fed to sample the one after it.
            shared = {slot: shared_prefix(self._kept[slot], sequence.prompt[:-1]) for slot in self._free}
            sequence.slot = max(self._free, key=shared.__getitem__)  # of equals, the first
            sequence.reused = sequence.consumed = shared[sequence.slot]
            self._free.remove(sequence.slot)
            admitted.append(sequence)
        self._in_slots += admitted
        return admitted

    def leave(self, sequence: Sequence, *, keep: bool = True) -> int | None:
        """Take a sequence out, wherever it is, and return the slot that it leaves. keep: its cache can be reused."""
        if sequence.slot is None:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            return None
        slot, sequence.slot = sequence.slot, None
        self._in_slots.remove(sequence)
        self._free.append(slot)
        # The newest token was not fed yet, so the cache has no key and value for it. Of a row whose first token was
        # not read, nobody knows whether it was valid.
        keep = keep and self._keep_prefixes and bool(sequence.sampled or not sequence.issued)
        tokens = [*sequence.prompt[: sequence.consumed].tolist(), *sequence.sampled[:-1]]
        self._kept[slot] = np.array(tokens if keep else [], dtype=np.int64)
        return slot

    def next_job(self) -> Chunk | Prompts | Window | None:
        """What the device does next; None where nothing is left to do before results are read."""
        prefilling, running = self.prefilling, [sequence for sequence in self._in_slots if sequence.may_run]
        if prefilling and not (running and self._interleave and self._chunk_was_last):
            self._chunk_was_last = True
            sequence = prefilling[0]
            joined = self._joined(sequence)
            if len(joined) > 1:
                return Prompts(joined)
            end = min(len(sequence.prompt), sequence.consumed + (self._chunk_size or len(sequence.prompt)))
            return Chunk(sequence, sequence.consumed, end)
        self._chunk_was_last = False
        if not running:
            return None
        guided = any(sequence.guided for sequence in running)
        most = max(sequence.limit - sequence.issued for sequence in running)
        return Window(tuple(running), 1 if guided else min(self._flush_every, most))

    def _joined(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """`sequence` and those whose prompts are read with its own, by slot."""
        fresh = {one.slot: one for one in self.prefilling if one.slot is not None and one.consumed == 0}
        if not self._join_prompts or sequence.slot not in fresh:
            return (sequence,)
        lengths = {slot: len(one.prompt) for slot, one in fresh.items()}
        return tuple(fresh[slot] for slot in joined_slots(lengths, sequence.slot, self._chunk_size))


def joined_slots(lengths: Mapping[int, int], slot: int, chunk_size: int | None = None) -> range:
    """Adjacent slots around `slot` whose prompts are read in one run: padded to the longest of them, each neighbour
    costs no more than a run of its own.

    lengths: tokens of the prompt of each slot that could be joined. chunk_size: most tokens of a run; None = only as
    many as make it faster.
    """
    most = min(_MOST_JOINED, chunk_size or _MOST_JOINED)
    joined, width = range(slot, slot + 1), lengths[slot]
    while True:
        for neighbour in (joined.stop, joined.start - 1):
            length = lengths.get(neighbour)
            if length is None:
                continue
            tokens = (len(joined) + 1) * max(width, length)
            if tokens <= min(most, len(joined) * width + length + _RUN):
                joined = range(min(neighbour, joined.start), max(neighbour + 1, joined.stop))
                width = max(width, length)
                break
        else:
            return joined


def shared_prefix(kept: Array, prompt: Array) -> int:
    """How many tokens two rows have in common from their start."""
    length = min(len(kept), len(prompt))
    different = np.flatnonzero(kept[:length] != prompt[:length])
    return int(different[0]) if len(different) else length
