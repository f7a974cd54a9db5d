"""Long work: the callback that receives its progress, the cost of each stage, and the garbage
collector meanwhile."""

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

# A function of the name of a stage and the finished fraction of the whole, in [0, 1].
Progress = Callable[[str, float], None]
# A number of bytes; None if it is unknown.
Figure = int | None
_SAMPLING_INTERVAL_S: Final = 0.05
# The collector never reaches this number of middle collections, so it makes no full collection.
_UNREACHED_THRESHOLD: Final = 1 << 30


class Stage(StrEnum):
    """The stages of long work, as a progress bar names them."""

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
    # The last report of the whole work.
    DONE = "done"


def unreported(stage: str, fraction: float) -> None:
    """A callback that ignores all reports, for callers without a callback."""


@contextmanager
def shown(progress: Progress | None) -> Iterator[Progress]:
    """Show a progress bar on a terminal or in a notebook to callers without a callback.

    The bar is tqdm's, a dependency of transformers. HF_HUB_DISABLE_PROGRESS_BARS hides it.

    Yields:
        The callback: `progress` if it is given.
    """
    try:
        from tqdm.auto import tqdm as bar_class
    except ModuleNotFoundError:
        bar_class = None
    in_notebook = "ipykernel" in sys.modules
    is_visible = in_notebook or (sys.stderr is not None and sys.stderr.isatty())
    is_hidden = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "") != ""
    if progress is not None or bar_class is None or not is_visible or is_hidden:
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
    """The stages of long work, reported to a callback in order. The finished fraction rises from 0
    to 1 once.

    >>> stages = Stages(progress, {Stage.TESTING: 8, Stage.PUBLISHING: 2})
    >>> stages.begin(Stage.TESTING)
    >>> advance = stages.begin(Stage.PUBLISHING)
    >>> advance(0.5)  # reports ("publishing", 0.9)
    >>> stages.finish()
    """

    def __init__(self, progress: Progress | None, shares: Mapping[str, float]) -> None:
        """Prepare the stages.

        Args:
            progress: The caller's callback, if any.
            shares: The proportional times of the stages by name, in order.
        """
        self._report = progress or unreported
        self._spans: dict[str, tuple[float, float]] = {}
        ends = list(accumulate(shares.values()))
        start = 0.0
        for stage, end in zip(shares, ends, strict=True):
            self._spans[stage] = (start / ends[-1], end / ends[-1])
            start = end

    def begin(self, stage: str) -> Callable[[float], None]:
        """Report the beginning of a stage; returns a function that reports its finished fraction,
        in [0, 1]."""
        start, end = self._spans[stage]

        def advance(fraction: float) -> None:
            self._report(stage, start + (end - start) * fraction)

        advance(0.0)
        return advance

    def finish(self) -> None:
        """Report the end of the whole work."""
        self._report(Stage.DONE, 1.0)


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of a stage. Only Linux reports bytes and memory; elsewhere they are None.

    Attributes:
        stage: The name of the stage.
        seconds: The elapsed time.
        cpu_seconds: The processor time of all threads of the process.
        bytes_read: The bytes read from storage; files that the system still has in memory cost no
            read.
        bytes_written: The bytes written to storage.
        peak_resident_bytes: The largest sampled memory of the process, including all mapped pages
            of files.
        peak_anonymous_bytes: The largest sampled memory without mapped files.
    """

    stage: str
    seconds: float
    cpu_seconds: float
    bytes_read: Figure
    bytes_written: Figure
    peak_resident_bytes: Figure
    peak_anonymous_bytes: Figure


def total(costs: Iterable[StageCost], name: str = "total") -> StageCost:
    """The cost of several stages together. name: The name of the sum."""
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
        progress: The callback that gets every report. If it is a `Meter`, it is returned, so that
            the parts of a whole make a single list.

    >>> with metered(progress) as meter:
    ...     meter(Stage.TRACING, 0.1)
    >>> [cost.stage for cost in meter.costs]
    ['starting', 'tracing the decode graph']
    """
    if isinstance(progress, Meter):
        yield progress
        return
    record = _Record()
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(_SAMPLING_INTERVAL_S):
            record.sample_memory()

    sampler = threading.Thread(target=sample, name="qsample-memory", daemon=True)
    sampler.start()
    try:
        yield Meter(progress or unreported, record)
    finally:
        ended.set()
        sampler.join()
        record.end()


