"""Long work: parts of a whole, stages with their shares and costs, and the garbage collector meanwhile.

Costs are compared with clocks, memory and storage that the tests measure themselves.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample import progress
from qsample.progress import (
    Progress,
    Stage,
    StageCost,
    Stages,
    metered,
    shown,
    total,
    unreported,
    young_collections,
)

linux = pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="Linux alone counts bytes and kinds of memory"
)
HELD = 1 << 26


def work(progress: Progress | None) -> None:
    stages = Stages(progress, {"first": 3, "second": 1})
    advance = stages.begin("first")
    advance(0.5)
    stages.begin("second")
    stages.finish()


def test_stages_take_their_shares() -> None:
    seen: list[tuple[str, float]] = []
    work(lambda stage, fraction: seen.append((stage, fraction)))
    assert seen == [("first", 0.0), ("first", 0.375), ("second", 0.75), ("done", 1.0)]
    work(None)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_for_callers_without_a_callback_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.delenv(
        "HF_HUB_DISABLE_PROGRESS_BARS", raising=False
    )  # commands that other tests run here set it
    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with shown(None) as report:
        report("tracing", 0.25)
        assert "tracing:  25%|" in terminal.getvalue().split("\r")[-1]
    assert not terminal.getvalue().split("\r")[-1].strip()  # it is gone at the end
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with shown(None) as report:
        assert report is unreported
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
    monkeypatch.setattr(sys, "stderr", file)
    with shown(None) as report:
        report("tracing", 0.25)
    with shown(print) as report:
        assert report is print
    assert file.getvalue() == ""


def bytes_written() -> int:
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes")).split()[1])


def test_seconds_are_those_of_the_stage() -> None:
    began = time.perf_counter()
    with metered(None) as meter:
        time.sleep(0.1)
        cpu_began = time.process_time()
        meter("computing", 0.1)
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        meter("computing", 0.5)
        meter("waiting", 0.6)
        computing_at_most = time.process_time() - cpu_began
        assert [cost.stage for cost in meter.costs] == ["starting", "computing"]
        meter(Stage.DONE, 1.0)
        time.sleep(0.1)
    whole = time.perf_counter() - began
    starting, computing, waiting = meter.costs
    assert [cost.stage for cost in meter.costs] == ["starting", "computing", "waiting"]
    assert starting.cpu_seconds < 0.1 <= starting.seconds
    assert 0.2 <= computing.cpu_seconds <= computing_at_most + 0.001
    assert waiting.cpu_seconds < 0.1 <= waiting.seconds
    assert 0.4 <= total(meter.costs).seconds <= whole + 0.001


@linux
def test_memory_is_sampled_within_a_stage_and_bytes_are_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled, sample = threading.Semaphore(0), progress._Record.sample_memory

    def noted(record: progress._Record) -> None:
        sample(record)
        sampled.release()

    monkeypatch.setattr(progress._Record, "sample_memory", noted)
    before = bytes_written()
    with metered(None) as meter:
        meter("holding", 0.1)
        held = np.ones(HELD // 8)
        while sampled.acquire(blocking=False):
            pass
        # The first of the samples may have begun before.
        assert all(sampled.acquire(timeout=120) for _ in range(2))
        del held
        meter("writing", 0.5)
        with (tmp_path / "file").open("wb") as file:
            file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    written = bytes_written() - before
    starting, holding, writing = meter.costs
    for name in ("peak_resident_bytes", "peak_anonymous_bytes"):
        peaks = [getattr(cost, name) for cost in (starting, holding, writing)]
        assert peaks[1] - max(peaks[0], peaks[2]) == pytest.approx(HELD, rel=0.1)
        assert getattr(total(meter.costs), name) == peaks[1]
    assert sum(cost.bytes_written or 0 for cost in meter.costs) == written


def test_a_system_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    with metered(None) as meter:
        pass
    (cost,) = meter.costs
    assert cost == StageCost("starting", cost.seconds, cost.cpu_seconds, None, None, None, None)
    assert total([cost, replace(cost, bytes_read=5)]).bytes_read is None


def test_parts_make_one_whole() -> None:
    seen: list[tuple[str, float]] = []
    with metered(lambda stage, fraction: seen.append((stage, fraction))) as meter:
        for part in (meter.part(0.0, 0.5), meter.part(0.5, 1.0)):
            with metered(part) as inner:
                inner("first", 0.0)
                time.sleep(0.05)
                work(inner)
    assert seen == [
        *(("first", 0.0), ("first", 0.0), ("first", 0.1875), ("second", 0.375)),
        *(("first", 0.5), ("first", 0.5), ("first", 0.6875), ("second", 0.875), ("done", 1.0)),
    ]
    assert [cost.stage for cost in meter.costs] == ["starting", "first", "second"]
    assert meter.costs[1].seconds >= 0.1, "a stage that comes again"


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Python's own setting, and a heap without the libraries' objects: a few new ones bring about full collections."""
    before = gc.get_threshold()  # of the suite
    gc.freeze()
    gc.collect()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def collections_of(generation: int) -> int:
    """Make many objects that stay, and return how many collections of the generation ran meanwhile."""
    before = gc.get_stats()[generation]["collections"]
    kept = [[number] for number in range(200_000)]
    return int(gc.get_stats()[generation]["collections"] - before) * bool(kept)


