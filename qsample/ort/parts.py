"""A decoder in parts, each on a device with a session, a thread and its memory; `Pipeline` runs
them in order.

Hidden states go from a part to the next, and inputs that lie on another device are copied before a
part runs. Runs that need not wait for each other, such as the pieces of a prompt, overlap: a part
begins its next run as soon as a run ends.
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

_HIDDEN_AXES: Final = (BATCH, SEQUENCE)
_DTYPE_NAMES: Final = {dtype.onnxruntime: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a decoder.

    Attributes:
        session: The session of its graph.
        spec: The inputs and outputs of its graph.
        device: The device of its memory, such as "cpu" or "cuda:1".
        thread: The thread that opened the session and runs it; the threads of ONNX Runtime have its
            processors.
        replays: The captures of its runs; None if it is not captured.
    """

    session: ort.InferenceSession
    spec: GraphSpec
    device: str
    thread: DeviceThread
    replays: Replays | None = None

    @staticmethod
    def of(
        session: ort.InferenceSession, device: str, thread: DeviceThread, *, captured: bool
    ) -> Part:
        """A part with the inputs and outputs of its session. captured: Whether its runs are
        captured and replayed."""
        inputs = tuple(_spec_of(value) for value in session.get_inputs())
        outputs = tuple(_spec_of(value) for value in session.get_outputs())
        replays = Replays(threaded=False) if captured else None
        return Part(session, GraphSpec(inputs, (), outputs), device, thread, replays)


def _spec_of(value: Any) -> TensorSpec:
    dtype = _DTYPE_NAMES.get(value.type, value.type)
    return TensorSpec(value.name, dtype, tuple(value.shape), "")


def hidden_states(parts: Sequence[Part]) -> set[str]:
    """The names of the tensors between the parts. Raises PackageError if the sizes of any are
    unknown."""
    outputs = {spec.name: spec for part in parts for spec in part.spec.outputs}
    found = {name for part in parts for name in part.spec.input_names if name in outputs}
    for name in found:
        spec = outputs[name]
        has_sizes = all(isinstance(axis, int) or axis in _HIDDEN_AXES for axis in spec.axes)
        if spec.dtype not in DTYPES or not has_sizes:
            raise PackageError(
                f"{spec.name:.80} of a part has dtype {spec.dtype} and shape {spec.axes}; compile the package again"
            )
    return found


