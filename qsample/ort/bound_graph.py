"""Sessions whose inputs and outputs are bound to buffers, and the threads that run them."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Final

import onnxruntime as ort

from qsample.contract.interface import GraphSpec
from qsample.ort.buffers import Buffer, Handle

NOT_CAPTURED: Final = -1  # ONNX Runtime's annotation of a run that is neither captured nor replayed
_Tasks = SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


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
        """`buffers` has every input and output of `spec` by name; `device` is the session's. With `replays` (CUDA
        graphs) and `captured`, the first run is captured and replayed later, over the same memory."""
        self._thread = None if replays is None else replays.thread
        number = None if replays is None else replays.number() if captured else NOT_CAPTURED
        self._binding: Any = session.io_binding()
        self._runs = {
            wait: partial(
                session.run_with_iobinding, self._binding, _run_options(number, device, wait=wait)
            )
            for wait in (True, False)
        }
        self._buffers = {
            name: buffers[name] for name in (*spec.input_names, *spec.output_names)
        }  # kept alive
        # ONNX Runtime copies an input from other memory when it is bound, not when the graph runs.
        foreign = _foreign_inputs(session) if device == "cpu" else set()
        self._copied = [
            name for name in spec.input_names if buffers[name].device != device or name in foreign
        ]
        self._staged: dict[
            Handle, ort.OrtValue
        ] = {}  # parts of tensors that are bound whole, and those tensors
        self._read, self._written = set[Handle](), set[Handle]()
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
        """parts: notes a part of a tensor that cannot be bound by itself."""
        if isinstance(buffer, Handle) and buffer.is_part:
            parts.add(buffer)
            value = self._staged.setdefault(buffer, buffer.staged())
            buffer = Handle(value, buffer.dtype, buffer.shape, 0, buffer.device)
        bind = buffer.bind_input if parts is self._read else buffer.bind_output
        bind(self._binding, name)

    def run(self, *, wait: bool = True) -> None:
        """Run once. wait: for the device to finish; False if more runs follow before anything is read."""
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
    """Inputs that a provider on the CPU wants in special memory, as OpenVINO does."""
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
    """Runs calls in order, while another thread reads their results. An executor accepts nothing after the main thread
    has ended, although threads that the interpreter waits for may still need it. This thread ends with its owner, or
    with the interpreter; never in the middle of a run."""

    def __init__(self, name: str, processors: Collection[int] | None = None) -> None:
        """processors: that it runs on, and the threads that it starts; by default as the calling thread."""
        self._tasks: _Tasks = SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._tasks, processors), name=name, daemon=True
        )
        self._open = True
        self._end = weakref.finalize(self, _end, self._tasks, self._thread)
        self._thread.start()  # last: ctrl-C may end the wait for it

    def submit(self, run: Callable[[], Any]) -> Future[Any]:
        """The future result of `run`. Raises RuntimeError after `shutdown`."""
        if not (self._open and self._end.alive):
            raise RuntimeError("the device's thread has ended")
        future: Future[Any] = Future()
        self._tasks.put((future, run))
        return future

    def shutdown(self) -> None:
        """Wait for everything that was submitted, and end the thread."""
        self._open = False
        _end(self._tasks, self._thread)
        self._end.detach()  # not if ctrl-C ended the wait: the interpreter waits then


def _work(tasks: _Tasks, processors: Collection[int] | None) -> None:
    if sys.platform == "linux" and processors is not None:
        os.sched_setaffinity(0, processors)  # of this thread
    while (task := tasks.get()) is not None:
        future, run = task
        try:
            future.set_result(run())
        except BaseException as error:  # for a thread that waits for the result
            future.set_exception(error)
        del task, future, run  # nothing is kept until the next call comes


def _end(tasks: _Tasks, thread: threading.Thread) -> None:
    tasks.put(None)
    if (
        threading.current_thread() is not thread and thread.is_alive()
    ):  # a thread that only begins finds the task
        thread.join()


class Replays:
    """The thread and the numbers of all captured runs of a session. ONNX Runtime keeps a captured graph for its thread
    under a number, as long as the session lives. So all runs are on `thread`, or, if that is None, on the one thread
    that calls them; and a number is used once: a replay reads and writes the memory that it was captured over."""

    def __init__(self, *, threaded: bool = True) -> None:
        self.thread = DeviceThread("qsample-replay") if threaded else None
        self._numbers = count(1)

    def number(self) -> int:
        """A new number, for a graph over a set of buffers."""
        return next(self._numbers)
