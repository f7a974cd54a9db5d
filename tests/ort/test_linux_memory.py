"""Huge pages for what is allocated inside the block, and for nothing else; pages of mapped files, given back and read
again."""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from qsample.ort import linux_memory, session
from qsample.ort.linux_memory import HUGE_PAGE, in_huge_pages, release_pages
from qsample.package.package import Package

PAGES = 8
MAPPED_PAGES = 64
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives pages back")


def allocate() -> mmap.mmap:
    """Memory that a random pattern was written to, in small pages."""
    memory = mmap.mmap(-1, PAGES * HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[:] = np.random.default_rng(0).bytes(len(memory))
    memory.madvise(mmap.MADV_HUGEPAGE)  # takes the other one back; what is there stays as it is
    return memory


def huge_pages_of(memory: mmap.mmap) -> int:
    """How many pages the mapping that `memory` is in has."""
    address, inside = np.frombuffer(memory, np.uint8).ctypes.data, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split()[0]:
            start, _, end = line.split()[0].partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024 // HUGE_PAGE
    raise AssertionError("the memory is not mapped")


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name == "qsample-huge-pages":
            thread.join()


def can_collapse() -> bool:
    """Whether the system does it when it is asked directly."""
    memory = allocate()
    try:
        memory.madvise(linux_memory._COLLAPSE)
    except (OSError, ValueError):
        return False
    return huge_pages_of(memory) > 0


@pytest.mark.skipif(
    not (sys.platform == "linux" and linux_memory._allowed() and can_collapse()),
    reason="needs Linux 6.1 and free huge pages",
)
def test_memory_that_is_allocated_inside_the_block_gets_them() -> None:
    before = allocate()
    had = huge_pages_of(before)
    with in_huge_pages():
        memory = allocate()
        small = huge_pages_of(memory)
    wait()
    # A mapping can start between two huge pages, and the system may have joined the two.
    assert huge_pages_of(memory) - small >= PAGES - 1
    assert had == 0
    assert memory[:] == before[:]


def test_parts_that_were_there_before_are_left_out() -> None:
    parts = linux_memory._without
    assert list(parts((10, 50), [])) == [(10, 50)]
    assert list(parts((10, 50), [(0, 10), (50, 60)])) == [(10, 50)]
    assert list(parts((10, 50), [(0, 20), (30, 35), (45, 60)])) == [(20, 30), (35, 45)]
    assert list(parts((10, 50), [(10, 50)])) == []


def test_switched_off_by_the_administrator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    enabled = tmp_path / "enabled"
    monkeypatch.setattr(linux_memory, "_ENABLED", enabled)
    assert not linux_memory._allowed()
    enabled.write_text("always madvise [never]\n")
    assert not linux_memory._allowed()
    enabled.write_text("always [madvise] never\n")
    assert linux_memory._allowed() is (sys.platform == "linux")
    monkeypatch.setattr(linux_memory, "_MAPS", tmp_path / "maps")
    assert not linux_memory._allowed()


def test_the_decoder_is_loaded_into_them(fake: Callable[..., Package], monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    @contextmanager
    def record() -> Iterator[None]:
        entered.append("entered")
        yield
        entered.append("left")

    monkeypatch.setattr(session, "in_huge_pages", record)
    session.open_sessions(fake(), "cpu")
    assert entered == ["entered", "left"]


def resident(path: Path) -> int:
    """KiB of `path` in this process's memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@on_linux
@pytest.mark.parametrize("access", [mmap.ACCESS_READ, mmap.ACCESS_COPY])
def test_pages_are_given_back_and_read_again(access: int, tmp_path: Path) -> None:
    content = bytes(range(256)) * (MAPPED_PAGES * mmap.PAGESIZE // 256)
    path, other = tmp_path / "weights", tmp_path / "other weights"
    for one in (path, other):
        one.write_bytes(content)
    with (
        open(path, "rb") as file,
        open(other, "rb") as other_file,
        mmap.mmap(file.fileno(), 0, access=access) as view,
        mmap.mmap(other_file.fileno(), 0, access=access) as other_view,
    ):
        assert view[:] == other_view[:] == content
        whole = MAPPED_PAGES * mmap.PAGESIZE // 1024
        assert (resident(path), resident(other)) == (whole, whole)
        release_pages(path)
        assert (resident(path), resident(other)) == (0, whole)
        assert view[:] == content


@on_linux
def test_what_was_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(MAPPED_PAGES * mmap.PAGESIZE))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        view[5] = 7
        release_pages(path)
        assert view[:8] == b"\0\0\0\0\0\7\0\0"


@on_linux
def test_a_file_that_is_not_mapped(tmp_path: Path) -> None:
    release_pages(tmp_path / "nothing")
