"""The GPU benchmark: its processes, comparisons and pages, and what it says without a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.progress import Progress

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
Benchmark = Callable[[str], ModuleType]


def run_parts(benchmark: Benchmark, folder: Path, *groups: Any, seconds: float = 60) -> list[Any]:
    """Run groups of (name, work, limit in seconds); the rows of the run."""
    parts: Any = benchmark("gpu_parts")
    rows = benchmark("gpu_report").Rows(folder)
    parts.LEAST_SECONDS = 0.5
    made = [[parts.Part(*part) for part in group] for group in groups]
    with Progress(auto_refresh=False, disable=True) as bar:
        parts.run_parts(made, rows, time.monotonic() + seconds, lambda: None, bar)
    read: list[Any] = rows.read()
    return read


@pytest.mark.ci
def test_a_part_that_fails_or_crashes_or_hangs_ends_alone(
    benchmark: Benchmark, tmp_path: Path
) -> None:
    late = tmp_path / "late"

    def fails(rows: Any) -> None:
        rows.add("prompts", ms=1.0)
        with rows.section("greedy"):
            raise ValueError("no such mix")
        raise RuntimeError("out of\nmemory")

    def crashes(rows: Any) -> None:
        rows.add("prompts", ms=2.0)
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(rows: Any) -> None:
        subprocess.Popen(["sh", "-c", f"sleep 2; touch {late}"])
        time.sleep(600)

    rows = run_parts(
        benchmark,
        tmp_path,
        [("host", fails), ("checks", crashes)],
        [("transformers", hangs, 1)],
        [("genai", lambda rows: rows.add("prompts", ms=3.0))],
    )
    assert [row["ms"] for table, row in rows if table == "prompts"][2:] == [3.0]
    assert {(row["part"], row["problem"]) for table, row in rows if table == "problems"} == {
        ("host", "greedy: ValueError: no such mix"),
        ("host", "failed: RuntimeError: out of memory"),
        ("checks", "its process ended with -9"),
        ("transformers", "ended at its time limit"),
    }
    assert "no such mix" in (tmp_path / "log.txt").read_text()
    time.sleep(2)
    assert not late.exists()


@pytest.mark.ci
def test_the_parts_of_a_group_run_side_by_side(benchmark: Benchmark, tmp_path: Path) -> None:
    def waits_for(other: str) -> Callable[[Any], None]:
        def work(rows: Any) -> None:
            rows.add("machine", name=other)
            while all(row["name"] == other for _, row in rows.read()):
                time.sleep(0.01)

        return work

    group = [("one", waits_for("a")), ("two", waits_for("b"))]
    rows = run_parts(benchmark, tmp_path, group, [("three", lambda rows: rows.add("steps"))])
    tables = [table for table, _ in rows if table != "parts"]
    assert tables == ["machine", "machine", "steps"]


def test_without_time_parts_are_omitted(benchmark: Benchmark, tmp_path: Path) -> None:
    rows = run_parts(benchmark, tmp_path, [("one", lambda rows: rows.add("steps"))], seconds=0)
    assert rows == [("problems", {"part": "one", "problem": "omitted, the time was up"})]


def step(system: str, rows: int, ms: float, mix: str = "greedy") -> dict[str, Any]:
    row = {"shape": "0.6B", "system": system, "rows": rows, "mix": mix, "ms_per_step": ms}
    return row | {"tokens_per_second": 1000 * rows / ms}


def test_the_claims_of_others_are_compared(benchmark: Benchmark) -> None:
    steps = [
        step("captured", 1, 2.0),
        step("captured", 32, 4.0),
        step("captured", 32, 5.0, "everything"),
        step("host, transformers' processors", 32, 10.0, "everything"),
        *(step(f"captured, read every {n}", 1, ms) for n, ms in ((1, 3.0), (4, 2.0))),
        step("captured, read every 4, one buffer", 1, 2.5),
    ]
    names = ("source", "rows", "mix", "ratio")
    found = [
        tuple(row[name] for name in names) for row in benchmark("gpu_report").comparisons(steps)
    ]
    assert found == [
        ("web-llm", 1, "greedy", 1.5),
        ("nkipy", 1, "greedy", 1.25),
        ("openinfer", 32, "greedy", 16.0),
        ("QEfficient", 32, "everything", 2.0),
    ]


def test_the_kernels_of_a_step_are_the_difference_of_two_runs(benchmark: Benchmark) -> None:
    def trace(kernels: int, copies: int) -> dict[str, Any]:
        return {
            "gemm": np.array([kernels, 3.0 * kernels]),
            "Memcpy DtoH": np.array([copies, copies]),
        }

    # 100 kernels and 8 copies read the prompt; then each step has 10 kernels, and each four steps 3 copies.
    short, long = (trace(100 + 10 * n, 8 + 3 * n // 4) for n in (16, 64))
    assert benchmark("gpu_systems").kernels_of_a_step((short, 16), (long, 64)) == {
        "kernels": 10.0,
        "copies": 0.75,
        "copies_to_the_host": 0.75,
        "microseconds": 30.75,
        "longest": "gemm 30; Memcpy DtoH 1",
    }


def test_a_page_is_made_of_several_runs_on_one_gpu(benchmark: Benchmark, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gpu, report = benchmark("gpu"), benchmark("gpu_report")

    def run(name: str, device: str, *steps: dict[str, Any]) -> Path:
        (tmp_path / name).mkdir()
        rows = [("machine", {"name": "gpu", "value": device}), *(("steps", row) for row in steps)]
        report.write(report.tables(f"python {name}", rows), tmp_path / name)
        return tmp_path / name / "gpu.json"

    smoke, first = run("smoke", "H200"), run("first", "H200", step("captured", 1, 2.0))
    rest = run("rest", "H200", step("uncaptured", 1, 4.0))
    (tmp_path / "docs").mkdir()
    gpu.publish([smoke, first, rest], tmp_path / "docs")
    page = (tmp_path / "docs" / "gpu.md").read_text()
    assert "Written by `python smoke; python first; python rest`." in page
    assert "| 0.6B | captured | 1 | greedy | 2 | 500 |" in page
    assert "| qsample | captured | uncaptured | 0.6B | 1 | greedy | 2 |" in page
    assert (tmp_path / "docs" / "gpu.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="results of H200 and H100; give those of one GPU"):
        gpu.publish([first, run("other", "H100")], tmp_path / "docs")


def test_builders_get_the_packages_of_their_own_interpreter(
    benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages of this interpreter may be in PYTHONPATH only; those of another interpreter are not."""
    run_quietly = benchmark("checkpoints").run_quietly
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    (tmp_path / "python").symlink_to(sys.executable)
    said = {}
    for python in (sys.executable, str(tmp_path / "python")):
        run_quietly(
            [python, "-c", "import os; print(os.environ.get('PYTHONPATH'))"], tmp_path / "log"
        )
        said[python] = (tmp_path / "log").read_text().strip()
    assert list(said.values()) == ["somewhere", "None"]


