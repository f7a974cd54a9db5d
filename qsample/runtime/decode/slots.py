"""The rows of a batch on the device, each started, filled and stopped separately.

Everything is bound once: the graphs read and write the same memory at every step, and a step reads the tokens that the
step before it sampled. The outputs for a host (`next_ids`, `status`, `lengths`) have two buffers that take turns, so
that they can be copied while the next step runs; the optional outputs have more, because they wait for a later read.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.tensors import (
    ADJUSTED_LOGITS,
    BATCH,
    CAPACITY,
    EMIT,
    INPUT_IDS,
    INPUT_LENGTHS,
    LENGTHS,
    LOGITS,
    NEXT_IDS,
    NOISE_STREAMS,
    NUM_DRAFT_TOKENS,
    NUM_NEW,
    ROW_AXES,
    RUNNING,
    SEARCHED_ROWS,
    SPECULATION_INPUTS,
    STATUS,
    STOPPED,
    TOKENS,
    TensorSpec,
    retained_name,
)
from qsample.images.prompt import ImagePrompt
from qsample.ort.bound_graph import BoundGraph
from qsample.ort.buffers import (
    DEVICES_WITHOUT_ADDRESSES,
    Buffer,
    OutputRing,
    RetainedState,
    SavedRows,
    rows_of,
    run_on_device,
)
from qsample.ort.parts import BoundParts
from qsample.ort.session import Sessions
from qsample.ort.small_graphs import columns_behind
from qsample.runtime.decode.adapter_use import AdapterRows
from qsample.runtime.decode.image_inputs import ImageInputs, ImagePiece
from qsample.runtime.decode.inputs import ParameterRows, PromptInputs, uniforms
from qsample.runtime.sequence import DraftStats

_IDLE: Final = STOPPED  # any status that is not running keeps a row from advancing
_GUESSES: Final = [spec.name for spec in SPECULATION_INPUTS]
_READ_EVERY_STEP: Final = (LENGTHS.name, STATUS.name)
_MOST_BOUND: Final = 512  # graphs, each over other rows: some 100 kB
_Graphs = list[BoundGraph | BoundParts]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of every row for a host.
    status, lengths: [B] int32. tokens: [B, T] int32; a row has lengths + 1 tokens after its first sample; with
    `newest`, [B, newest], the last column being the token at position `lengths`. drafts: how the guesses of each row
    fared since it began; empty if the package makes none."""

    status: Array
    lengths: Array
    tokens: Array
    newest: int | None = None
    drafts: tuple[DraftStats, ...] = ()

    def tokens_from(self, slot: int, position: int) -> list[int]:
        """A row's tokens from a position on, up to the newest. Raises IndexError if `tokens` lacks some of them."""
        end = int(self.lengths[slot]) + 1
        skipped = 0 if self.newest is None else end - self.newest
        if position < skipped and position < end:
            raise IndexError(
                f"the tokens from position {position} on are {end - position}, and {self.newest} were read"
            )
        tokens: list[int] = (
            self.tokens[slot, position - skipped : end - skipped].tolist() if position < end else []
        )
        return tokens


class NewestTokens:
    """Gathers the last tokens of each of `count` rows on the device, so that only these are copied from it."""

    def __init__(self, count: int, device: str) -> None:
        self._count, self._device = count, device
        self._zero = Buffer.of(np.zeros(1, dtype=np.int32), device)
        self._made: dict[
            int, tuple[Buffer, Buffer]
        ] = {}  # number of tokens → columns, and their tokens

    def read(self, states: Mapping[str, Buffer], count: int) -> Array:
        """[B, count] int32: each row's last tokens up to position `lengths`."""
        if count not in self._made:
            columns = Buffer.of(np.arange(1 - count, 1, dtype=np.int32)[None], self._device)
            self._made[count] = (
                columns,
                Buffer.of(np.zeros((self._count, count), np.int32), self._device),
            )
        columns, gathered = self._made[count]
        lengths = states[LENGTHS.name].reshaped(self._count, 1)
        inputs = {"x": states[TOKENS.name], "row": lengths, "column": columns, "zero": self._zero}
        run_on_device(columns_behind(), inputs, {"y": gathered})
        return gathered.read()


