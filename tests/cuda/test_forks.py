"""The stubs refuse a process that was forked from a process that they served, as CUDA does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_no_process_is_served_after_a_fork_from_one_that_was(first: bool) -> None:
    """It is why the parts of benchmarks/gpu.py are forked from a process that leaves the GPU alone."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING.replace("FIRST", str(first))],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"},
    )
    assert int(done.stdout.split()[-1]) == first  # ONNX Runtime prints, too