@pytest.mark.ci
def test_where_cuda_does_not_run_it_says_why_and_ends(tmp_path: Path) -> None:
    command = [
        sys.executable,
        BENCHMARKS / "gpu.py",
        "--out",
        tmp_path,
        "--work",
        tmp_path / "work",
    ]
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(
        [*map(str, command)], check=False, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    (results,) = tmp_path.glob("*/gpu.json")  # in a folder of the run, so that no run overwrites it
    found = json.loads(results.read_text())
    problems = [row["problem"] for row in found["problems"] if row["part"] == "the GPU"]
    assert problems[0].startswith("nvidia-smi: FileNotFoundError")
    assert problems[1].startswith("the provider's library, see docs/devices.md: OSError: ")
    assert "CUDAExecutionProvider" in problems[2]
    assert {row["part"] for row in found["problems"]} <= {"the GPU", "the run"}


@pytest.mark.ci
def test_the_sampler_is_checked_over_logits_of_every_kind(
    benchmark: Benchmark, tmp_path: Path
) -> None:
    """On the CPU. A wrong argmax is found."""
    checks: Any = benchmark("gpu_checks")
    report = benchmark("gpu_report")
    rows = report.Rows(tmp_path)
    checks.check_sampler(rows, "cpu", 9000)
    assert {table for table, _ in rows.read()} == {"sampler"}
    captured_step = checks.captured_step

    def one_later(face: Any, provider: str) -> Any:
        """The last of equal logits is taken, as by a kernel that breaks ties otherwise."""
        own = captured_step(face, provider)

        def step(logits: Any, inputs: Any) -> Any:
            out = own(logits, inputs)
            if (logits == 1).all():
                out["next_ids"][:] = logits.shape[1] - 1
            return out

        return step

    checks.captured_step = one_later
    wrong = report.Rows(tmp_path, "the sampler")
    checks.check_sampler(wrong, "cpu", 9000)
    problems = [row["problem"] for table, row in wrong.read() if table == "problems"]
    assert [problem.split(":")[0] for problem in problems] == [
        "equal logits, V = 9000, 0 further filters",
        "equal logits, V = 1187, 13 further filters",
    ]
    assert all("next_ids" in problem for problem in problems)
