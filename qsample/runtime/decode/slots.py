"""The rows of a batch on the device, each started, filled and stopped separately.

Everything is bound once: the graphs read and write the same memory at every step, and a step reads the
tokens that the step before it sampled. The outputs for a host (`next_ids`, `status`, `lengths`) have
two buffers that take turns, so that they can be copied while the next step runs. The optional outputs
have more buffers, because they wait for a later read.
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
    GRAMMAR_STATE,
    HOST_AXES,
    INPUT_IDS,
    INPUT_LENGTHS,
    LENGTHS,
    LOGITS,
    NEXT_IDS,
    NOISE_STREAMS,
    NUM_DRAFT_TOKENS,
    NUM_NEW,
    RUNNING,
    SCORED,
    SCORED_IDS,
    SCORED_PLACES,
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
from qsample.request.structured.tables import FREE_ROW, TokenGrammar
from qsample.runtime.decode.adapter_use import AdapterRows
from qsample.runtime.decode.grammar_rows import GrammarRows
from qsample.runtime.decode.image_inputs import ImageInputs, ImagePiece
from qsample.runtime.decode.inputs import ParameterRows, PromptInputs, uniforms
from qsample.runtime.decode.prefix_file import PrefixPart
from qsample.runtime.sequence import DraftStats, ScoredTokens

# Any status except RUNNING keeps a row from advancing.
_IDLE_STATUS: Final = STOPPED
_SPECULATION_NAMES: Final = [spec.name for spec in SPECULATION_INPUTS]
_STATES_READ_EVERY_STEP: Final = (LENGTHS.name, STATUS.name)
# Each bound graph is over other rows, and takes some 100 kB.
_MAX_BOUND_GRAPHS: Final = 512
_Graphs = list[BoundGraph | BoundParts]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of every row for a host.

    Attributes:
        status: [B] int32, the contract's status of each row.
        lengths: [B] int32, the number of tokens in the cache of each row.
        tokens: [B, T] int32, the tokens of each row: `lengths` + 1 after its first sample. With
            `newest`, [B, newest], and the last column is the token at position `lengths`.
        newest: the number of last tokens that were read; None for all.
        drafts: how the guesses of each row fared since it began; empty if the package makes none.
    """

    status: Array
    lengths: Array
    tokens: Array
    newest: int | None = None
    drafts: tuple[DraftStats, ...] = ()

    def tokens_from(self, slot: int, position: int) -> list[int]:
        """The tokens of a row from a position to the newest. Raises IndexError if `tokens` lacks some
        of them."""
        end = int(self.lengths[slot]) + 1
        if position >= end:
            return []
        skipped = 0 if self.newest is None else end - self.newest
        if position < skipped:
            raise IndexError(
                f"the tokens from position {position} on are {end - position}, and {self.newest} were "
                "read"
            )
        tokens: list[int] = self.tokens[slot, position - skipped : end - skipped].tolist()
        return tokens


class NewestTokens:
    """Gathers the last tokens of each row on the device, so that only these are copied from it."""

    def __init__(self, rows: int, device: str) -> None:
        self._rows = rows
        self._device = device
        self._zero = Buffer.of(np.zeros(1, dtype=np.int32), device)
        # By number of tokens: their columns relative to `lengths`, and the memory for the result.
        self._columns: dict[int, Buffer] = {}
        self._results: dict[int, Buffer] = {}

    def read(self, states: Mapping[str, Buffer], count: int) -> Array:
        """[B, count] int32: the last `count` tokens of each row, up to position `lengths`."""
        if count not in self._results:
            columns = np.arange(1 - count, 1, dtype=np.int32)[None]
            self._columns[count] = Buffer.of(columns, self._device)
            self._results[count] = Buffer.of(np.zeros((self._rows, count), np.int32), self._device)
        inputs = {
            "x": states[TOKENS.name],
            "row": states[LENGTHS.name].reshaped(self._rows, 1),
            "column": self._columns[count],
            "zero": self._zero,
        }
        result = self._results[count]
        run_on_device(columns_behind(), inputs, {"y": result})
        return result.read()


