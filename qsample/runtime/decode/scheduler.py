"""Gives slots to sequences, and chooses the next job of the device. No tensors here.

A sequence waits, is admitted to a slot, has its prompt read in chunks, and runs until it ends. The
slot that it leaves keeps its prompt in the cache. The next sequence gets the slot that keeps the
longest beginning of its prompt; if a step over fewer rows is cheaper, only slots next to those in
use count. A longer beginning in another slot, free or not, is copied, and the tokens that the chosen
slot kept are moved to the slot that was left longest ago. If rows are far apart all the same,
because rows between them have ended, the first or the last row is moved. Recurrent states continue
from their saved copies.
"""

from __future__ import annotations

from bisect import insort
from collections import abc, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.ort.rounding import RowCounts
from qsample.ort.session import Sessions
from qsample.request.structured.tables import TokenGrammar
from qsample.runtime.adapters import Adapter
from qsample.runtime.decode.adapter_use import AdapterPlaces, Marks
from qsample.runtime.decode.jobs import (
    Admission,
    Copy,
    KeptTokens,
    Move,
    Read,
    Save,
    Window,
    slot_of,
    span_of,
)
from qsample.runtime.decode.prefix_file import PrefixFile
from qsample.runtime.decode.prefixes import (
    Pieces,
    SavedStates,
    reusable_prefix,
    shared_prefix,
    shared_tokens,
)
from qsample.runtime.sequence import NO_TOKENS, Sequence

# The cost of a run without its tokens, in tokens: at 0.6 B parameters 2 with int4 weights, 13 with
# float32.
_RUN_COST_TOKENS: Final = 4
# The tokens of a row that are copied while a step computes another row: 50 at 0.6 B parameters with
# int4 weights.
_COPIED_TOKENS_PER_ROW: Final = 32
# The most sequences that wait for an adapter while later sequences are admitted. Looking further would
# take time in each step.
_MAX_PASSED_SEQUENCES: Final = 256
# A run of more tokens reads none of them faster, and takes more memory.
_MAX_JOINED_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The abilities of a package's graphs, and how a scheduler uses them.

    Attributes:
        pieces: the places at which prompts are cut.
        tail_size: see `ort.batching`.
        recurrent: whether the model has states that belong to a slot's newest token, so that another
            slot can continue from them only at that moment, or from a copy that was saved.
        whole_up_to: see `Interface`.
        attention: whether the model has keys and values, and a slot has to hold these as well.
        join_prompts: whether whole prompts of adjacent slots are read in a single run, if they have
            the same length.
        ragged: whether prompts of any lengths are read together, and also the rests of prompts after
            the beginnings that slots hold.
        step_rows: see `ort.batching`; slots in use are then best close together, and beginnings of
            prompts are copied between slots.
        flush_every: the number of decode steps between two reads, at least 1.
        prefill_chunk_size: the most prompt tokens of a chunk, but at least a piece; None for the
            whole prompt.
        interleave: whether a chunk and a window take turns, so that running rows wait for no more
            than a chunk; otherwise every prompt in a slot is read before any row decodes.
        saved_states: the most saved copies of recurrent states.
        max_loras: the most adapters that rows use at once.
        reuse_sampled: whether prompts continue also from tokens that a slot sampled, and from
            anywhere.
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
        """The abilities of a package's graphs. choices: `flush_every` and the fields after it."""
        interface = sessions.interface
        return cls(
            pieces=Pieces.of(sessions),
            tail_size=sessions.prompts.tail_size,
            recurrent=bool(interface.fixed_states),
            whole_up_to=interface.whole_up_to,
            attention=bool(interface.key_values),
            join_prompts=sessions.prompts.joins_prompts,
            ragged=sessions.prompts.ragged,
            step_rows=sessions.rows.step,
            max_loras=interface.features.max_loras,
            **choices,
        )