class Meter:
    """A progress callback that measures stages, which begin with its reports. `metered` makes
    it."""

    def __init__(self, progress: Progress, record: _Record) -> None:
        self._report = progress
        self._record = record

    def __call__(self, stage: str, fraction: float) -> None:
        # Work after the last report, such as cleaning up, belongs to the last stage.
        if stage != Stage.DONE:
            self._record.begin(stage)
        self._report(stage, fraction)

    def part(self, start: float, end: float) -> Meter:
        """A callback for a part of the work: its fractions 0 to 1 become `start` to `end`.

        `Stage.DONE` of the part is passed on only if the whole ends with the part.
        """

        def report(stage: str, fraction: float) -> None:
            if stage != Stage.DONE or end == 1.0:
                self._report(stage, start + (end - start) * fraction)

        return Meter(report, self._record)

    @property
    def costs(self) -> tuple[StageCost, ...]:
        """The finished stages in the order in which they began; after the body of `metered`, all
        stages."""
        return tuple(self._record.costs.values())


class _Record:
    """Measures one stage at a time."""

    def __init__(self) -> None:
        self.costs: dict[str, StageCost] = {}
        self._start(Stage.STARTING)

    def sample_memory(self) -> None:
        """Sample the memory. Any thread may call this."""
        self._memory.append(_figures("/proc/self/status", "VmRSS", "RssAnon"))

    def begin(self, stage: str) -> None:
        """Begin a stage, and end the stage before it. Nothing happens if the stage has begun
        already."""
        if stage != self._stage:
            self.end()
            self._start(stage)

    def _start(self, stage: str) -> None:
        self._stage = stage
        self._storage = _figures("/proc/self/io", "read_bytes", "write_bytes")
        self._memory: list[list[Figure]] = []
        self.sample_memory()
        self._cpu = time.process_time()
        self._clock = time.perf_counter()

    def end(self) -> None:
        """End the current stage."""
        seconds = time.perf_counter() - self._clock
        cpu_seconds = time.process_time() - self._cpu
        self.sample_memory()
        read_before, written_before = self._storage
        read, written = _figures("/proc/self/io", "read_bytes", "write_bytes")
        resident, anonymous = zip(*self._memory, strict=True)
        cost = StageCost(
            str(self._stage),
            round(seconds, 3),
            round(cpu_seconds, 3),
            bytes_read=_difference(read_before, read),
            bytes_written=_difference(written_before, written),
            peak_resident_bytes=_known(max, resident),
            peak_anonymous_bytes=_known(max, anonymous),
        )
        # A stage may come again.
        earlier = self.costs.get(self._stage)
        self.costs[self._stage] = cost if earlier is None else total([earlier, cost], self._stage)


def _known(combine: Callable[[list[int]], int], figures: Iterable[Figure]) -> Figure:
    """Combine figures; None if any is unknown."""
    listed = list(figures)
    known = [figure for figure in listed if figure is not None]
    return combine(known) if known and len(known) == len(listed) else None


def _difference(before: Figure, after: Figure) -> Figure:
    """The growth of a figure; None if it is unknown."""
    return None if before is None or after is None else after - before


def _figures(file: str, *names: str) -> list[Figure]:
    """The bytes that Linux reports for this process.

    Args:
        file: The file of the report.
        names: The names of the figures in it.

    Returns:
        A figure for each name; None if it is unknown, as on other systems.
    """
    try:
        lines = Path(file).read_text("utf-8", "replace").splitlines()
    except OSError:
        return [None] * len(names)
    reported: dict[str, int] = {}
    for line in lines:
        name, _, text = line.partition(":")
        if name in names:
            words = text.split()
            unit = 1024 if words[-1] == "kB" else 1
            reported[name] = int(words[0]) * unit
    return [reported.get(name) for name in names]


# The lock guards the two values after it.
_collector_lock = threading.Lock()
_users = 0
_threshold_before = gc.get_threshold()


@contextmanager
def young_collections() -> Iterator[None]:
    """Let the garbage collector collect only young objects while the body runs.

    A full collection visits each object of torch, transformers and a traced graph, which takes half
    a second and longer, and an export would start a dozen of them and find almost nothing. The
    setting belongs to the process: if several threads use it, the last one restores it.
    """
    global _users, _threshold_before
    with _collector_lock:
        if _users == 0:
            _threshold_before = gc.get_threshold()
            gc.set_threshold(*_threshold_before[:2], _UNREACHED_THRESHOLD)
        _users += 1
    try:
        yield
    finally:
        with _collector_lock:
            _users -= 1
            if _users == 0:
                gc.set_threshold(*_threshold_before)
