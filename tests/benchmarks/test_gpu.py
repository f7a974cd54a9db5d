"""The GPU benchmark: its report of measurements and failures, and a run on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.ci
def test_a_part_that_fails_or_crashes_or_hangs_ends_alone(
    benchmark: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    report = benchmark("gpu_report")
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

    run = report.run_apart
    assert run("0.6B: host", fails, results.take, 60) is None
    assert "SIGKILL" in run("0.6B: checks", crashes, results.take)
    assert "not done after 1 s" in run(
        "0.6B: transformers", hangs, results.take, 1, {"A_SWITCH": "on"}
    )
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


def test_cells_are_compared(benchmark: Callable[[str], ModuleType]) -> None:
    report = benchmark("gpu_report")
    seconds = {
        ("captured", "greedy"): 0.002,
        ("captured", "everything"): 0.0021,
        ("host", "greedy"): 0.003,
    }
    seconds |= {("captured, int4", "greedy"): 0.001, ("captured, int4", "everything"): 0.0011}
    cells = [
        report.Cell("0.6B", system, 1, mix, taken, None) for (system, mix), taken in seconds.items()
    ]
    assert report.comparisons(cells) == [
        "0.6B, captured, 1 rows, greedy: 1.50 times as fast as host",
        "0.6B, captured, 1 rows: everything takes +5.0% over greedy",
        "0.6B, captured, int4, 1 rows: everything takes +10.0% over greedy",
    ]


def test_builders_get_the_packages_of_their_own_interpreter(
    benchmark: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


class Sending:
    """The end of a pipe that keeps all messages."""

    def __init__(self, sent: list[tuple[str, ...]]) -> None:
        self._sent = sent

    def send(self, message: tuple[str, tuple[str, ...]]) -> None:
        kind, values = message
        self._sent.append((kind, *values))


def test_where_cuda_does_not_run_it_says_why_and_ends(
    benchmark: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, plan, report = benchmark("gpu_parts"), benchmark("gpu"), benchmark("gpu_report")
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    monkeypatch.setattr(
        parts, "execution_providers", lambda _: ("CUDAExecutionProvider", "CPUExecutionProvider")
    )
    monkeypatch.setattr(parts, "missing_library", lambda: "; libcublasLt.so.13: not found")
    results = report.Results(tmp_path / "out", "python benchmarks/gpu.py")
    ended = report.run_apart("the GPU", parts.look_at_the_gpu, results.take, 60)
    assert ended is None
    missing, provider = results.problems
    assert missing.startswith("nvidia-smi: FileNotFoundError")
    assert "CUDAExecutionProvider" in provider
    assert provider.endswith("; libcublasLt.so.13: not found")
    assert not results.machine

    names = (
        "provider",
        "shapes",
        "parts",
        "systems",
        "dtype",
        "weights",
        "batch",
        "mix",
        "genai",
        "bandwidth",
    )
    values = (
        "cuda",
        ["tiny"],
        plan.PARTS,
        plan.SYSTEMS,
        "bfloat16",
        ["int4"],
        [1, 4, 32],
        ["greedy"],
        None,
        None,
    )
    options = Namespace(**dict(zip(names, values, strict=True)))
    planned = plan.Plan(options, tmp_path)
    some = planned.parts()
    assert next(some).name == "the GPU"
    with pytest.raises(plan.NoGpuError, match="not seen to run here"):
        next(some)
    planned = plan.Plan(options, tmp_path)
    some = planned.parts()
    next(some)
    planned.found("provider", "runs")
    assert [part.name for part in some][:3] == [
        "the sampler",
        "tiny: export",
        "tiny, cuda-bfloat16: smoke test",
    ]


@pytest.mark.ci
def test_the_sampler_is_checked_over_logits_of_every_kind(
    benchmark: Callable[[str], ModuleType],
) -> None:
    """Two graphs, with and without control flow, on the CPU. A wrong argmax is found."""
    sampler = benchmark("gpu_checks")
    sent: list[tuple[str, ...]] = []
    reports = benchmark("gpu_report").Reports(Sending(sent))
    sampler.check_sampler("cpu", reports, 9000)
    assert {kind for kind, *_ in sent} == {"check"}
    assert len(sent) == 9

    choose, sessions = sampler._choose, []

    def one_later(session: Any, inputs: Any) -> Any:
        """The first session takes the last of equal logits, as a kernel might."""
        sessions.append(session)
        got = choose(session, inputs)
        if session is sessions[0] and (inputs["logits"] == 1).all():
            got[list(sampler.ROWS).index("greedy"), 0] = 8999
        return got

    sampler._choose = one_later
    sent.clear()
    sampler.check_sampler("cpu", reports, 9000)
    problems = [values for kind, *values in sent if kind == "problem"]
    assert len(problems) == 1
    assert "equal logits" in problems[0][0]
    assert "greedy: [8999, 0] for [0, 0]" in problems[0][0]


@pytest.mark.slow
def test_a_whole_run_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [
        sys.executable,
        BENCHMARKS / "gpu.py",
        "--provider",
        "cpu",
        "--shapes",
        "tiny",
        "--batch",
        "1",
        "4",
    ]
    command += [
        "--new-tokens",
        "12",
        "--rounds",
        "1",
        "--work",
        tmp_path / "work",
        "--out",
        tmp_path / "out",
    ]
    subprocess.run([str(part) for part in command], check=True, cwd=BENCHMARKS.parent, timeout=1200)
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert found["problems"] == []
    systems = {row["system"] for row in found["rows"]}
    baked = {"baked", "baked, int4", *(f"baked, read every {n}" for n in (1, 16))}
    assert systems == {*baked, "host", "transformers, static cache"}
    assert {row["rows"] for row in found["rows"]} == {1, 4}
    cells = [(row["system"], row["rows"], row["mix"]) for row in found["rows"]]
    assert len(cells) == len(set(cells))
    checks = "\n".join(found["checks"]["tiny"])
    assert "96 of 96 greedy tokens are transformers' argmax" in checks
    assert (tmp_path / "out" / "gpu.png").stat().st_size > 1000
    # What does not fit into the time is left out, and said to be.
    subprocess.run(
        [*map(str, command), "--budget-seconds", "0"],
        check=True,
        cwd=BENCHMARKS.parent,
        timeout=1200,
    )
    late = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert late["rows"] == []
    assert all("omitted, the time was up" in line for line in late["problems"])