@dataclass(slots=True, eq=False)
class Slot:
    """A row of the batch: the sequence in it, or the tokens that it keeps while it is free.

    Attributes:
        number: the number of the row.
        left_at: the rank of a free slot; the slot with the lowest rank was left longest ago.
        owner: the sequence in the slot; None while the slot is free.
        kept_tokens: [n] int64, the marked tokens whose keys and values a free slot keeps.
        kept_states_end: the most tokens that the states of a free slot follow.
    """

    number: int
    left_at: int
    owner: Sequence | None = None
    kept_tokens: Array = field(default_factory=lambda: NO_TOKENS)
    kept_states_end: int = 0

    @property
    def held_tokens(self) -> Array:
        """[n] int64: the marked tokens whose keys and values the slot has."""
        if self.owner is None:
            return self.kept_tokens
        placement = self.owner.placement
        return placement.marked_prompt[: placement.tokens_read]

    @property
    def states_end(self) -> int:
        """The most tokens that the states of the slot follow."""
        if self.owner is None:
            return self.kept_states_end
        return len(self.owner.request.prompt) + self.owner.placement.tokens_issued

    def give_to(self, sequence: Sequence) -> None:
        """Let a sequence have this free slot."""
        self.owner = sequence
        self.kept_tokens = NO_TOKENS
        sequence.placement.slot = self.number

    def take_back(self, kept_tokens: Array, left_at: int) -> None:
        """Make the slot free. kept_tokens: see the attribute."""
        assert self.owner is not None
        self.kept_states_end = self.states_end
        self.owner.placement.slot = None
        self.owner = None
        self.kept_tokens = kept_tokens
        self.left_at = left_at

    def keep_as(self, other: Slot) -> None:
        """Keep the tokens of another free slot in its place, and take its rank."""
        self.kept_tokens = other.kept_tokens
        self.kept_states_end = other.kept_states_end
        self.left_at = other.left_at


@dataclass(frozen=True, slots=True)
class _MoveEstimate:
    """A move of a row, the rows that each step then saves, and the tokens that it copies."""

    move: Move
    rows_saved: int
    tokens_copied: int


