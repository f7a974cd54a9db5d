"""Long work: the callback that receives its progress, the cost of each stage, and Python's garbage meanwhile."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

Progress = Callable[
    [str, float], None
]  # the name of a stage, and the fraction of the whole that is done, in [0, 1]
Figure = int | None  # bytes; None = unknown
_INTERVAL: Final = 0.05  # seconds between two looks at the memory
_NEVER: Final = 1 << 30  # middle collections, before a full collection


class Stage(StrEnum):
    """The stages of long work, in the words that a progress bar shows."""

    STARTING = "starting"
    WAITING = "waiting for another process that makes the same package"
    MAKING_AGAIN = "the package in the cache is damaged and is made again"
    OPENING = "opening the checkpoint"
    CHECKING = "checking the model"
    TRACING = "tracing the decode graph"
    WRITING_WEIGHTS = "writing the weights"
    COMPARING = "comparing with the original"

    FINDING = "finding the decoder"
    READING = "reading the decoder"
    RUNNING = "running the decoder as it is"
    REWRITING = "rewriting"
    COMPARING_WITH_CHECKPOINT = "comparing with the checkpoint"

    WRITING_TEXT = "writing the text to fit to"
    OPTIMISING = "optimising the graph"
    MEASURING_CACHE = "measuring keys and values"
    FITTING = "fitting weights to the text"
    WRITING_GRAPH = "writing the graph"
    TESTING = "self-test"
    DIVERGENCE = "measuring the divergence"
    PUBLISHING = "publishing"

    LOADING = "loading"
    READING_TEXT = "reading the text"
    READING_PROMPT = "reading the prompt"
    TIMING = "timing"
    DONE = "done"  # the last report of the whole


def unreported(stage: str, fraction: float) -> None:
    """The callback of a caller who gave none."""


@contextmanager
def shown(progress: Progress | None) -> Iterator[Progress]:
    """`progress`; for callers without one, a bar on a terminal or in a notebook, by tqdm, which transformers brings.
    HF_HUB_DISABLE_PROGRESS_BARS hides it, too."""
    try:
        from tqdm.auto import tqdm as bar_class
    except ModuleNotFoundError:
        bar_class = None
    notebook = "ipykernel" in sys.modules
    in_sight = notebook or (sys.stderr is not None and sys.stderr.isatty())
    if (
        progress is not None
        or bar_class is None
        or not in_sight
        or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS")
    ):
        yield progress or unreported
        return
    bar: Any
    with bar_class(
        total=1.0, leave=False, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
    ) as bar:

        def report(stage: str, fraction: float) -> None:
            bar.set_description_str(str(stage), refresh=False)
            bar.n = fraction
            bar.refresh()

        report(Stage.STARTING, 0.0)
        yield report


class Stages:
    """The stages of long work, in order, reported to a callback: the fraction done rises from 0 to 1 once.

    >>> stages = Stages(progress, {Stage.TESTING: 8, Stage.PUBLISHING: 2})
    >>> stages.begin(Stage.TESTING)
    >>> advance = stages.begin(Stage.PUBLISHING)
    >>> advance(0.5)  # reports ("publishing", 0.9)
    >>> stages.finish()
    """

    def __init__(self, progress: Progress | None, shares: Mapping[str, float]) -> None:
        """progress: the caller's callback, if any. shares: the stages by name, with their times in proportion."""
        self._report = progress or unreported
        ends = list(accumulate(shares.values(), initial=0.0))
        self._spans = {
            stage: (start / ends[-1], end / ends[-1])
            for stage, start, end in zip(shares, ends, ends[1:], strict=False)
        }

    def begin(self, stage: str) -> Callable[[float], None]:
        """Report that `stage` begins, and return a function that reports the fraction of it that is done, in [0, 1]."""
        start, end = self._spans[stage]

        def advance(fraction: float) -> None:
            self._report(stage, start + (end - start) * fraction)

        advance(0.0)
        return advance

    def finish(self) -> None:
        """Report the end of the whole."""
        self._report(Stage.DONE, 1.0)


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of a stage; numbers that only Linux reports (bytes, memory) may be None.

    Attributes:
        seconds: of the clock.
        cpu_seconds: of all threads of the process.
        bytes_read, bytes_written: from and to storage; files that the system still holds in memory cost no read.
        peak_resident_bytes: the most memory of the process, as samples found it; with each mapping of a file's page.
        peak_anonymous_bytes: without mapped files.
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
    """Measure the stages of the body, from `Stage.STARTING` on; `progress` gets every report.

    If `progress` measures already, it is returned: parts of a whole make a single list.

    >>> with metered(progress) as meter:
    ...     meter(Stage.TRACING, 0.1)
    >>> [cost.stage for cost in meter.costs]
    ['starting', 'tracing the decode graph']
    """
    if isinstance(progress, Meter):
        yield progress
        return
    record, ended = _Record(), threading.Event()

    def sample() -> None:
        while not ended.wait(_INTERVAL):
            record.look()

    sampler = threading.Thread(target=sample, name="qsample-memory", daemon=True)
    sampler.start()
    try:
        yield Meter(progress or unreported, record)
    finally:
        ended.set()
        sampler.join()
        record.end()


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
        """A callback for work that is a part of the whole: its fractions 0 to 1 become `start` to `end`. The part's
        "done" is passed on only if the whole ends with it."""

        def report(stage: str, fraction: float) -> None:
            if stage != Stage.DONE or end == 1.0:
                self._report(stage, start + (end - start) * fraction)

        return Meter(report, self._record)

    @property
    def costs(self) -> tuple[StageCost, ...]:
        """The stages that have ended, in order of their beginnings; all of them after the body of `metered`."""
        return tuple(self._record.costs.values())


