"""The benchmark of exporters: figures of a process, its tables, and a run on a tiny model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

WORK = """
import os, sys, time
held = bytearray(b"x") * (1 << 27)
with open(sys.argv[1], "wb") as file:
    file.write(bytes(1 << 20))
    os.fsync(file.fileno())
print("the result")
while time.process_time() < 0.5:
    pass
"""


@pytest.fixture
def export(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("export")


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="Linux alone counts memory and bytes"
)
def test_the_figures_of_a_process(export: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "log"
    measured = export.measure(
        [sys.executable, "-c", WORK, str(tmp_path / "file")], log, limit=60, memory=1e9
    )
    assert measured["stdout"] == "the result\n"
    assert 0.5 <= measured["cpu_seconds"] <= measured["seconds"] + 0.1
    assert 1 << 27 <= measured["peak_anonymous"] < (1 << 27) + (1 << 24) < 1 << 28
    assert 1 << 20 <= measured["peak_disk"] < 1 << 21
    assert measured["written"] in (0, *range(1 << 20, 1 << 21)), "0 on a file system in memory"

    for limits, message in (
        ({"limit": 60, "memory": 1e8}, "more than 0 GB"),
        ({"limit": 0, "memory": 1e9}, "than 0 s"),
    ):
        with pytest.raises(RuntimeError, match=message):
            export.measure([sys.executable, "-c", WORK, str(tmp_path / "file")], log, **limits)
    with pytest.raises(RuntimeError, match="ValueError: no such model"):
        export.measure(
            [sys.executable, "-c", "raise ValueError('no such model')"], log, limit=60, memory=1e9
        )


def turn(seconds: float, **stages: float) -> dict[str, Any]:
    sizes = {"peak_anonymous": 1e9, "written": 3e9, "bytes": 4e9}
    figures = {"seconds": seconds, "cpu_seconds": 2 * seconds, **sizes}
    return figures | (
        {"stages": {name.replace("_", " "): value for name, value in stages.items()}}
        if stages
        else {}
    )


def test_tables(export: ModuleType, tmp_path: Path) -> None:
    # The machine halves its speed after the first round.
    portable = [
        turn(4.0, checking_the_model=1.0, publishing=3.0),
        turn(8.0, checking_the_model=2.0, publishing=6.0),
    ]
    own = [
        turn(10.0, checking_the_model=4.0, tracing=6.0),
        turn(20.0, checking_the_model=8.0, tracing=12.0),
    ]
    turns = {export.OWN: own, "qsample, portable": portable, "genai, int4": [turn(5.0), turn(10.0)]}
    known = {
        "turns": turns,
        "missing": {"mobius, float32": "no such | model"},
        "versions": {"torch": "1 and 2"},
    }
    header, rows = export.table_rows(known)
    assert header[:5] == ["exporter", "weights", "seconds", "of qsample, int4", "CPU seconds"]
    assert rows[0] == [
        "qsample, portable",
        "bfloat16",
        "6.0",
        "0.40x",
        "12.0",
        "1.00",
        "3.00",
        "4.00",
    ]
    assert [row[3] for row in rows] == ["0.40x", "1.00x", "0.50x"]
    header, rows = export.stage_rows(known)
    assert header == ["stage, seconds", "qsample, portable", "qsample, int4"]
    assert ["tracing", "", "9.0"] in rows
    assert rows[-2:] == [
        ["**checks together**", "**1.5**", "**6.0**"],
        ["**without the checks**", "**4.5**", "**9.0**"],
    ]

    pytest.importorskip("matplotlib")
    export.write({"machine": "a machine", "shapes": {"tiny": known}}, tmp_path / "export")
    page = (tmp_path / "export.md").read_text()
    assert "mobius, float32 is missing: no such / model." in page
    assert "2 rounds, torch 1 and 2." in page
    assert (tmp_path / "export.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_whole_run_on_a_tiny_model(run: Callable[..., tuple[Any, str]], tmp_path: Path) -> None:
    systems = ["qsample, int4", "genai, int4"]
    found = run("export", "--shape", "tiny", "--rounds", "1", "--system", *systems)[0]["shapes"][
        "tiny"
    ]
    (measured,) = found["turns"]["qsample, int4"]
    assert measured["seconds"] > sum(measured["stages"].values()) > 1
    assert "tracing the decode graph" in measured["stages"]
    assert found["turns"].keys() | found["missing"].keys() == {*systems}
    assert not (tmp_path / "work" / "tiny" / "out").exists()
