"""Runs the scheduler's jobs on the slots, and hands on the tokens of each sequence as they are read.

A job is a chunk of a prompt, some short prompts, or `flush_every` decode steps without a read between them. A row that
ends inside such a window is inert from there on (the graph sees to that), so reading late changes no token. A step
gives a running row at least a token, and more if its guesses were right; a read shows the number. With double
buffering, a thread runs the next job while this thread copies and delivers the tokens of the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Final

import numpy as np

from qsample.checks import check_count
from qsample.contract.arrays import Array
from qsample.contract.tensors import DRAFT_IDS, LENGTH, RUNNING, STOPPED
from qsample.errors import QsampleError
from qsample.ort.bound_graph import DeviceThread
from qsample.ort.session import Sessions
from qsample.runtime.decode.jobs import Admission, Copy, Read, Save, Window, slot_of
from qsample.runtime.decode.prefix_file import PrefixFile
from qsample.runtime.decode.scheduler import Scheduler
from qsample.runtime.decode.slots import Slots, Snapshot
from qsample.runtime.decode.stored_prefixes import StoredPrefixes
from qsample.runtime.sequence import PrefixStats, Sequence

_CACHE_IS_VALID: Final = (STOPPED, LENGTH)
_FLUSH_EVERY: Final = 4  # if a read waits for the device


def choose_flush_every(sessions: Sessions, flush_every: int | None, *, guided: bool = False) -> int:
    """The number of steps between two reads: `flush_every`, or a number that suits the device: on the CPU a read costs
    microseconds, elsewhere it waits for the device. Raises ValueError if `flush_every` is more than 1 and every step
    has to be read: for optional outputs, or if `guided`, as a function, or a prediction, must see every token."""
    check_count("flush_every", flush_every)
    optional = [spec.name for spec in sessions.interface.token_outputs]
    if guided or optional:
        if flush_every is not None and flush_every > 1:
            reason = (
                f"the package returns {', '.join(optional)}"
                if optional
                else "allowed_tokens is a function, or prediction given"
            )
            raise ValueError(f"flush_every is {flush_every} and {reason}, which takes a read after every token; give 1")
        return 1
    return flush_every or (1 if sessions.device == "cpu" else _FLUSH_EVERY)


class DecodeLoop:
    """Runs the jobs of a scheduler on slots. One thread calls it. `step` calls `deliver` with each sequence that was
    read; that may call `leave`.

    >>> with DecodeLoop(slots, Scheduler(slots.count, config), deliver, double_buffering=True) as loop:
    ...     loop.add(Sequence(prompt, parameters, seed=0))
    ...     while loop.busy:
    ...         loop.step()
    """

    def __init__(
        self,
        slots: Slots,
        scheduler: Scheduler,
        deliver: Callable[[Sequence], None],
        *,
        double_buffering: bool,
        stored: StoredPrefixes | None = None,
    ) -> None:
        self._slots = slots
        self._stored = stored
        self._scheduler = scheduler
        self._deliver = deliver
        self._device = DeviceThread("qsample-device") if double_buffering and slots.read_while_running else None
        self._most = slots.most_new_tokens
        # Those that the newest job gives tokens, and the least that each gets if it still runs.
        self._unread: list[tuple[Sequence, int]] = []
        self._left: set[int] = set()  # slots to stop before the next job
        self.prefixes = PrefixStats()
        self.steps = 0  # decode steps, each a run of the graph

    def __enter__(self) -> DecodeLoop:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None and self._stored is not None:
            self._stop_left()  # which keeps their prompts
        self.close()

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or is in a slot, or the prompt of a sequence is still to be kept."""
        to_keep = self._stored is not None and self._left
        return bool(self._scheduler.waiting or self._scheduler.in_slots or to_keep)

    @property
    def prefilling(self) -> bool:
        """Whether some sequence in a slot has no first token yet."""
        return bool(self._scheduler.prefilling)

    def add(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)

    def leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take a sequence out. Nothing more of it is delivered; its slot is free from the next job on."""
        slot = self._scheduler.leave(sequence, keep=keep)
        self._unread = [(unread, count) for unread, count in self._unread if unread is not sequence]
        if slot is not None:
            self._left.add(slot)

    def set_parameter(self, sequence: Sequence, name: str, values: Array) -> None:
        """Replace a parameter of a guided sequence before its next token."""
        if sequence.slot is not None:
            self._slots.set_parameters(sequence.slot, {name: values})

    def step(self) -> None:
        """Run a job on the device, and deliver the tokens that were read."""
        self._stop_left()
        for admission in self._scheduler.admit(None if self._stored is None else self._stored.held):
            self._begin(admission)
        if self._slots.narrows and (move := self._scheduler.next_move()) is not None:
            self._slots.move(move.source, move.target, move.kept)  # with its unread tokens
        if not self._slots.prepared:
            self._read_and_deliver()
            self._slots.prepare()
        followed = any(sequence.followed for sequence in self._scheduler.in_slots)
        if self._device is None or followed:
            self._read_and_deliver()
            self._write_drafts()
        job = self._scheduler.next_job()
        if job is None:
            self._read_and_deliver()
        elif self._device is None or followed:
            for call in self._issue(job):
                call()
            self._read_and_deliver()
        else:
            self._overlap(self._device, job)

    def _write_drafts(self) -> None:
        """Write the guesses of the sequences that run and have a prediction."""
        for sequence in self._scheduler.in_slots:
            if sequence.prediction is not None and sequence.sampled:
                draft = sequence.prediction.draft(sequence.sampled, self._most - 1)
                self._slots.set_parameters(slot_of(sequence), {DRAFT_IDS.name: draft})

    def _stop_left(self) -> None:
        """Make the slots idle that were left since the last job."""
        for slot in self._left:
            save = self._scheduler.save_answer(slot, self._slots.tokens_in_states)
            if save is not None:
                self._save(save)()
            if self._stored is not None and self._stored.keeps:
                tokens, place, adapter = self._scheduler.to_store(slot)
                self._stored.keep(tokens, partial(self._slots.unload, slot, place=place), adapter)
            self._slots.stop(slot)
        self._left.clear()

    def _begin(self, admission: Admission) -> None:
        """Get the slot ready that a sequence was given."""
        sequence, copy = admission.sequence, admission.copy
        slot = slot_of(sequence)
        sequence.admitted_at = time.perf_counter()
        if admission.moved is not None:
            self._slots.copy(slot, *admission.moved)
        if admission.stored is not None:
            self._load(sequence, slot, admission.stored)
        if admission.adapter is not None:
            self._slots.adapters.put(sequence.adapter_place, admission.adapter)
        self._slots.begin(
            slot, sequence.prompt, sequence.seed, sequence.parameters, sequence.reused, sequence.adapter_place
        )
        if copy.source != slot:
            self._copy(copy)()
        elif copy.place is not None:
            self._slots.saved.restore(copy.place, slot)

    def _load(self, sequence: Sequence, slot: int, held: PrefixFile) -> None:
        """Load the beginning of a prompt into its slot; if it is gone, the prompt will be read."""
        assert self._stored is not None
        parts = self._stored.read(held, sequence.reused)
        if parts:
            self._slots.load(slot, parts)
        else:
            sequence.reused = sequence.consumed = 0

    def close(self) -> None:
        """Wait for the device and end its thread."""
        if self._device is not None:
            self._device.shutdown()

    def _overlap(self, device: DeviceThread, job: Read | Window) -> None:
        """Copy this side's values while the first call of `job` writes the other side; deliver them during the rest.
        The second call would write to this side again, so it is handed over after the copy."""
        side, unread = self._slots.side, self._unread
        first, *rest = self._issue(job)
        running: list[Future[None]] = [device.submit(first)]
        try:
            snapshot = self._slots.read(side, self._most_of(unread)) if unread else None
            running += [device.submit(call) for call in rest]
            if snapshot is not None:
                self._hand_out(unread, snapshot)
        finally:
            for call in running:
                call.result()

    def _issue(self, job: Read | Window) -> list[Callable[[], None]]:
        """The runs of the graph that a job consists of."""
        if isinstance(job, Window):
            self._unread = list(zip(job.sequences, job.counts, strict=True))
            self.steps += job.steps
            return [partial(self._slots.decode, job.rows, wait=step == job.steps) for step in range(1, job.steps + 1)]
        self._unread = [(sequence, 1) for sequence in job.sequences] if job.last else []
        calls = [self._copy(copy) for copy in job.copies]
        for sequence, _ in self._unread:  # its whole prompt is issued
            self.prefixes.prompts += 1
            self.prefixes.prompt_tokens += len(sequence.prompt)
            self.prefixes.hits += sequence.reused > 0
            self.prefixes.cached_tokens += sequence.reused
        first, *others = job.sequences
        prefill = partial(self._slots.prefill, slot_of(first))
        if others:
            pairs = zip(job.sequences, job.pieces, strict=True)
            ids = [sequence.prompt[piece.start : piece.stop] for sequence, piece in pairs]
            return [*calls, partial(prefill, *ids, emit=True), *map(self._save, job.saves)]
        for piece in job.pieces:
            emit = piece.stop == len(first.prompt)
            saves = [self._save(save) for save in job.saves if save.tokens == piece.stop]
            wait = bool(saves) or piece is job.pieces[-1]
            calls += [partial(prefill, first.prompt[piece.start : piece.stop], emit=emit, wait=wait), *saves]
        return calls

    def _copy(self, copy: Copy) -> Callable[[], None]:
        """The call for it."""
        tokens = copy.sequence.prompt[: copy.tokens]
        return partial(self._slots.copy, copy.source, slot_of(copy.sequence), tokens, copy.place)

    def _save(self, save: Save) -> Callable[[], None]:
        """The call for it."""
        self.prefixes.saved_states = self._scheduler.saved_states
        self.prefixes.saved_bytes = self._scheduler.saved_states * self._slots.saved.nbytes
        return partial(self._slots.saved.save, save.slot, save.place)

    def _read_and_deliver(self) -> None:
        if self._unread:
            unread, self._unread = self._unread, []
            self._hand_out(unread, self._slots.read(newest=self._most_of(unread)))

    def _most_of(self, unread: list[tuple[Sequence, int]]) -> int:
        """The most new tokens of a row."""
        return self._most * max(issued for _, issued in unread)

    def _hand_out(self, unread: list[tuple[Sequence, int]], snapshot: Snapshot) -> None:
        for sequence, issued in unread:
            slot = sequence.slot
            if slot is None:  # it left meanwhile
                continue
            known, status = len(sequence.prompt) + len(sequence.sampled), int(snapshot.status[slot])
            tokens = snapshot.tokens_from(slot, known)
            sequence.sampled += tokens
            if snapshot.outputs:  # such packages are read after every step
                rows = {name: values[slot] for name, values in snapshot.outputs.items()}
                sequence.outputs += _of_each_token(rows, len(tokens), several=self._most > 1)
            if snapshot.drafts:
                sequence.drafts = snapshot.drafts[slot]
            sequence.status = status
            if status != RUNNING:
                self.leave(sequence, keep=status in _CACHE_IS_VALID)
            elif not issued <= len(tokens) <= issued * self._most or len(sequence.sampled) >= sequence.limit:
                raise QsampleError(
                    f"a row still runs with {len(sequence.sampled)} new tokens of at most {sequence.limit}, the last "
                    f"{len(tokens)} from {issued} steps; the graph does not follow the decode contract"
                )
            sequence.issued += max(len(tokens) - issued, 0)
            self._deliver(sequence)
            if sequence.status != status and sequence.slot is not None:  # a stop string ended it
                self.leave(sequence)


def _of_each_token(outputs: Mapping[str, Array], count: int, *, several: bool) -> list[Mapping[str, Array]]:
    """The optional outputs of a row for each of its `count` new tokens. several: they have an axis of tokens."""
    if not several:
        return [{name: values.copy() for name, values in outputs.items()}] * count
    return [{name: np.array(values[token], ndmin=1) for name, values in outputs.items()} for token in range(count)]
