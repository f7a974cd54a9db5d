"""A thread that runs the graphs while another one reads what they left."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Tasks = SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


class DeviceThread:
    """Runs what it is given, one after another.

    An executor takes nothing any more once the main thread has ended, although threads that the interpreter waits for
    may still need it. This one ends with its owner, or with the interpreter; never in the middle of a run.
    """

    def __init__(self, name: str) -> None:
        self._tasks: _Tasks = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
        self._open = True
        self._end = weakref.finalize(self, _end, self._tasks, self._thread)
        self._thread.start()  # last: ctrl-C may end the wait for it

    def submit(self, run: Callable[[], Any]) -> Future[Any]:
        """What `run` returns or raises, once it has."""
        if not (self._open and self._end.alive):
            raise RuntimeError("the device's thread has ended")
        future: Future[Any] = Future()
        self._tasks.put((future, run))
        return future

    def shutdown(self) -> None:
        """Wait for what was submitted, and end."""
        self._open = False
        _end(self._tasks, self._thread)
        self._end.detach()  # not where ctrl-C ended the wait: the interpreter waits then


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        future, run = task
        try:
            future.set_result(run())
        except BaseException as error:  # whoever waits for it gets it
            future.set_exception(error)
        del task, future, run  # nothing is kept until the next one comes


def _end(tasks: _Tasks, thread: threading.Thread) -> None:
    tasks.put(None)
    if threading.current_thread() is not thread and thread.is_alive():  # one that only begins finds the task
        thread.join()
