"""Rows of small packages alone and in company: on the processor at hand, and on others in scripts/check_processors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

ASKED = "QSAMPLE_PROCESSORS" in os.environ
COLUMNS = (
    "processor",
    "package",
    "rows",
    "differences",
    "reused",
    "accepted",
    "seconds",
    "rounding",
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Only scripts/check_processors takes the minutes that other processors need."""
    return (
        True
        if not ASKED and collection_path == Path(__file__).with_name("test_processors.py")
        else None
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A table of all that ran, here or in other processes of pytest-xdist."""
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.stats.get(kind, [])]
    found = [
        json.loads(value)
        for one in reports
        for name, value in one.user_properties
        if name == "workload"
    ]
    lines = [COLUMNS, *([str(row[column]) for column in COLUMNS] for row in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if found:
        terminalreporter.section("rows alone and in company")
        for line in lines:
            cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            terminalreporter.line("  ".join(cells).rstrip())
