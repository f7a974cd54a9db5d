"""benchmarks/gpu.py from its first line to its last, before it meets a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


FORKING = """
import os
import onnxruntime as ort
from qsample.ort.small_graphs import identity

def opened():
    try:
        return ort.InferenceSession(identity(1), providers=["CUDAExecutionProvider"]).get_providers()[0]
    except Exception as error:
        return str(error)

if FIRST:
    assert opened() == "CUDAExecutionProvider"
child = os.fork()
if child == 0:
    os._exit(opened() != "CUDAExecutionProvider")
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("first", [False, True])
def test_the_stubs_serve_no_process_that_was_forked_from_one_they_served(first: bool) -> None:
    """As CUDA does: it is why the benchmark's parts are forked from a process that leaves the GPU alone."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING.replace("FIRST", str(first))],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"},
    )
    assert int(done.stdout.split()[-1]) == first  # ONNX Runtime prints, too


@pytest.mark.slow
def test_the_benchmark_runs_to_its_end(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.cuda.puppet",
        ROOT / "benchmarks" / "gpu.py",
        "--dtype",
        "float16",
    ]
    command += [
        "--shapes",
        "tiny",
        "--parts",
        "smoke",
        "first",
        "checks",
        "--systems",
        "captured",
        "uncaptured",
        "host",
    ]
    command += ["--batch", "1", "32", "--new-tokens", "8", "--rounds", "1"]
    command += ["--work", tmp_path / "work", "--out", tmp_path / "out"]
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT, timeout=3600)
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    # The stubs lack a driver, numbers in bfloat16, and CUPTI; an environment may lack matplotlib.
    lacking = (
        "nvidia-smi:",
        "tiny, cuda-bfloat16: smoke test:",
        "tiny, cuda-float16: trace of the copies",
        "the plot:",
    )
    assert [line for line in found["problems"] if not line.startswith(lacking)] == []
    cells = {(row["system"], row["rows"], row["mix"]) for row in found["rows"]}
    mixes = ("greedy", "plain temperature", "everything")
    assert cells == {
        *(
            (system, rows, mix)
            for system in ("captured", "captured, int4")
            for rows in (1, 32)
            for mix in mixes
        ),
        *(
            (system, rows, mix)
            for system in ("uncaptured", "host")
            for rows in (1, 32)
            for mix in mixes[::2]
        ),
    }
    assert all(row["floor"] > 0 for row in found["rows"])
    assert len(found["rows"]) == len(cells)
    assert len(found["checks"]["sampler"]) == 9
    checks = found["checks"]["tiny"]
    for name in ("cuda-float16", "cuda-float16-int4", "cuda-float16-int8-cache"):
        assert f"tiny, {name}: without capture: the same tokens" in checks
