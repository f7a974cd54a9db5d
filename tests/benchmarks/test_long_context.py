"""The benchmark of long histories: the figures of its report, the participants, and a run on a tiny model."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("long_context")


def measured(steps: list[float], *, together: str | bool = "12:00", first: float | None = None) -> dict[str, Any]:
    facts = {"first_token_s": first, "step_ms": steps, "memory": {"anonymous": 2_500_000_000, "mapped": 0}}
    return facts | {"cache_bytes": 1_200_000_000, "version": "onnxruntime 1", "together": together}


def test_the_table(benchmark: ModuleType, tmp_path: Path) -> None:
    results = benchmark.Cells(tmp_path / "long.json", "machine")
    # The machine halves its speed after the first round.
    results.add("tiny", 4096, 1, benchmark.FLOAT32, **measured([10.0, 20.0, 20.0], first=12.34))
    results.add("tiny", 4096, 1, benchmark.INT8, **measured([5.0, 10.0, 11.0], first=15.0))
    results.add("tiny", 4096, 4, benchmark.FLOAT32, **measured([40.0], together=False))
    results.add("tiny", 4096, 4, benchmark.INT8, **measured([20.0], together=False))
    results.add("tiny", 4096, 1, "llama.cpp, f16", **measured([5.0, 10.0, 11.0], together="12:30"))  # another run
    results.set_missing("tiny", 4096, 4, "genai", "not | enough memory here")
    results.save()
    results = benchmark.Cells(tmp_path / "long.json", "machine")
    rows = benchmark.table_rows(results, "tiny")[1]
    assert rows == [
        ["4,096", "1", benchmark.FLOAT32, "12.3", "20.0", "1.00x", "2.50", "1.20"],
        ["4,096", "1", benchmark.INT8, "15.0", "10.0", "0.50x", "2.50", "1.20"],
        ["4,096", "1", "llama.cpp, f16", "", "10.0", "", "2.50", "1.20"],
        ["4,096", "4", benchmark.FLOAT32, "", "40.0", "", "2.50", "1.20"],
        ["4,096", "4", benchmark.INT8, "", "20.0", "", "2.50", "1.20"],
        ["4,096", "4", "genai", "not / enough memory here", "", "", "", ""],
    ]
    assert benchmark.Cells(tmp_path / "long.json", "another machine").data["cells"] == []


def test_what_is_left_to_measure(benchmark: ModuleType, tmp_path: Path) -> None:
    results = benchmark.Cells(tmp_path / "long.json", "machine")
    results.add("tiny", 4096, 1, benchmark.FLOAT32, **measured([1.0]))
    cell = benchmark.Cell(4096, 1)
    assert results.has("tiny", cell, [benchmark.FLOAT32])
    assert not results.has("tiny", cell, [benchmark.FLOAT32, "genai"])
    assert not results.has("tiny", benchmark.Cell(4096, 4), [benchmark.FLOAT32])
    results.set_missing("tiny", 4096, 1, "genai", "no")
    assert results.has("tiny", cell, [benchmark.FLOAT32, "genai"])


def test_who_reads_and_who_is_filled(benchmark: ModuleType) -> None:
    models = dict.fromkeys(benchmark.SYSTEMS, Path())
    assert benchmark.taking_part(benchmark.Cell(16384, 1), models) == list(models)
    assert benchmark.taking_part(benchmark.Cell(4096, 4), models) == list(models)
    assert "genai" not in benchmark.taking_part(benchmark.Cell(16384, 4), models)
    making = argparse.Namespace(history=[4096, 16384], fill=True)
    reading = argparse.Namespace(history=[4096, 16384], fill=False)
    for system in benchmark.SYSTEMS:
        can_be_filled = system != "genai"
        assert not benchmark.is_filled(system, benchmark.Cell(4096, 1), making)
        assert not benchmark.is_filled(system, benchmark.Cell(16384, 1), reading)
        assert benchmark.is_filled(system, benchmark.Cell(16384, 1), making) == can_be_filled
        assert benchmark.is_filled(system, benchmark.Cell(4096, 4), reading) == can_be_filled


@pytest.mark.slow
def test_a_whole_run_on_a_tiny_model(benchmark: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, BENCHMARKS / "long_context.py", "--shape", "tiny", "--work", tmp_path / "work"]
    command += ["--system", benchmark.FLOAT32, benchmark.INT8, "--history", "200", "300", "--rows", "1", "2"]
    command += ["--rounds", "2", "--new-tokens", "4", "--output", tmp_path / "out" / "long"]
    subprocess.run([*map(str, command), "--minutes", "0"], check=True, cwd=BENCHMARKS.parent, timeout=900)
    assert not (tmp_path / "out" / "long.json").exists()  # no cell fits into no time
    subprocess.run([*map(str, command)], check=True, cwd=BENCHMARKS.parent, timeout=900)
    cells = json.loads((tmp_path / "out" / "long.json").read_text())["cells"]
    assert [(cell["history"], cell["rows"], cell["system"]) for cell in cells] == [
        (history, rows, system)
        for history in (200, 300)
        for rows in (1, 2)
        for system in (benchmark.FLOAT32, benchmark.INT8)
    ]
    for cell in cells:
        assert len(cell["step_ms"]) == 2
        assert (cell["first_token_s"] is None) == (cell["rows"] > 1 or cell["history"] > 200)
    assert "| 300 | 2 | qsample, int8 cache |" in (tmp_path / "out" / "long.md").read_text()
    before = (tmp_path / "out" / "long.json").stat().st_mtime_ns
    subprocess.run([*map(str, command)], check=True, cwd=BENCHMARKS.parent, timeout=900)
    assert (tmp_path / "out" / "long.json").stat().st_mtime_ns == before  # nothing is left to measure
