"""What `qsample serve` makes of its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsample.cli.serve import _named
from tests.helpers.fake_package import fake_package


@pytest.mark.parametrize("named", [".", "../tiny", "../tiny/", "sub/.."])
def test_a_package_is_called_like_its_folder(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = fake_package(tmp_path / "tiny")
    (package.path / "sub").mkdir()
    monkeypatch.chdir(package.path)
    assert list(_named(named, [], None)) == ["tiny"]


def test_a_timeout_in_which_nothing_can_be_answered(run: Any, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "tiny")
    status, _, told = run("serve", package.path, "--request-timeout", "0")
    assert status == 2
    assert told.startswith(
        "qsample: --request-timeout is 0, too short for an answer; give more, or leave it out; see qsample"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--generation-config", "vllm"], '--generation-config is \'vllm\'; give "openai" or "auto"'),
        (["--reasoning-parser", "r2"], "--reasoning-parser is 'r2'; choose from "),
        (["--speculative-config", "{"], "--speculative-config is not valid JSON (Expecting property name"),
        (
            ["--speculative-config", '{"method": "eagle"}'],
            "--speculative-config is {'method': 'eagle'}; tokens are guessed",
        ),
        (["--served-model-name", ""], "--served-model-name is empty; give the name"),
        (["--model", "tiny=elsewhere", "--served-model-name", "tiny"], "--model names tiny twice"),
        (["--model", "small=elsewhere"], "elsewhere is not a package"),
    ],
)
def test_settings_are_checked_before_a_checkpoint_is_exported(
    arguments: list[str], told: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qsample.cli.serve.open_exported", lambda *given, **options: pytest.fail("it was exported"))
    status, _, err = run("serve", "checkpoint", *arguments)
    assert status in (1, 2)
    assert told in err
