"""Runs the scheduler's jobs on the slots, and delivers the tokens of each sequence as they are read.

A job is a chunk of a prompt, some short prompts, or `flush_every` decode steps without a read between
them. A row that ends inside such a window is inert from there on (the graph sees to that), so
reading late changes no token. A step gives a running row at least one token, and more if its guesses
were right; a read shows how many. With double buffering, a thread runs the next job while this thread
copies and delivers the tokens of the last.

While the tokens of some row have to be read after every step, a window is a single step and only the
tokens are read. The optional outputs still wait for `flush_every` steps, or for the end of a row, and
the tokens of the rows that return them wait with them.
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
from qsample.runtime.decode.image_inputs import ImagePiece, image_piece
from qsample.runtime.decode.jobs import Admission, Copy, Read, Save, Window, slot_of, span_of
from qsample.runtime.decode.prefix_file import PrefixFile
from qsample.runtime.decode.scheduler import Scheduler
from qsample.runtime.decode.slots import Slots
from qsample.runtime.decode.stored_prefixes import StoredPrefixes
from qsample.runtime.sequence import DraftStats, Prediction, PrefixStats, ScoredTokens, Sequence

# The statuses of rows that have ended with a cache from which another row can continue.
_VALID_CACHE_STATUSES: Final = (STOPPED, LENGTH)
# The steps between two reads on devices for which a read has to wait.
_DEVICE_FLUSH_EVERY: Final = 4

_DeviceCall = Callable[[], None]


def choose_flush_every(sessions: Sessions, flush_every: int | None) -> int:
    """The number of decode steps between two reads.

    Args:
        sessions: the graphs of the package.
        flush_every: the caller's choice, at least 1; None for a number that suits the device. On the
            CPU a read costs microseconds, elsewhere it waits for the device.

    Raises:
        ValueError: If `flush_every` is not a positive integer.
    """
    check_count("flush_every", flush_every)
    if flush_every is not None:
        return flush_every
    return 1 if sessions.device == "cpu" else _DEVICE_FLUSH_EVERY


@dataclass(frozen=True, slots=True)
class _UnreadTokens:
    """The steps that give a sequence tokens, at least one each if it still runs."""

    sequence: Sequence
    steps: range


@dataclass(frozen=True, slots=True)
class _UnreadOutputs:
    """The optional outputs of the `count` tokens that the first of `steps` gave a sequence."""

    sequence: Sequence
    steps: range
    count: int


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
class _LeftPrompt:
    """The prompt of a sequence that has left its slot.

    Attributes:
        identities: [n] int64, the identities of its tokens.
        adapter_sha256: the sha256 of its adapter; "" for none.
    """

    identities: Array
    adapter_sha256: str


class DecodeLoop:
    """Runs the jobs of a scheduler on slots. One thread calls it. `step` calls `deliver` with each
    sequence that was read; `deliver` may call `leave`.

    >>> with DecodeLoop(slots, Scheduler(slots.count, config), deliver, double_buffering=True) as loop:
    ...     loop.add(Sequence(SequenceRequest(prompt, parameters, seed=0)))
    ...     while loop.busy:
    ...         loop.step()

    Attributes:
        prefixes: the prompts that were read, and their beginnings that were not read again.
        steps: the number of decode steps, each a run of the graph.
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
        """Start the device's thread, if there is one.

        Args:
            slots: the rows on the device.
            scheduler: the scheduler of these rows.
            deliver: called with each sequence of which tokens were read, or that has ended.
            double_buffering: run a job while the results of the job before it are read, if the
                device allows it.
            stored: the prefixes that are loaded into slots, and the folder that keeps prompts; None
                for neither.
        """
        self._slots = slots
        self._stored = stored
        self._scheduler = scheduler
        self._deliver = deliver
        self._device: DeviceThread | None = None
        if double_buffering and slots.read_while_running:
            self._device = DeviceThread("qsample-device")
        self._max_tokens_per_step = slots.most_new_tokens
        # The steps of the newest job, until their tokens are read.
        self._unread_tokens: list[_UnreadTokens] = []
        # The tokens that were read without their outputs, in the order of their steps.
        self._unread_outputs: list[_UnreadOutputs] = []
        # The prompts that left their slots since the last job. The next job stops these slots.
        self._left_prompts: dict[int, _LeftPrompt] = {}
        self.prefixes = PrefixStats()
        self.steps = 0

    def __enter__(self) -> DecodeLoop:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None and self._stored is not None:
            self._stop_left_slots()  # keeps their prompts
        self.close()

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or is in a slot, or a prompt is still to be kept."""
        if self._scheduler.waiting > 0 or self._scheduler.in_slots:
            return True
        return self._stored is not None and bool(self._left_prompts)

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
        """Take a sequence out. Nothing more of it is delivered; its slot is free from the next job
        on. keep: whether other sequences may continue from its cache."""
        slot = self._scheduler.leave(sequence, keep=keep)
        self._unread_tokens = [
            unread for unread in self._unread_tokens if unread.sequence is not sequence
        ]
        self._unread_outputs = [
            unread for unread in self._unread_outputs if unread.sequence is not sequence
        ]
        if slot is not None:
            left = _LeftPrompt(sequence.identities, sequence.request.adapter_sha256)
            self._left_prompts[slot] = left

    def set_parameter(self, sequence: Sequence, name: str, values: Array) -> None:
        """Replace a parameter of a guided sequence before its next token."""
        if sequence.placement.slot is not None:
            self._slots.set_parameters(sequence.placement.slot, {name: values})

    def step(self) -> None:
        """Run a job on the device, and deliver the tokens that were read."""
        self._stop_left_slots()
        stored_prefixes = None if self._stored is None else self._stored.held
        for admission in self._scheduler.admit(stored_prefixes, self._slots.grammars.takes):
            self._begin(admission)
        self._move_row()
        if not self._slots.prepared:
            self._read_and_deliver()
            self.read_outputs()
            self._slots.prepare()
        reads_every_step = self._reads_every_step()
        if self._device is None or reads_every_step:
            self._read_and_deliver()
            self._write_drafts()
        job = self._scheduler.next_job()
        if job is None:
            self._read_and_deliver()
            return
        if isinstance(job, Window) and job.steps > 1:
            self.read_outputs()  # the window may overwrite all outputs that wait
        if self._device is None or reads_every_step:
            for call in self._issue(job):
                call()
            self._read_and_deliver()
        else:
            self._overlap(self._device, job)

    def close(self) -> None:
        """Wait for the device and end its thread."""
        if self._device is not None:
            self._device.shutdown()

    def read_outputs(self) -> None:
        """Give the tokens that were read their optional outputs, all in a single read."""
        unread = self._unread_outputs
        if not unread:
            return
        steps = self._steps_of_unread_outputs()
        self._unread_outputs = []
        rows = span_of(slot_of(outputs.sequence) for outputs in unread)
        names: set[str] = set()
        for outputs in unread:
            names.update(outputs.sequence.request.output_names)
        values = self._slots.read_outputs(steps, names, rows)
        tokens_per_step = values.pop(NUM_NEW.name, None)
        for outputs in unread:
            self._add_outputs(outputs, values, tokens_per_step, steps, rows)

    def _add_outputs(
        self,
        unread: _UnreadOutputs,
        values: dict[str, Array],
        tokens_per_step: Array | None,
        steps: range,
        rows: range,
    ) -> None:
        """Add the outputs of a read to the tokens of a sequence.

        Args:
            unread: the tokens.
            values: the optional outputs by name, [steps, rows, ...].
            tokens_per_step: [steps, rows], the number of tokens that each step gave; None for 1.
            steps: the steps of the read.
            rows: the slots of the read.
        """
        row = slot_of(unread.sequence) - rows.start
        outputs = unread.sequence.progress.outputs
        end = len(outputs) + unread.count
        for step in unread.steps:
            index = step - steps.start
            count = 1 if tokens_per_step is None else int(tokens_per_step[index, row])
            for token in range(min(count, end - len(outputs))):
                token_outputs: dict[str, Array] = {}
                for name in unread.sequence.request.output_names:
                    value = values[name][index, row]
                    if tokens_per_step is not None:
                        value = np.array(value[token], ndmin=1)
                    # A copy, so that a token does not keep the outputs of other rows in memory.
                    token_outputs[name] = value.copy()
                outputs.append(token_outputs)

    def _reads_every_step(self) -> bool:
        """Whether the tokens of some sequence in a slot have to be read after every step."""
        return any(sequence.request.is_read_every_step for sequence in self._scheduler.in_slots)

    def _write_drafts(self) -> None:
        """Write the guesses of the sequences that run and have a prediction."""
        for sequence in self._scheduler.in_slots:
            progress = sequence.progress
            if progress.prediction is not None and progress.sampled:
                draft = progress.prediction.draft(progress.sampled, self._max_tokens_per_step - 1)
                self._slots.set_parameters(slot_of(sequence), {DRAFT_IDS.name: draft})

    def _stop_left_slots(self) -> None:
        """Make the slots idle that were left since the last job, and keep their prompts."""
        for slot, left in self._left_prompts.items():
            save = self._scheduler.save_answer(slot, self._slots.tokens_in_states)
            if save is not None:
                self._save(save)()
            if self._stored is not None and self._stored.keeps:
                tokens, place = self._scheduler.to_store(slot, left.identities)
                read_states = partial(self._slots.unload, slot, place=place)
                self._stored.keep(tokens, read_states, left.adapter_sha256)
            self._slots.stop(slot)
        self._left_prompts.clear()

    def _begin(self, admission: Admission) -> None:
        """Prepare the slot assigned to a sequence."""
        sequence = admission.sequence
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
            grammar=sequence.request.tables,
        )
        copy = admission.copy
        if copy.source != slot:
            self._copy(copy)()
        elif copy.saved_place is not None:
            self._slots.saved.restore(copy.saved_place, slot)

    def _load(self, sequence: Sequence, slot: int, prefix: PrefixFile) -> None:
        """Load the beginning of a prompt into its slot. If its file is gone, the prompt is read."""
        assert self._stored is not None
        parts = self._stored.read(prefix, sequence.placement.tokens_reused)
        if parts:
            self._slots.load(slot, parts)
        else:
            self._scheduler.forget_reused_tokens(sequence)

    def _move_row(self) -> None:
        """Move a row, with its unread tokens, closer to the other rows if the scheduler asks for it."""
        move = self._scheduler.next_move() if self._slots.narrows else None
        if move is not None:
            self._slots.move(move.source, move.target, move.kept)

    def _overlap(self, device: DeviceThread, job: Read | Window) -> None:
        """Run a job in the device's thread while the results of the job before it are read.

        The first call of the job writes the other side of the states, so this side can be copied
        meanwhile. The second call writes to this side again, so it is submitted after the copy.
        """
        step = self._slots.step
        unread = self._unread_tokens
        first, *rest = self._issue(job)
        running: list[Future[None]] = [device.submit(first)]
        try:
            results = self._read(unread, step)
            for call in rest:
                running.append(device.submit(call))
            self._hand_out(results)
        finally:
            for future in running:
                future.result()

    def _issue(self, job: Read | Window) -> list[_DeviceCall]:
        """The calls that a job consists of; their tokens become the unread tokens."""
        return self._issue_window(job) if isinstance(job, Window) else self._issue_read(job)

    def _issue_window(self, window: Window) -> list[_DeviceCall]:
        first = self._slots.step + 1
        self._unread_tokens = [
            _UnreadTokens(sequence, range(first, first + count))
            for sequence, count in zip(window.sequences, window.counts, strict=True)
        ]
        self.steps += window.steps
        rows = window.rows
        calls: list[_DeviceCall] = [partial(self._slots.decode, rows, wait=False)] * window.steps
        calls[-1] = partial(self._slots.decode, rows, wait=True)
        return calls

    def _issue_read(self, read: Read) -> list[_DeviceCall]:
        step = self._slots.step
        calls = [self._copy(copy) for copy in read.copies]
        if len(read.sequences) > 1:
            pieces = list(zip(read.sequences, read.pieces, strict=True))
            calls.append(self._prefill(pieces, emit=True))
            calls += [self._save(save) for save in read.saves]
        else:
            calls += self._calls_for_pieces(read)
        self._unread_tokens = []
        if read.last:  # the calls have the whole prompts, and their images
            for sequence in read.sequences:
                self._unread_tokens.append(_UnreadTokens(sequence, range(step, step + 1)))
                self._count_prompt(sequence)
                if sequence.images is not None:
                    sequence.images.features = None
        return calls

    def _calls_for_pieces(self, read: Read) -> list[_DeviceCall]:
        """The calls that read pieces of the only prompt."""
        (sequence,) = read.sequences
        calls: list[_DeviceCall] = []
        for piece in read.pieces:
            emit = piece.stop == len(sequence.request.prompt)
            saves = [self._save(save) for save in read.saves if save.tokens == piece.stop]
            wait = bool(saves) or piece is read.pieces[-1]
            scored = sequence.request.scored
            if scored is None:
                calls.append(self._prefill([(sequence, piece)], emit=emit, wait=wait))
            else:
                in_piece = scored.in_piece(piece)
                calls.append(partial(self._score, sequence, piece, in_piece, emit=emit))
            calls += saves
        return calls

    def _count_prompt(self, sequence: Sequence) -> None:
        """Count a prompt that is read to its end."""
        reused = sequence.placement.tokens_reused
        self.prefixes.prompts += 1
        self.prefixes.prompt_tokens += len(sequence.request.prompt)
        self.prefixes.hits += int(reused > 0)
        self.prefixes.cached_tokens += reused

    def _prefill(
        self, pieces: list[tuple[Sequence, range]], *, emit: bool, wait: bool = True
    ) -> _DeviceCall:
        """The call for pieces of prompts in adjacent slots. emit, wait: see `Slots.prefill`."""
        ids = [sequence.request.prompt[piece.start : piece.stop] for sequence, piece in pieces]
        images = [_image_piece(sequence, piece) for sequence, piece in pieces]
        first_slot = slot_of(pieces[0][0])
        return partial(self._slots.prefill, first_slot, *ids, emit=emit, wait=wait, images=images)

    def _score(self, sequence: Sequence, piece: range, scored: ScoredTokens, *, emit: bool) -> None:
        """Read a piece of a prompt, and keep the scores of the tokens after it."""
        ids = sequence.request.prompt[piece.start : piece.stop]
        scores = self._slots.prefill_scored(slot_of(sequence), ids, scored, emit=emit)
        sequence.progress.scores.append(scores)

    def _copy(self, copy: Copy) -> _DeviceCall:
        """The call that makes a copy."""
        target = slot_of(copy.sequence)
        tokens = copy.sequence.request.prompt[: copy.tokens]
        return partial(self._slots.copy, copy.source, target, tokens, copy.saved_place)

    def _save(self, save: Save) -> _DeviceCall:
        """The call that saves states."""
        self.prefixes.saved_states = self._scheduler.saved_states
        self.prefixes.saved_bytes = self._scheduler.saved_states * self._slots.saved.nbytes
        return partial(self._slots.saved.save, save.slot, save.place)

    def _read_and_deliver(self) -> None:
        """Read and deliver the tokens of the newest job."""
        unread = self._unread_tokens
        self._unread_tokens = []
        self._hand_out(self._read(unread))

    def _read(self, unread: list[_UnreadTokens], step: int | None = None) -> list[_ReadResult]:
        """Read tokens, and the optional outputs unless they can wait. step: the newest step whose
        tokens are read; by default the newest of all."""
        in_slots = [one for one in unread if one.sequence.placement.slot is not None]
        if not in_slots:
            return []
        most_steps = max(len(unread_tokens.steps) for unread_tokens in in_slots)
        snapshot = self._slots.read(step, self._max_tokens_per_step * most_steps)
        results: list[_ReadResult] = []
        for unread_tokens in in_slots:
            sequence = unread_tokens.sequence
            steps = unread_tokens.steps
            slot = slot_of(sequence)
            known = len(sequence.request.prompt) + len(sequence.progress.sampled)
            tokens = snapshot.tokens_from(slot, known)
            status = int(snapshot.status[slot])
            drafts = snapshot.drafts[slot] if snapshot.drafts else None
            results.append(_ReadResult(sequence, len(steps), tokens, status, drafts))
            if sequence.request.output_names and tokens:
                self._unread_outputs.append(_UnreadOutputs(sequence, steps, len(tokens)))
        if not self._outputs_can_wait(results):
            self.read_outputs()
        return results

    def _outputs_can_wait(self, results: list[_ReadResult]) -> bool:
        """Whether the optional outputs may be read later than the tokens of these results."""
        if not self._reads_every_step():
            return False
        if any(result.status != RUNNING for result in results):
            return False
        return len(self._steps_of_unread_outputs()) < self._slots.flush_every

    def _steps_of_unread_outputs(self) -> range:
        """The steps from the first whose outputs are unread to the last."""
        starts = [unread.steps.start for unread in self._unread_outputs]
        stops = [unread.steps.stop for unread in self._unread_outputs]
        return range(min(starts, default=0), max(stops, default=0))

    def _hand_out(self, results: list[_ReadResult]) -> None:
        """Add the results of a read to their sequences, and deliver these."""
        for result in results:
            sequence = result.sequence
            if sequence.placement.slot is None:  # it left meanwhile
                continue
            progress = sequence.progress
            progress.sampled += result.tokens
            progress.status = sequence.request.status_at_end(result.status, progress.sampled)
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
            if sequence.ended and sequence.placement.slot is not None:
                self.leave(sequence)

    def _check_contract(self, result: _ReadResult) -> None:
        """Raise QsampleError if a row that still runs has too few or too many tokens."""
        new = len(result.tokens)
        total = len(result.sequence.progress.sampled)
        limit = result.sequence.request.max_new_tokens
        is_plausible = result.steps <= new <= result.steps * self._max_tokens_per_step
        if not is_plausible or total >= limit:
            raise QsampleError(
                f"a row still runs with {total} new tokens of at most {limit}, the last {new} from "
                f"{result.steps} steps; the graph does not follow the decode contract"
            )


def _image_piece(sequence: Sequence, piece: range) -> ImagePiece | None:
    """The images of a piece of a prompt; None for a prompt without images."""
    if sequence.images is None:
        return None
    return image_piece(sequence.images.prompt, sequence.images.features, piece)
