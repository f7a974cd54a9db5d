"""Requests enter in order of arrival; who sits in which slot, and what the device does next, leaves. No tensors here.

A request waits, then sits in a slot while its prompt is read in chunks, then runs until it ends. A slot that is left
keeps its tokens in the cache; the next request is put where the longest beginning of its prompt is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from qsample.tensors import Array

# What a run of the graph costs beside its tokens, in tokens: at 0.6 B parameters 2 with int4 weights, 13 with float32.
_RUN: Final = 4
# A run of more tokens reads none of them faster, and takes more memory.
_MOST_JOINED: Final = 512


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One prompt on its way through the loop.

    prompt: [n] int64. parameters: the row of every name of `Interface.parameters`. seed: of its random numbers.
    guided: someone must see each token before the next one is sampled.
    Kept by the loop: slot, None outside one. seated_at: when it got its slot, on `time.perf_counter`. reused: prompt
    tokens that were in the slot's cache. consumed: prompt tokens in the cache. new_tokens: sampled, as far as they were
    read. issued: tokens sampled if the row still runs.
    """

    prompt: Array
    parameters: Mapping[str, Array]
    seed: int
    guided: bool = False
    slot: int | None = None
    reused: int = 0
    consumed: int = 0
    issued: int = 0
    seated_at: float | None = None
    new_tokens: list[int] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """The most tokens that this row samples."""
        return int(self.parameters["max_length"]) - len(self.prompt)

    @property
    def may_run(self) -> bool:
        """Whether the row has its first token and did not certainly end since."""
        return 0 < self.issued < self.limit


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a prompt, [start, end), for one call. last: the first token is sampled after it."""

    request: DecodeRequest
    start: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == len(self.request.prompt)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The whole prompts of `requests`, in adjacent slots, for one call; the first token of each is sampled after it."""

    requests: tuple[DecodeRequest, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """`steps` decode steps without a read between them, for the rows of `requests`."""

    requests: tuple[DecodeRequest, ...]
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
        self._waiting: deque[DecodeRequest] = deque()
        self._order: list[DecodeRequest] = []  # those in slots, first come first
        self._flush_every = flush_every
        self._chunk_size = prefill_chunk_size
        self._interleave = interleave
        self._keep_prefixes = keep_prefixes
        self._join_prompts = join_prompts
        self._chunk_was_last = False

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def seated(self) -> list[DecodeRequest]:
        """Requests in slots, first come first."""
        return list(self._order)

    @property
    def prefilling(self) -> list[DecodeRequest]:
        """Requests in slots whose prompt is not read yet, first come first."""
        return [request for request in self._order if request.consumed < len(request.prompt)]

    def add(self, request: DecodeRequest) -> None:
        self._waiting.append(request)

    def admit(self) -> list[DecodeRequest]:
        """Seat those who waited longest, as far as slots are free. Their `consumed` is what the cache holds already."""
        admitted = []
        while self._waiting and self._free:
            request = self._waiting.popleft()
            # Not the whole prompt: the last token has to be fed to sample the one after it.
            shared = {slot: shared_prefix(self._kept[slot], request.prompt[:-1]) for slot in self._free}
            request.slot = max(self._free, key=shared.__getitem__)  # of equals, the first
            request.reused = request.consumed = shared[request.slot]
            self._free.remove(request.slot)
            admitted.append(request)
        self._order += admitted
        return admitted

    def leave(self, request: DecodeRequest, *, keep: bool = True) -> int | None:
        """Take a request out, wherever it is, and return the slot that it leaves. keep: its cache can be used again."""
        if request.slot is None:
            if request in self._waiting:
                self._waiting.remove(request)
            return None
        slot, request.slot = request.slot, None
        self._order.remove(request)
        self._free.append(slot)
        # The newest token was not fed yet, so the cache has no key and value for it. Of a row whose first token was
        # not read, nobody knows whether it was valid.
        keep = keep and self._keep_prefixes and bool(request.new_tokens or not request.issued)
        tokens = [*request.prompt[: request.consumed].tolist(), *request.new_tokens[:-1]]
        self._kept[slot] = np.array(tokens if keep else [], dtype=np.int64)
        return slot

    def next_job(self) -> Chunk | Prompts | Window | None:
        """What the device does next; None where nothing is left to do before results are read."""
        prefilling, running = self.prefilling, [request for request in self._order if request.may_run]
        if prefilling and not (running and self._interleave and self._chunk_was_last):
            self._chunk_was_last = True
            request = prefilling[0]
            joined = self._joined(request)
            if len(joined) > 1:
                return Prompts(joined)
            end = min(len(request.prompt), request.consumed + (self._chunk_size or len(request.prompt)))
            return Chunk(request, request.consumed, end)
        self._chunk_was_last = False
        if not running:
            return None
        guided = any(request.guided for request in running)
        most = max(request.limit - request.issued for request in running)
        return Window(tuple(running), 1 if guided else min(self._flush_every, most))

    def _joined(self, request: DecodeRequest) -> tuple[DecodeRequest, ...]:
        """`request` and those whose prompts are read with its own, by slot."""
        fresh = {one.slot: one for one in self.prefilling if one.slot is not None and one.consumed == 0}
        if not self._join_prompts or request.slot not in fresh:
            return (request,)
        lengths = {slot: len(one.prompt) for slot, one in fresh.items()}
        return tuple(fresh[slot] for slot in joined_slots(lengths, request.slot, self._chunk_size))


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
