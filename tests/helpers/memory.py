"""The memory of this process."""

from __future__ import annotations

from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident() -> int:
    """Bytes of this process in memory; 0 where nothing says so."""
    return int(_STATM.read_text(encoding="utf-8").split()[1]) * 4096 if _STATM.exists() else 0
