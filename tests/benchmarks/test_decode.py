"""The decode benchmark: what its report computes from rounds, and a run of it on a model of a few bytes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("decode_report", BENCHMARKS / "decode_report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ratios_are_taken_within_a_round(report: ModuleType, tmp_path: Path) -> None:
    results = report.Results(tmp_path / "decode.json", "machine")
    # The machine halves its speed after the first round; the peer takes twice qsample's time in each.
    results.add_cell("qwen3-0.6b", 64, 1, "greedy", "qsample", [100.0, 200.0, 200.0], [10.0, 20.0, 20.0])
    results.add_cell("qwen3-0.6b", 64, 1, "greedy", "genai", [300.0, 600.0, 600.0], [20.0, 40.0, 44.0])
    assert results.ratio("qwen3-0.6b", 64, 1, "greedy", "genai", "decode") == 2.0
    assert results.ratio("qwen3-0.6b", 64, 1, "greedy", "genai", "prefill") == 3.0
    results.save()
    assert report.Results(tmp_path / "decode.json", "machine").data == results.data
    assert report.Results(tmp_path / "decode.json", "another machine").data["shapes"] == {}


def test_a_cell_that_is_measured_again_replaces_the_old_one(report: ModuleType, tmp_path: Path) -> None:
    results = report.Results(tmp_path / "decode.json", "machine")
    for step in (10.0, 20.0):
        results.add_cell("tiny", 64, 1, "greedy", "qsample", [1.0], [step])
    results.add_cell("tiny", 64, 4, "greedy", "qsample", [1.0], [30.0])
    assert [cell["step_ms"] for cell in results.shape("tiny")["cells"]] == [[20.0], [30.0]]
    assert results.ratio("tiny", 64, 1, "greedy", "genai", "decode") is None


def test_overhead_is_a_share_of_a_greedy_step(report: ModuleType, tmp_path: Path) -> None:
    results = report.Results(tmp_path / "decode.json", "machine")
    results.add_overhead("tiny", 4, {"greedy": 20.0, "greedy_host": 0.5}, 1.012)
    results.set_tokens("tiny", compared=64, equal=63)
    assert report._overhead_rows(results, "tiny")[1] == [["4", "1.2%", "2.5%"]]
    assert report._tokens(results, "tiny").endswith(": 63 of 64.")


@pytest.mark.slow
def test_a_whole_run_on_a_tiny_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, BENCHMARKS / "decode.py", "--shape", "tiny", "--work", tmp_path / "work"]
    command += ["--system", "transformers", "--batch", "1", "2", "--prompt", "16", "--rounds", "2", "--new-tokens", "4"]
    command += ["--overhead-steps", "8", "--output", tmp_path / "out" / "decode"]
    subprocess.run([str(part) for part in command], check=True, cwd=BENCHMARKS.parent, timeout=900)
    found = json.loads((tmp_path / "out" / "decode.json").read_text())["shapes"]["tiny"]
    assert len(found["cells"]) == 2 * 2 * 4  # batches, systems, mixes
    assert found["tokens"]["equal"] == found["tokens"]["compared"] == 64
    assert found["quantization"]["dtype"] == "int4"
    assert "| 16 | 2 | greedy |" in (tmp_path / "out" / "decode.md").read_text()
    assert (tmp_path / "out" / "decode.png").stat().st_size > 1000
