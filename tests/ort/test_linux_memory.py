"""Huge pages for what is allocated inside the block, and for nothing else; the memory of a session that ends, and pages
of mapped files, are given back."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from qsample.ort import linux_memory, session
from qsample.ort.linux_memory import HUGE_PAGE_BYTES, give_back_after, in_huge_pages, release_pages
from qsample.package.package import Package

ROOT = Path(__file__).parents[2]
PAGES = 8
MAPPED_PAGES = 64
_IN_A_NEW_HEAP = f"import {__name__} as tests; tests.check_a_heap_of_huge_pages()"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives pages back")


def allocate() -> mmap.mmap:
    """Memory that a random pattern was written to, in small pages."""
    memory = mmap.mmap(-1, PAGES * HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[:] = np.random.default_rng(0).bytes(len(memory))
    memory.madvise(mmap.MADV_HUGEPAGE)  # takes the other one back; what is there stays as it is
    return memory


def flags_at(address: int) -> list[str]:
    """The flags of the mapping at an address; "hg" if huge pages are asked for it."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split()[0]:
            start, _, end = line.split()[0].partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("the memory is not mapped")


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name == "qsample-huge-pages":
            thread.join()


@pytest.mark.skipif(
    not (sys.platform == "linux" and linux_memory._allowed()), reason="needs Linux's huge pages"
)
def test_memory_that_is_allocated_inside_the_block_gets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked for: whether huge pages are free depends on the whole machine."""
    advised: list[tuple[int, int]] = []
    advise = linux_memory._advise

    def record(parts: Iterable[tuple[int, int]], advice: int) -> None:
        parts = list(parts)
        if advice == linux_memory._MADV_COLLAPSE:
            advised.extend(parts)
        advise(parts, advice)

    monkeypatch.setattr(linux_memory, "_advise", record)
    before = allocate()
    with in_huge_pages():
        memory = allocate()
    wait()

    def is_advised(memory: mmap.mmap) -> bool:
        start = np.frombuffer(memory, np.uint8).ctypes.data
        return any(first <= start and start + len(memory) <= end for first, end in advised)

    assert [is_advised(before), is_advised(memory)] == [False, True]
    assert memory[:] == before[:]


on_glibc = pytest.mark.skipif(
    not (
        sys.platform == "linux"
        and linux_memory._allowed()
        and hasattr(ctypes.CDLL(None), "mallopt")
    ),
    reason="needs glibc and Linux's huge pages",
)


@on_glibc
def test_large_allocations_come_from_a_heap_of_huge_pages() -> None:
    """In a process of its own: other tests leave holes in the heap, which glibc would fill first."""
    subprocess.run([sys.executable, "-c", _IN_A_NEW_HEAP], cwd=ROOT, check=True, timeout=300)


def check_a_heap_of_huge_pages() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, size = ctypes.c_void_p, PAGES * HUGE_PAGE_BYTES // 2
    libc.malloc_trim(0)
    with in_huge_pages(4 * size):
        parts = [libc.malloc(size) for _ in range(4)]
        for part in parts:
            ctypes.memset(part, 1, size)
        # Without gaps between them, in memory for which huge pages are asked. How many of these are free depends on
        # the whole machine.
        assert all(0 <= after - part - size < 64 for part, after in itertools.pairwise(parts))
        assert {"hg" in flags_at(part + size // 2) for part in parts} == {True}
    for part in parts:
        libc.free(ctypes.c_void_p(part))


@on_glibc
def test_the_memory_of_a_session_is_given_back_when_it_ends() -> None:
    def megabytes() -> float:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("RssAnon:")[2].split()[0]) / 1024

    weights = np.ones((2048, 4096), np.float32)  # 32 MiB
    graph = onnx.parser.parse_graph(
        "g (float[m, 2048] x) => (float[m, 4096] y) { y = MatMul (x, w) }"
    )
    graph.initializer.append(numpy_helper.from_array(weights, "w"))
    data = onnx.helper.make_model(graph).SerializeToString()
    with in_huge_pages(4 * weights.nbytes):
        session = ort.InferenceSession(data)
        above = np.ones(1 << 20)  # what is allocated later keeps the heap from shrinking
    give_back_after(session)
    before = megabytes()
    del session
    gc.collect()
    assert before - megabytes() > 24
    assert above.all()


def test_parts_that_were_there_before_are_left_out() -> None:
    parts = linux_memory._without
    assert list(parts((10, 50), [])) == [(10, 50)]
    assert list(parts((10, 50), [(0, 10), (50, 60)])) == [(10, 50)]
    assert list(parts((10, 50), [(0, 20), (30, 35), (45, 60)])) == [(20, 30), (35, 45)]
    assert list(parts((10, 50), [(10, 50)])) == []


def test_switched_off_by_the_administrator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    enabled = tmp_path / "enabled"
    monkeypatch.setattr(linux_memory, "_HUGE_PAGES_SETTING", enabled)
    assert not linux_memory._allowed()
    enabled.write_text("always madvise [never]\n")
    assert not linux_memory._allowed()
    enabled.write_text("always [madvise] never\n")
    assert linux_memory._allowed() is (sys.platform == "linux")
    monkeypatch.setattr(linux_memory, "_MAPS_FILE", tmp_path / "maps")
    assert not linux_memory._allowed()


def test_the_decoder_is_loaded_into_them(
    fake: Callable[..., Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[str | int] = []

    @contextmanager
    def record(size: int) -> Iterator[None]:
        entered.append(size)
        yield
        entered.append("left")

    monkeypatch.setattr(session, "in_huge_pages", record)
    package = fake()
    (package.path / "decoder.onnx.data").write_bytes(bytes(100))
    session.open_sessions(package, "cpu")
    assert entered == [150, "left"]


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


class Libc:
    """Notes what it is asked for; its only block of memory begins at `start`."""

    def __init__(self, start: int | None) -> None:
        self.calls: list[tuple[Any, ...]] = []

        def malloc(size: Any) -> int | None:
            self.calls.append(("malloc", size.value))
            return start

        self.malloc = malloc

    def mallopt(self, option: int, value: int) -> None:
        self.calls.append(("mallopt", option, value))

    def madvise(self, start: Any, size: Any, advice: int) -> None:
        self.calls.append(("madvise", start.value, size.value, advice))

    def free(self, start: Any) -> None:
        self.calls.append(("free", start.value))


HUGE = 1 << 21
# The numbers of glibc's malloc.h, with the thresholds after an allocation of 32 MiB was freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
ONE_HEAP = [("mallopt", M_MMAP_MAX, 0), ("mallopt", M_TRIM_THRESHOLD, -1)]
LATER = [
    ("mallopt", M_MMAP_MAX, 65536),
    ("mallopt", M_MMAP_THRESHOLD, 32 << 20),
    ("mallopt", M_TRIM_THRESHOLD, 64 << 20),
]


@pytest.mark.parametrize("start", [None, HUGE + 5])
def test_what_glibc_is_asked_for(start: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heap that grows once, of whole huge pages; afterwards, even behind an error, glibc's own thresholds."""
    libc = Libc(start)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    with pytest.raises(KeyError), linux_memory._in_heap(3 * HUGE):
        raise KeyError
    advised = [("madvise", 2 * HUGE, 2 * HUGE, 14), ("free", start)] if start is not None else []
    assert libc.calls == [*ONE_HEAP, ("malloc", 3 * HUGE), *advised, *LATER]


@pytest.mark.parametrize(
    ("part", "advised"),
    [
        ((HUGE, 2 * HUGE), [(HUGE, HUGE)]),
        ((1, HUGE), []),
        ((1, 2 * HUGE), [(HUGE, HUGE)]),
        ((HUGE - 1, 4 * HUGE - 1), [(HUGE, 2 * HUGE)]),
        ((5, 9), []),
    ],
)
def test_whole_huge_pages_are_advised(
    part: tuple[int, int], advised: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    libc = Libc(None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    linux_memory._advise([part], 25)
    assert libc.calls == [("madvise", *place, 25) for place in advised]
