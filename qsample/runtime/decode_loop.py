"""Prompts and parameter arrays enter; one `Step` of tokens after another leaves, until no row runs.

Everything is bound once: the graphs read and write the same memory at every step, and what a step sampled is what the
next one reads. Two `next_ids` buffers take turns, because a graph may write an output while it still reads its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from qsample.contract import (
    ADJUSTED_LOGITS,
    BATCH,
    CAPACITY,
    EMIT,
    INPUT_IDS,
    INPUT_LENGTHS,
    INVALID_LOGITS,
    LOGITS,
    NEXT_IDS,
    RUNNING,
    SAMPLER_STATES,
    STALLED,
    STATUS,
    GraphSpec,
    TensorSpec,
)
from qsample.errors import QsampleError
from qsample.runtime.session import Sessions
from qsample.runtime.state import Array, Buffer, RetainedState

_OPTIONAL_OUTPUTS: Final = ("logprobs", "top_logprob_ids", "top_logprobs", "probs")


@dataclass(frozen=True, slots=True)
class Step:
    """What one step sampled, copied to the host.

    tokens: [B] int64. emitted: [B] bool, false where the row had ended before, or its logits were invalid. status: [B]
    int32 after the step. outputs: the optional outputs that the package has, by name.
    """

    tokens: Array
    emitted: Array
    status: Array
    outputs: Mapping[str, Array]


class DecodeLoop:
    """A fixed set of rows, from their prompts to their last tokens.

    >>> loop = DecodeLoop(sessions, parameters, seeds=[0, 1], capacity=256)
    >>> for step in loop.run([prompt_0, prompt_1]): ...
    """

    def __init__(
        self,
        sessions: Sessions,
        parameters: Mapping[str, Array],
        seeds: Sequence[int],
        capacity: int,
        *,
        in_place: bool = True,
    ) -> None:
        """parameters: every name of `Interface.parameters`, one row each. seeds: one a row. capacity: T, in tokens."""
        self._sessions = sessions
        self._rows = len(seeds)
        self._capacity = capacity
        interface = sessions.interface
        sizes = {**interface.sizes, BATCH: self._rows, CAPACITY: capacity}
        # With the sampler on the host, only the cache stays on the device.
        self._device = device = "cpu" if sessions.sampler is not None else sessions.device
        specs: dict[TensorSpec, str] = dict.fromkeys(SAMPLER_STATES, device)
        specs |= dict.fromkeys(interface.cache_states, sessions.device)
        self._state = RetainedState(specs, sizes, in_place=in_place)
        self._state.start(sessions.initial_state, seeds, capacity)

        self._next_ids = [Buffer.allocate(NEXT_IDS, sizes, device) for _ in range(2)]
        self._newest = 0  # which of them the last step wrote
        extra = [spec for spec in interface.sampler_outputs if spec.name in _OPTIONAL_OUTPUTS]
        self._outputs = {spec.name: Buffer.allocate(spec, sizes, device) for spec in extra}
        self._shared = {name: Buffer.of(array, device) for name, array in parameters.items()} | dict(self._outputs)
        if sessions.sampler is not None:
            logits = Buffer.allocate(LOGITS, sizes, device)
            self._shared |= {LOGITS.name: logits, ADJUSTED_LOGITS.name: logits}
        self._one_token = {
            INPUT_LENGTHS.name: Buffer.of(np.ones(self._rows, dtype=np.int32), device),
            EMIT.name: Buffer.of(np.ones(self._rows, dtype=np.bool_), device),
        }
        self._step_graphs: dict[tuple[int, int], list[_BoundGraph]] = {}
        self._status = np.full(self._rows, RUNNING, dtype=np.int32)

    def run(self, prompts: Sequence[Array], prefill_chunk_size: int | None = None) -> Iterator[Step]:
        """Prefill `prompts`, then decode until every row has ended. Yields a step per sampled token.

        prompts: [n] int64 a row, 1 <= n < capacity. prefill_chunk_size: most prompt tokens in one call; None = all.
        """
        yield self.prefill(prompts, prefill_chunk_size)
        for _ in range(self._capacity):
            if not (self._status == RUNNING).any():
                return
            yield self.decode()
        # Each step fills a slot of every running row, so only a wrong graph comes here.
        raise QsampleError(
            f"rows still run after {self._capacity} steps; the graph does not follow the decode contract"
        )

    def set_parameter(self, name: str, values: Array) -> None:
        """Replace a parameter's values, of every row, from the next call on. values: as `Interface.parameters` says."""
        self._shared[name].write(values)

    def prefill(self, prompts: Sequence[Array], chunk_size: int | None = None) -> Step:
        """Consume the prompts and sample each row's first token.

        A batch of several tokens a row is legal only as a first prefill, so chunks of more than one row go row by row
        through views of the row's slice of every buffer.
        """
        if self._rows == 1:
            self._prefill_chunks(prompts[0], chunk_size, row=None)
        elif chunk_size is None:
            self._prefill_together(prompts)
        else:
            for row, prompt in enumerate(prompts):
                self._prefill_chunks(prompt, chunk_size, row)
        return self._read()

    def decode(self) -> Step:
        """Feed each row its newest token and sample the next one."""
        key = (self._state.side, self._newest)
        if key not in self._step_graphs:
            call = {INPUT_IDS.name: self._next_ids[self._newest], **self._one_token}
            self._step_graphs[key] = self._bind(call, self._next_ids[1 - self._newest])
        self._run(self._step_graphs[key])
        self._state.flip()
        self._newest = 1 - self._newest
        return self._read()

    def _prefill_together(self, prompts: Sequence[Array]) -> None:
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
        ids = np.zeros((self._rows, lengths.max()), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        call = self._call(ids, lengths, emit=True)
        self._run(self._bind(call, self._next_ids[self._newest]))
        self._state.flip()

    def _prefill_chunks(self, prompt: Array, chunk_size: int | None, row: int | None) -> None:
        """Feed one row its prompt, `chunk_size` tokens a call. The last chunk is not padded: it could pass T."""
        chunk_size = chunk_size or len(prompt)
        for start in range(0, len(prompt), chunk_size):
            chunk = prompt[None, start : start + chunk_size]
            lengths = np.array([chunk.shape[1]], dtype=np.int32)
            call = self._call(chunk, lengths, emit=start + chunk_size >= len(prompt))
            next_ids = self._next_ids[self._newest]
            self._run(self._bind(call, next_ids if row is None else next_ids.row(row), row))
            if row is None:
                self._state.flip()

    def _call(self, ids: Array, lengths: Array, *, emit: bool) -> dict[str, Buffer]:
        arrays = {INPUT_IDS.name: ids, INPUT_LENGTHS.name: lengths, EMIT.name: np.full(len(ids), emit)}
        return {name: Buffer.of(array, self._device) for name, array in arrays.items()}

    def _bind(self, call: Mapping[str, Buffer], next_ids: Buffer, row: int | None = None) -> list[_BoundGraph]:
        """The package's graphs in running order, over all rows or one."""
        shared = {name: buffer if row is None else buffer.row(row) for name, buffer in self._shared.items()}
        buffers = shared | self._state.inputs(row) | self._state.outputs(row) | dict(call) | {NEXT_IDS.name: next_ids}
        interface, sessions = self._sessions.interface, self._sessions
        graphs = [_BoundGraph(sessions.decoder, interface.decoder, buffers, sessions.device)]
        if sessions.sampler is not None:
            graphs.append(_BoundGraph(sessions.sampler, interface.sampler, buffers, "cpu"))
        return graphs

    def _run(self, graphs: Sequence[_BoundGraph]) -> None:
        for graph in graphs:
            graph.run()

    def _read(self) -> Step:
        before, self._status = self._status, self._state.read(STATUS.name)
        if (self._status == STALLED).any():
            raise QsampleError(
                "a row needs the graph with control flow, which this package lacks; use a portable package"
            )
        emitted = (before == RUNNING) & (self._status != INVALID_LOGITS)
        tokens = self._next_ids[self._newest].read()[:, 0]
        return Step(tokens, emitted, self._status, {name: buffer.read() for name, buffer in self._outputs.items()})


class _BoundGraph:
    """A session with every input and output bound; `run` reads and writes that memory."""

    def __init__(
        self, session: ort.InferenceSession, spec: GraphSpec, buffers: Mapping[str, Buffer], device: str
    ) -> None:
        self._session = session
        self._binding: Any = session.io_binding()
        # ONNX Runtime copies an input from another device when it is bound, not when the graph runs.
        self._copied = {name: buffers[name] for name in spec.input_names if buffers[name].device != device}
        for name in spec.input_names:
            buffers[name].bind_input(self._binding, name)
        for name in spec.output_names:
            buffers[name].bind_output(self._binding, name)
        self._buffers = [buffers[name] for name in (*spec.input_names, *spec.output_names)]  # keeps the memory alive

    def run(self) -> None:
        for name, buffer in self._copied.items():
            buffer.bind_input(self._binding, name)
        self._session.run_with_iobinding(self._binding)
