"""Runs the scheduler's jobs on the slots, and hands on the tokens of each sequence as they are read.

A job is a chunk of a prompt, some short prompts, or `flush_every` decode steps without a read between them. A row that
ends inside such a window is inert from there on (the graph sees to that), so reading late changes no token. A step
gives a running row at least a token, and more if its guesses were right; a read shows the number. With double
buffering, a thread runs the next job while this thread copies and delivers the tokens of the last.

While some row has to be followed, a window is a single step and only its tokens are read: the optional outputs still
wait for `flush_every` steps, and with them the tokens of the rows that return them, or for the end of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from qsample.checks import check_count
from qsample.contract.arrays import Array
from qsample.contract.tensors import DRAFT_IDS, LENGTH, NUM_NEW, RUNNING, STOPPED
from qsample.errors import QsampleError
from qsample.ort.bound_graph import DeviceThread
from qsample.ort.session import Sessions
from qsample.runtime.decode.image_inputs import image_piece
from qsample.runtime.decode.jobs import Admission, Copy, Read, Save, Window, slot_of, span_of
from qsample.runtime.decode.prefix_file import PrefixFile
from qsample.runtime.decode.scheduler import Scheduler
from qsample.runtime.decode.slots import Slots
from qsample.runtime.decode.stored_prefixes import StoredPrefixes
from qsample.runtime.sequence import DraftStats, Prediction, PrefixStats, Sequence

_VALID_CACHE_STATUSES: Final = (STOPPED, LENGTH)
_FLUSH_EVERY: Final = 4  # if a read waits for the device


def choose_flush_every(sessions: Sessions, flush_every: int | None) -> int:
    """The number of steps between two reads: `flush_every`, or a number that suits the device: on the CPU a read costs
    microseconds, elsewhere it waits for the device. Raises ValueError for less than 1."""
    check_count("flush_every", flush_every)
    return flush_every or (1 if sessions.device == "cpu" else _FLUSH_EVERY)


@dataclass(frozen=True, slots=True)
class _ReadResult:
    """The results of a sequence in a read.

    Attributes:
        sequence: the sequence.
        steps: the number of steps that give it tokens if it still runs.
        tokens: the tokens that are new.
        status: the contract's status.
        drafts: how its guesses fared since it began; None if the package makes none.
    """

    sequence: Sequence
    steps: int
    tokens: list[int]
    status: int
    drafts: DraftStats | None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Optional outputs that were not read yet: of `count` tokens of a sequence, which the first of `steps` gave it."""

    sequence: Sequence
    steps: range
    count: int


