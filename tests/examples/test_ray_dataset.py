"""The example of a dataset prints the texts of `generate` with the seeds of its rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qsample.addons.ray.processor import seed_of
from qsample.runtime import load

ROOT = Path(__file__).parents[2]
pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def test_it_prints_what_generate_gives(bundled_package: Path) -> None:
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "ray_dataset.py", bundled_package],
        capture_output=True, text=True, check=False, env={**os.environ, **variables, "PYTHONPATH": python_path},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    prompts = [
        "In the beginning",
        "Blessed are",
        "And Jesus said unto them",
        "And the LORD spake unto",
    ]
    model = load(bundled_package)
    lines = []
    for number in range(8):
        prompt = prompts[number % 4]
        seed = seed_of({"id": number}, "id")
        output = model.generate(prompt, max_new_tokens=16, temperature=0.7, seed=seed)
        lines.append(f"{number}: {prompt + (output.texts or [''])[0]!r}")
    assert result.stdout.splitlines() == lines
