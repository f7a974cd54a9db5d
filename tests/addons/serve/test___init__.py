"""The names that `qsample.addons.serve` has, each imported when it is first used."""

from __future__ import annotations

import pytest

from qsample.addons import serve
from qsample.addons.serve import app, settings


def test_names() -> None:
    assert serve.make_app is app.make_app
    assert serve.ServeSettings is settings.ServeSettings
    assert {*serve.__all__} == {"make_app", "ServeSettings"}


def test_another_name() -> None:
    with pytest.raises(AttributeError, match=r"'qsample.addons.serve' has no attribute 'x'"):
        _ = serve.x  # type: ignore[attr-defined]
