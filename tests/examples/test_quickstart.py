"""examples/quickstart.py runs on a small model, and, slowly, as it is."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qsample.package.package import read_package

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "quickstart.py"


def check(output: str, folder: Path) -> None:
    assert output.splitlines()[0].startswith("greedy: ")
    assert output.count("batch:") == 3
    assert read_package(folder / "tiny").manifest.kind == "portable"
    assert read_package(folder / "tiny-cpu").manifest.kind == "device"


@pytest.mark.ci
def test_a_small_model(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qsample.models.bundled.TINY_LM", checkpoint("llama"))
    runpy.run_path(str(SCRIPT))["main"](tmp_path)
    check(capsys.readouterr().out, tmp_path)


@pytest.mark.slow
def test_the_bundled_model(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path],
        env={"PYTHONPATH": str(SCRIPT.parents[1]), "PATH": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout, tmp_path)
