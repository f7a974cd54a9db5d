"""Every processor that can be shown here: a row's tokens and log-probabilities do not depend on its company.

scripts/check_processors sets QSAMPLE_PROCESSORS to the folder for what it keeps, QSAMPLE_PROCESSORS_ROWS to the number
of rows, and QSAMPLE_QEMU if QEMU's models are wanted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from tests.processors import as_processor, emulated
from tests.processors.packages import PACKAGES, make_packages

FOLDER = Path(os.environ["QSAMPLE_PROCESSORS"]).absolute()
ROWS = int(os.environ.get("QSAMPLE_PROCESSORS_ROWS", "1000"))
HERE = as_processor.class_at_hand()
MODELS = [model for model in emulated.MODELS if "QSAMPLE_QEMU" in os.environ]
_SLOWER = 50  # times, under QEMU


@pytest.fixture(scope="session")
def packages(shared_folder: Path) -> list[Path]:
    """Made by two processes from both ends."""
    second = os.environ.get("PYTEST_XDIST_WORKER") == "gw1"
    make_packages(shared_folder / "processors", *(reversed(PACKAGES) if second else PACKAGES))
    return make_packages(shared_folder / "processors")


@pytest.fixture
def check(
    packages: list[Path], record_property: Callable[[str, object], None]
) -> Callable[..., None]:
    """(processor, start of the command, environment, rows) → asserts that all packages ran without a difference."""

    def run(processor: str, python: list[str], variables: dict[str, str], rows: int) -> None:
        command = [
            *python,
            "-m",
            "tests.processors.workload",
            *map(str, packages),
            "--rows",
            str(rows),
        ]
        done = subprocess.run(
            command, env=variables, cwd=emulated.ROOT, capture_output=True, text=True, check=False
        )
        reports = [json.loads(line) for line in done.stdout.splitlines()]
        for report in reports:
            record_property("workload", json.dumps({"processor": processor, **report}))
        assert len(reports) == len(packages), done.stderr
        assert [report for report in reports if report["differences"]] == []
        # Otherwise prefixes and guesses were not tested.
        assert [
            report for report in reports if not report["reused"] or report["accepted"] == 0
        ] == []

    return run


def test_the_processor_at_hand(check: Callable[..., None]) -> None:
    check(HERE, [sys.executable], {**os.environ, "PYTHONPATH": str(emulated.ROOT)}, ROWS)


@pytest.mark.parametrize("name", as_processor.lesser_classes())
def test_lesser_processors(name: str, check: Callable[..., None]) -> None:
    folder = FOLDER / "lesser"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        as_processor.build(folder)
    check(name, [sys.executable], as_processor.environment(folder, name), ROWS)


@pytest.mark.parametrize("model", MODELS)
def test_emulated_processors(model: str, check: Callable[..., None]) -> None:
    found = emulated.python(model, FOLDER)
    if found is None:
        pytest.skip(
            f"no QEMU {'.'.join(map(str, emulated.OLDEST))} or newer with a Python for {model}"
        )
    check(model, *found, max(ROWS // _SLOWER, 12))
