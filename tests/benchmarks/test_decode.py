"""The decode benchmark: the figures of its report, and a run on a tiny model."""

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
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("decode_report")


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("turns")


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


def test_a_run_goes_on_where_the_one_before_stopped(report: ModuleType, turns: ModuleType, tmp_path: Path) -> None:
    results = report.Results(tmp_path / "decode.json", "machine")
    results.add_cell("tiny", 64, 1, "greedy", "qsample", [9.0, 9.0], [1.0, 1.0])
    results.save()
    results = report.Results(tmp_path / "decode.json", "machine")
    cell = turns.Cell(64, 1, "greedy")
    assert results.is_complete("tiny", cell, ["qsample"], rounds=2)
    assert not results.is_complete("tiny", cell, ["qsample"], rounds=3)
    assert not results.is_complete("tiny", turns.Cell(64, 4, "greedy"), ["qsample"], rounds=2)
    assert not results.is_complete("tiny", turns.Cell(64, 1, "top-p 0.95"), ["qsample"], rounds=2)
    assert not results.is_complete("tiny", cell, ["qsample", "genai"], rounds=2)
    results.set_missing("tiny", "genai", "ValueError: no such model")
    assert results.is_complete("tiny", cell, ["qsample", "genai"], rounds=2)
    results.clear_missing("tiny", "genai")
    assert not results.is_complete("tiny", cell, ["qsample", "genai"], rounds=2)


class FakeWorker:
    """Answers with its own seconds, and ends after so many questions."""

    def __init__(self, log: list[str], name: str, seconds: float, questions: int) -> None:
        self.log, self.name, self.seconds, self.questions = log, name, seconds, questions

    def ask(self, **request: Any) -> dict[str, Any]:
        self.log.append(f"{self.name} {request['prompt_tokens']} {request['new_tokens']}")
        self.questions -= 1
        if self.questions < 0:
            raise RuntimeError("the process ended")
        return {"first_token": 3 * self.seconds, "steps": [self.seconds] * (request["new_tokens"] - 1)}


def test_systems_take_turns_and_one_that_ends_is_out(turns: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PAUSE", 0.0)
    log: list[str] = []
    failures: list[str] = []
    workers = {"qsample": FakeWorker(log, "qsample", 0.001, 99), "genai": FakeWorker(log, "genai", 0.002, 2)}
    first, steps = turns.take_turns(
        workers,
        turns.Cell(1024, 4, "greedy"),
        {"temperature": 0.0},
        3,
        24,
        failed=lambda name, error: failures.append(name),
        after_round=lambda: log.append("round"),
    )
    # The first system changes; the round that warms up reads a short prompt.
    assert log[:5] == ["qsample 64 4", "genai 64 4", "genai 1024 24", "qsample 1024 24", "round"]
    assert log[5:] == ["qsample 1024 24", "genai 1024 24", "round", "qsample 1024 24", "round"]
    assert failures == ["genai"]
    assert list(workers) == list(first) == ["qsample"]
    assert first["qsample"] == pytest.approx([3.0] * 3)
    assert steps["qsample"] == pytest.approx([1.0] * 3)


def test_the_plan_and_a_grid(report: ModuleType, tmp_path: Path) -> None:
    decode = importlib.import_module("decode")
    options = argparse.Namespace(shape=None, prompt=None, batch=None, mix=None, rounds=None)
    assert decode.chosen_parts(options) == list(decode.PLAN)
    parts = decode.chosen_parts(argparse.Namespace(**vars(options) | {"shape": ["qwen3-4b"], "rounds": 7}))
    assert [(part.shape, part.rows, part.rounds) for part in parts] == [("qwen3-4b", (1,), 7)]
    (part,) = decode.chosen_parts(argparse.Namespace(**vars(options) | {"prompt": [16], "mix": ["greedy"]}))
    assert [str(cell) for cell in part.cells] == ["prompt 16, 1 rows, greedy", "prompt 16, 4 rows, greedy"]

    # Cells of the plan that have all their rounds are left out, whoever else runs.
    part = decode.Part("tiny", (64,), (1, 4), ("greedy",), 2, without=("transformers",))
    results = report.Results(tmp_path / "decode.json", "machine")
    results.add_cell("tiny", 64, 1, "greedy", "qsample", [9.0, 9.0], [1.0, 1.0])
    assert [cell.rows for _, cell in decode.remaining(results, [part], ["qsample", "transformers"], again=False)] == [4]
    assert [cell.rows for _, cell in decode.remaining(results, [part], ["qsample"], again=True)] == [1, 4]


@pytest.mark.slow
def test_a_whole_run_on_a_tiny_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, BENCHMARKS / "decode.py", "--shape", "tiny", "--work", tmp_path / "work"]
    command += ["--system", "transformers", "--batch", "1", "2", "--prompt", "16", "--rounds", "2", "--new-tokens", "4"]
    command += ["--overhead-steps", "8", "--output", tmp_path / "out" / "decode"]
    # No cell fits into no time.
    late = [*map(str, command), "--minutes", "0"]
    subprocess.run(late, check=True, cwd=BENCHMARKS.parent, timeout=900)
    assert json.loads((tmp_path / "out" / "decode.json").read_text())["shapes"]["tiny"]["cells"] == []
    subprocess.run([str(part) for part in command], check=True, cwd=BENCHMARKS.parent, timeout=900)
    found = json.loads((tmp_path / "out" / "decode.json").read_text())["shapes"]["tiny"]
    assert len(found["cells"]) == 2 * 2 * 4  # batches, systems, mixes
    assert found["tokens"]["equal"] == found["tokens"]["compared"] == 64
    assert found["quantization"]["dtype"] == "int4"
    assert "| 16 | 2 | greedy |" in (tmp_path / "out" / "decode.md").read_text()
    assert (tmp_path / "out" / "decode.png").stat().st_size > 1000
