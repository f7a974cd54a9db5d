"""Parts of a run, each in a process of its own with a time limit.

A fault of a kernel stays with its process, in which every later call on the GPU fails.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Final

from gpu_report import Rows
from rich.progress import Progress

LEAST_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.1
# Exports and compilations use several cores each.
MAX_RUNNING: Final = max(2, (os.cpu_count() or 1) // 3)


@dataclass(frozen=True)
class Part:
    """A piece of work that adds rows, and the seconds after which its process is ended."""

    name: str
    work: Callable[[Rows], object]
    seconds: float = 150.0


def run_parts(
    groups: Iterable[Sequence[Part]],
    rows: Rows,
    end: float,
    poll: Callable[[], None],
    bar: Progress,
) -> None:
    """Run groups of parts one after the other, the parts of a group side by side.

    Args:
        groups: the groups.
        rows: the rows of the run, to which the problems of parts are added.
        end: the moment of `time.monotonic` at which every part ends.
        poll: called again and again meanwhile.
        bar: the progress bar; it must have no thread, because a fork copies the locks that threads hold.
    """
    listed = [*groups]
    task = bar.add_task("", total=sum(map(len, listed)))
    # A forked process has the modules of this one, torch above all, at once.
    context = multiprocessing.get_context("fork")
    # Each with its start and its limit.
    running: dict[BaseProcess, tuple[Part, float, float]] = {}
    try:
        for group in listed:
            later = [*group]
            while later or running:
                while later and len(running) < MAX_RUNNING:
                    part = later.pop(0)
                    start = time.monotonic()
                    limit = min(start + part.seconds, end)
                    if limit - start < LEAST_SECONDS:
                        rows.of(part.name).problem("omitted, the time was up")
                        continue
                    process = context.Process(target=_work, args=(part, rows.of(part.name)))
                    process.start()
                    running[process] = part, start, limit
                names = "; ".join(part.name for part, *_ in running.values())
                bar.update(task, description=names, refresh=True)
                time.sleep(POLL_SECONDS)
                for process, (part, start, limit) in list(running.items()):
                    code, now = process.exitcode, time.monotonic()
                    if code is None and now < limit:
                        continue
                    _stop(process)
                    del running[process]
                    rows.add("parts", part=part.name, seconds=round(now - start, 1))
                    if code is None:
                        rows.of(part.name).problem("ended at its time limit")
                    elif code != 0:
                        rows.of(part.name).problem(f"its process ended with {code}")
                    bar.advance(task)
                poll()
    finally:
        for process in running:
            _stop(process)


def _stop(process: BaseProcess) -> None:
    """End a process and those that it started."""
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _work(part: Part, rows: Rows) -> None:
    os.setpgid(0, 0)
    log = (rows.folder / "log.txt").open("a", buffering=1, encoding="utf-8")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    with rows.section("failed"):
        part.work(rows)
    log.flush()
    os._exit(0)  # a driver may hang while a process leaves it
