"""Puts weights into huge pages on Linux, and gives it back the pages of mapped files.

A decode step reads all weights once, hundreds of megabytes, and processors prefetch memory page by page: from pages of
2 MiB a step of a model with 4-bit weights is some 8 % faster than from pages of 4 KiB, and a prompt of 64 tokens takes
0.7 times as long. ONNX Runtime does not ask for them. glibc maps large allocations one by one, with gaps between them;
so while a session opens, they come from its heap, which is told to be in huge pages. Whatever lies elsewhere is put
together afterwards by a thread, which would slow the first prompt if it had all the weights to copy.

A graph's weights are mapped, and a session reads all of them to lay them out for its kernels. The pages count as this
process's until the memory is needed, although only a table that rows are looked up in is read again.
"""

from __future__ import annotations

import ctypes
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, Final

HUGE_PAGE: Final = 1 << 21  # bytes, on x86-64, and on Arm with base pages of 4 KiB
_USE_HUGE_PAGES: Final = 14  # MADV_HUGEPAGE
_COLLAPSE: Final = 25  # MADV_COLLAPSE; Linux before 6.1 rejects it
# Options of glibc's mallopt: nothing is mapped by itself, and the end of the heap is kept.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_ONE_HEAP: Final = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
# The largest thresholds that glibc takes by itself.
_AFTERWARDS: Final = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS: Final = Path("/proc/self/maps")

_DONT_NEED: Final = 4  # Linux's MADV_DONTNEED
# Addresses, permissions, inode and file of a mapping, in both of Linux's lists.
_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) *(.*)")

Mapping = tuple[int, int]  # start and end, in bytes


@contextmanager
def in_huge_pages(size: int = 0) -> Iterator[None]:
    """Put memory that is allocated and written to inside the `with` block into huge pages. size: about how many bytes.
    Later allocations of up to 32 MiB come from the heap, too, as if glibc had seen one of that size freed. Memory that
    lies elsewhere is copied by a thread, at unchanged addresses, from Linux 6.1 on. Nothing happens on other systems,
    without contiguous memory, or if huge pages are switched off."""
    if not _allowed():
        yield
        return
    before = _anonymous_mappings()
    with _in_heap(size):
        yield
    parts = [part for mapping in _anonymous_mappings() for part in _without(mapping, before)]
    Thread(target=_advise, args=(parts, _COLLAPSE), name="qsample-huge-pages", daemon=True).start()


@contextmanager
def _in_heap(size: int) -> Iterator[None]:
    """Let allocations of any size come from the heap, which first grows by `size` bytes of huge pages."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # not glibc
        yield
        return
    libc.malloc.restype = ctypes.c_void_p
    for option in _ONE_HEAP.items():
        libc.mallopt(*option)
    try:
        start = libc.malloc(ctypes.c_size_t(size))
        if start is not None:
            _advise([(start, start + size)], _USE_HUGE_PAGES)
            libc.free(ctypes.c_void_p(start))
        yield
    finally:
        for option in _AFTERWARDS.items():
            libc.mallopt(*option)


def give_back_after(session: Any) -> None:
    """Give Linux the memory of an InferenceSession when it ends: glibc would keep what is freed inside its heap."""
    if _allowed() and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        weakref.finalize(session._sess, libc.malloc_trim, 0).atexit = False


def _advise(parts: Iterable[Mapping], advice: int) -> None:
    """If memory was freed since, the call fails or is about the memory that is there now; both are fine."""
    libc = ctypes.CDLL(None)
    for start, end in parts:
        start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if start < end:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


def _allowed() -> bool:
    if sys.platform != "linux":
        return False
    try:
        return "[never]" not in _ENABLED.read_text() and _MAPS.exists()  # sandboxes may hide either
    except OSError:
        return False


def _anonymous_mappings() -> list[Mapping]:
    """Private memory of no file that may be written, the stacks of threads included; in order."""
    found = map(_MAPPING.match, _MAPS.read_text(encoding="utf-8", errors="replace").splitlines())
    private = [match for match in found if match and match[3] == "rw-p" and match[4] == "0"]
    return [
        (int(match[1], 16), int(match[2], 16)) for match in private if match[5] in ("", "[heap]")
    ]


def _without(mapping: Mapping, others: Iterable[Mapping]) -> Iterator[Mapping]:
    """The parts of `mapping` that no other, in order, covers: the system joins adjacent mappings."""
    start, end = mapping
    for other_start, other_end in others:
        if other_end <= start or other_start >= end:
            continue
        if start < other_start:
            yield start, other_start
        start = other_end
    if start < end:
        yield start, end


def release_pages(path: Path) -> None:
    """Give the pages of `path` back, on Linux. Pages that were written to stay: they are in no file."""
    if sys.platform != "linux":
        return
    try:
        if str(path.resolve()) not in _MAPS.read_text(encoding="utf-8", errors="replace"):
            return  # what follows counts every page of the process, and takes long
        mappings = list(_unchanged_mappings(path.resolve()))
        libc = ctypes.CDLL(None)
    except OSError:  # no /proc
        return
    for start, end in mappings:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONT_NEED)


def _unchanged_mappings(path: Path) -> Iterator[Mapping]:
    """Start and end of each mapping of `path` without a changed page."""
    mapping: Mapping | None = None
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            match = _MAPPING.match(line)
            if match:
                mapping = (int(match[1], 16), int(match[2], 16)) if match[5] == str(path) else None
            elif (
                mapping is not None and line.startswith("Anonymous:") and int(line.split()[1]) == 0
            ):
                yield mapping
