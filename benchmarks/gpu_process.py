"""A part of a run in a process of its own, with a time limit: what breaks there breaks nothing else.

A kernel's fault stays with its process: every later call on the GPU fails there, and so would all parts that follow.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

DONE = "done"


class Reports:
    """What a part has found, on its way to the process that writes it down; see `gpu_report.Results`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, kind: str, *values: Any) -> None:
        self._connection.send((kind, values))

    def machine(self, name: str, value: str) -> None:
        self.send("machine", name, value)

    def check(self, shape: str, line: str) -> None:
        self.send("check", shape, line)

    def cell(self, cell: Any) -> None:
        self.send("cell", cell)

    def problem(self, line: str) -> None:
        self.send("problem", line)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """What goes wrong in it is reported, and ends this section alone."""
        try:
            yield
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.problem(f"{name}: {type(error).__name__}: {' '.join(str(error).split()):.300}")


def run_apart(
    name: str,
    work: Callable[[Reports], None],
    take: Callable[..., None],
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> str | None:
    """Fork a process for `work`, and hand what it reports to `take`.

    seconds: how long it may take; None = for ever. environment: additions to that process's. Returns what ended it,
    where that was not the end of `work`.
    """
    # Not spawned: what the parent has imported, torch above all, is there at once. The parent uses no GPU.
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, work, writer, dict(environment or {})))
    process.start()
    writer.close()
    end = None if seconds is None else time.perf_counter() + seconds
    try:
        while True:
            left = None if end is None else max(end - time.perf_counter(), 0)
            ready = wait([reader, process.sentinel], left)
            if not ready:
                return f"stopped, it was not done after {seconds:.0f} s"
            if reader in ready:
                try:
                    kind, values = reader.recv()
                except EOFError:
                    break
                if kind == DONE:
                    return None
                take(kind, *values)
            else:
                break
        process.join()
        code = process.exitcode or 0
        return f"its process ended with signal {signal.Signals(-code).name}" if code < 0 else f"it ended with {code}"
    finally:
        _stop(process)
        reader.close()


def _child(name: str, work: Callable[[Reports], None], connection: Connection, environment: Mapping[str, str]) -> None:
    os.setpgid(0, 0)  # with the processes that it starts, so that all of them can be ended
    os.environ.update(environment)
    reports = Reports(connection)
    with reports.section(name):
        work(reports)
    reports.send(DONE)


def _stop(process: Any) -> None:
    process.join(0.2)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
