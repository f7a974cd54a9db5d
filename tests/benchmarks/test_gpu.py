"""The GPU benchmark: what its report makes of measurements and failures, and a run of it on the CPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("gpu_report")
    sys.modules.pop("gpu_report")


def test_a_part_that_fails_is_noted_and_the_next_one_goes_on(report: ModuleType, tmp_path: Path) -> None:
    results = report.Results(tmp_path / "out", "python benchmarks/gpu.py")
    with results.section("0.6B: packages"):
        with results.section("0.6B: captured"):
            raise RuntimeError("out of\nmemory")
        results.cells.append(report.Cell("0.6B", "host", 4, "greedy", 0.002, 0.0005))
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert "- 0.6B: captured: RuntimeError: out of memory" in page
    assert "| 0.6B | host | 4 | greedy | 2.000 | 2000 | 25% |" in page
    document = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert document["rows"][0]["tokens_per_second"] == 2000


def test_an_interrupt_is_not_held_back(report: ModuleType, tmp_path: Path) -> None:
    results = report.Results(tmp_path, "")
    with pytest.raises(KeyboardInterrupt), results.section("part"):
        raise KeyboardInterrupt
    assert (tmp_path / "gpu.md").exists()


@pytest.mark.slow
def test_a_whole_run_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, BENCHMARKS / "gpu.py", "--provider", "cpu", "--shapes", "tiny", "--batch", "1", "4"]
    command += ["--new-tokens", "12", "--rounds", "1", "--work", tmp_path / "work", "--out", tmp_path / "out"]
    subprocess.run([str(part) for part in command], check=True, cwd=BENCHMARKS.parent, timeout=1200)
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert found["problems"] == []
    systems = {row["system"] for row in found["rows"]}
    assert systems == {*(f"baked, read every {n}" for n in (1, 4, 16)), "host", "transformers, static cache"}
    assert {row["rows"] for row in found["rows"]} == {1, 4}
    checks = "\n".join(found["checks"]["tiny"])
    assert "OTHER TOKENS" not in checks
    assert "96 of 96 greedy tokens are transformers' argmax" in checks
    assert (tmp_path / "out" / "gpu.png").stat().st_size > 1000
    # What does not fit into the time is left out, and said to be.
    subprocess.run([*map(str, command), "--budget-seconds", "0"], check=True, cwd=BENCHMARKS.parent, timeout=1200)
    late = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert late["rows"] == []
    assert all("left out, the time was up" in line for line in late["problems"])