class Drafts:
    """Counts how the guesses of each of `count` rows fared, on two sides that take turns, as the states have."""

    def __init__(self, count: int) -> None:
        self._counts = np.zeros((2, count, 4), dtype=np.int64)  # the fields of `DraftStats`

    def count(self, side: int, outputs: Mapping[str, Buffer], rows: range) -> None:
        """Add the guesses of a step over some rows. side: that the step read; it wrote `outputs`."""
        part = slice(rows.start, rows.stop)
        new, guesses = (outputs[spec.name].read()[part] for spec in (NUM_NEW, NUM_DRAFT_TOKENS))
        self._counts[1 - side] = self._counts[side]
        self._counts[1 - side, part] += np.stack(
            [new > 0, guesses > 0, guesses, np.maximum(new - 1, 0)], axis=1
        )

    def clear(self, row: int) -> None:
        self._counts[:, row] = 0

    def swap_rows(self, one: int, other: int) -> None:
        self._counts[:, [one, other]] = self._counts[:, [other, one]]

    def of_rows(self, side: int) -> tuple[DraftStats, ...]:
        return tuple(DraftStats(*row) for row in self._counts[side].tolist())


class Slots:
    """`count` rows of `capacity` tokens.

    A slot is idle until `begin` gives it a prompt. `prefill` feeds it that prompt, a chunk a call, or several slots
    their prompts, while other slots wait; between its chunks the slot is idle for `decode`, which advances all running
    rows by a token, or by several if the package guesses tokens. A row that ends is idle again by itself: the graph
    neither advances it nor writes to it, except for the key and value at position `lengths`, which belong to no token
    yet.

    No method may be called while another runs, except for `read` and `read_outputs` of earlier steps than that of a
    `decode` that runs.
    """

    def __init__(
        self,
        sessions: Sessions,
        count: int,
        capacity: int,
        *,
        saved_states: int = 0,
        flush_every: int = 1,
    ) -> None:
        """saved_states: places for copies of recurrent states. flush_every: most steps whose optional outputs wait to
        be read."""
        self._sessions = sessions
        self._interface = interface = sessions.interface
        self.count, self.capacity, self.flush_every = count, capacity, flush_every
        # Kernels may round a single row otherwise: steps are over more rows then, of which some stay idle.
        self._rows = rows = sessions.rows.batch.cover(count)
        # With the sampler on the host, only the cache stays on the device.
        self._device = device = "cpu" if sessions.sampler is not None else sessions.device
        self._sizes = {
            **interface.sizes,
            BATCH: rows,
            CAPACITY: capacity,
            **dict.fromkeys(ROW_AXES, 1),
        }

        specs: dict[TensorSpec, str] = dict.fromkeys(interface.sampler_states, device)
        specs |= {spec: sessions.device_of(spec) for spec in interface.cache_states}
        self._state = RetainedState(specs, self._sizes, turns=_READ_EVERY_STEP)
        self._state[STATUS.name].write_at(slice(None), _IDLE)
        fixed = {spec: sessions.device_of(spec) for spec in interface.fixed_states}
        self.saved = SavedRows(self._state, fixed, self._sizes, saved_states)

        self.step = 0  # the number of the newest
        waiting = flush_every if interface.token_outputs else 1
        self._outputs = OutputRing(interface.sampler_outputs, self._sizes, device, waiting)
        for step in range(len(self._outputs)):
            self._outputs.of(step)[NEXT_IDS.name].write_at(slice(None), 0)  # for idle rows
        given = "cpu" if sessions.sampler is not None else sessions.input_device
        narrow = (
            sessions.replays is None
        )  # ONNX Runtime keeps what it captured, and would capture another graph
        self._parameters = ParameterRows(
            interface, self._sizes, given, narrow=narrow, needed=device == "cpu"
        )
        self.adapters = AdapterRows(interface, rows, sessions.device)
        self._logits: dict[str, Buffer] = {}  # between the graphs of a package that has two
        if sessions.sampler is not None:
            logits = Buffer.allocate(LOGITS, self._sizes, device)
            self._logits = {LOGITS.name: logits, ADJUSTED_LOGITS.name: logits}

        self._ones = Buffer.of(np.ones(rows, dtype=np.int32), given)
        self._emit = {emit: Buffer.of(np.full(rows, emit), given) for emit in (True, False)}
        most_rows = count if sessions.prompts.joins_prompts else 1
        # A token of padding has room, because a prompt is shorter than the capacity. No fixed width: the last piece
        # could pass the capacity.
        self._chunk = PromptInputs(
            most_rows, capacity, sessions.prompts.piece_tokens, given, renewed=bool(sessions.parts)
        )
        # Parts lie on several devices, and features are not always as many.
        self._images = ImageInputs(
            interface, rows, capacity, given, "cpu" if sessions.parts else given
        )
        # A prompt's chunks run with a separate status, so that the batch sees an idle row between them.
        self._chunk_status = Buffer.of(np.full(most_rows, RUNNING, dtype=np.int32), device)
        self._newest = NewestTokens(rows, device)
        self._drafts = Drafts(rows) if interface.features.num_speculative_tokens else None
        self._bind_decoder = sessions.binder(interface.decoder)
        self._bound: dict[tuple[object, ...], _Graphs] = {}  # the least recently used first
        # With the sampler on the host: the logits of some slots, [n, V], to sample from in place of the model's.
        self.process_logits: Callable[[range, Array], Array] | None = None

    @property
    def read_while_running(self) -> bool:
        """Whether the results of a step may be read while another thread runs the next."""
        return self._device not in DEVICES_WITHOUT_ADDRESSES

    @property
    def output_names(self) -> tuple[str, ...]:
        """The optional outputs of the package."""
        return tuple(spec.name for spec in self._interface.token_outputs)

    @property
    def most_new_tokens(self) -> int:
        """The most tokens that a step gives a row."""
        return 1 + self._interface.features.num_speculative_tokens

    @property
    def prepared(self) -> bool:
        """Whether `decode` has its captures, if it needs any. New parameters may change that."""
        keys = [self._key(range(self._rows), step) for step in range(len(self._outputs))]
        return self._sessions.replays is None or all(key in self._bound for key in keys)

    def prepare(self) -> None:
        """Capture `decode`, once everything is read: this overwrites the optional outputs. Nothing else may use the
        device meanwhile. ONNX Runtime runs a graph several times before it replays it, so the rows are idle for it: the
        cache at their next position is written again."""
        outputs = self._outputs.of(self.step)[NEXT_IDS.name]
        status, next_ids = self._state[STATUS.name].read(), outputs.read()
        self._state[STATUS.name].write_at(slice(None), _IDLE)
        for _ in range(len(self._outputs)):
            self._bound[self._key(range(self._rows), self.step)] = self._bind_batch(
                range(self._rows)
            )
            self.decode()
        self._state[STATUS.name].write_at(slice(None), status)
        outputs.write(next_ids)

    def begin(
        self,
        slot: int,
        prompt: Array,
        seed: int,
        parameters: Mapping[str, Array],
        reused: int = 0,
        adapter: int = 0,
        images: ImagePrompt | None = None,
    ) -> None:
        """Get an idle slot ready for `prompt`, [n] int64, 1 <= n < capacity, for `prefill` to feed it.
        parameters: the row of every name of `Interface.parameters`: scalars, or [E], [N], [W], [D], [Q, L].
        reused: tokens of the prompt that the slot's cache holds already, from its start; less than n. adapter: the
        place of the row's adapter, see `AdapterRows.put`; 0 = none. images: of the prompt."""
        self.adapters.begin(slot, adapter)
        self._images.begin(slot, images)
        for spec in self._interface.sampler_states:
            if spec.name in NOISE_STREAMS:
                self._state[spec.name].write_at(
                    slot, uniforms(seed, self.capacity, NOISE_STREAMS[spec.name])
                )
            elif spec not in (LENGTHS, STATUS, TOKENS):
                self._state[spec.name].clear_row(slot)
        if self._drafts is not None:
            self._drafts.clear(slot)
        self._write_history(slot, prompt[:reused])
        self.set_parameters(slot, parameters)

    def copy(self, source: int, slot: int, prompt: Array, place: int | None = None) -> None:
        """Copy `source` to a slot as far as it is after `prompt`, [n] int64, n >= 1: the first tokens of `source`; all
        of them if the model has recurrent states, unless these are saved in `place`."""
        for spec in self._interface.cache_states:
            if CAPACITY in spec.axes:
                self._state[spec.name].copy_row(source, slot, (slice(None), slice(len(prompt))))
            elif place is None:
                self._state[spec.name].copy_row(source, slot)
        if place is not None:
            self.saved.restore(place, slot)
        self._write_history(slot, prompt)

    def load(self, slot: int, parts: abc.Sequence[tuple[int, int, Mapping[str, Array]]]) -> None:
        """Write states from elsewhere to an idle slot, before `begin`.
        parts: (start, stop, states): of the tokens [start, stop), keys and values [H, stop - start or more, D] by name;
        the recurrent states belong to the first part, after its last token."""
        for spec in self._interface.cache_states:
            if CAPACITY in spec.axes:
                columns = [
                    (slice(start, stop), states[spec.name][:, : stop - start])
                    for start, stop, states in parts
                ]
                self._state[spec.name].write_columns(slot, columns)
            else:
                self._state[spec.name].write_at(slot, parts[0][2][spec.name])

    def unload(
        self, slot: int, start: int, stop: int, place: int | None = None
    ) -> dict[str, Array]:
        """A copy of the states of a slot's tokens [start, stop) by name, as `load` takes them. place: of the saved
        recurrent states; by default the slot's."""
        saved = {} if place is None else self.saved.read(place)
        for spec in self._interface.cache_states:
            if CAPACITY in spec.axes:
                saved[spec.name] = self._state[spec.name].read_row(slot)[:, start:stop].copy()
            elif place is None:
                saved[spec.name] = self._state[spec.name].read_row(slot).copy()
        return saved

    @property
    def narrows(self) -> bool:
        """Whether steps can be over fewer rows, and rows be moved for it."""
        return self._sessions.rows.step is not None

    def move(self, slot: int, target: int, kept: int) -> None:
        """Put a row into an idle slot, and the first `kept` tokens of that slot into the row's; between two calls."""
        columns = int(self._state[LENGTHS.name].read()[slot]), kept
        for spec in self._interface.cache_states:
            self._state[spec.name].swap_rows(
                slot, target, columns if CAPACITY in spec.axes else None
            )
        for spec in self._interface.sampler_states:
            self._state[spec.name].swap_rows(slot, target)
        self._outputs.swap_rows(slot, target)
        if self._drafts is not None:
            self._drafts.swap_rows(slot, target)
        self._parameters.swap_rows(slot, target)
        self.adapters.swap_rows(slot, target)
        self._images.swap_rows(slot, target)

    def tokens_in_states(self, slot: int) -> int:
        """The number of tokens that a slot's states are after."""
        return int(self._state[LENGTHS.name].read()[slot])

    def _write_history(self, slot: int, tokens: Array) -> None:
        self._state[LENGTHS.name].write_at(slot, len(tokens))
        row = np.full(self.capacity, tokens[0] if len(tokens) else 0, TOKENS.dtype)
        row[: len(tokens)] = tokens
        self._state[TOKENS.name].write_at(slot, row)

    def set_parameters(self, slot: int, parameters: Mapping[str, Array]) -> None:
        """Replace a row of some parameters, from the next call on. The widest row decides a buffer's width."""
        if not self._sessions.guesses:
            parameters = {
                name: values for name, values in parameters.items() if name not in _GUESSES
            }
        if self._parameters.set(slot, parameters):
            self._bound.clear()

    def prefill(
        self,
        slot: int,
        *ids: Array,
        emit: bool,
        wait: bool = True,
        images: abc.Sequence[ImagePiece | None] = (),
    ) -> None:
        """Feed a slot the next piece of its prompt, [n] int64; with `emit`, the last, sampling the first new token.
        Several arrays, if the sessions join prompts, are for `slot` and the slots after it, in a single run: the first
        tokens of each, because attention takes several rows of several tokens only at their beginning; any tokens if
        the calls are ragged. wait: False if nothing but the next piece of the same prompt follows: then a decoder in
        parts reads both at a time. images: what each takes of the images of its prompt; by default nothing."""
        rows = range(slot, slot + len(ids))
        chunk = self._chunk.write(ids)
        chunk |= self._images.of_prompts(
            images or [None] * len(ids), chunk[INPUT_IDS.name].shape[1]
        )
        key = rows, emit, self._outputs.place(self.step), self.adapters.key(rows)
        graphs = self._graphs(key, partial(self._bind_rows, rows, emit))
        for graph in graphs:
            for name, buffer in chunk.items():
                graph.bind_input(name, buffer)
            if emit:
                graph.bind_input(SEARCHED_ROWS.name, self._parameters.searched.of_rows(rows))
        # To its end without parts: the next chunk is written to the same memory. And with a sampler on the host, which
        # writes the lengths.
        wait = wait or not self._sessions.parts or self._sessions.sampler is not None
        self._run(graphs, rows if emit else None, wait=wait)

    def decode(self, rows: range | None = None, *, wait: bool = True) -> None:
        """Feed rows their newest token; running rows sample the next. Prepares the slots unless `prepared`.
        rows: at least all that run, by default every row; adjacent rows come along if the package needs them. wait: for
        the device; False if another `decode` follows before anything is read."""
        rows = self._rows_of_step(rows or range(self.count))
        key = self._key(rows, self.step)
        if key not in self._bound and self._sessions.replays is not None:
            self.prepare()
        self._parameters.searched.of_batch()  # writes it if it changed; nothing else runs then
        wait = wait or bool(self._sessions.parts)  # another device reads what the last one wrote
        self._run(self._graphs(key, partial(self._bind_batch, rows)), rows, wait=wait)
        if self._drafts is not None:
            self._drafts.count(self._state.side, self._outputs.of(self.step + 1), rows)
        self._state.flip(rows if len(rows) < self._rows else None)
        self.step += 1

    def _rows_of_step(self, rows: range) -> range:
        """These rows, and adjacent rows if a step has to be over more."""
        counts = self._sessions.rows.step
        if counts is None:
            return range(self._rows)
        if self.adapters.used(rows):
            counts = self._sessions.rows.adapter_step
        count = min(counts.cover(len(rows)), self._rows)
        start = min(rows.start, self._rows - count)
        return range(start, start + count)

    def _key(self, rows: range, step: int) -> tuple[object, ...]:
        """Identifies the memory that `decode` is bound to after a step."""
        return (
            self._outputs.place(step),
            self._parameters.searched.size,
            rows,
            self.adapters.key(rows),
        )

    def read(self, step: int | None = None, newest: int | None = None) -> Snapshot:
        """A copy for the host after the last call.
        step: the value of `step` before a `decode` that runs now; by default the newest. newest: the number of each
        row's last tokens that is enough, if the tokens are not in the host's memory; by default all."""
        side = (self.step if step is None else step) % 2  # `flip` and `decode` take turns in step
        states = self._state.inputs(side=side)
        status, lengths = states[STATUS.name].read(), states[LENGTHS.name].read()
        if (
            newest is None
            or self._device in ("cpu", *DEVICES_WITHOUT_ADDRESSES)
            or newest >= self.capacity
        ):
            tokens, newest = states[TOKENS.name].read(), None
        else:
            tokens = self._newest.read(states, newest)
        drafts = () if self._drafts is None else self._drafts.of_rows(side)
        return Snapshot(status, lengths, tokens, newest, drafts)

    def read_outputs(
        self, steps: range, names: abc.Collection[str], rows: range
    ) -> dict[str, Array]:
        """A copy of some optional outputs, [steps, rows, ...] by name. steps: at most `flush_every`, the newest. If a
        step gives several tokens, the axis J comes third, and NUM_NEW is among the outputs."""
        several = {NUM_NEW.name} if self._drafts is not None and names else set()
        return {name: self._outputs.read(steps, name, rows) for name in {*names, *several}}

    def stop(self, slot: int) -> None:
        """Make a slot idle, and its parameters cheap; its cache stays."""
        self._state[STATUS.name].write_at(slot, _IDLE)
        self._parameters.clear(slot)
        self.adapters.begin(slot, 0)

    def _run(self, graphs: _Graphs, sampled: range | None, *, wait: bool = True) -> None:
        """sampled: the slots that get a token; their logits may be processed before a sampler on the host."""
        for index, graph in enumerate(graphs):
            if index and sampled is not None and self.process_logits is not None:
                logits, slots = self._logits[LOGITS.name], slice(sampled.start, sampled.stop)
                logits.write_at(slots, self.process_logits(sampled, logits.read()[slots]))
            graph.run(wait=wait)

    def _graphs(self, key: tuple[object, ...], bind: Callable[[], _Graphs]) -> _Graphs:
        """The graphs of a key, bound now unless they are. The least recently used make room."""
        self._bound[key] = graphs = self._bound.pop(key, None) or bind()
        if len(self._bound) > _MOST_BOUND and self._sessions.replays is None:
            del self._bound[next(iter(self._bound))]
        return graphs

    def _bind_batch(self, rows: range) -> _Graphs:
        now, then = self._outputs.of(self.step), self._outputs.of(self.step + 1)
        call = {
            INPUT_IDS.name: now[NEXT_IDS.name],
            INPUT_LENGTHS.name: self._ones,
            EMIT.name: self._emit[True],
        }
        states = self._state.inputs() | self._state.outputs()
        buffers = rows_of(self._parameters.buffers | self._logits | states | then | call, rows)
        buffers[SEARCHED_ROWS.name] = self._parameters.searched.of_batch()
        return self._bind(
            buffers | self.adapters.inputs(rows) | self._images.of_step(rows), captured=True
        )

    def _bind_rows(self, rows: range, emit: bool) -> _Graphs:
        """Over some rows of everything, in place. Their status is written to the batch's with the first token only."""
        buffers = rows_of(
            self._parameters.buffers | self._logits | self._outputs.of(self.step), rows
        )
        buffers |= self._state.inputs(rows) | self._state.outputs(rows)
        status = self._chunk_status.rows(0, len(rows))
        buffers |= self._images.of_prompts([None] * len(rows), 1)
        buffers |= self._chunk.of_rows(len(rows)) | {
            EMIT.name: self._emit[emit].rows(0, len(rows)),
            SEARCHED_ROWS.name: self._parameters.searched.of_rows(range(0)),
            STATUS.name: status,
        }
        if not emit:
            buffers[retained_name(STATUS.name)] = status
        return self._bind(buffers | self.adapters.inputs(rows), captured=False)

    def _bind(self, buffers: Mapping[str, Buffer], *, captured: bool) -> _Graphs:
        """The package's graphs in running order."""
        graphs: _Graphs = [self._bind_decoder(buffers, captured=captured)]
        if self._sessions.sampler is not None:
            graphs.append(
                BoundGraph(self._sessions.sampler, self._interface.sampler, buffers, "cpu")
            )
        return graphs
