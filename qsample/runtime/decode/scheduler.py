"""Gives slots to sequences, and chooses the next job of the device. No tensors here.

A sequence waits, is admitted to a slot, has its prompt read in chunks, and runs until it ends. The slot that it leaves
keeps its prompt in the cache. The next sequence gets the slot that keeps the longest beginning of its prompt; if a step
over fewer rows is cheaper, only slots next to those in use count. A longer beginning in another slot, free or not, is
copied, and the tokens that the chosen slot kept are moved to the slot that was left longest ago. If rows are far apart
all the same, because rows between them have ended, the first or the last row is moved. Recurrent states continue from
their saved copies.
"""

from __future__ import annotations

from bisect import insort
from collections import abc, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.ort.rounding import RowCounts
from qsample.ort.session import Sessions
from qsample.runtime.decode.adapter_use import AdapterPlaces, Marks
from qsample.runtime.decode.jobs import Admission, Copy, Move, Read, Save, Window, slot_of, span_of
from qsample.runtime.decode.prefix_file import PrefixFile
from qsample.runtime.decode.prefixes import (
    Pieces,
    SavedStates,
    reusable_prefix,
    shared_prefix,
    shared_tokens,
)
from qsample.runtime.sequence import Sequence

# The cost of a run without its tokens, in tokens: at 0.6 B parameters 2 with int4 weights, 13 with float32.
_RUN: Final = 4
# Tokens of a row that are copied while a step computes another row: 50 at 0.6 B parameters with int4 weights.
_COPIED: Final = 32
_MOST_PASSED: Final = (
    256  # sequences that wait for an adapter; looking further takes time in each step
)
_NOTHING: Final[Array] = np.empty(0, dtype=np.int64)
# A run of more tokens reads none of them faster, and takes more memory.
_MOST_JOINED: Final = 512


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The abilities of a package's graphs, and how a scheduler uses them. tail_size, step_rows: see `ort.batching`.

    Attributes:
        pieces: the places at which prompts are cut.
        recurrent: the model has states that belong to a slot's newest token, so that another slot can continue from
            them at that moment, or from a copy that was saved.
        whole_up_to: see `Interface`.
        attention: the model has keys and values, and a slot has to hold these as well.
        join_prompts: read whole prompts of adjacent slots in a single run, if they have the same length.
        ragged: read prompts of any lengths together, and the rest of prompts after the beginnings that slots hold.
        step_rows: slots in use are best close together then, and beginnings of prompts are copied between slots.
        flush_every: decode steps between two reads, at least 1.
        prefill_chunk_size: most prompt tokens of a chunk, but at least a piece; by default the whole prompt.
        interleave: take turns between a chunk and a window, so that running rows wait for no more than a chunk;
            otherwise every prompt in a slot is read before any row decodes.
        saved_states, max_loras: most saved copies of recurrent states; most adapters that rows use at once.
        reuse_sampled: continue from tokens that a slot sampled, too, and from anywhere.
    """

    pieces: Pieces
    tail_size: int | None = None
    recurrent: bool = False
    whole_up_to: int = -1
    attention: bool = True
    join_prompts: bool = False
    ragged: bool = False
    step_rows: RowCounts | None = None
    flush_every: int = 1
    prefill_chunk_size: int | None = None
    interleave: bool = True
    saved_states: int = 0
    max_loras: int = 0
    reuse_sampled: bool = False

    @classmethod
    def of(cls, sessions: Sessions, **choices: Any) -> SchedulerConfig:
        """As suits the graphs of a package. choices: `flush_every` and the fields after it."""
        return cls(
            Pieces.of(sessions),
            sessions.prompts.tail_size,
            bool(sessions.interface.fixed_states),
            sessions.interface.whole_up_to,
            bool(sessions.interface.key_values),
            sessions.prompts.joins_prompts,
            sessions.prompts.ragged,
            sessions.rows.step,
            max_loras=sessions.interface.features.max_loras,
            **choices,
        )


class Scheduler:
    """Requests of equal priority run in arrival order; one that waits for an adapter does not block later ones.

    A prompt is read in pieces, each in a separate call, even if more work waits: kernels round differently for another
    number of tokens, and nothing but the prompt may decide that. So chunks are whole pieces, prompts are read together
    if they have the same length, and a prompt continues from the tokens of a slot at the end of a piece.

    States are saved at the end of a prompt's whole pieces, from which the next turn of a conversation continues; at the
    place at which a prompt leaves another, because a third may leave them there, too (as in Marconi,
    https://arxiv.org/abs/2411.19379); and with `reuse_sampled` at the end of an answer.
    """

    def __init__(self, slots: int, config: SchedulerConfig) -> None:
        self._config = config
        self._pieces = config.pieces
        self._kept: dict[int, Array] = dict.fromkeys(
            range(slots), _NOTHING
        )  # of each free slot, marked
        self._tokens = dict.fromkeys(
            range(slots), 0
        )  # that the states of each free slot are after, at most
        self._free = list(range(slots))  # the slot that was left longest ago first
        self._waiting: deque[Sequence] = deque()
        self._in_slots: list[Sequence] = []  # first come first
        self._marks = Marks()
        self._adapters = AdapterPlaces(config.max_loras)
        self._saved = SavedStates(config.saved_states if config.recurrent else 0)
        self._moves = config.step_rows is not None and config.attention
        self._step_rows = RowCounts(slots) if config.step_rows is None else config.step_rows
        self._chunk_was_last = False
        self._wasted = 0  # rows of the steps since the last move that a move would have saved

    @property
    def waiting(self) -> int:
        """Number of sequences without a slot."""
        return len(self._waiting)

    @property
    def saved_states(self) -> int:
        """Number of copies of states."""
        return len(self._saved.beginnings)

    @property
    def in_slots(self) -> list[Sequence]:
        """Sequences in slots, first come first."""
        return list(self._in_slots)

    @property
    def prefilling(self) -> list[Sequence]:
        """Sequences in slots whose prompt is not read yet, first come first."""
        return [sequence for sequence in self._in_slots if sequence.consumed < len(sequence.prompt)]

    def add(self, sequence: Sequence) -> None:
        """Let it wait, after the requests of the same priority."""
        sequence.marked = self._marks.mark(sequence.identities, sequence.adapter)
        insort(self._waiting, sequence, key=lambda one: one.priority)

    def admit(self, held: Callable[[], abc.Sequence[PrefixFile]] | None = None) -> list[Admission]:
        """Give free slots to the requests that waited longest. held: returns the beginnings that a slot can load."""
        admitted: list[Admission] = []
        passed: list[Sequence] = []
        claimed: dict[int, str] = {}
        stored = held() if held is not None and self._waiting and self._free else ()
        while self._waiting and self._free and len(passed) < _MOST_PASSED:
            sequence = self._waiting.popleft()
            taken = self._adapters.take(sequence.adapter, claimed)
            if taken is None:
                passed.append(sequence)
                continue
            sequence.adapter_place, is_new = taken
            reusable = {
                slot: self._reusable(self._kept[slot], sequence.marked, slot) for slot in self._free
            }
            used = [slot_of(one) for one in self._in_slots]
            rows = {slot: self._step_rows.cover(len(span_of([*used, slot]))) for slot in self._free}
            # Of equals, the first.
            slot = min(self._free, key=lambda slot: (rows[slot], -reusable[slot]))
            source = max([slot, *self._free], key=reusable.__getitem__)
            tokens = reusable[source]
            found, loadable = self._best_stored(stored, sequence)
            found = found if loadable > tokens else None
            if found:
                source, tokens = slot, loadable
            sequence.slot, sequence.reused, sequence.consumed = slot, tokens, tokens
            place = None if found else self._saved.use(sequence.marked[:tokens])
            moved = self._make_room(slot, source, sequence.marked, 0 if found else tokens)
            self._free.remove(slot)
            del self._kept[slot]
            self._in_slots.append(sequence)
            copy, adapter = (
                Copy(sequence, source, tokens, place),
                sequence.adapter if is_new else None,
            )
            admitted.append(Admission(sequence, copy, moved, found, adapter))
        self._waiting.extendleft(reversed(passed))
        return admitted

    def _best_stored(
        self, stored: abc.Sequence[PrefixFile], sequence: Sequence
    ) -> tuple[PrefixFile | None, int]:
        """The stored prefix that has most of a prompt, and how many tokens of it."""
        own = "" if sequence.adapter is None else sequence.adapter.sha256
        loadable = [
            (self._loadable(one.tokens, sequence.identities), one)
            for one in stored
            if one.adapter == own
        ]
        tokens, found = max(loadable, key=lambda item: item[0], default=(0, None))
        return found, tokens

    def _make_room(
        self, slot: int, source: int, prompt: Array, reused: int
    ) -> tuple[int, int] | None:
        """Another free slot for the tokens that `slot` keeps, and their number: the slot left longest ago gives way.
        Otherwise, slots next to the slots in use would forget the newest tokens, and other slots keep tokens that no
        request needs. None if nothing is moved: if the step is over all slots, the slot left longest ago was chosen."""
        kept, spare = (
            self._kept[slot],
            next(free for free in self._free if free == slot or free != source),
        )
        if source != slot and shared_prefix(self._kept[source], prompt) == len(self._kept[source]):
            self._free.remove(source)  # `slot` is about to hold all of it
            self._free.insert(0, source)
        if spare == slot or not len(kept) or (source == slot and reused) or not self._moves:
            return None
        self._kept[spare], self._tokens[spare] = kept, self._tokens[slot]
        self._free.remove(spare)
        self._free.insert(self._free.index(slot), spare)
        return spare, len(kept)

    def leave(self, sequence: Sequence, *, keep: bool = True) -> int | None:
        """Take a sequence out, wherever it is, and return the slot that it leaves. keep: its cache can be reused."""
        if sequence.slot is None:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            return None
        slot, sequence.slot = sequence.slot, None
        self._in_slots.remove(sequence)
        self._free.append(slot)
        self._tokens[slot] = len(sequence.prompt) + sequence.issued
        self._adapters.leave(sequence.adapter_place)
        # It is unknown whether a row is valid whose first token was not read.
        keep = keep and bool(sequence.sampled or not sequence.issued)
        tokens = sequence.marked[: sequence.consumed]
        if self._config.reuse_sampled and len(
            tokens
        ):  # the newest token was not fed yet, so the cache lacks it
            sampled = self._marks.mark(np.array(sequence.sampled[:-1], np.int64), sequence.adapter)
            tokens = np.concatenate([tokens, sampled])
        self._kept[slot] = tokens if keep else _NOTHING
        return slot

    def save_answer(self, slot: int, tokens_in_states: Callable[[int], int]) -> Save | None:
        """The place for the states of a slot that was just left, if they are after all the tokens that it keeps.
        tokens_in_states: the number of tokens that a slot's states are after, asked only if it matters. A row may have
        gone on before it was found to have ended."""
        tokens = self._kept[slot]
        wanted = self._config.reuse_sampled and self._saved.places and len(tokens)
        if not wanted or tokens_in_states(slot) != len(tokens):
            return None
        place = self._saved.add(tokens, self._is_held)
        return None if place is None else Save(slot, len(tokens), place)

    def next_job(self) -> Read | Window | None:
        """The next job of the device, taken as done; None if nothing is left to do before results are read."""
        prefilling, running = (
            self.prefilling,
            [sequence for sequence in self._in_slots if sequence.may_run],
        )
        if prefilling and not (running and self._config.interleave and self._chunk_was_last):
            self._chunk_was_last = True
            read = self._next_read(prefilling)
            for copy in read.copies:
                copy.sequence.reused = copy.tokens
                copy.sequence.consumed = max(copy.sequence.consumed, copy.tokens)
            for sequence, piece in zip(
                reversed(read.sequences), reversed(read.pieces), strict=False
            ):
                sequence.consumed, sequence.issued = piece.stop, int(read.last)
            return read
        self._chunk_was_last = False
        if not running:
            return None
        followed = any(sequence.followed for sequence in running)
        left = [sequence.limit - sequence.issued for sequence in running]
        steps = 1 if followed else min(self._config.flush_every, max(left))
        window = Window(tuple(running), steps, tuple(min(steps, count) for count in left))
        best = self._best_move()
        self._wasted = 0 if best is None else self._wasted + steps * best[1]
        for sequence, count in zip(running, window.counts, strict=True):
            sequence.issued += count
        return window

    def next_move(self) -> Move | None:
        """A move, taken as done, once steps over unused rows have cost as much as it does; None so far."""
        best = self._best_move() if self._wasted else None
        if best is None or self._wasted * _COPIED < best[2]:
            return None
        move, self._wasted = best[0], 0
        sequence = next(one for one in self._in_slots if one.slot == move.source)
        sequence.slot = move.target
        self._kept[move.source] = self._kept.pop(move.target)
        self._tokens[move.source] = self._tokens[move.target]
        self._free[self._free.index(move.target)] = move.source  # as long ago
        return move

    def _best_move(self) -> tuple[Move, int, int] | None:
        """The move of the first or the last row that costs least for each row that a step then saves; the number of
        these rows; and the number of tokens that are copied."""
        used = sorted(map(slot_of, self._in_slots))
        width = self._step_rows.cover(len(span_of(used))) if used else 0
        if width <= self._step_rows.cover(len(used)):
            return None
        moves: list[tuple[Move, int, int]] = []
        for one in self._in_slots:
            source = slot_of(one)
            if source in (used[0], used[-1]) and one.may_run:
                rest = span_of(slot for slot in used if slot != source)
                spans = {slot: max(rest[-1], slot) - min(rest[0], slot) + 1 for slot in self._free}
                widths = {slot: self._step_rows.cover(span) for slot, span in spans.items()}
                target = min(self._free, key=lambda slot: (widths[slot], len(self._kept[slot])))
                kept, held = len(self._kept[target]), len(one.prompt) + one.issued
                if widths[target] < width:
                    moves.append(
                        (Move(source, target, kept), width - widths[target], held + 2 * kept)
                    )
        return min(moves, key=lambda move: move[2] / move[1], default=None)

    def _next_read(self, prefilling: list[Sequence]) -> Read:
        """The next part of the first prompt, or some whole prompts with it."""
        sequence, *others = prefilling
        start, end = sequence.consumed, len(sequence.prompt)
        copies: tuple[Copy, ...] = ()
        source, tokens = self._holder(sequence)
        if tokens > start:
            copies = (Copy(sequence, source, tokens, self._saved.use(sequence.marked[:tokens])),)
            start = tokens
        if self._config.recurrent:
            # Those that begin alike wait until this prompt is read as far as they go together.
            together = {
                one: reusable_prefix(sequence.marked, one.marked, self._pieces, None)
                for one in others
            }
            ahead = {one: tokens for one, tokens in together.items() if tokens > one.consumed}
            copies += tuple(
                Copy(one, slot_of(sequence), start)
                for one, tokens in ahead.items()
                if tokens == start
            )
            end = min([end, *(tokens for tokens in ahead.values() if tokens > start)])
        joined = self._joined(sequence, start) if end == len(sequence.prompt) else {sequence: start}
        if len(joined) > 1:
            pieces = tuple(range(begun, len(one.prompt)) for one, begun in joined.items())
            saves = tuple(
                save
                for one, begun in joined.items()
                for save in self._saves(one, begun, len(one.prompt))
            )
            return Read(tuple(joined), pieces, copies, saves)
        pieces = self._pieces.cut(sequence.marked, start, end, self._config.prefill_chunk_size)
        return Read((sequence,), pieces, copies, self._saves(sequence, start, pieces[-1].stop))

    def _saves(self, sequence: Sequence, start: int, end: int) -> tuple[Save, ...]:
        """The states to save while the tokens [start, end) of a prompt are read."""
        if not self._saved.places:
            return ()
        prompt = sequence.marked
        seen = [*self._saved.beginnings, *self._kept.values()]
        seen += [one.marked for one in self._in_slots if one is not sequence]
        # The same prompt again continues from before its last token, a longer prompt from after it.
        ends = {
            len(prompt),
            len(prompt) - 1,
            max(map(partial(shared_prefix, prompt), seen), default=0),
        }
        saves = []
        for tokens in sorted({self._pieces.begin(prompt, end) for end in ends}):
            if start < tokens <= end:
                place = self._saved.add(prompt[:tokens], self._is_held)
                saves += [Save(slot_of(sequence), tokens, place)] if place is not None else []
        return tuple(saves)

    def _is_held(self, tokens: Array) -> bool:
        """Whether some slot has the keys and values of all these tokens, or none are needed."""
        held = [*self._kept.values(), *(one.marked[: one.consumed] for one in self._in_slots)]
        return not self._config.attention or any(
            shared_prefix(one, tokens) == len(tokens) for one in held
        )

    def _holder(self, sequence: Sequence) -> tuple[int, int]:
        """The other slot that holds most of a prompt's beginning, and how many tokens of it."""
        held = self._kept | {
            slot_of(one): one.marked[: one.consumed]
            for one in self._in_slots
            if one is not sequence
        }
        reusable = {
            slot: self._reusable(tokens, sequence.marked, slot) for slot, tokens in held.items()
        }
        return max(reusable.items(), key=lambda item: item[1], default=(0, 0))

    def _reusable(self, held: Array, prompt: Array, slot: int) -> int:
        """The number of tokens of `prompt` that need not be read after `held`, in a slot; its last token has to be."""
        if self._config.recurrent and self._tokens_in(slot) > self._config.whole_up_to:
            most = shared_prefix(held, prompt) if self._config.attention else len(prompt)
            tokens = self._saved.longest(prompt, min(most, len(prompt) - 1))
            return 0 if self._pieces.run(prompt, tokens) else tokens
        if self._config.reuse_sampled:
            return shared_tokens(held, prompt, self._pieces)
        return reusable_prefix(held, prompt, self._pieces, self._config.tail_size)

    def _tokens_in(self, slot: int) -> int:
        """The number of tokens that a slot's states are after, at most."""
        running = (len(one.prompt) + one.issued for one in self._in_slots if one.slot == slot)
        return next(running, self._tokens[slot])

    def _loadable(self, stored: Array, prompt: Array) -> int:
        """The number of tokens of `prompt` that need not be read after `stored`, a number of whole pieces."""
        if self._config.recurrent:  # the states are those after all of it
            whole = shared_prefix(stored, prompt[:-1]) == len(stored) and not self._pieces.run(
                prompt, len(stored)
            )
            return len(stored) if whole else 0
        return reusable_prefix(stored, prompt, self._pieces, self._config.tail_size)

    def to_store(self, slot: int, identities: Array) -> tuple[Array, int | None]:
        """The whole pieces of a prompt that has just left a slot, as far as the slot keeps them, and the place of the
        recurrent states after them, if any; no tokens if something of that is not there. identities: of the prompt."""
        tokens = self._kept[slot][: len(identities)]
        tokens = tokens[: self._pieces.begin(tokens, len(tokens))]
        place = self._saved.use(tokens) if self._config.recurrent else None
        if self._config.recurrent and place is None:
            return _NOTHING, None
        return identities[: len(tokens)], place

    def _joined(self, first: Sequence, start: int) -> dict[Sequence, int]:
        """`first` and the sequences whose prompts are read to their ends with its own, by slot, each with the number of
        its tokens that were read: `start` of the first."""
        if not self._config.join_prompts or (start and not self._config.ragged):
            return {first: start}
        begun = {
            one: one.consumed for one in self.prefilling if self._config.ragged or one.consumed == 0
        }
        begun[first] = start
        ready = {
            slot_of(one): one
            for one, tokens in begun.items()
            if len(self._pieces.cut(one.marked, tokens, len(one.prompt))) == 1
            and not self._waits(one, first)
        }
        if slot_of(first) not in ready:
            return {first: start}
        lengths = {slot: len(one.prompt) - begun[one] for slot, one in ready.items()}
        most, ragged = self._config.prefill_chunk_size, self._config.ragged
        slots = joined_slots(lengths, slot_of(first), self._pieces.size, most, ragged=ragged)
        return {ready[slot]: begun[ready[slot]] for slot in slots}

    def _waits(self, one: Sequence, first: Sequence) -> bool:
        """Whether it is cheaper to copy most of a prompt after `first` was read than to read both together."""
        if one is first or self._config.recurrent:
            return False
        copied = max(self._holder(one)[1], self._reusable(first.marked, one.marked, slot_of(first)))
        return copied - one.consumed > _RUN


def joined_slots(
    lengths: Mapping[int, int],
    slot: int,
    piece_size: int,
    chunk_size: int | None = None,
    *,
    ragged: bool = False,
) -> range:
    """Adjacent slots around `slot` whose prompts are read in a single run: they have the same length, at most a piece,
    so that each row computes the same numbers as alone; or any length, if `ragged`: rows do so in any case.
    lengths: tokens to read for each slot that could be joined. chunk_size: most tokens of a run; by default, only as
    many as make it faster."""
    most = min(_MOST_JOINED, chunk_size or _MOST_JOINED)
    joined = [slot]

    def fits(other: int) -> bool:
        tokens = lengths.get(other)
        alike = tokens is not None and (ragged or tokens == lengths[slot] <= piece_size)
        return alike and sum(lengths[one] for one in (*joined, other)) <= most

    while fits(joined[-1] + 1):
        joined.append(joined[-1] + 1)
    while fits(joined[0] - 1):
        joined.insert(0, joined[0] - 1)
    return span_of(joined)