class DecodeLoop:
    """Runs the jobs of a scheduler on slots. One thread calls it. `step` calls `deliver` with each sequence that was
    read; that may call `leave`.

    >>> with DecodeLoop(slots, Scheduler(slots.count, config), deliver, double_buffering=True) as loop:
    ...     loop.add(Sequence(SequenceRequest(prompt, parameters, seed=0)))
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
        self._device = (
            DeviceThread("qsample-device")
            if double_buffering and slots.read_while_running
            else None
        )
        self._most = slots.most_new_tokens
        # Those that the newest job gives tokens, and the steps that do, each at least one if the row still runs.
        self._unread: list[tuple[Sequence, range]] = []
        self._waiting: list[_Waiting] = []  # in the order of their steps
        # Slots to stop before the next job, with the identities and the adapter's sha256 of the prompts that left them.
        self._left: dict[int, tuple[Array, str]] = {}
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
        """Let a sequence wait for a slot."""
        if sequence.request.expected_tokens is not None:
            sequence.progress.prediction = Prediction(sequence.request.expected_tokens)
        self._scheduler.add(sequence)

    def leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take a sequence out. Nothing more of it is delivered; its slot is free from the next job on."""
        slot = self._scheduler.leave(sequence, keep=keep)
        self._unread = [(unread, steps) for unread, steps in self._unread if unread is not sequence]
        self._waiting = [waiting for waiting in self._waiting if waiting.sequence is not sequence]
        if slot is not None:
            self._left[slot] = (sequence.identities, sequence.request.adapter_sha256)

    def set_parameter(self, sequence: Sequence, name: str, values: Array) -> None:
        """Replace a parameter of a guided sequence before its next token."""
        if sequence.placement.slot is not None:
            self._slots.set_parameters(sequence.placement.slot, {name: values})

    def step(self) -> None:
        """Run a job on the device, and deliver the tokens that were read."""
        self._stop_left()
        for admission in self._scheduler.admit(None if self._stored is None else self._stored.held):
            self._begin(admission)
        if self._slots.narrows and (move := self._scheduler.next_move()) is not None:
            self._slots.move(move.source, move.target, move.kept)  # with its unread tokens
        if not self._slots.prepared:
            self._read_and_deliver()
            self.read_outputs()
            self._slots.prepare()
        reads_every_step = self._reads_every_step()
        if self._device is None or reads_every_step:
            self._read_and_deliver()
            self._write_drafts()
        job = self._scheduler.next_job()
        if isinstance(job, Window) and job.steps > 1:  # it may write all places
            self.read_outputs()
        if job is None:
            self._read_and_deliver()
        elif self._device is None or reads_every_step:
            for call in self._issue(job):
                call()
            self._read_and_deliver()
        else:
            self._overlap(self._device, job)

    def _reads_every_step(self) -> bool:
        """Whether the tokens of some sequence in a slot have to be read after every step."""
        return any(sequence.request.is_read_every_step for sequence in self._scheduler.in_slots)

    def _write_drafts(self) -> None:
        """Write the guesses of the sequences that run and have a prediction."""
        for sequence in self._scheduler.in_slots:
            progress = sequence.progress
            if progress.prediction is not None and progress.sampled:
                draft = progress.prediction.draft(progress.sampled, self._most - 1)
                self._slots.set_parameters(slot_of(sequence), {DRAFT_IDS.name: draft})

    def _stop_left(self) -> None:
        """Make the slots idle that were left since the last job."""
        for slot, (identities, adapter) in self._left.items():
            save = self._scheduler.save_answer(slot, self._slots.tokens_in_states)
            if save is not None:
                self._save(save)()
            if self._stored is not None and self._stored.keeps:
                tokens, place = self._scheduler.to_store(slot, identities)
                self._stored.keep(tokens, partial(self._slots.unload, slot, place=place), adapter)
            self._slots.stop(slot)
        self._left.clear()

    def _begin(self, admission: Admission) -> None:
        """Get the slot ready that a sequence was given."""
        sequence, copy = admission.sequence, admission.copy
        slot = slot_of(sequence)
        sequence.progress.admitted_at = time.perf_counter()
        if admission.moved is not None:
            # Nothing reads the token ids of a free slot.
            ids = np.zeros(admission.moved.tokens, np.int64)
            self._slots.copy(slot, admission.moved.target, ids)
        if admission.stored is not None:
            self._load(sequence, slot, admission.stored)
        if admission.adapter is not None:
            self._slots.adapters.put(sequence.placement.adapter_place, admission.adapter)
        self._slots.begin(
            slot,
            sequence.request.prompt,
            sequence.request.seed,
            sequence.request.parameters,
            reused=sequence.placement.tokens_reused,
            adapter=sequence.placement.adapter_place,
            images=None if sequence.images is None else sequence.images.prompt,
        )
        if copy.source != slot:
            self._copy(copy)()
        elif copy.saved_place is not None:
            self._slots.saved.restore(copy.saved_place, slot)

    def _load(self, sequence: Sequence, slot: int, held: PrefixFile) -> None:
        """Load the beginning of a prompt into its slot; if it is gone, the prompt will be read."""
        assert self._stored is not None
        parts = self._stored.read(held, sequence.placement.tokens_reused)
        if parts:
            self._slots.load(slot, parts)
        else:
            self._scheduler.forget_reused_tokens(sequence)

    def close(self) -> None:
        """Wait for the device and end its thread."""
        if self._device is not None:
            self._device.shutdown()

    def _overlap(self, device: DeviceThread, job: Read | Window) -> None:
        """Copy this side's values while the first call of `job` writes the other side; deliver them during the rest.
        The second call would write to this side again, so it is handed over after the copy."""
        step, unread = self._slots.step, self._unread
        first, *rest = self._issue(job)
        running: list[Future[None]] = [device.submit(first)]
        try:
            found = self._read(unread, step)
            running += [device.submit(call) for call in rest]
            self._hand_out(found)
        finally:
            for call in running:
                call.result()

    def _issue(self, job: Read | Window) -> list[Callable[[], None]]:
        """The runs of the graph that a job consists of."""
        now = self._slots.step
        if isinstance(job, Window):
            counts = zip(job.sequences, job.counts, strict=True)
            self._unread = [
                (sequence, range(now + 1, now + 1 + count)) for sequence, count in counts
            ]
            self.steps += job.steps
            return [
                partial(self._slots.decode, job.rows, wait=step == job.steps)
                for step in range(1, job.steps + 1)
            ]
        self._unread = (
            [(sequence, range(now, now + 1)) for sequence in job.sequences] if job.last else []
        )
        calls = [self._copy(copy) for copy in job.copies]
        for sequence, _ in self._unread:  # its whole prompt is issued
            self.prefixes.prompts += 1
            self.prefixes.prompt_tokens += len(sequence.request.prompt)
            self.prefixes.hits += sequence.placement.tokens_reused > 0
            self.prefixes.cached_tokens += sequence.placement.tokens_reused
        first, *others = job.sequences
        if others:
            pairs = list(zip(job.sequences, job.pieces, strict=True))
            calls += [self._prefill(pairs, emit=True), *map(self._save, job.saves)]
        else:
            for piece in job.pieces:
                emit = piece.stop == len(first.request.prompt)
                saves = [self._save(save) for save in job.saves if save.tokens == piece.stop]
                wait = bool(saves) or piece is job.pieces[-1]
                calls += [self._prefill([(first, piece)], emit=emit, wait=wait), *saves]
        for sequence, _ in self._unread:
            if sequence.images is not None:
                sequence.images.features = None  # the calls have them
        return calls

    def _prefill(
        self, pieces: list[tuple[Sequence, range]], *, emit: bool, wait: bool = True
    ) -> Callable[[], None]:
        """The call for pieces of prompts in adjacent slots."""
        ids = [one.request.prompt[piece.start : piece.stop] for one, piece in pieces]
        images = [
            None
            if one.images is None
            else image_piece(one.images.prompt, one.images.features, piece)
            for one, piece in pieces
        ]
        return partial(
            self._slots.prefill, slot_of(pieces[0][0]), *ids, emit=emit, wait=wait, images=images
        )

    def _copy(self, copy: Copy) -> Callable[[], None]:
        """The call for it."""
        tokens = copy.sequence.request.prompt[: copy.tokens]
        return partial(
            self._slots.copy, copy.source, slot_of(copy.sequence), tokens, copy.saved_place
        )

    def _save(self, save: Save) -> Callable[[], None]:
        """The call for it."""
        self.prefixes.saved_states = self._scheduler.saved_states
        self.prefixes.saved_bytes = self._scheduler.saved_states * self._slots.saved.nbytes
        return partial(self._slots.saved.save, save.slot, save.place)

    def _read_and_deliver(self) -> None:
        unread, self._unread = self._unread, []
        self._hand_out(self._read(unread))

    def _read(
        self, unread: list[tuple[Sequence, range]], step: int | None = None
    ) -> list[_ReadResult]:
        """Read the tokens of the steps up to `step`, by default the newest, and the optional outputs unless they can
        wait."""
        unread = [
            (sequence, steps) for sequence, steps in unread if sequence.placement.slot is not None
        ]  # the rest has left
        if not unread:
            return []
        snapshot = self._slots.read(step, self._most * max(len(steps) for _, steps in unread))
        found = []
        for sequence, steps in unread:
            slot, known = (
                slot_of(sequence),
                len(sequence.request.prompt) + len(sequence.progress.sampled),
            )
            tokens = snapshot.tokens_from(slot, known)
            drafts = snapshot.drafts[slot] if snapshot.drafts else None
            found.append(
                _ReadResult(sequence, len(steps), tokens, int(snapshot.status[slot]), drafts)
            )
            if sequence.request.output_names and tokens:
                self._waiting.append(_Waiting(sequence, steps, len(tokens)))
        if (
            not self._reads_every_step()
            or len(self._steps_waiting()) >= self._slots.flush_every
            or any(one.status != RUNNING for one in found)
        ):
            self.read_outputs()
        return found

    def _steps_waiting(self) -> range:
        """From the first step whose outputs wait to be read to the last."""
        ends = [end for one in self._waiting for end in (one.steps.start, one.steps.stop)]
        return range(min(ends, default=0), max(ends, default=0))

    def read_outputs(self) -> None:
        """Give the tokens that were read their optional outputs, all in a single read, unless they have them."""
        steps, waiting, self._waiting = self._steps_waiting(), self._waiting, []
        if not waiting:
            return
        rows = span_of(slot_of(one.sequence) for one in waiting)
        names = {name for one in waiting for name in one.sequence.request.output_names}
        values = self._slots.read_outputs(steps, names, rows)
        counts = values.pop(NUM_NEW.name, None)
        for one in waiting:
            row = slot_of(one.sequence) - rows.start
            wanted = one.sequence.request.output_names
            outputs = one.sequence.progress.outputs
            end = len(outputs) + one.count
            for index in range(one.steps.start - steps.start, one.steps.stop - steps.start):
                given = 1 if counts is None else int(counts[index, row])
                for token in range(min(given, end - len(outputs))):
                    found = {name: values[name][index, row] for name in wanted}
                    if counts is not None:
                        found = {
                            name: np.array(value[token], ndmin=1) for name, value in found.items()
                        }
                    # A copy, so that a token keeps none of the outputs of the other rows.
                    outputs.append({name: value.copy() for name, value in found.items()})

    def _hand_out(self, results: list[_ReadResult]) -> None:
        """Add the results of a read to their sequences, and deliver these."""
        for result in results:
            sequence = result.sequence
            if sequence.placement.slot is None:  # it left meanwhile
                continue
            progress = sequence.progress
            progress.sampled += result.tokens
            progress.status = result.status
            if result.drafts is not None:
                progress.drafts = result.drafts
            if result.status == RUNNING:
                self._check_contract(result)
            else:
                self.leave(sequence, keep=result.status in _VALID_CACHE_STATUSES)
            accepted_guesses = len(result.tokens) - result.steps
            if accepted_guesses > 0:
                self._scheduler.count_accepted_guesses(sequence, accepted_guesses)
            self._deliver(sequence)
            if sequence.stop_string is not None and sequence.placement.slot is not None:
                self.leave(sequence)

    def _check_contract(self, result: _ReadResult) -> None:
        """Raise QsampleError if a row that still runs has too few or too many tokens."""
        new = len(result.tokens)
        total = len(result.sequence.progress.sampled)
        limit = result.sequence.request.max_new_tokens
        is_plausible = result.steps <= new <= result.steps * self._most
        if not is_plausible or total >= limit:
            raise QsampleError(
                f"a row still runs with {total} new tokens of at most {limit}, the last {new} from "
                f"{result.steps} steps; the graph does not follow the decode contract"
            )
