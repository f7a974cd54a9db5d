"""What `qsample serve` makes of its arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsample.cli.serve import _models
from tests.helpers.fake_package import fake_package


@pytest.mark.parametrize("named", [".", "../tiny", "../tiny/", "sub/.."])
def test_a_package_is_called_like_its_folder(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = fake_package(tmp_path / "tiny")
    (package.path / "sub").mkdir()
    monkeypatch.chdir(package.path)
    assert list(_models(named, [], None, None)) == ["tiny"]


def test_a_timeout_in_which_nothing_can_be_answered(run: object, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "tiny")
    status, _, told = run("serve", package.path, "--request-timeout", "0")  # type: ignore[operator]
    assert (status, told) == (
        1,
        "qsample: --request-timeout is 0, in which no answer comes; give more, or leave it out\n",
    )
