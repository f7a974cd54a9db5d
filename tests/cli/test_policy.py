"""`qsample policy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def test_components_are_written(run: Any, tmp_path: Path) -> None:
    status, stdout, stderr = run("policy", tmp_path / "out", "--vocab-size", "40", "--provider", "cuda")
    assert status == 0, stderr
    assert all(Path(line).is_file() for line in stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either OUT or --into"),
        (["out"], "give --vocab-size"),
        (["out", "--vocab-size", "4", "--contract", "x"], "contract is 'x'"),
        (["--into", "missing"], "cannot read missing/inference_metadata.yaml"),
    ],
)
def test_wrong_options(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, stderr = run("policy", *arguments)
    assert status in (1, 2)
    assert message in " ".join(stderr.split())
    assert not list(tmp_path.iterdir())
