"""Drives the decoder of a package step by step, with every input decided on by the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from qsample.contract.arrays import Array, rounded
from qsample.contract.tensors import (
    BATCH,
    CAPACITY,
    HOST_AXES,
    INPUT_IDS,
    INPUT_LENGTHS,
    LENGTHS,
    REPLAY_ROWS,
    SEQUENCE,
    TensorSpec,
    retained_name,
)
from qsample.ort.bound_graph import BoundGraph
from qsample.ort.buffers import Buffer, copy_on_device
from qsample.ort.parts import BoundParts
from qsample.ort.session import Sessions, with_logits


class Stepper:
    """Rows of a package on its device. Each run reads a token of every row.

    `write` replaces inputs and states, `run` runs the graph, and `read` returns outputs or states.
    Parameters that were not written are off, and everything else is zeros, so every row runs and
    none emits a token.

    Attributes:
        specs: The inputs, and the states without the cache.
        outputs: The names of the outputs, without states.
    """

    def __init__(
        self,
        sessions: Sessions,
        rows: int,
        capacity: int,
        *,
        captured: bool = False,
        logits: bool = False,
    ) -> None:
        """Allocate the memory.

        A capture runs the graph several times over the same inputs, so a cache that may not be
        written twice is not updated in place.

        Args:
            sessions: The sessions of the package.
            rows: The number of rows, at least 1.
            capacity: T.
            captured: Whether runs are captured and replayed, if the package is made for that.
            logits: Whether `sessions` were opened with the logits among the outputs.
        """
        interface = sessions.interface
        self._sessions = sessions
        spec = with_logits(interface.decoder) if logits else interface.decoder
        self._sizes = {
            **interface.sizes,
            BATCH: rows,
            SEQUENCE: 1,
            CAPACITY: capacity,
        }
        self._sizes |= {str(axis): rows for spec in REPLAY_ROWS for axis in spec.axes}
        self._sizes |= dict.fromkeys(HOST_AXES, 1)
        self.specs = tuple(
            one for one in (*spec.inputs, *spec.states) if one not in interface.cache_states
        )
        self.outputs = tuple(one.name for one in spec.outputs)
        self._buffers = {
            one.name: self._allocate(one) for one in (*spec.inputs, *spec.states, *spec.outputs)
        }
        # The next values of these states are in separate memory.
        self._separate_states: list[str] = []
        for state in spec.states:
            if state.read_only:
                continue
            name = retained_name(state.name)
            is_cache = state in interface.cache_states
            if is_cache and (CAPACITY in state.axes or not captured):
                self._buffers[name] = self._buffers[state.name]
            else:
                self._buffers[name] = self._allocate(state)
                self._separate_states.append(state.name)
        self.reset()
        self._bind = sessions.binder(spec)
        self._step = self._bind(self._buffers, captured=captured)
        piece = {**self._sizes, BATCH: 1, SEQUENCE: min(sessions.prompts.piece_size, capacity)}
        self._piece = Buffer.allocate(INPUT_IDS, piece, sessions.input_device)
        # The inputs of images, for text.
        self._image_inputs_off = {
            one: _off(one, piece, sessions.input_device) for one in interface.image_inputs
        }
        # The graphs that read pieces, by row.
        self._readers: dict[int, BoundGraph | BoundParts] = {}

    def reset(self) -> None:
        """Begin again: parameters are off, everything else is zeros. The cache need not be
        cleared."""
        for spec in self.specs:
            # No part of a graph for replay is left out.
            every_row = np.arange(self._sizes[BATCH])
            self.write(spec.name, every_row if spec in REPLAY_ROWS else spec.off or 0)
        self.write(INPUT_LENGTHS.name, 1)

    def write(self, name: str, values: Any) -> None:
        """Replace an input or a state of every row. values: Values of its shape, or that broadcast
        to it."""
        buffer = self._buffers[name]
        spec = next(one for one in self.specs if one.name == name)
        buffer.write(np.broadcast_to(rounded(values, spec.dtype), buffer.shape))

    def run(self) -> None:
        """Run once. The cache moves on, other states wait for `advance`."""
        self._step.run()

    def advance(self) -> None:
        """Make the states that the last run wrote the current states."""
        for name in self._separate_states:
            copy_on_device(self._buffers[retained_name(name)], self._buffers[name])

    def read(self, name: str) -> Array:
        """A copy of an output, or of a state as it is now."""
        return self._buffers[name].read()

    def fill(self, row: int, ids: Array) -> None:
        """Fill a row's cache with tokens from position 0 on; not for captured runs. ids: [n]
        int64."""
        size = self._piece.shape[1]
        lengths = np.zeros(self._sizes[BATCH], np.int32)
        for start in range(0, len(ids), size):
            piece = ids[start : start + size]
            lengths[row] = start
            self.write(LENGTHS.name, lengths)
            self._piece.write(np.pad(piece, (0, size - len(piece)))[None])
            self._reader(row, len(piece)).run()

    def _reader(self, row: int, tokens: int) -> BoundGraph | BoundParts:
        """The graph over a single row that reads the first `tokens` tokens of the piece."""
        ids = self._piece.reshaped(1, tokens)
        inputs = {
            INPUT_IDS.name: ids,
            INPUT_LENGTHS.name: Buffer.of(np.array([tokens], np.int32), ids.device),
        }
        for spec, off in self._image_inputs_off.items():
            has_tokens = SEQUENCE in spec.axes
            inputs[spec.name] = off.reshaped(1, tokens, *off.shape[2:]) if has_tokens else off
        if row not in self._readers:
            # The matrices of adapters are for all rows.
            shared = {spec.name for spec in self.specs if BATCH not in spec.axes}
            buffers = {
                name: buffer if name in shared else buffer.rows(row)
                for name, buffer in self._buffers.items()
                if name not in inputs
            }
            # No row emits a token, but ONNX Runtime before 1.32 gets empty lists wrong on the CPU.
            only_row = Buffer.of(np.zeros(1, np.int64), ids.device)
            lists = {spec.name: only_row for spec in REPLAY_ROWS}
            self._readers[row] = self._bind(buffers | inputs | lists, captured=False)
        graph = self._readers[row]
        for name, buffer in inputs.items():
            graph.bind_input(name, buffer)
        return graph

    def _allocate(self, spec: TensorSpec) -> Buffer:
        return Buffer.allocate(spec, self._sizes, self._sessions.device_of(spec))


def _off(spec: TensorSpec, sizes: dict[str, int], device: str) -> Buffer:
    """An input with the value that switches it off."""
    buffer = Buffer.allocate(spec, sizes, device)
    buffer.write(np.full(buffer.shape, rounded(spec.off, spec.dtype)))
    return buffer
