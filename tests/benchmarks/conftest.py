"""The benchmarks as modules and as programs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the benchmarks, anew for each test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (BENCHMARKS / f"{name.replace('.', '/')}.py").exists() or name == "systems":
            sys.modules.pop(name)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """Runs a benchmark with options, `--work` in a folder of the test; the figures and the page that it wrote."""
    pytest.importorskip("matplotlib")

    def run(name: str, *options: object) -> tuple[Any, str]:
        output = tmp_path / "out" / name
        command = [
            sys.executable,
            BENCHMARKS / f"{name}.py",
            *options,
            "--work",
            tmp_path / "work",
            "--output",
            output,
        ]
        subprocess.run([*map(str, command)], check=True, cwd=BENCHMARKS.parent, timeout=900)
        if output.with_suffix(".png").exists():
            assert output.with_suffix(".png").stat().st_size > 1000
        return json.loads(output.with_suffix(".json").read_text()), output.with_suffix(
            ".md"
        ).read_text()

    return run
