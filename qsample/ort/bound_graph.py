"""Sessions whose inputs and outputs are bound to buffers, and the threads that run them."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Final

import onnxruntime as ort

from qsample.contract.interface import GraphSpec
from qsample.ort.buffers import Buffer, Handle

# ONNX Runtime neither captures nor replays a run with this number.
NOT_CAPTURED: Final = -1


@dataclass(frozen=True, slots=True)
class _Task:
    """A call for a thread, and its future result."""

    call: Callable[[], Any]
    future: Future[Any]


# None ends the thread.
_Tasks = SimpleQueue[_Task | None]


class BoundGraph:
    """A session with every input and output bound; `run` reads and writes that memory."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: GraphSpec,
        buffers: Mapping[str, Buffer],
        device: str,
        replays: Replays | None = None,
        *,
        captured: bool = True,
    ) -> None:
        """Bind a session.

        Args:
            session: The session.
            spec: Its inputs and outputs.
            buffers: The memory of every input and output by name.
            device: The device of the session.
            replays: The captures of the session's runs (CUDA graphs); None if they are not
                captured.
            captured: Whether the first run is captured, and replayed later over the same memory, if
                there are `replays`.
        """
        if replays is None:
            self._thread = None
            number = None
        else:
            self._thread = replays.thread
            number = replays.number() if captured else NOT_CAPTURED
        self._binding: Any = session.io_binding()
        self._runs = {
            wait: partial(
                session.run_with_iobinding, self._binding, _run_options(number, device, wait=wait)
            )
            for wait in (True, False)
        }
        # These references keep the memory alive.
        self._buffers = {name: buffers[name] for name in (*spec.input_names, *spec.output_names)}
        # ONNX Runtime copies an input from other memory when it is bound, not when the graph runs.
        foreign = _foreign_inputs(session) if device == "cpu" else set()
        self._copied = [
            name for name in spec.input_names if buffers[name].device != device or name in foreign
        ]
        # Tensors without addresses are bound whole: these stand for parts of such tensors.
        self._staged: dict[Handle, ort.OrtValue] = {}
        self._read = set[Handle]()
        self._written = set[Handle]()
        for name in spec.input_names:
            self._bind(name, buffers[name], self._read)
        for name in spec.output_names:
            self._bind(name, buffers[name], self._written)

    def bind_input(self, name: str, buffer: Buffer) -> None:
        """Read an input from other memory from now on; an input that the graph lacks is ignored."""
        if name in self._buffers and self._buffers[name] != buffer:
            self._buffers[name] = buffer
            self._bind(name, buffer, self._read)

    def _bind(self, name: str, buffer: Buffer, parts: set[Handle]) -> None:
        """Bind a buffer. parts: `self._read` or `self._written`, to which a part of a tensor is
        added that cannot be bound by itself."""
        if isinstance(buffer, Handle) and buffer.is_part:
            parts.add(buffer)
            value = self._staged.setdefault(buffer, buffer.staged())
            buffer = Handle(value, buffer.dtype, buffer.shape, 0, buffer.device)
        bind = buffer.bind_input if parts is self._read else buffer.bind_output
        bind(self._binding, name)

    def run(self, *, wait: bool = True) -> None:
        """Run once. wait: Whether to wait for the device; False if more runs follow before anything
        is read."""
        for name in self._copied:
            self._buffers[name].bind_input(self._binding, name)
        for part in self._read:
            part.take(self._staged[part])
        if self._thread is None:
            self._runs[wait]()
        else:
            self._thread.submit(self._runs[wait]).result()
        for part in self._written:
            part.put(self._staged[part])


def _foreign_inputs(session: ort.InferenceSession) -> set[str]:
    """The inputs that a provider on the CPU wants in special memory, as OpenVINO does."""
    memories = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return {value.name for value, memory in memories if memory.name != "Cpu"}


def _run_options(capture: int | None, device: str, *, wait: bool) -> ort.RunOptions | None:
    if device == "cpu" and capture is None:
        return None
    options = ort.RunOptions()
    if capture is not None:
        options.add_run_config_entry("gpu_graph_id", str(capture))
    if not wait and device != "cpu":
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


class DeviceThread:
    """Runs calls in order, while another thread reads their results.

    An executor of the standard library accepts nothing after the main thread has ended, although
    threads that the interpreter waits for may still need it. This thread ends with its owner, or
    with the interpreter, and never in the middle of a run.
    """

    def __init__(self, name: str, processors: Collection[int] | None = None) -> None:
        """Start the thread.

        Args:
            name: The name of the thread.
            processors: The numbers of the processors for the thread and the threads that it starts;
                by default those of the calling thread.
        """
        self._tasks: _Tasks = SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._tasks, processors), name=name, daemon=True
        )
        self._open = True
        self._end = weakref.finalize(self, _end, self._tasks, self._thread)
        # This comes last, because ctrl-C may end the wait for the start.
        self._thread.start()

    def submit(self, run: Callable[[], Any]) -> Future[Any]:
        """The future result of `run`. Raises RuntimeError after `shutdown`."""
        if not (self._open and self._end.alive):
            raise RuntimeError("the device's thread has ended")
        future: Future[Any] = Future()
        self._tasks.put(_Task(run, future))
        return future

    def shutdown(self) -> None:
        """Wait for everything that was submitted, and end the thread."""
        self._open = False
        _end(self._tasks, self._thread)
        # If ctrl-C ends the wait above, the interpreter waits at its end.
        self._end.detach()


def _work(tasks: _Tasks, processors: Collection[int] | None) -> None:
    """Run tasks until a None comes."""
    if sys.platform == "linux" and processors is not None:
        this_thread = 0
        os.sched_setaffinity(this_thread, processors)
    while (task := tasks.get()) is not None:
        try:
            task.future.set_result(task.call())
        except BaseException as error:  # The thread that waits for the result gets it.
            task.future.set_exception(error)
        # Nothing of this task stays alive while the thread waits for the next.
        del task


def _end(tasks: _Tasks, thread: threading.Thread) -> None:
    """End a thread. A thread that has not begun yet ends when it finds the None."""
    tasks.put(None)
    if threading.current_thread() is not thread and thread.is_alive():
        thread.join()


class Replays:
    """The thread and the numbers of all captured runs of a session.

    ONNX Runtime keeps a captured graph for its thread under a number, as long as the session lives.
    So all runs are on `thread`, or, if that is None, on the only thread that calls them. A number
    is used once, because a replay reads and writes the memory that it was captured over.
    """

    def __init__(self, *, threaded: bool = True) -> None:
        self.thread = DeviceThread("qsample-replay") if threaded else None
        self._numbers = count(1)

    def number(self) -> int:
        """A new number, for a graph over a set of buffers."""
        return next(self._numbers)