class Scheduler:
    """Gives slots to sequences, and chooses jobs.

    Sequences of equal priority run in arrival order. A sequence that waits for an adapter does not
    block later sequences.

    A prompt is read in pieces, each in a separate call, even if more work waits: kernels round
    differently for another number of tokens, and only the prompt may decide that number. So chunks
    are whole pieces, prompts are read together if they have the same length, and a prompt continues
    from the tokens of a slot at the end of a piece.

    States are saved at the end of a prompt's whole pieces, from which the next turn of a
    conversation continues; at the place at which a prompt leaves another, because a third may leave
    them there, too (as in Marconi, https://arxiv.org/abs/2411.19379); and with `reuse_sampled` at
    the end of an answer.
    """

    def __init__(self, slots: int, config: SchedulerConfig) -> None:
        self._config = config
        self._pieces = config.pieces
        self._slots = [Slot(number, left_at=number) for number in range(slots)]
        self._next_rank = slots  # the slot that is left next gets this rank
        self._waiting: deque[Sequence] = deque()
        self._in_slots: list[Sequence] = []  # first come first
        self._marks = Marks()
        self._adapters = AdapterPlaces(config.max_loras)
        self._saved = SavedStates(config.saved_states if config.recurrent else 0)
        self._moves_kept_tokens = config.step_rows is not None and config.attention
        self._step_rows = RowCounts(slots) if config.step_rows is None else config.step_rows
        self._chunk_was_last = False
        self._wasted_rows = 0  # rows of the steps since the last move that a move would have saved

    @property
    def waiting(self) -> int:
        """The number of sequences without a slot."""
        return len(self._waiting)

    @property
    def saved_states(self) -> int:
        """The number of copies of states."""
        return len(self._saved.beginnings)

    @property
    def in_slots(self) -> list[Sequence]:
        """The sequences in slots, first come first."""
        return list(self._in_slots)

    @property
    def prefilling(self) -> list[Sequence]:
        """The sequences in slots whose prompt is not read yet, first come first."""
        return [
            sequence
            for sequence in self._in_slots
            if sequence.placement.tokens_read < len(sequence.request.prompt)
        ]

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait, after the sequences of the same priority."""
        marked_prompt = self._marks.mark(sequence.identities, sequence.request.adapter)
        sequence.placement.marked_prompt = marked_prompt
        insort(self._waiting, sequence, key=lambda waiting: waiting.request.priority)

    def admit(
        self,
        stored_prefixes: Callable[[], abc.Sequence[PrefixFile]] | None = None,
        takes_grammars: Callable[[abc.Sequence[TokenGrammar]], bool] | None = None,
    ) -> list[Admission]:
        """Give free slots to the sequences that waited longest.

        Args:
            stored_prefixes: returns the beginnings of prompts that a slot can load; called only if a
                sequence can be admitted.
            takes_grammars: says whether so many further rows may follow grammars at once. A sequence
                waits until they may, and later sequences with grammars wait behind it.
        """
        free = self._free_slots() if self._waiting else []
        if not free:
            return []
        stored = () if stored_prefixes is None else stored_prefixes()
        admissions: list[Admission] = []
        passed: list[Sequence] = []
        claimed: dict[int, str] = {}
        grammars: list[TokenGrammar] = []
        takes_more = True
        while self._waiting and free and len(passed) < _MAX_PASSED_SEQUENCES:
            sequence = self._waiting.popleft()
            grammar = sequence.request.tables
            if grammar is not None and takes_grammars is not None:
                takes_more = takes_more and takes_grammars([*grammars, grammar])
                if not takes_more:
                    passed.append(sequence)
                    continue
            taken = self._adapters.take(sequence.request.adapter, claimed)
            if taken is None:
                passed.append(sequence)
                continue
            if grammar is not None:
                grammars.append(grammar)
            sequence.placement.adapter_place = taken.place
            new_adapter = sequence.request.adapter if taken.is_new else None
            admissions.append(self._admit_to_slot(sequence, free, stored, new_adapter))
            free = self._free_slots()
        self._waiting.extendleft(reversed(passed))
        return admissions

    def _free_slots(self) -> list[Slot]:
        """The free slots; the slot that was left longest ago comes first."""
        free = [slot for slot in self._slots if slot.owner is None]
        return sorted(free, key=lambda slot: slot.left_at)

    def _admit_to_slot(
        self,
        sequence: Sequence,
        free: list[Slot],
        stored: abc.Sequence[PrefixFile],
        new_adapter: Adapter | None,
    ) -> Admission:
        """Give a sequence the best of the free slots. new_adapter: see `Admission.adapter`."""
        prompt = sequence.placement.marked_prompt
        reusable = {slot: self._reusable(slot, sequence) for slot in free}
        slot = self._best_slot(free, reusable)
        # `slot` comes first, so that it wins a tie.
        source = max([slot, *free], key=reusable.__getitem__)
        tokens = reusable[source]
        prefix, loadable = self._best_stored(stored, sequence)
        if prefix is not None and loadable > tokens:
            copy = Copy(sequence, slot.number, loadable)
            moved = self._make_room(slot, slot, prompt, 0)
        else:
            prefix = None
            copy = Copy(sequence, source.number, tokens, self._saved.use(prompt[:tokens]))
            moved = self._make_room(slot, source, prompt, tokens)
        slot.give_to(sequence)
        sequence.placement.tokens_reused = copy.tokens
        sequence.placement.tokens_read = copy.tokens
        self._in_slots.append(sequence)
        return Admission(sequence, copy, moved, prefix, new_adapter)

    def _best_slot(self, free: list[Slot], reusable: Mapping[Slot, int]) -> Slot:
        """The slot with which a step computes the fewest rows; of several, the slot that holds most
        of the prompt; of several, the slot that was left longest ago. reusable: the number of prompt
        tokens that each free slot holds."""
        used = [slot_of(sequence) for sequence in self._in_slots]

        def preference(slot: Slot) -> tuple[int, int]:
            rows = self._step_rows.cover(len(span_of([*used, slot.number])))
            return rows, -reusable[slot]

        return min(free, key=preference)

    def _best_stored(
        self, stored: abc.Sequence[PrefixFile], sequence: Sequence
    ) -> tuple[PrefixFile | None, int]:
        """The stored prefix that has most of a prompt, and the number of prompt tokens it has."""
        best = None
        most_tokens = 0
        if sequence.request.reads_every_token:
            return best, most_tokens
        for prefix in stored:
            if prefix.adapter == sequence.request.adapter_sha256:
                tokens = self._loadable(prefix.tokens, sequence.identities)
                if best is None or tokens > most_tokens:
                    best = prefix
                    most_tokens = tokens
        return best, most_tokens

    def _make_room(self, slot: Slot, source: Slot, prompt: Array, tokens: int) -> KeptTokens | None:
        """Let another free slot have the tokens that `slot` keeps, before a sequence gets `slot`.

        The slot that was left longest ago gives way. Otherwise, slots next to the slots in use would
        forget the newest tokens, and other slots would keep tokens that no request needs. Nothing is
        moved if a step is over all slots: `slot` is then the slot left longest ago.

        Args:
            slot: the slot that the sequence gets.
            source: the slot that holds the first `tokens` tokens of the sequence's marked `prompt`.
        """
        free = self._free_slots()
        spare = next(other for other in free if other is slot or other is not source)
        if source is not slot:
            held = source.kept_tokens
            if shared_prefix(held, prompt) == len(held):  # `slot` is about to hold all of it
                source.left_at = free[0].left_at - 1
        is_reused_in_place = source is slot and tokens > 0
        if not self._moves_kept_tokens or spare is slot or is_reused_in_place:
            return None
        if len(slot.kept_tokens) == 0:
            return None
        spare.keep_as(slot)
        return KeptTokens(spare.number, len(spare.kept_tokens))

    def leave(self, sequence: Sequence, *, keep: bool = True) -> int | None:
        """Take a sequence out, wherever it is, and return the slot that it leaves. keep: whether its
        cache can be reused."""
        if sequence.placement.slot is None:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            return None
        slot = self._slots[sequence.placement.slot]
        kept_tokens = self._tokens_to_keep(sequence) if keep else NO_TOKENS
        self._in_slots.remove(sequence)
        self._adapters.leave(sequence.placement.adapter_place)
        slot.take_back(kept_tokens, self._next_rank)
        self._next_rank += 1
        return slot.number

    def _tokens_to_keep(self, sequence: Sequence) -> Array:
        """[n] int64: the marked tokens that the slot of a sequence keeps when it is left."""
        placement = sequence.placement
        sampled = sequence.progress.sampled
        if placement.tokens_issued > 0 and not sampled:
            return NO_TOKENS  # it is unknown whether the row is valid
        tokens = placement.marked_prompt[: placement.tokens_read]
        if not self._config.reuse_sampled or len(tokens) == 0:
            return tokens
        # The newest token was not fed yet, so the cache lacks it.
        fed = np.array(sampled[:-1], np.int64)
        return np.concatenate([tokens, self._marks.mark(fed, sequence.request.adapter)])

    def save_answer(self, slot: int, tokens_in_states: Callable[[int], int]) -> Save | None:
        """The place for the states of a slot that was just left, if they follow exactly the tokens
        that the slot keeps. A row may have gone on before it was found to have ended.
        tokens_in_states: returns the number of tokens that a slot's states follow; called only if
        the answer matters."""
        tokens = self._slots[slot].kept_tokens
        is_wanted = self._config.reuse_sampled and self._saved.places > 0 and len(tokens) > 0
        if not is_wanted or tokens_in_states(slot) != len(tokens):
            return None
        place = self._saved.add(tokens, self._is_held)
        return None if place is None else Save(slot, len(tokens), place)

    def forget_reused_tokens(self, sequence: Sequence) -> None:
        """Have all of a prompt read, because its stored prefix is gone."""
        sequence.placement.tokens_reused = 0
        sequence.placement.tokens_read = 0

    def count_accepted_guesses(self, sequence: Sequence, tokens: int) -> None:
        """Note that a row has sampled `tokens` more tokens than its steps."""
        sequence.placement.tokens_issued += tokens

    def next_job(self) -> Read | Window | None:
        """The next job of the device, taken as done; None if nothing is left to do before results
        are read."""
        prefilling = self.prefilling
        running = [sequence for sequence in self._in_slots if sequence.may_run]
        is_turn_of_window = bool(running) and self._config.interleave and self._chunk_was_last
        if prefilling and not is_turn_of_window:
            self._chunk_was_last = True
            read = self._next_read(prefilling)
            self._take_read_as_done(read)
            return read
        self._chunk_was_last = False
        return self._next_window(running) if running else None

    def _take_read_as_done(self, read: Read) -> None:
        for copy in read.copies:
            placement = copy.sequence.placement
            placement.tokens_reused = copy.tokens
            placement.tokens_read = max(placement.tokens_read, copy.tokens)
        for sequence, end in zip(read.sequences, read.ends, strict=True):
            sequence.placement.tokens_read = end
            sequence.placement.tokens_issued = int(read.last)

    def _next_window(self, running: list[Sequence]) -> Window:
        """The next decode steps of the sequences that run, taken as done."""
        left = [
            sequence.request.max_new_tokens - sequence.placement.tokens_issued
            for sequence in running
        ]
        if any(sequence.request.is_read_every_step for sequence in running):
            steps = 1
        else:
            steps = min(self._config.flush_every, max(left))
        counts = tuple(min(steps, count) for count in left)
        best = self._best_move()
        self._wasted_rows = 0 if best is None else self._wasted_rows + steps * best.rows_saved
        for sequence, count in zip(running, counts, strict=True):
            sequence.placement.tokens_issued += count
        return Window(tuple(running), steps, counts)

    def next_move(self) -> Move | None:
        """A move, taken as done, once steps over unused rows have cost as much as it does; None so
        far."""
        best = self._best_move() if self._wasted_rows > 0 else None
        if best is None or self._wasted_rows * _COPIED_TOKENS_PER_ROW < best.tokens_copied:
            return None
        self._wasted_rows = 0
        source = self._slots[best.move.source]
        target = self._slots[best.move.target]
        sequence = source.owner
        assert sequence is not None
        source.owner = None
        source.keep_as(target)
        target.give_to(sequence)
        return best.move

    def _best_move(self) -> _MoveEstimate | None:
        """The move of the first or the last row that costs least for each row that a step then
        saves."""
        used = sorted(slot_of(sequence) for sequence in self._in_slots)
        rows = self._step_rows.cover(len(span_of(used))) if used else 0
        if rows <= self._step_rows.cover(len(used)):
            return None
        estimates = [
            self._estimate_move(sequence, used)
            for sequence in self._in_slots
            if slot_of(sequence) in (used[0], used[-1]) and sequence.may_run
        ]
        useful = [estimate for estimate in estimates if estimate.rows_saved > 0]
        return min(
            useful, key=lambda estimate: estimate.tokens_copied / estimate.rows_saved, default=None
        )

    def _estimate_move(self, sequence: Sequence, used: list[int]) -> _MoveEstimate:
        """The best move of the first or the last row. used: the slots in use, in order."""
        source = slot_of(sequence)
        others = [slot for slot in used if slot != source]

        def rows_with(slot: Slot) -> int:
            span = span_of([others[0], others[-1], slot.number])
            return self._step_rows.cover(len(span))

        target = min(self._free_slots(), key=lambda slot: (rows_with(slot), len(slot.kept_tokens)))
        kept = len(target.kept_tokens)
        rows_saved = self._step_rows.cover(len(span_of(used))) - rows_with(target)
        # The kept tokens are copied there and back.
        tokens_copied = self._slots[source].states_end + 2 * kept
        return _MoveEstimate(Move(source, target.number, kept), rows_saved, tokens_copied)

    def _next_read(self, prefilling: list[Sequence]) -> Read:
        """The next part of the first prompt, or some whole prompts with it."""
        first = prefilling[0]
        prompt = first.placement.marked_prompt
        start = first.placement.tokens_read
        end = len(prompt)
        copies: list[Copy] = []
        source, tokens = self._other_holder(first)
        if tokens > start:
            copies.append(Copy(first, source, tokens, self._saved.use(prompt[:tokens])))
            start = tokens
        if self._config.recurrent:
            common = self._common_beginnings(first, prefilling[1:])
            for sequence, tokens in common.items():
                if tokens == start:
                    copies.append(Copy(sequence, slot_of(first), start))
            # Prompts that share a prefix with this one wait until the prefix has been read.
            end = min([end, *(tokens for tokens in common.values() if tokens > start)])
        joined = self._joined(first, start) if end == len(prompt) else {first: start}
        if len(joined) > 1:
            return self._read_together(joined, copies)
        pieces = self._pieces.cut(prompt, start, end, self._config.prefill_chunk_size)
        saves = self._saves(first, start, pieces[-1].stop)
        return Read((first,), pieces, tuple(copies), tuple(saves))

    def _common_beginnings(self, first: Sequence, others: list[Sequence]) -> dict[Sequence, int]:
        """The number of tokens that other sequences can copy from `first` at some point, if they
        have read fewer."""
        prompt = first.placement.marked_prompt
        common: dict[Sequence, int] = {}
        for sequence in others:
            placement = sequence.placement
            tokens = reusable_prefix(prompt, placement.marked_prompt, self._pieces, None)
            may_copy = not sequence.request.reads_every_token
            if may_copy and tokens > placement.tokens_read:
                common[sequence] = tokens
        return common

    def _read_together(self, joined: Mapping[Sequence, int], copies: list[Copy]) -> Read:
        """A read of the rests of several prompts. joined: the number of tokens of each sequence that
        were read."""
        pieces: list[range] = []
        saves: list[Save] = []
        for sequence, start in joined.items():
            end = len(sequence.request.prompt)
            pieces.append(range(start, end))
            saves += self._saves(sequence, start, end)
        return Read(tuple(joined), tuple(pieces), tuple(copies), tuple(saves))

    def _saves(self, sequence: Sequence, start: int, end: int) -> list[Save]:
        """The states to save while the tokens [start, end) of a prompt are read."""
        if self._saved.places == 0:
            return []
        prompt = sequence.placement.marked_prompt
        seen = list(self._saved.beginnings)
        for slot in self._slots:
            if slot.owner is None:
                seen.append(slot.kept_tokens)
            elif slot.owner is not sequence:
                seen.append(slot.owner.placement.marked_prompt)
        departure = max((shared_prefix(prompt, tokens) for tokens in seen), default=0)
        # The same prompt again continues from before its last token, a longer prompt from after it.
        ends = {len(prompt), len(prompt) - 1, departure}
        saves: list[Save] = []
        for tokens in sorted({self._pieces.begin(prompt, place) for place in ends}):
            if start < tokens <= end:
                place = self._saved.add(prompt[:tokens], self._is_held)
                if place is not None:
                    saves.append(Save(slot_of(sequence), tokens, place))
        return saves

    def _is_held(self, tokens: Array) -> bool:
        """Whether some slot has the keys and values of all these tokens, or none are needed."""
        if not self._config.attention:
            return True
        return any(shared_prefix(slot.held_tokens, tokens) == len(tokens) for slot in self._slots)

    def _other_holder(self, sequence: Sequence) -> tuple[int, int]:
        """The other slot that holds most of a prompt's beginning, and the number of its tokens."""
        running = [self._slots[slot_of(other)] for other in self._in_slots if other is not sequence]
        best = 0
        most_tokens = 0
        for slot in self._free_slots() + running:
            tokens = self._reusable(slot, sequence)
            if tokens > most_tokens:
                best = slot.number
                most_tokens = tokens
        return best, most_tokens

    def _reusable(self, slot: Slot, sequence: Sequence) -> int:
        """The number of tokens of a prompt that need not be read after the tokens that a slot
        holds. The last token of the prompt always has to be read, and so do all tokens of a prompt
        that is scored."""
        if sequence.request.reads_every_token:
            return 0
        return self._reusable_after(slot.held_tokens, slot, sequence.placement.marked_prompt)

    def _reusable_after(self, held: Array, slot: Slot, prompt: Array) -> int:
        """The number of tokens of `prompt` that need not be read once a slot holds the tokens `held`."""
        if self._config.recurrent and slot.states_end > self._config.whole_up_to:
            most = shared_prefix(held, prompt) if self._config.attention else len(prompt)
            tokens = self._saved.longest(prompt, min(most, len(prompt) - 1))
            return 0 if self._pieces.run(prompt, tokens) else tokens
        if self._config.reuse_sampled:
            return shared_tokens(held, prompt, self._pieces)
        return reusable_prefix(held, prompt, self._pieces, self._config.tail_size)

    def _loadable(self, stored: Array, prompt: Array) -> int:
        """The number of tokens of `prompt` that need not be read after `stored`, a number of whole
        pieces."""
        if not self._config.recurrent:
            return reusable_prefix(stored, prompt, self._pieces, self._config.tail_size)
        # The stored states follow all of `stored`.
        length = len(stored)
        is_whole = shared_prefix(stored, prompt[:-1]) == length
        return length if is_whole and not self._pieces.run(prompt, length) else 0

    def to_store(self, slot: int, identities: Array) -> tuple[Array, int | None]:
        """The beginning of a prompt that can be stored, after the prompt has just left a slot.

        Args:
            slot: the slot.
            identities: the identities of the prompt, without marks.

        Returns:
            The identities of the whole pieces that the slot keeps, and the place of the recurrent
            states after them, if the model has any. No tokens if the states are not there.
        """
        kept = self._slots[slot].kept_tokens[: len(identities)]
        tokens = kept[: self._pieces.begin(kept, len(kept))]
        if not self._config.recurrent:
            return identities[: len(tokens)], None
        place = self._saved.use(tokens)
        return (NO_TOKENS, None) if place is None else (identities[: len(tokens)], place)

    def _joined(self, first: Sequence, start: int) -> dict[Sequence, int]:
        """The sequences whose prompts are read to their ends with `first`, in the order of their
        slots, each with the number of its tokens that were read. start: that number of `first`."""
        config = self._config
        is_alone = not config.join_prompts or first.request.scored is not None
        if is_alone or (start > 0 and not config.ragged):
            return {first: start}
        begun = {first: start}
        for sequence in self.prefilling:
            tokens_read = sequence.placement.tokens_read
            is_alone = sequence is first or sequence.request.scored is not None
            if not is_alone and (config.ragged or tokens_read == 0):
                begun[sequence] = tokens_read
        ready = {
            slot_of(sequence): sequence
            for sequence, tokens in begun.items()
            if self._is_last_piece(sequence, tokens) and not self._waits_for_copy(sequence, first)
        }
        if slot_of(first) not in ready:
            return {first: start}
        lengths = {
            slot: len(sequence.request.prompt) - begun[sequence] for slot, sequence in ready.items()
        }
        slots = joined_slots(
            lengths,
            slot_of(first),
            self._pieces.size,
            config.prefill_chunk_size,
            ragged=config.ragged,
        )
        return {ready[slot]: begun[ready[slot]] for slot in slots}

    def _is_last_piece(self, sequence: Sequence, tokens_read: int) -> bool:
        """Whether the rest of a prompt is read in a single piece."""
        prompt = sequence.placement.marked_prompt
        return len(self._pieces.cut(prompt, tokens_read, len(prompt))) == 1

    def _waits_for_copy(self, sequence: Sequence, first: Sequence) -> bool:
        """Whether it is cheaper to copy most of a prompt after `first` was read than to read both
        together."""
        if sequence is first or self._config.recurrent:
            return False
        prompt = sequence.placement.marked_prompt
        _, from_other = self._other_holder(sequence)
        from_first = self._reusable_after(
            first.placement.marked_prompt, self._slots[slot_of(first)], prompt
        )
        copied = max(from_other, from_first)
        return copied - sequence.placement.tokens_read > _RUN_COST_TOKENS


def joined_slots(
    lengths: Mapping[int, int],
    slot: int,
    piece_size: int,
    chunk_size: int | None = None,
    *,
    ragged: bool = False,
) -> range:
    """The adjacent slots around `slot` whose prompts are read in a single run.

    They have the same length, at most a piece, so that each row computes the same numbers as in a
    separate run.

    Args:
        lengths: the number of tokens to read for each slot that could be joined.
        slot: the slot that is read in any case.
        piece_size: the number of tokens of a piece.
        chunk_size: the most tokens of a run; by default, only as many as make it faster.
        ragged: whether rows of any lengths compute the same numbers together.
    """
    most = min(_MAX_JOINED_TOKENS, _MAX_JOINED_TOKENS if chunk_size is None else chunk_size)
    joined = [slot]

    def fits(other: int) -> bool:
        if other not in lengths:
            return False
        is_alike = ragged or lengths[other] == lengths[slot] <= piece_size
        return is_alike and sum(lengths[one] for one in (*joined, other)) <= most

    while fits(joined[-1] + 1):
        joined.append(joined[-1] + 1)
    while fits(joined[0] - 1):
        joined.insert(0, joined[0] - 1)
    return span_of(joined)
