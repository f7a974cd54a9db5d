"""examples/quickstart.py runs as it stands, and what it shows is what README.md says it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from qsample.package import read_package

ROOT = Path(__file__).resolve().parents[2]


def test_quickstart(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "examples/quickstart.py", tmp_path],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("greedy: ")
    assert done.stdout.count("batch:") == 3
    assert read_package(tmp_path / "tiny").manifest.kind == "portable"
    assert read_package(tmp_path / "tiny-cpu").manifest.kind == "device"
