"""Drives a compiled package step by step, in the sessions that `load` opens, captured where they are.

Like `GraphRunner`, it copies every state but the cache in and out, so that a test decides on each token that is fed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qsample.contract import (
    BATCH,
    CAPACITY,
    LENGTHS,
    NOISE_STREAMS,
    ROW_AXES,
    SEARCHED,
    SEARCHED_ROWS,
    SEED,
    SEQUENCE,
    TensorSpec,
    retained_name,
)
from qsample.ort.bound_graph import BoundGraph
from qsample.ort.buffers import Buffer, copy_on_device
from qsample.ort.session import open_sessions
from qsample.package import Package
from qsample.runtime.decode.inputs import uniforms
from qsample.tensors import Array


class PublishedRunner:
    """The decode graph of a compiled package over `rows` rows of one token each.

    replays: runs that replayed a captured graph.
    """

    def __init__(self, package: Package, rows: int) -> None:
        compilation = package.manifest.compilation
        assert compilation is not None
        self._sessions = sessions = open_sessions(package)
        self._spec, self._caches = package.interface.decoder, package.interface.cache_states
        self._capacity = compilation.ctx_len
        sizes = {BATCH: rows, SEQUENCE: 1, CAPACITY: self._capacity, SEARCHED: rows, **dict.fromkeys(ROW_AXES, 1)}
        self._sizes = package.interface.sizes | sizes
        self._inputs = {spec.name: self._allocate(spec) for spec in (*self._spec.inputs, *self._spec.states)}
        self._outputs = {spec.name: self._allocate(spec) for spec in self._spec.outputs}
        # A capture runs the graph several times over the same inputs: in place is what may be written again.
        for spec in self._spec.states:
            again = spec in self._caches and CAPACITY in spec.axes
            if not spec.read_only:
                self._outputs[retained_name(spec.name)] = self._inputs[spec.name] if again else self._allocate(spec)
        self._decoder = BoundGraph(
            sessions.decoder, self._spec, self._inputs | self._outputs, sessions.device, sessions.replays
        )
        self._runs = 0

    @property
    def replays(self) -> int:
        return max(self._runs - 1, 0) if self._sessions.replays is not None else 0

    def start(self, rows: int) -> dict[str, Array]:
        """The starting state but the cache, which need not be cleared; row i with seed i. rows: those of the runner."""
        assert self._sizes[BATCH] == rows
        specs = [spec for spec in self._spec.states if spec not in self._caches]
        state = {spec.name: np.zeros(spec.shape(self._sizes), spec.dtype) for spec in specs}
        for name, stream in NOISE_STREAMS.items():
            if name in state:
                state[name][:] = [uniforms(seed, self._capacity, stream) for seed in range(rows)]
        return {LENGTHS.name: np.zeros(rows, np.int32), **state}

    def step(
        self, ids: Array, lengths: Array, state: dict[str, Array], parameters: Mapping[str, float] | None = None
    ) -> dict[str, Array]:
        """Run once and move `state` on; see `GraphRunner.step`. ids: [rows, 1]. lengths: ones. Returns every output but
        the states."""
        values = {"emit": True, "temperature": 0.0} | dict(parameters or {})
        rows = np.arange(len(ids))
        given = {"input_ids": ids, "input_lengths": lengths, SEARCHED_ROWS.name: rows, SEED.name: rows, **state}
        for spec in (*self._spec.inputs, *self._spec.states):
            if spec not in self._caches:
                value = np.asarray(given.get(spec.name, values.get(spec.name, spec.off)))
                self._inputs[spec.name].write(np.broadcast_to(value, spec.shape(self._sizes)).astype(spec.dtype))
        self._decoder.run()
        self._runs += 1
        for spec in self._caches:
            source, target = self._outputs[retained_name(spec.name)], self._inputs[spec.name]
            if source is not target:
                copy_on_device(source, target)
        for name in state:
            if retained_name(name) in self._outputs:
                state[name] = self._outputs[retained_name(name)].read()
        if retained_name(LENGTHS.name) not in self._outputs:
            state[LENGTHS.name] = (state[LENGTHS.name] + lengths).astype(np.int32)
        return {spec.name: self._outputs[spec.name].read() for spec in self._spec.outputs}

    def _allocate(self, spec: TensorSpec) -> Buffer:
        return Buffer.allocate(spec, self._sizes, self._sessions.device)
