"""Settings that a server refuses."""

from __future__ import annotations

import pytest

from qsample.serve.settings import ServeSettings


@pytest.mark.parametrize("name", ["api_keys", "cors_origins"])
def test_a_text_is_no_tuple_of_texts(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is a text"):
        ServeSettings(models={"tiny": "tiny"}, **{name: "secret"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_timeout": 0}, "request_timeout is 0, too short for an answer"),
        ({"request_timeout": float("inf")}, "request_timeout is inf"),
        ({"drain_timeout": float("inf")}, "drain_timeout is inf"),
        ({"drain_timeout": -1}, "drain_timeout is -1"),
    ],
)
def test_wrong_times(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeSettings(models={"tiny": "tiny"}, **options)  # type: ignore[arg-type]