class Drafts:
    """Counts how the guesses of each row fared, on two sides that take turns, as the sides of the
    states do."""

    def __init__(self, rows: int) -> None:
        # [side, row, field], the fields in the order of `DraftStats`.
        self._counts = np.zeros((2, rows, 4), dtype=np.int64)

    def count(self, side: int, outputs: Mapping[str, Buffer], rows: range) -> None:
        """Add the guesses of a step.

        Args:
            side: the side of the states that the step read.
            outputs: the outputs that the step wrote.
            rows: the rows of the step.
        """
        part = slice(rows.start, rows.stop)
        new = outputs[NUM_NEW.name].read()[part]
        guesses = outputs[NUM_DRAFT_TOKENS.name].read()[part]
        accepted = np.maximum(new - 1, 0)
        self._counts[1 - side] = self._counts[side]
        self._counts[1 - side, part] += np.stack([new > 0, guesses > 0, guesses, accepted], axis=1)

    def clear(self, row: int) -> None:
        """Set the counts of a row to 0."""
        self._counts[:, row] = 0

    def swap_rows(self, one: int, other: int) -> None:
        """Swap two rows."""
        self._counts[:, [one, other]] = self._counts[:, [other, one]]

    def of_rows(self, side: int) -> tuple[DraftStats, ...]:
        """The counts of every row on one side."""
        return tuple(DraftStats(*row) for row in self._counts[side].tolist())


