"""A package that reads given tokens in place of its own, and the logits after each: one token of every row a call."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qsample.contract import (
    BATCH,
    CAPACITY,
    EMIT,
    INPUT_IDS,
    INPUT_LENGTHS,
    LENGTHS,
    LOGITS,
    ROW_AXES,
    SEARCHED,
    SEARCHED_ROWS,
    SEQUENCE,
    TensorSpec,
    retained_name,
)
from qsample.ort.bound_graph import BoundGraph
from qsample.ort.buffers import Buffer
from qsample.ort.options import SessionOptions
from qsample.ort.session import open_sessions, with_logits
from qsample.package import Package
from qsample.tensors import Array


class ForcedTokens:
    """`rows` rows of `capacity` tokens of a package, on the device that it runs on.

    The host says how many tokens of each row count, `lengths` [rows] int32; a recurrent layer wants them to grow by
    what was read, or to start again from 0. No row emits: the sampler of a package that has one does nothing.
    """

    def __init__(self, package: Package, rows: int, capacity: int, options: SessionOptions) -> None:
        self._sessions = sessions = open_sessions(package, options=options, logits=True)
        self._spec = with_logits(sessions.interface.decoder)
        self.rows, self._device = rows, sessions.device
        self._piece_size = min(sessions.piece_size, capacity)
        interface = sessions.interface
        self._sizes = {**interface.sizes, BATCH: rows, CAPACITY: capacity, **dict.fromkeys(ROW_AXES, 1)}
        self._ids = Buffer.allocate(INPUT_IDS, {**self._sizes, SEQUENCE: 1}, self._device)
        self._logits = Buffer.allocate(LOGITS, self._sizes, self._device)
        # Row 0, needlessly: on the CPU, ONNX Runtime before 1.32 gets an empty list wrong.
        self._searched = Buffer.allocate(SEARCHED_ROWS, {SEARCHED: 1}, self._device)
        self._buffers = self._bound()
        self._step = self._graph(self._buffers)
        self._piece_ids = Buffer.allocate(INPUT_IDS, {BATCH: 1, SEQUENCE: self._piece_size}, self._device)
        self._readers: dict[int, BoundGraph] = {}

    def read(self, row: int, ids: Array) -> None:
        """Fill a row's cache with the tokens `ids`, [n] int64, from position 0 on."""
        lengths = np.zeros(self.rows, np.int32)
        for start in range(0, len(ids), self._piece_size):
            piece = ids[start : start + self._piece_size]
            lengths[row] = start
            self._buffers[LENGTHS.name].write(lengths)
            whole = np.zeros((1, self._piece_size), np.int64)
            whole[0, : len(piece)] = piece
            self._piece_ids.write(whole)
            self._reader(row, len(piece)).run()

    def step(self, ids: Array, lengths: Array) -> Array:
        """The logits [rows, V] float32 after one more token of each row; they hold until the next call.

        ids: [rows] int64. lengths: [rows] int32, the tokens in front of it.
        """
        self._ids.write(ids[:, None])
        self._buffers[LENGTHS.name].write(lengths)
        self._step.run()
        logits: Array = self._logits.owner.numpy()  # on the CPU the memory itself
        return logits

    def _bound(self) -> dict[str, Buffer]:
        """The memory of every input and output of a step. What only a sampler would change goes where nobody reads."""
        interface, spec = self._sessions.interface, self._spec
        fixed = {
            INPUT_IDS.name: self._ids,
            INPUT_LENGTHS.name: Buffer.of(np.ones(self.rows, np.int32), self._device),
            EMIT.name: Buffer.of(np.zeros(self.rows, bool), self._device),
            LOGITS.name: self._logits,
            SEARCHED_ROWS.name: self._searched,
        }
        buffers = {
            tensor.name: fixed.get(tensor.name) or self._allocate(tensor)
            for tensor in (*spec.inputs, *spec.states, *spec.outputs)
        }
        caches = {state.name for state in interface.cache_states}
        for state in spec.states:
            if not state.read_only:
                in_place = state.name in caches
                buffers[retained_name(state.name)] = buffers[state.name] if in_place else self._allocate(state)
        return buffers

    def _allocate(self, tensor: TensorSpec) -> Buffer:
        """Of a parameter: switched off. Of anything else: zeros, and so a status of running."""
        if tensor.off is None:
            return Buffer.allocate(tensor, self._sizes, self._device)
        return Buffer.of(np.full(tensor.shape(self._sizes), tensor.off, tensor.dtype), self._device)

    def _reader(self, row: int, tokens: int) -> BoundGraph:
        """The graph over one row, which reads the first `tokens` of the piece."""
        ids = self._piece_ids.reshaped(1, tokens)
        if row not in self._readers:
            one = {name: buffer.rows(row) for name, buffer in self._buffers.items()}
            one[INPUT_LENGTHS.name] = Buffer.of(np.ones(1, np.int32), self._device)
            one[SEARCHED_ROWS.name] = self._searched
            self._readers[row] = self._graph({**one, INPUT_IDS.name: ids})
        graph = self._readers[row]
        graph.bind_input(INPUT_IDS.name, ids)
        graph.bind_input(INPUT_LENGTHS.name, Buffer.of(np.array([tokens], np.int32), self._device))
        return graph

    def _graph(self, buffers: Mapping[str, Buffer]) -> BoundGraph:
        sessions = self._sessions
        return BoundGraph(sessions.decoder, self._spec, buffers, self._device, sessions.replays, captured=False)
