"""The parts of the GPU benchmark in separate processes, and their results in gpu.json, gpu.md and gpu.png.

A part has its own process and a time limit: a fault of a kernel stays with its process, in which every later call on
the GPU fails. The results are rewritten with every measurement, check and error.
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
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import report
from report import markdown, write_json

CAPTURED = "captured"  # the system that is compared with all others; see gpu_systems.py
DONE = "done"


@dataclass(frozen=True)
class Cell:
    """A line of the table.

    `seconds` is the time of a step, the median of the rounds. `floor` is the time to read the weights and the cache
    once; None if the device's bandwidth is unknown.
    """

    shape: str
    system: str
    rows: int
    mix: str
    seconds: float
    floor: float | None

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds

    @property
    def columns(self) -> list[str]:
        share = "" if self.floor is None else f"{self.floor / self.seconds:.0%}"
        figures = [f"{1e3 * self.seconds:.3f}", f"{self.tokens_per_second:.0f}", share]
        return [self.shape, self.system, str(self.rows), self.mix, *figures]


HEADER = ["shape", "system", "rows", "mix", "ms per step", "tokens/s", "share of the floor"]


def comparisons(cells: list[Cell]) -> list[str]:
    """A line for each comparison of which both sides were measured."""
    seconds = {(cell.shape, cell.system, cell.rows, cell.mix): cell.seconds for cell in cells}
    lines = []
    for shape, system, rows, mix in seconds:
        if not system.startswith(CAPTURED):
            continue
        here = f"{shape}, {system}, {rows} rows"
        own = seconds[shape, system, rows, mix]
        greedy = seconds.get((shape, system, rows, "greedy"))
        if mix != "greedy" and greedy is not None:
            lines.append(f"{here}: {mix} takes {own / greedy - 1:+.1%} over greedy")
        others = [
            other
            for other in dict.fromkeys(key[1] for key in seconds)
            if not other.startswith(CAPTURED)
        ]
        for other in others if system == CAPTURED else ():
            theirs = seconds.get((shape, other, rows, mix))
            if theirs is not None:
                lines.append(f"{here}, {mix}: {theirs / own:.2f} times as fast as {other}")
    return lines


class Results:
    """The results of a run, saved with each report: the machine may be gone before the run ends."""

    def __init__(self, folder: Path, command: str) -> None:
        self._folder, self._command = folder, command
        self.machine: dict[str, str] = {}
        self.checks: dict[str, list[str]] = {}
        self.cells: list[Cell] = []
        self.problems: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, kind: str, *values: Any) -> None:
        """Record a report of a part; see `Reports`."""
        if kind == "machine":
            name, text = values
            self.machine[name] = text
        elif kind == "check":
            shape, line = values
            self.checks.setdefault(shape, []).append(line)
        elif kind == "cell":
            self.cells.append(values[0])
        else:
            self.problems.append(values[0])
        print(
            *(values[0].columns if kind == "cell" else values),
            sep=" | ",
            file=sys.stderr,
            flush=True,
        )
        self.save()

    def save(self) -> None:
        """Write gpu.json and gpu.md."""
        rows = [asdict(cell) | {"tokens_per_second": cell.tokens_per_second} for cell in self.cells]
        document = {
            "machine": self.machine,
            "checks": self.checks,
            "problems": self.problems,
            "rows": rows,
        }
        write_json(self._folder / "gpu.json", document)
        written = self._folder / "gpu.md.part"
        written.write_text("\n".join([*self._page(), ""]))
        written.replace(self._folder / "gpu.md")  # complete at any time

    def _page(self) -> list[str]:
        lines = ["# Decoding on a GPU", "", f"Written by `{self._command}`.", ""]
        lines += [f"- {name}: {value}" for name, value in self.machine.items()] + [""]
        for shape, said in self.checks.items():
            lines += [f"**{shape}**", "", *(f"- {line}" for line in said), ""]
        if self.problems:
            lines += ["**Failed or omitted**", "", *(f"- {line}" for line in self.problems), ""]
        if self.cells:
            lines += markdown(HEADER, [cell.columns for cell in self.cells])
            lines += ["", *(f"- {line}" for line in comparisons(self.cells))]
        if (self._folder / "gpu.png").exists():
            lines += ["", "![tokens per second](gpu.png)"]
        return lines

    def plot(self, mix: str) -> None:
        """Write gpu.png: tokens per second over rows, of the cells with `mix`."""
        cells = [cell for cell in self.cells if cell.mix == mix]
        shapes = list(dict.fromkeys(cell.shape for cell in cells))
        if not shapes:
            return
        figure, axes = report.new_figure(1, len(shapes), (5, 4), sharex=True, sharey=True)
        for axis, shape in zip(axes[0], shapes, strict=True):
            for system in dict.fromkeys(cell.system for cell in cells):
                points = [
                    (c.rows, c.tokens_per_second)
                    for c in cells
                    if (c.shape, c.system) == (shape, system)
                ]
                if points:
                    axis.plot(*zip(*sorted(points), strict=True), **report.line_style(system))
            axis.set(title=f"{shape}, {mix}", xlabel="rows", xscale="log", yscale="log")
        axes[0][0].set_ylabel("tokens/s")
        report.save_figure(figure, self._folder / "gpu.png")
        self.save()


class Reports:
    """Sends the findings of a part to the process that records them; see `Results`."""

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
        """Report an error in this section, which ends only this section."""
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
    """Fork a process for `work`, and pass its reports to `take`.

    Args:
        name: The name of the part, for error messages.
        work: The work.
        take: The receiver of the reports.
        seconds: The time limit; None = none.
        environment: Additions to the environment of the process.

    Returns:
        The reason if the process ended early, otherwise None.
    """
    # Forked, not spawned: the modules of the parent, torch above all, are available at once. The parent uses no GPU.
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
        return (
            f"its process ended with signal {signal.Signals(-code).name}"
            if code < 0
            else f"it ended with {code}"
        )
    finally:
        _stop(process)
        reader.close()


def _child(
    name: str,
    work: Callable[[Reports], None],
    connection: Connection,
    environment: Mapping[str, str],
) -> None:
    os.setpgid(0, 0)  # its group includes its child processes, so that all of them can be ended
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