class Pipeline:
    """The parts over the memory of some rows. No method may be called while another runs.

    Attributes:
        parts: The parts in order.
        hidden: The names of the hidden states between them.
        running: The unfinished runs, each as the future of its last part.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.hidden = hidden_states(parts)
        self.running = deque[Future[None]]()
        # The lengths of the rows after the unfinished runs.
        self._lengths: Array | None = None

    def bind(self, buffers: Mapping[str, Buffer], *, captured: bool = True) -> BoundParts:
        """Bind the parts. buffers: Every input and output of the decoder by name, states on the
        device of their part."""
        return BoundParts(self, buffers, captured=captured)

    def finish(self, left: int = 0) -> None:
        """Wait until at most `left` runs are unfinished."""
        try:
            while len(self.running) > left:
                self.running.popleft().result()
        except BaseException:
            # The remaining runs end in their threads before anything else runs there.
            self.running.clear()
            raise

    def lengths(self, buffers: Mapping[str, Buffer]) -> Array:
        """The lengths of the rows after all unfinished runs, for a run that reads further tokens of
        the rows."""
        if self.running and self._lengths is not None:
            lengths = self._lengths
        else:
            lengths = _values(buffers[LENGTHS.name])
        self._lengths = lengths + _values(buffers[INPUT_LENGTHS.name])
        return lengths


def _values(buffer: Buffer) -> Array:
    if isinstance(buffer, HostBuffer):
        return buffer.read()
    return np.array([buffer.read_row(row) for row in range(buffer.shape[0])])


class BoundParts:
    """The parts with every input and output bound, driven as a `BoundGraph` is."""

    def __init__(
        self, pipeline: Pipeline, buffers: Mapping[str, Buffer], *, captured: bool
    ) -> None:
        self._pipeline = pipeline
        self._captured = captured
        self._buffers = dict(buffers)
        self._changed = {LENGTHS.name}
        # There are as many lanes as runs can be unfinished. They take turns.
        self._lanes: list[_Lane] = []

    def bind_input(self, name: str, buffer: Buffer) -> None:
        """Read an input from other memory from now on; an input that the graph lacks is ignored."""
        self._buffers[name] = buffer
        self._changed.add(name)

    def run(self, *, wait: bool = True) -> None:
        """Run once.

        Args:
            wait: Whether to wait for its end; False if another run for later tokens of the same
                rows follows, over other ids and input_lengths, before anything is read.
        """
        pipeline = self._pipeline
        parts = pipeline.parts
        pipeline.finish(len(parts) - 1)
        lane = self._next_lane()
        inputs = {name: self._buffers[name] for name in self._changed}
        # The last part writes the lengths: until it has, earlier parts get them from here.
        lengths = None if wait and not pipeline.running else pipeline.lengths(self._buffers)
        done: Future[None] | None = None
        for number, part in enumerate(parts):
            part_inputs = inputs
            if lengths is not None and part is not parts[-1]:
                part_inputs = inputs | {LENGTHS.name: Buffer.of(lengths, part.device)}
            there = lane.on_device(number, part_inputs)
            done = part.thread.submit(partial(lane.run, number, there, done))
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


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """Memory that is copied to another device."""

    source: Buffer
    target: Buffer


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
        """Bind each part. shape: The shape of the ids, [B, S]."""
        self.shape = shape
        sizes = dict(zip((BATCH, SEQUENCE), shape, strict=True))
        known = {name: buffer for name, buffer in buffers.items() if name not in pipeline.hidden}
        self._graphs: list[BoundGraph] = []
        # The inputs of each part that lie on another device.
        self._copies_before: list[dict[str, _Copy]] = []
        # The hidden states of each part that later parts on other devices read.
        self._copies_after: list[list[_Copy]] = [[] for _ in pipeline.parts]
        makers = dict[str, int]()
        for number, part in enumerate(pipeline.parts):
            memory = dict(known)
            copies = dict[str, _Copy]()
            for name in part.spec.input_names:
                source = known[name]
                if source.device not in (part.device, "cpu"):
                    spec = TensorSpec(name, source.dtype, source.shape, "")
                    memory[name] = Buffer.allocate(spec, {}, part.device)
                    copy = _Copy(source, memory[name])
                    if name in makers:
                        self._copies_after[makers[name]].append(copy)
                    else:
                        copies[name] = copy
            for spec in part.spec.outputs:
                if spec.name in pipeline.hidden:
                    makers[spec.name] = number
                    known[spec.name] = Buffer.allocate(spec, sizes, part.device)
                    memory[spec.name] = known[spec.name]
            self._copies_before.append(copies)
            self._graphs.append(
                BoundGraph(
                    part.session, part.spec, memory, part.device, part.replays, captured=captured
                )
            )

    def on_device(self, number: int, inputs: Mapping[str, Buffer]) -> dict[str, Buffer]:
        """Copy the inputs of a part that lie on another device. Returns `inputs` with the copies in
        place of them."""
        there = dict(inputs)
        for name, copy in self._copies_before[number].items():
            buffer = inputs.get(name, copy.source)
            if buffer.device != copy.target.device:
                copy_on_device(buffer, copy.target)
                there[name] = copy.target
        return there

    def run(self, number: int, inputs: Mapping[str, Buffer], before: Future[None] | None) -> None:
        """Run a part after the part before it.

        In the part's thread, nothing may run on another device: a session that is captured does not
        choose its device before each run.

        Args:
            number: The number of the part.
            inputs: The inputs that may be in other memory than in the last run.
            before: The run of the part before it.
        """
        if before is not None:
            before.result()
        for name, buffer in inputs.items():
            self._graphs[number].bind_input(name, buffer)
        self._graphs[number].run()
        for copy in self._copies_after[number]:
            copy_on_device(copy.source, copy.target)