class Slots:
    """`count` rows of `capacity` tokens.

    A slot is idle until `begin` gives it a prompt. `prefill` feeds it that prompt, a chunk a call, or
    several slots their prompts, while other slots wait. Between its chunks the slot is idle for
    `decode`, which advances all running rows by a token, or by several if the package guesses tokens.
    A row that ends becomes idle by itself: the graph neither advances it nor writes to it, except for
    the key and value at position `lengths`, which belong to no token yet.

    No method may be called while another runs, except for `read` and `read_outputs` of steps before
    that of a `decode` that runs.

    Attributes:
        count: the number of slots.
        capacity: the number of tokens of a row.
        flush_every: the most steps whose optional outputs wait to be read.
        step: the number of the newest step.
        saved: the places for copies of recurrent states.
        adapters: the memory of adapters.
        grammars: the memory of grammars.
        process_logits: a function of some slots and their logits, [n, V], that returns the logits to
            sample from; None to sample from the model's logits. Only packages with their sampler on
            the host call it.
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
        """Allocate the memory.

        Args:
            sessions: the graphs of the package.
            count: see the attribute, like `capacity` and `flush_every`.
            saved_states: the number of places for copies of recurrent states.
        """
        interface = sessions.interface
        # Kernels may round a single row differently: a step is then over more rows, and some stay
        # idle.
        rows = sessions.rows.batch.cover(count)
        # With the sampler on the host, only the cache stays on the device.
        device = "cpu" if sessions.sampler is not None else sessions.device
        self.count = count
        self.capacity = capacity
        self.flush_every = flush_every
        self._sessions = sessions
        self._interface = interface
        self._rows = rows
        self._device = device
        self._sizes = {
            **interface.sizes,
            BATCH: rows,
            CAPACITY: capacity,
            **dict.fromkeys(HOST_AXES, 1),
        }

        specs: dict[TensorSpec, str] = dict.fromkeys(interface.sampler_states, device)
        specs |= {spec: sessions.device_of(spec) for spec in interface.cache_states}
        self._state = RetainedState(specs, self._sizes, turns=_STATES_READ_EVERY_STEP)
        self._state[STATUS.name].write_at(slice(None), _IDLE_STATUS)
        fixed = {spec: sessions.device_of(spec) for spec in interface.fixed_states}
        self.saved = SavedRows(self._state, fixed, self._sizes, saved_states)

        self.step = 0
        steps_to_wait = flush_every if interface.token_outputs else 1
        self._outputs = OutputRing(interface.sampler_outputs, self._sizes, device, steps_to_wait)
        for step in range(len(self._outputs)):
            self._outputs.of(step)[NEXT_IDS.name].write_at(slice(None), 0)  # idle rows read them
        input_device = "cpu" if sessions.sampler is not None else sessions.input_device
        # With fewer columns, ONNX Runtime would capture another graph, and keep the old one.
        narrow = sessions.replays is None
        self._parameters = ParameterRows(
            interface, self._sizes, input_device, narrow=narrow, needed=device == "cpu"
        )
        self.adapters = AdapterRows(interface, rows, sessions.device)
        self.grammars = GrammarRows(interface, rows, input_device)
        # The logits between the graphs of a package that has its sampler on the host.
        self._logits: dict[str, Buffer] = {}
        if sessions.sampler is not None:
            logits = Buffer.allocate(LOGITS, self._sizes, device)
            self._logits = {LOGITS.name: logits, ADJUSTED_LOGITS.name: logits}

        self._ones = Buffer.of(np.ones(rows, dtype=np.int32), input_device)
        self._emit = {emit: Buffer.of(np.full(rows, emit), input_device) for emit in (True, False)}
        max_prompt_rows = count if sessions.prompts.joins_prompts else 1
        # A token of padding has room, because a prompt is shorter than the capacity. The width is not
        # fixed: the last piece could exceed the capacity.
        self._prompt_inputs = PromptInputs(
            max_prompt_rows,
            capacity,
            sessions.prompts.piece_tokens,
            input_device,
            renewed=bool(sessions.parts),
        )
        # Parts lie on several devices, and the number of features varies.
        prompt_device = "cpu" if sessions.parts else input_device
        self._images = ImageInputs(interface, rows, capacity, input_device, prompt_device)
        # The chunks of a prompt run with a separate status, so that the batch sees an idle row between
        # them.
        self._prompt_status = Buffer.of(np.full(max_prompt_rows, RUNNING, dtype=np.int32), device)
        self._newest = NewestTokens(rows, device)
        self._drafts = Drafts(rows) if interface.features.num_speculative_tokens > 0 else None
        self._bind_decoder = sessions.binder(interface.decoder)
        self._bind_scoring_decoder = sessions.binder(interface.scoring_decoder)
        # The graphs bound to each memory; the least recently used come first.
        self._bound: dict[tuple[object, ...], _Graphs] = {}
        self.process_logits: Callable[[range, Array], Array] | None = None

    @property
    def read_while_running(self) -> bool:
        """Whether the results of a step may be read while another thread runs the next."""
        return self._device not in DEVICES_WITHOUT_ADDRESSES

    @property
    def most_new_tokens(self) -> int:
        """The most tokens that a step gives a row."""
        return 1 + self._interface.features.num_speculative_tokens

    @property
    def prepared(self) -> bool:
        """Whether `decode` has its captures, if it needs any. New parameters may change that."""
        if self._sessions.replays is None:
            return True
        all_rows = range(self._rows)
        steps = range(len(self._outputs))
        return all(self._key(all_rows, step) in self._bound for step in steps)

    def prepare(self) -> None:
        """Capture `decode`, once everything is read: this overwrites the optional outputs.

        Nothing else may use the device meanwhile. ONNX Runtime runs a graph several times before it
        replays it, so all rows are idle during the capture. The cache at their next position is
        written again later.
        """
        all_rows = range(self._rows)
        newest_ids = self._outputs.of(self.step)[NEXT_IDS.name]
        status = self._state[STATUS.name].read()
        next_ids = newest_ids.read()
        self._state[STATUS.name].write_at(slice(None), _IDLE_STATUS)
        for _ in range(len(self._outputs)):
            self._bound[self._key(all_rows, self.step)] = self._bind_batch(all_rows)
            self.decode()
        self._state[STATUS.name].write_at(slice(None), status)
        newest_ids.write(next_ids)

    def begin(
        self,
        slot: int,
        prompt: Array,
        seed: int,
        parameters: Mapping[str, Array],
        reused: int = 0,
        adapter: int = 0,
        images: ImagePrompt | None = None,
        grammar: TokenGrammar | None = None,
    ) -> None:
        """Prepare an idle slot, so that `prefill` can feed it a prompt.

        Args:
            slot: the slot.
            prompt: the token ids of the prompt, [n] int64, 1 <= n < capacity.
            seed: the seed of the row's random numbers.
            parameters: a row of every name of `Interface.parameters`: scalars, or [E], [N], [W], [D],
                [Q, L].
            reused: the number of tokens of the prompt that the slot's cache holds already, from its
                start; less than n.
            adapter: the place of the row's adapter, see `AdapterRows.put`; 0 = none.
            images: the images of the prompt; None without any.
            grammar: the grammar that the answer follows; None for any text.
        """
        self.adapters.begin(slot, adapter)
        self._images.begin(slot, images)
        for spec in self._interface.sampler_states:
            if spec.name in NOISE_STREAMS:
                noise = uniforms(seed, self.capacity, NOISE_STREAMS[spec.name])
                self._state[spec.name].write_at(slot, noise)
            elif spec not in (LENGTHS, STATUS, TOKENS):
                self._state[spec.name].clear_row(slot)
        if self.grammars.begin(slot, grammar):
            self._bound.clear()
        if grammar is not None:
            self._state[GRAMMAR_STATE.name].write_at(slot, self.grammars.start_state(slot))
        if self._drafts is not None:
            self._drafts.clear(slot)
        self._write_history(slot, prompt, reused)
        self.set_parameters(slot, parameters)
        self._parameters.replay.set_grammar(slot, grammar is not None)

    def copy(self, source: int, slot: int, prompt: Array, place: int | None = None) -> None:
        """Copy the first tokens of a slot to another.

        Args:
            source: the slot to copy from.
            slot: the slot to copy to.
            prompt: the token ids of these tokens, [n] int64, n >= 1; if the model has recurrent
                states and `place` is None, all tokens of `source`.
            place: the place of the saved recurrent states after these tokens; None for the states of
                `source`.
        """
        for spec in self._interface.cache_states:
            if CAPACITY in spec.axes:
                self._state[spec.name].copy_row(source, slot, (slice(None), slice(len(prompt))))
            elif place is None:
                self._state[spec.name].copy_row(source, slot)
        if place is not None:
            self.saved.restore(place, slot)
        self._write_history(slot, prompt, len(prompt))

    def load(self, slot: int, parts: abc.Sequence[PrefixPart]) -> None:
        """Write states from elsewhere to an idle slot, before `begin`. parts: the states of a
        beginning of a prompt, the last part first. The first item has the recurrent states."""
        for spec in self._interface.cache_states:
            if CAPACITY in spec.axes:
                columns = []
                for part in parts:
                    values = part.states[spec.name][:, : part.stop - part.start]
                    columns.append((slice(part.start, part.stop), values))
                self._state[spec.name].write_columns(slot, columns)
            else:
                self._state[spec.name].write_at(slot, parts[0].states[spec.name])

    def unload(
        self, slot: int, start: int, stop: int, place: int | None = None
    ) -> dict[str, Array]:
        """A copy of the states of a slot's tokens [start, stop) by name, see `PrefixPart.states`.
        place: the place of the saved recurrent states; by default the states of the slot."""
        states = {} if place is None else self.saved.read(place)
        for spec in self._interface.cache_states:
            if CAPACITY in spec.axes:
                states[spec.name] = self._state[spec.name].read_row(slot)[:, start:stop].copy()
            elif place is None:
                states[spec.name] = self._state[spec.name].read_row(slot).copy()
        return states

    @property
    def narrows(self) -> bool:
        """Whether steps can be over fewer rows, so that rows are moved closer together."""
        return self._sessions.rows.step is not None

    def move(self, slot: int, target: int, kept: int) -> None:
        """Move a row to an idle slot, and the first `kept` tokens of that slot to the slot of the row;
        between two calls."""
        columns = (self.tokens_in_states(slot), kept)
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
        self.grammars.swap_rows(slot, target)
        self._images.swap_rows(slot, target)

    def tokens_in_states(self, slot: int) -> int:
        """The number of tokens that the states of a slot follow."""
        return int(self._state[LENGTHS.name].read()[slot])

    def _write_history(self, slot: int, prompt: Array, reused: int) -> None:
        """Write the tokens of a slot, of whose prompt the cache holds the first `reused`."""
        # Graphs for replay record sampled tokens alone.
        known = prompt if self._interface.captured else prompt[:reused]
        self._state[LENGTHS.name].write_at(slot, reused)
        row = np.full(self.capacity, known[0] if len(known) > 0 else 0, TOKENS.dtype)
        row[: len(known)] = known
        self._state[TOKENS.name].write_at(slot, row)

    def set_parameters(self, slot: int, parameters: Mapping[str, Array]) -> None:
        """Replace a row of some parameters, from the next call on. The widest row decides the width of
        a buffer."""
        if not self._sessions.guesses:
            parameters = {
                name: values
                for name, values in parameters.items()
                if name not in _SPECULATION_NAMES
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
        """Feed a slot the next piece of its prompt.

        Args:
            slot: the slot.
            ids: the token ids of the piece, [n] int64. Several arrays, if the sessions join
                prompts, are for `slot` and the slots after it, in a single run: the first tokens of each,
                because attention takes several rows of several tokens only at their beginning; any
                tokens if the calls are ragged.
            emit: whether this is the last piece, after which the first new token is sampled.
            wait: False if only the next piece of the same prompt follows: a decoder in parts then
                reads both at a time.
            images: the images in the piece of each slot; by default none.
        """
        rows = range(slot, slot + len(ids))
        inputs = self._inputs_of_prompts(ids, images)
        key = (rows, emit, self._outputs.place(self.step), self.adapters.key(rows))
        graphs = self._graphs(key, partial(self._bind_rows, rows, emit))
        for graph in graphs:
            for name, buffer in inputs.items():
                graph.bind_input(name, buffer)
        if emit:
            self._bind_lists(graphs, rows)
        # Without parts, the next piece is written to the same memory. A sampler on the host writes the
        # lengths.
        wait = wait or not self._sessions.parts or self._sessions.sampler is not None
        self._run(graphs, rows if emit else None, wait=wait)

    def _inputs_of_prompts(
        self, ids: abc.Sequence[Array], images: abc.Sequence[ImagePiece | None] = ()
    ) -> dict[str, Buffer]:
        """The inputs of a call over pieces of prompts that differ from call to call, by name."""
        inputs = self._prompt_inputs.write(ids)
        width = inputs[INPUT_IDS.name].shape[1]
        return inputs | self._images.of_prompts(images or [None] * len(ids), width)

    def prefill_scored(
        self, slot: int, ids: Array, scored: ScoredTokens, *, emit: bool
    ) -> dict[str, Array]:
        """Feed a slot the next piece of its prompt as `prefill` does, and score tokens.

        Args:
            slot: the slot.
            ids: the token ids of the piece, [n] int64.
            scored: the m tokens to score after them.
            emit: as in `prefill`.

        Returns:
            `Interface.prompt_outputs` by name, [m, ...].
        """
        count = len(scored.ids)
        # A token sampled by this call may round otherwise than in other calls: the head computes
        # the rows of the scored tokens, too.
        outputs = {
            spec.name: Buffer.allocate(spec, {**self._sizes, SCORED: count}, self._device)
            for spec in self._interface.prompt_outputs
        }
        rows = range(slot, slot + 1)
        buffers = self._buffers_of_rows(rows, emit) | self._inputs_of_prompts([ids]) | outputs
        buffers |= self._parameters.replay.of_rows(rows)
        places = scored.places.astype(SCORED_PLACES.dtype)
        buffers[SCORED_PLACES.name] = Buffer.of(places, self._device)
        buffers[SCORED_IDS.name] = Buffer.of(scored.ids.astype(SCORED_IDS.dtype), self._device)
        # Each call has other sizes, so its graph is bound anew, which takes less than a millisecond.
        self._bind_scoring_decoder(buffers, captured=False).run()
        return {name: buffer.read() for name, buffer in outputs.items()}

    def decode(self, rows: range | None = None, *, wait: bool = True) -> None:
        """Feed rows their newest token; running rows sample the next. Prepares the slots unless
        `prepared`.

        Args:
            rows: the rows, at least all that run; by default every row. Adjacent rows are added if
                the package needs them.
            wait: whether to wait for the device; False if another `decode` follows before anything is
                read.
        """
        rows = self._rows_of_step(rows or range(self.count))
        key = self._key(rows, self.step)
        if key not in self._bound and self._sessions.replays is not None:
            self.prepare()
        self._parameters.replay.write()  # while nothing runs
        wait = wait or bool(self._sessions.parts)  # a device reads what another one has written
        graphs = self._graphs(key, partial(self._bind_batch, rows))
        if len(rows) < self._rows:
            self._bind_lists(graphs, rows)
        self._run(graphs, rows, wait=wait)
        if self._drafts is not None:
            self._drafts.count(self._state.side, self._outputs.of(self.step + 1), rows)
        self._state.flip(rows if len(rows) < self._rows else None)
        self.step += 1

    def _rows_of_step(self, rows: range) -> range:
        """The given rows, and adjacent rows if a step has to be over more."""
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
            self._parameters.replay.sizes,
            rows,
            self.adapters.key(rows),
        )

    def read(self, step: int | None = None, newest: int | None = None) -> Snapshot:
        """A copy of the rows for the host after the last call.

        Args:
            step: the value of `step` before a `decode` that runs now; by default the newest.
            newest: the number of last tokens of each row that is enough, if the tokens are not in the
                host's memory; by default all.
        """
        # Each `decode` flips the side.
        side = (self.step if step is None else step) % 2
        states = self._state.inputs(side=side)
        status = states[STATUS.name].read()
        lengths = states[LENGTHS.name].read()
        drafts = () if self._drafts is None else self._drafts.of_rows(side)
        is_in_host_memory = self._device in ("cpu", *DEVICES_WITHOUT_ADDRESSES)
        if newest is None or is_in_host_memory or newest >= self.capacity:
            return Snapshot(status, lengths, states[TOKENS.name].read(), None, drafts)
        tokens = self._newest.read(states, newest)
        return Snapshot(status, lengths, tokens, newest, drafts)

    def read_outputs(
        self, steps: range, names: abc.Collection[str], rows: range
    ) -> dict[str, Array]:
        """A copy of some optional outputs by name, [steps, rows, ...]. If a step gives several tokens,
        the axis J comes third, and NUM_NEW is among the outputs. steps: the newest steps, at most
        `flush_every`."""
        read_names = set(names)
        if read_names and self._drafts is not None:
            read_names.add(NUM_NEW.name)
        return {name: self._outputs.read(steps, name, rows) for name in read_names}

    def stop(self, slot: int) -> None:
        """Make a slot idle, and turn its parameters off; its cache stays."""
        self._state[STATUS.name].write_at(slot, _IDLE_STATUS)
        self._parameters.clear(slot)
        self.adapters.begin(slot, 0)
        if self._interface.features.grammars:
            self._state[GRAMMAR_STATE.name].write_at(slot, FREE_ROW)
            self.grammars.end(slot)

    def _run(self, graphs: _Graphs, sampled: range | None, *, wait: bool = True) -> None:
        """Run graphs in order. sampled: the slots that get a token; their logits may be processed
        before a sampler on the host."""
        for index, graph in enumerate(graphs):
            is_host_sampler = index > 0
            if is_host_sampler and sampled is not None and self.process_logits is not None:
                logits = self._logits[LOGITS.name]
                slots = slice(sampled.start, sampled.stop)
                logits.write_at(slots, self.process_logits(sampled, logits.read()[slots]))
            graph.run(wait=wait)

    def _graphs(self, key: tuple[object, ...], bind: Callable[[], _Graphs]) -> _Graphs:
        """The graphs of a key, bound now unless they are. The least recently used make room."""
        graphs = self._bound.pop(key, None) or bind()
        self._bound[key] = graphs
        if len(self._bound) > _MAX_BOUND_GRAPHS and self._sessions.replays is None:
            del self._bound[next(iter(self._bound))]
        return graphs

    def _bind_batch(self, rows: range) -> _Graphs:
        """Bind the graphs for a decode step over some rows."""
        batch = self._parameters.buffers | self._logits
        batch |= self._state.inputs() | self._state.outputs()
        batch |= self._outputs.of(self.step + 1)
        batch[INPUT_IDS.name] = self._outputs.of(self.step)[NEXT_IDS.name]
        batch[INPUT_LENGTHS.name] = self._ones
        batch[EMIT.name] = self._emit[True]
        buffers = rows_of(batch, rows)
        buffers |= self._parameters.replay.of_batch()
        buffers |= self.grammars.inputs
        buffers |= self.adapters.inputs(rows)
        buffers |= self._images.of_step(rows)
        return self._bind(buffers, captured=True)

    def _bind_lists(self, graphs: _Graphs, rows: range) -> None:
        """Let a call that is not replayed read what its rows need of a graph for replay."""
        if not self._interface.captured:
            return
        for name, buffer in self._parameters.replay.of_rows(rows).items():
            for graph in graphs:
                graph.bind_input(name, buffer)

    def _bind_rows(self, rows: range, emit: bool) -> _Graphs:
        """Bind the graphs for pieces of the prompts of some rows."""
        return self._bind(self._buffers_of_rows(rows, emit), captured=False)

    def _buffers_of_rows(self, rows: range, emit: bool) -> dict[str, Buffer]:
        """The memory for pieces of the prompts of some rows, whose states change in place. The
        status of the batch is written only with the first token."""
        count = len(rows)
        batch = self._parameters.buffers | self._logits | self._outputs.of(self.step)
        buffers = rows_of(batch, rows)
        buffers |= self._state.inputs(rows) | self._state.outputs(rows)
        buffers |= self._images.of_prompts([None] * count, 1)
        buffers |= self._prompt_inputs.of_rows(count)
        status = self._prompt_status.rows(0, count)
        buffers[EMIT.name] = self._emit[emit].rows(0, count)
        buffers |= self._parameters.replay.of_rows(range(0))
        buffers[STATUS.name] = status
        if not emit:
            buffers[retained_name(STATUS.name)] = status
        buffers |= self.grammars.inputs
        buffers |= self.adapters.inputs(rows)
        return buffers

    def _bind(self, buffers: Mapping[str, Buffer], *, captured: bool) -> _Graphs:
        """Bind the graphs of the package, in running order."""
        graphs: _Graphs = [self._bind_decoder(buffers, captured=captured)]
        if self._sessions.sampler is not None:
            graphs.append(
                BoundGraph(self._sessions.sampler, self._interface.sampler, buffers, "cpu")
            )
        return graphs
