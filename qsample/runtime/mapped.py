"""A file that this process maps enters; its pages leave the process's memory. What is read again comes from the file.

A graph's weights are mapped, and a session reads all of them to lay them out for its kernels. The pages count as this
process's own until somebody needs the memory, although only a table that rows are looked up in is read again.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_DONT_NEED: Final = 4  # Linux's MADV_DONTNEED
_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +(.*)")


def release_pages(path: Path) -> None:
    """Give the pages of `path` back, where the system is Linux. What was written to stays: it is in no file."""
    if sys.platform != "linux":
        return
    try:
        mappings = list(_unchanged_mappings(path.resolve()))
        libc = ctypes.CDLL(None)
    except OSError:  # no /proc
        return
    for start, end in mappings:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONT_NEED)


def _unchanged_mappings(path: Path) -> Iterator[tuple[int, int]]:
    """Start and end of each mapping of `path` without a page of its own."""
    mapping: tuple[int, int] | None = None
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            found = _MAPPING.match(line)
            if found:
                mapping = (int(found[1], 16), int(found[2], 16)) if found[3].rstrip("\n") == str(path) else None
            elif mapping is not None and line.startswith("Anonymous:") and int(line.split()[1]) == 0:
                yield mapping
