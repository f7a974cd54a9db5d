"""A decoder in parts, each on a device with a session, a thread and its memory; `Pipeline` runs them in order.

Hidden states go from a part to the next, and inputs that lie on another device are copied before a part runs. Runs that
need not wait for each other, such as the pieces of a prompt, overlap: a part begins the next as soon as it ends one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from qsample.contract.arrays import DTYPES, Array
from qsample.contract.interface import GraphSpec
from qsample.contract.tensors import BATCH, INPUT_IDS, INPUT_LENGTHS, LENGTHS, SEQUENCE, TensorSpec
from qsample.errors import PackageError
from qsample.ort.bound_graph import BoundGraph, DeviceThread, Replays
from qsample.ort.buffers import Buffer, HostBuffer, copy_on_device

_AXES: Final = (BATCH, SEQUENCE)
_DTYPES: Final = {dtype.onnxruntime: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a decoder.
    device: of its memory, such as "cpu" or "cuda:1". thread: opened the session and runs it; ONNX Runtime's threads
    have its processors. replays: None if it is not captured."""

    session: ort.InferenceSession
    spec: GraphSpec
    device: str
    thread: DeviceThread
    replays: Replays | None = None

    @staticmethod
    def of(
        session: ort.InferenceSession, device: str, thread: DeviceThread, *, captured: bool
    ) -> Part:
        inputs, outputs = (
            tuple(map(_spec_of, side)) for side in (session.get_inputs(), session.get_outputs())
        )
        return Part(
            session,
            GraphSpec(inputs, (), outputs),
            device,
            thread,
            Replays(threaded=False) if captured else None,
        )


def _spec_of(value: Any) -> TensorSpec:
    return TensorSpec(value.name, _DTYPES.get(value.type, value.type), tuple(value.shape), "")


def hidden_states(parts: Sequence[Part]) -> set[str]:
    """The names of the tensors between the parts. Raises PackageError if the sizes of any are unknown."""
    given = {spec.name: spec for part in parts for spec in part.spec.outputs}
    found = {name for part in parts for name in part.spec.input_names if name in given}
    for spec in map(given.__getitem__, found):
        if spec.dtype not in DTYPES or not all(
            isinstance(axis, int) or axis in _AXES for axis in spec.axes
        ):
            raise PackageError(
                f"{spec.name:.80} of a part has dtype {spec.dtype} and shape {spec.axes}; compile the package again"
            )
    return found


