"""The records of the stubs: a line per call, `THREAD CALL DETAILS`; see stubs/stubs.c."""

from __future__ import annotations

import os
import re
from pathlib import Path

TRACE = "STUB_TRACE"
_HOST = re.compile(r"(?:copy|copy-async|copy2d-async) (?:pageable|pinned)->\w+ (\d+)")


class Trace:
    """The calls since it was made, or since `clear`."""

    def __init__(self) -> None:
        self._path = Path(os.environ[TRACE])
        self._start = 0
        self.clear()

    def clear(self) -> None:
        self._start = self._path.stat().st_size if self._path.exists() else 0

    def calls(self, containing: str = "") -> list[str]:
        """Those with a text, without their thread."""
        if not self._path.exists():
            return []
        with self._path.open() as file:
            file.seek(self._start)
            return [line.partition(" ")[2].rstrip() for line in file if containing in line]

    def captures(self) -> int:
        """How many captures ended as they should."""
        ends = self.calls("END-CAPTURE")
        assert len(ends) == len(self.calls("BEGIN-CAPTURE"))
        assert all(end.endswith("broken 0") for end in ends)
        return len(ends)

    def captured_kernels(self) -> int:
        """Kernels of all captures."""
        return sum(call.startswith("kernel") for call in self.calls(" CAPTURED"))

    def captured_launches(self) -> int:
        """Kernels of all captures, and reductions by cuDNN, whose kernels are not known by name."""
        captured, launches = False, 0
        for call in self.calls():
            if call.startswith(("BEGIN-CAPTURE", "END-CAPTURE")):
                captured = call.startswith("BEGIN")
            launches += captured and call.startswith("cudnnReduceTensor")
        return launches + self.captured_kernels()

    def captured_copies(self) -> int:
        """Copies and memsets of all captures."""
        return sum(call.startswith(("copy", "memset")) for call in self.calls(" CAPTURED"))

    def captured_reads_of_the_host(self) -> list[str]:
        """Copies from the host's memory that each replay would repeat."""
        return [call for call in self.calls(" CAPTURED") if _HOST.match(call)]

    def problems(self) -> list[str]:
        """Calls that CUDA would have refused, and replays that would read changed memory of the host."""
        return [call for call in self.calls() if call.startswith(("REFUSED", "STALE"))]

    def bytes_from_host(self) -> int:
        """Bytes copied from the host to the device."""
        return self._copied("(?:pageable|pinned)->device")

    def bytes_to_host(self) -> int:
        """Bytes copied from the device to the host."""
        return self._copied("device->(?:pageable|pinned)")

    def _copied(self, way: str) -> int:
        matches = (re.match(rf"copy\S* {way} (\d+)", call) for call in self.calls("device"))
        return sum(int(match[1]) for match in matches if match)
