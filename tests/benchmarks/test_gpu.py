"""The GPU benchmark: what its report makes of measurements and failures, and a run of it on the CPU."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """gpu_report and gpu_process."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("gpu_report", "gpu_process")
    report, process = (importlib.import_module(name) for name in names)
    yield report, process
    for name in names:
        sys.modules.pop(name)


def test_a_part_that_fails_or_crashes_or_hangs_ends_alone(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    report, process = modules
    results = report.Results(tmp_path / "out", "python benchmarks/gpu.py")
    cell = report.Cell("0.6B", "host", 4, "greedy", 0.002, 0.0005)
    late = tmp_path / "late"

    def fails(reports: Any) -> None:
        reports.cell(cell)
        with reports.section("greedy"):
            raise ValueError("no such mix")
        raise RuntimeError("out of\nmemory")

    def crashes(reports: Any) -> None:
        reports.check("0.6B", "the same tokens")
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(reports: Any) -> None:
        reports.machine("gpu", os.environ["A_SWITCH"])
        subprocess.Popen(["sh", "-c", f"sleep 2; touch {late}"])
        time.sleep(600)

    run = process.run_apart
    assert run("0.6B: host", fails, results.take, 60) is None
    assert "SIGKILL" in run("0.6B: checks", crashes, results.take)
    assert "not done after 1 s" in run("0.6B: transformers", hangs, results.take, 1, {"A_SWITCH": "on"})
    assert run("0.6B: genai", lambda reports: reports.cell(cell), results.take) is None
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert "- 0.6B: host: RuntimeError: out of memory" in page
    assert "- greedy: ValueError: no such mix" in page
    assert "| 0.6B | host | 4 | greedy | 2.000 | 2000 | 25% |" in page
    assert "- the same tokens" in page
    assert "- gpu: on" in page
    assert "A_SWITCH" not in os.environ
    document = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert [row["tokens_per_second"] for row in document["rows"]] == [2000, 2000]
    time.sleep(2)
    assert not late.exists()


def test_cells_are_compared(modules: tuple[ModuleType, ModuleType]) -> None:
    report, _ = modules
    seconds = {("captured", "greedy"): 0.002, ("captured", "everything"): 0.0021, ("host", "greedy"): 0.003}
    seconds |= {("captured, int4", "greedy"): 0.001, ("captured, int4", "everything"): 0.0011}
    cells = [report.Cell("0.6B", system, 1, mix, taken, None) for (system, mix), taken in seconds.items()]
    assert report.comparisons(cells) == [
        "0.6B, captured, 1 rows, greedy: 1.50 times as fast as host",
        "0.6B, captured, 1 rows: everything takes +5.0% over greedy",
        "0.6B, captured, int4, 1 rows: everything takes +10.0% over greedy",
    ]


@pytest.mark.slow
def test_a_whole_run_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, BENCHMARKS / "gpu.py", "--provider", "cpu", "--shapes", "tiny", "--batch", "1", "4"]
    command += ["--new-tokens", "12", "--rounds", "1", "--work", tmp_path / "work", "--out", tmp_path / "out"]
    subprocess.run([str(part) for part in command], check=True, cwd=BENCHMARKS.parent, timeout=1200)
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert found["problems"] == []
    systems = {row["system"] for row in found["rows"]}
    baked = {"baked", "baked, int4", *(f"baked, read every {n}" for n in (1, 16))}
    assert systems == {*baked, "host", "transformers, static cache"}
    assert {row["rows"] for row in found["rows"]} == {1, 4}
    checks = "\n".join(found["checks"]["tiny"])
    assert "96 of 96 greedy tokens are transformers' argmax" in checks
    assert (tmp_path / "out" / "gpu.png").stat().st_size > 1000
    # What does not fit into the time is left out, and said to be.
    subprocess.run([*map(str, command), "--budget-seconds", "0"], check=True, cwd=BENCHMARKS.parent, timeout=1200)
    late = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert late["rows"] == []
    assert all("left out, the time was up" in line for line in late["problems"])
