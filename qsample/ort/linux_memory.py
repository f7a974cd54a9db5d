"""Puts weights into huge pages on Linux, and gives it back the pages of mapped files.

A decode step reads all weights once, hundreds of megabytes, and processors prefetch memory page by
page: from pages of 2 MiB, a step of a model with 4-bit weights is about 8 % faster than from pages
of 4 KiB, and a prompt of 64 tokens takes 0.7 times as long. ONNX Runtime does not ask for huge
pages. glibc maps large allocations one by one, with gaps between them; so while a session opens,
they come from glibc's heap, for which huge pages are requested. A thread moves memory that lies
elsewhere to huge pages afterwards. It would slow the first prompt if it had to copy all the
weights.

A graph's weights are mapped, and a session reads all of them to lay them out for its kernels. The
pages count as this process's until the memory is needed, although only the table of embeddings is
read again.
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

# The size on x86-64, and on Arm with base pages of 4 KiB.
HUGE_PAGE_BYTES: Final = 1 << 21
# Linux's values of madvise's advice. Linux before 6.1 rejects MADV_COLLAPSE.
_MADV_DONTNEED: Final = 4
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
# The options of glibc's mallopt.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4
# All memory comes from the heap, and the end of the heap is not given back.
_ONE_HEAP_OPTIONS: Final = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1}
# The largest thresholds that glibc would choose.
_LATER_OPTIONS: Final = {
    _M_MMAP_MAX: 65536,
    _M_MMAP_THRESHOLD: 32 << 20,
    _M_TRIM_THRESHOLD: 64 << 20,
}
_HUGE_PAGES_SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS_FILE: Final = Path("/proc/self/maps")
# The addresses, the permissions, the inode and the file of a mapping, in both of Linux's lists.
_MAPPING_PATTERN: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) *(.*)")

# The addresses of the start and the end.
Mapping = tuple[int, int]


@contextmanager
def in_huge_pages(size: int = 0) -> Iterator[None]:
    """Put memory that is allocated and written to inside the `with` block into huge pages.

    From Linux 6.1 on, a thread copies memory that lies outside of the heap, at unchanged addresses.
    Later allocations of up to 32 MiB come from the heap as well, as if glibc had seen an allocation
    of that size freed. Nothing happens on other systems, without contiguous memory, or if huge
    pages are switched off.

    Args:
        size: The number of bytes, about.
    """
    if not _allowed():
        yield
        return
    before = _anonymous_mappings()
    with _in_heap(size):
        yield
    parts = [part for mapping in _anonymous_mappings() for part in _without(mapping, before)]
    Thread(
        target=_advise, args=(parts, _MADV_COLLAPSE), name="qsample-huge-pages", daemon=True
    ).start()


@contextmanager
def _in_heap(size: int) -> Iterator[None]:
    """Let allocations of any size come from the heap, which first grows by `size` bytes of huge
    pages."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # not glibc
        yield
        return
    libc.malloc.restype = ctypes.c_void_p
    for option, value in _ONE_HEAP_OPTIONS.items():
        libc.mallopt(option, value)
    try:
        start = libc.malloc(ctypes.c_size_t(size))
        if start is not None:
            _advise([(start, start + size)], _MADV_HUGEPAGE)
            libc.free(ctypes.c_void_p(start))
        yield
    finally:
        for option, value in _LATER_OPTIONS.items():
            libc.mallopt(option, value)


def give_back_after(session: Any) -> None:
    """Give the memory of an InferenceSession back to Linux when it ends; glibc would keep freed
    memory in its heap."""
    if not _allowed():
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        weakref.finalize(session._sess, libc.malloc_trim, 0).atexit = False


def _advise(parts: Iterable[Mapping], advice: int) -> None:
    """Advise Linux on the whole huge pages in parts of the memory.

    If memory was freed meanwhile, the call fails or is about the memory that is there now; both are
    harmless.
    """
    libc = ctypes.CDLL(None)
    for start, end in parts:
        first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        last = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if first < last:
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def _allowed() -> bool:
    if sys.platform != "linux":
        return False
    try:
        # Sandboxes may hide either file.
        return "[never]" not in _HUGE_PAGES_SETTING.read_text() and _MAPS_FILE.exists()
    except OSError:
        return False


def _anonymous_mappings() -> list[Mapping]:
    """Writable private memory without a file, the stacks of threads included, in order."""
    mappings = list[Mapping]()
    for line in _MAPS_FILE.read_text(encoding="utf-8", errors="replace").splitlines():
        match = _MAPPING_PATTERN.match(line)
        if match is None:
            continue
        is_anonymous = match[4] == "0" and match[5] in ("", "[heap]")
        if match[3] == "rw-p" and is_anonymous:
            mappings.append((int(match[1], 16), int(match[2], 16)))
    return mappings


def _without(mapping: Mapping, others: Iterable[Mapping]) -> Iterator[Mapping]:
    """The parts of a mapping that no other mapping covers: the system joins adjacent mappings.
    others: In order."""
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
    """Give the pages of a mapped file back to Linux. Pages that were written to stay: they are in
    no file."""
    if sys.platform != "linux":
        return
    try:
        if str(path.resolve()) not in _MAPS_FILE.read_text(encoding="utf-8", errors="replace"):
            return  # The next list counts every page of the process, which takes long.
        mappings = list(_unchanged_mappings(path.resolve()))
        libc = ctypes.CDLL(None)
    except OSError:  # There is no /proc.
        return
    for start, end in mappings:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _unchanged_mappings(path: Path) -> Iterator[Mapping]:
    """The start and the end of each mapping of a file without a changed page."""
    mapping: Mapping | None = None
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            match = _MAPPING_PATTERN.match(line)
            if match:
                mapping = (int(match[1], 16), int(match[2], 16)) if match[5] == str(path) else None
            elif (
                mapping is not None and line.startswith("Anonymous:") and int(line.split()[1]) == 0
            ):
                yield mapping
