"""What the commands share: opening a package, or what is not one yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsample.cli.common import is_package, open_exported, open_model
from qsample.models.model import PackagedModel, SourceModel
from tests.helpers.fake_package import fake_package


def test_a_package_is_opened_with_the_features_that_it_has(tmp_path: Path) -> None:
    path = fake_package(tmp_path / "package", sampler=False, allowed_tokens=True).path
    assert is_package(str(path))
    opened = open_model(str(path))
    assert isinstance(opened, PackagedModel)
    assert opened.package.interface.features.allowed_tokens
    assert open_exported(str(path), None).package.path == path


def test_a_checkpoint_is_not_loaded_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    (tmp_path / "config.json").write_text("{}")
    assert not is_package(str(tmp_path))
    assert isinstance(open_model(str(tmp_path)), SourceModel)