class _Record:
    """Measures a stage at a time."""

    def __init__(self) -> None:
        self.costs: dict[str, StageCost] = {}
        self._start(Stage.STARTING)

    def look(self) -> None:
        """Sample the memory; any thread may."""
        self._memory.append(_figures("/proc/self/status", "VmRSS", "RssAnon"))

    def begin(self, stage: str) -> None:
        """End the stage so far, unless it is `stage`."""
        if stage != self._stage:
            self.end()
            self._start(stage)

    def _start(self, stage: str) -> None:
        self._stage, self._storage = stage, _figures("/proc/self/io", "read_bytes", "write_bytes")
        self._memory: list[list[Figure]] = []
        self.look()
        self._cpu, self._clock = time.process_time(), time.perf_counter()

    def end(self) -> None:
        seconds, cpu = time.perf_counter() - self._clock, time.process_time() - self._cpu
        self.look()
        storage = zip(
            self._storage, _figures("/proc/self/io", "read_bytes", "write_bytes"), strict=True
        )
        read, written = (_known(lambda pair: pair[1] - pair[0], pair) for pair in storage)
        resident, anonymous = (_known(max, samples) for samples in zip(*self._memory, strict=True))
        cost = StageCost(
            str(self._stage), round(seconds, 3), round(cpu, 3), read, written, resident, anonymous
        )
        earlier = self.costs.get(self._stage)  # a stage may come again
        self.costs[self._stage] = cost if earlier is None else total([earlier, cost], self._stage)


def _known(combine: Callable[[list[int]], int], figures: Iterable[Figure]) -> Figure:
    """`combine` of the figures; None if any is unknown."""
    listed = list(figures)
    known = [figure for figure in listed if figure is not None]
    return combine(known) if known and len(known) == len(listed) else None


def _figures(file: str, *names: str) -> list[Figure]:
    """Bytes that Linux tells of this process under these names, None elsewhere."""
    try:
        lines = [
            line.partition(":") for line in Path(file).read_text("utf-8", "replace").splitlines()
        ]
    except OSError:
        return [None] * len(names)
    told = {name: value.split() for name, _, value in lines}
    return [
        int(told[name][0]) * (1024 if told[name][-1] == "kB" else 1) if name in told else None
        for name in names
    ]


_collecting = threading.Lock()
_users = 0
_before = gc.get_threshold()


@contextmanager
def young_collections() -> Iterator[None]:
    """Collect young objects only while the body runs. A collection of all objects looks at each object of torch,
    transformers and a traced graph, for half a second and longer, and an export would start a dozen of them to find
    next to nothing. The setting is the process's: the last of several threads restores it."""
    global _users, _before
    with _collecting:
        if _users == 0:
            _before = gc.get_threshold()
            gc.set_threshold(*_before[:2], _NEVER)
        _users += 1
    try:
        yield
    finally:
        with _collecting:
            _users -= 1
            if _users == 0:
                gc.set_threshold(*_before)