def test_only_young_objects_are_collected(small_heap: None) -> None:
    assert collections_of(2) > 0
    with young_collections():
        assert collections_of(2) == 0
        assert collections_of(0) > 0
    assert collections_of(2) > 0


def test_the_last_of_several_threads_restores_the_setting() -> None:
    before, inside, leave = gc.get_threshold(), threading.Event(), threading.Event()

    def hold() -> None:
        with young_collections():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    with young_collections():
        thread.start()
        inside.wait()
    held = gc.get_threshold()
    leave.set()
    thread.join()
    assert held[2] > before[2]
    assert gc.get_threshold() == before


@pytest.mark.parametrize("notebook", [False, True])
@pytest.mark.parametrize("terminal", [None, False, True])
@pytest.mark.parametrize("hidden", [None, "", "0"])
def test_where_a_bar_is_shown_and_what_is_drawn(
    notebook: bool, terminal: bool | None, hidden: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, float]] = []

    class Bar(contextlib.nullcontext[Any]):
        def __init__(self, **options: Any) -> None:
            super().__init__(self)
            self.n = 0.0

        def set_description_str(self, text: str, refresh: bool = True) -> None:
            self.text = text
            if refresh:
                self.refresh()

        def refresh(self) -> None:
            drawn.append((self.text, self.n))

    modules = {"tqdm": SimpleNamespace(), "tqdm.auto": SimpleNamespace(tqdm=Bar)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    if notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setattr(sys, "stderr", {True: Terminal(), False: io.StringIO()}.get(terminal))  # type: ignore[arg-type]
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    if hidden is not None:
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", hidden)
    with shown(None) as report:
        report(Stage.TESTING, 0.25)
    is_visible = (notebook or terminal is True) and not hidden
    assert drawn == [("starting", 0.0), ("self-test", 0.25)] * is_visible
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with shown(None) as report:
        assert report is unreported, "without tqdm"


def test_costs_together() -> None:
    """Times and bytes add up, the peaks are the larger ones; a figure that is unknown once is unknown."""
    one = StageCost("one", 1.0004, 0.25, 10, 1, 500, 90)
    two = StageCost("two", 2.0023, 0.5, 20, 2, 400, 95)
    assert total([one, two]) == StageCost("total", 3.003, 0.75, 30, 3, 500, 95)
    for name in ("bytes_written", "peak_resident_bytes", "peak_anonymous_bytes"):
        unknown: dict[str, Any] = {name: None}
        found = total([one, replace(two, **unknown)], "name")
        assert found == replace(total([one, two], "name"), **unknown)
    assert total([]) == StageCost("total", 0, 0, None, None, None, None)


def test_the_sampler_of_memory_ends_with_the_work() -> None:
    before = {*threading.enumerate()}
    work = metered(None)
    work.__enter__()
    (sampler,) = {*threading.enumerate()} - before
    assert sampler.daemon, "it keeps no interpreter alive"
    assert not work.__exit__(LookupError, LookupError(), None), "the error goes on"
    assert not sampler.is_alive()
