"""What a benchmark ran on, for the head of its report."""

from __future__ import annotations

import os
import platform
from pathlib import Path

# What the speed of matrix products of 4 and 8 bits hangs on.
_EXTENSIONS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "asimd", "asimddp", "i8mm")


def describe_machine(threads: int) -> str:
    """The processor and its vector extensions, where Linux tells them; the cores; `threads`."""
    facts: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    flags = f"{facts.get('flags', '')} {facts.get('Features', '')}".split()
    extensions = ", ".join(name for name in _EXTENSIONS if name in flags)
    name = facts.get("model name") or platform.processor() or platform.machine()
    return f"{name}{f' ({extensions})' if extensions else ''}, {os.cpu_count()} cores, {threads} threads"
