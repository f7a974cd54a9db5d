"""Pages of mapped files: given back, and the same when they are read again."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from qsample.runtime.session.linux_memory import release_pages

PAGES = 64
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives pages back")


def resident(path: Path) -> int:
    """KiB of `path` in this process's memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.parametrize("access", [mmap.ACCESS_READ, mmap.ACCESS_COPY])
def test_pages_are_given_back_and_read_again(access: int, tmp_path: Path) -> None:
    content = bytes(range(256)) * (PAGES * mmap.PAGESIZE // 256)
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
        whole = PAGES * mmap.PAGESIZE // 1024
        assert (resident(path), resident(other)) == (whole, whole)
        release_pages(path)
        assert (resident(path), resident(other)) == (0, whole)
        assert view[:] == content


def test_what_was_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(PAGES * mmap.PAGESIZE))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        view[5] = 7
        release_pages(path)
        assert view[:8] == b"\0\0\0\0\0\7\0\0"


def test_a_file_that_is_not_mapped(tmp_path: Path) -> None:
    release_pages(tmp_path / "nothing")
