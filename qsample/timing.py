"""The cost of each stage of long work, in time, storage and memory: `Meter`, a progress callback, measures it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qsample.progress import Progress, Stage, part, unreported

_INTERVAL: Final = 0.05  # seconds between two looks at the memory

Figure = int | None  # bytes; None = unknown


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of a stage. None = unknown: Linux alone reports bytes and memory.

    Attributes:
        stage: its name.
        seconds: of the clock.
        cpu_seconds: of all threads of the process.
        bytes_read, bytes_written: from and to storage; files that the system still holds in memory cost no read.
        peak_resident_bytes: the most memory of the process, pages of mapped files included, as samples found it.
        peak_anonymous_bytes: without them.
    """

    stage: str
    seconds: float
    cpu_seconds: float
    bytes_read: Figure
    bytes_written: Figure
    peak_resident_bytes: Figure
    peak_anonymous_bytes: Figure


def total(costs: Iterable[StageCost], name: str = "total") -> StageCost:
    """The cost of several stages together, under `name`."""
    listed = list(costs)
    return StageCost(
        name,
        round(sum(cost.seconds for cost in listed), 3),
        round(sum(cost.cpu_seconds for cost in listed), 3),
        _known(sum, (cost.bytes_read for cost in listed)),
        _known(sum, (cost.bytes_written for cost in listed)),
        _known(max, (cost.peak_resident_bytes for cost in listed)),
        _known(max, (cost.peak_anonymous_bytes for cost in listed)),
    )


@contextmanager
def metered(progress: Progress | None) -> Iterator[Meter]:
    """Measure the stages of the body, from `Stage.STARTING` on.

    Args:
        progress: gets every report. If it measures already, it is returned: parts of a whole make a single list.

    >>> with metered(progress) as meter:
    ...     meter(Stage.TRACING, 0.1)
    >>> [cost.stage for cost in meter.costs]
    ['starting', 'tracing the decode graph']
    """
    if isinstance(progress, Meter):
        yield progress
        return
    record = _Record()
    try:
        yield Meter(progress or unreported, record)
    finally:
        record.stop()


class Meter:
    """A progress callback: its reports begin the stages that are measured. `metered` makes it."""

    def __init__(self, progress: Progress, record: _Record) -> None:
        self._report = progress
        self._record = record

    def __call__(self, stage: str, fraction: float) -> None:
        if stage != Stage.DONE:  # work after it, such as cleaning up, belongs to the last stage
            self._record.begin(stage)
        self._report(stage, fraction)

    def part(self, start: float, end: float) -> Meter:
        """As `progress.part`, measured with the whole."""
        return Meter(part(self._report, start, end), self._record)

    @property
    def costs(self) -> tuple[StageCost, ...]:
        """The stages that have ended, in order of their beginnings; all of them after the body of `metered`."""
        return self._record.costs


class _Record:
    """Measures a stage at a time; a thread of its own samples the memory."""

    def __init__(self) -> None:
        self._costs: dict[str, StageCost] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._start(Stage.STARTING)
        self._sampler = threading.Thread(target=self._sample, name="qsample-timing", daemon=True)
        self._sampler.start()

    @property
    def costs(self) -> tuple[StageCost, ...]:
        return tuple(self._costs.values())

    def begin(self, stage: str) -> None:
        """End the stage so far, unless it is `stage`."""
        if stage != self._stage:
            self._end()
            self._start(stage)

    def stop(self) -> None:
        self._ended.set()
        self._sampler.join()
        self._end()

    def _start(self, stage: str) -> None:
        self._stage, self._storage = stage, _storage()
        with self._lock:
            self._peaks = _memory()
        self._cpu, self._clock = time.process_time(), time.perf_counter()

    def _end(self) -> None:
        seconds, cpu = time.perf_counter() - self._clock, time.process_time() - self._cpu
        self._look()
        read, written = (
            _known(lambda pair: pair[1] - pair[0], pair) for pair in zip(self._storage, _storage(), strict=True)
        )
        cost = StageCost(str(self._stage), round(seconds, 3), round(cpu, 3), read, written, *self._peaks)
        earlier = self._costs.get(self._stage)  # a stage may come again
        self._costs[self._stage] = cost if earlier is None else total([earlier, cost], self._stage)

    def _sample(self) -> None:
        while not self._ended.wait(_INTERVAL):
            self._look()

    def _look(self) -> None:
        with self._lock:
            resident, anonymous = (_known(max, pair) for pair in zip(self._peaks, _memory(), strict=True))
            self._peaks = resident, anonymous


def _known(combine: Callable[[list[int]], int], figures: Iterable[Figure]) -> Figure:
    """`combine` of the figures; None if any is unknown."""
    listed = list(figures)
    known = [figure for figure in listed if figure is not None]
    return combine(known) if known and len(known) == len(listed) else None


def _memory() -> tuple[Figure, Figure]:
    """Resident and anonymous memory of this process, in bytes."""
    lines = _lines("/proc/self/status")
    return _number(lines, "VmRSS", 1024), _number(lines, "RssAnon", 1024)


def _storage() -> tuple[Figure, Figure]:
    """Bytes that this process has read from storage, and written to it."""
    lines = _lines("/proc/self/io")
    return _number(lines, "read_bytes"), _number(lines, "write_bytes")


def _lines(file: str) -> list[str]:
    """The lines of a file of Linux; [] elsewhere."""
    try:
        return Path(file).read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _number(lines: list[str], name: str, unit: int = 1) -> Figure:
    """The number in the line that begins with `name`, in units of `unit` bytes; None without such a line."""
    return next((unit * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