class Pipeline:
    """The parts over the memory of some rows. No method may be called while another runs."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts, self.hidden = parts, hidden_states(parts)
        self.running: deque[Future[None]] = (
            deque()
        )  # runs that nobody waited for, of their last parts
        self._lengths: Array | None = None  # of the rows after these

    def bind(self, buffers: Mapping[str, Buffer], *, captured: bool = True) -> BoundParts:
        """`buffers` has every input and output of the decoder by name, states on the device of their part."""
        return BoundParts(self, buffers, captured=captured)

    def finish(self, left: int = 0) -> None:
        """Wait until at most `left` runs are under way."""
        try:
            while len(self.running) > left:
                self.running.popleft().result()
        except BaseException:
            self.running.clear()  # what is left ends in its threads before anything else runs there
            raise

    def lengths(self, buffers: Mapping[str, Buffer]) -> Array:
        """The lengths of the rows after all runs under way, for a run that reads more tokens behind them."""
        now = (
            self._lengths
            if self.running and self._lengths is not None
            else _values(buffers[LENGTHS.name])
        )
        self._lengths = now + _values(buffers[INPUT_LENGTHS.name])
        return now


def _values(buffer: Buffer) -> Array:
    if isinstance(buffer, HostBuffer):
        return buffer.read()
    return np.array([buffer.read_row(row) for row in range(buffer.shape[0])])


class BoundParts:
    """The parts with every input and output bound, driven as a `BoundGraph` is."""

    def __init__(
        self, pipeline: Pipeline, buffers: Mapping[str, Buffer], *, captured: bool
    ) -> None:
        self._pipeline, self._captured = pipeline, captured
        self._buffers, self._changed = dict(buffers), {LENGTHS.name}
        self._lanes: list[_Lane] = []  # as many as runs can be under way, in turns

    def bind_input(self, name: str, buffer: Buffer) -> None:
        """Read an input from other memory from now on; an input that the graph lacks is ignored."""
        self._buffers[name] = buffer
        self._changed.add(name)

    def run(self, *, wait: bool = True) -> None:
        """Run once. wait: to its end; False if another run for later tokens of the same rows follows, over other ids
        and input_lengths, before anything is read."""
        pipeline = self._pipeline
        parts = pipeline.parts
        pipeline.finish(len(parts) - 1)
        lane = self._next_lane()
        inputs = {name: self._buffers[name] for name in self._changed}
        # The last part writes the lengths: until it has, earlier parts get them from here.
        lengths = None if wait and not pipeline.running else pipeline.lengths(self._buffers)
        done: Future[None] | None = None
        for number, part in enumerate(parts):
            own = inputs
            if lengths is not None and part is not parts[-1]:
                own = inputs | {LENGTHS.name: Buffer.of(lengths, part.device)}
            done = part.thread.submit(partial(lane.run, number, lane.on_device(number, own), done))
        assert done is not None
        pipeline.running.append(done)
        if wait:
            pipeline.finish()

    def _next_lane(self) -> _Lane:
        shape = self._buffers[INPUT_IDS.name].shape
        count = 1 if self._captured else len(self._pipeline.parts)
        lane = self._lanes.pop(0) if len(self._lanes) == count else None
        if lane is None or lane.shape != shape:
            lane = _Lane(self._pipeline, self._buffers, shape, captured=self._captured)
        self._lanes.append(lane)
        return lane


class _Lane:
    """The memory of a run: its hidden states, and inputs that are copied from another device."""

    def __init__(
        self,
        pipeline: Pipeline,
        buffers: Mapping[str, Buffer],
        shape: tuple[int, ...],
        *,
        captured: bool,
    ) -> None:
        """shape: of the ids, [B, S]."""
        self.shape = shape
        sizes = dict(zip((BATCH, SEQUENCE), shape, strict=True))
        known = {name: buffer for name, buffer in buffers.items() if name not in pipeline.hidden}
        self._graphs: list[BoundGraph] = []
        # Of each part: the inputs that lie elsewhere, and copies of them; its hidden states, and copies elsewhere.
        self._copied: list[dict[str, tuple[Buffer, Buffer]]] = []
        self._sent: list[list[tuple[Buffer, Buffer]]] = [[] for _ in pipeline.parts]
        maker = dict[str, int]()
        for number, part in enumerate(pipeline.parts):
            memory, copied = dict(known), {}
            for name in part.spec.input_names:
                source = known[name]
                if source.device not in (part.device, "cpu"):
                    spec = TensorSpec(name, source.dtype, source.shape, "")
                    memory[name] = Buffer.allocate(spec, {}, part.device)
                    if name in maker:
                        self._sent[maker[name]].append((source, memory[name]))
                    else:
                        copied[name] = source, memory[name]
            for spec in part.spec.outputs:
                if spec.name in pipeline.hidden:
                    maker[spec.name] = number
                    memory[spec.name] = known[spec.name] = Buffer.allocate(spec, sizes, part.device)
            self._copied.append(copied)
            self._graphs.append(
                BoundGraph(
                    part.session, part.spec, memory, part.device, part.replays, captured=captured
                )
            )

    def on_device(self, number: int, inputs: Mapping[str, Buffer]) -> dict[str, Buffer]:
        """`inputs` for a part, those on another device copied, as its other inputs there are."""
        given = dict(inputs)
        for name, (source, target) in self._copied[number].items():
            buffer = inputs.get(name, source)
            if buffer.device != target.device:
                copy_on_device(buffer, target)
                given[name] = target
        return given

    def run(self, number: int, inputs: Mapping[str, Buffer], before: Future[None] | None) -> None:
        """Run a part when the part before it has run. inputs: those that may be in other memory than in the last run.
        In the part's thread, nothing may run on another device: a session that is captured does not choose its own
        before each run."""
        if before is not None:
            before.result()
        for name, buffer in inputs.items():
            self._graphs[number].bind_input(name, buffer)
        self._graphs[number].run()
        for source, target in self._sent[number]:
            copy_on_device(source, target)
