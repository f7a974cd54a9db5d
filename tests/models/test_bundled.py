"""The bundled model: README.md's first command, and the next one, which needs no export."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qsample.package.package import read_package
from tests.conftest import made_once
from tests.helpers.command_line import qsample

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.ci
def test_the_first_command_and_the_next(shared_folder: Path) -> None:
    def fill(folder: Path) -> None:
        arguments = [
            "generate",
            "--raw",
            "-p",
            "And the LORD spake unto",
            "--max-new-tokens",
            "60",
            "--seed",
            "7",
        ]
        done = qsample(*arguments, QSAMPLE_CACHE=str(folder))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("And the LORD spake unto ")

    cache = made_once(shared_folder / "bundled-cache", fill)
    (entry,) = (path for path in cache.iterdir() if path.name != ".locks")
    manifest = read_package(entry).manifest
    assert manifest.compilation is not None
    assert manifest.compilation.provider == "cpu"
    # Without torch, an export would fail.
    code = "import sys; sys.modules['torch'] = None; from qsample.cli import main; main()"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "generate",
            "--raw",
            "-p",
            "In the beginning",
            "--max-new-tokens",
            "24",
            "--seed",
            "1",
        ],
        env={"QSAMPLE_CACHE": str(cache), "PATH": ""},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("In the beginning")
    words = done.stdout.split()
    assert len([word for word in words if word.strip(".,;:").isalpha()]) >= 8, "readable words"
    assert done.stderr.count("\n") == 1, "no stage of an export"
