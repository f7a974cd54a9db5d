"""`qsample.bake`: which source its keywords make, and what reaches the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import qsample
from qsample.addons.bake import api
from qsample.addons.bake.source import DecoderSource
from qsample.checkpoints.source import HubOptions
from qsample.contract.interface import Features


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each export was given."""
    calls: list[dict[str, Any]] = []

    class Model:
        def __init__(self, source: Any, features: Any) -> None:
            self.given = {"source": source, "features": features}

        def export(self, out: Any, **options: Any) -> str:
            calls.append({**self.given, "out": out, **options})
            return "package"

    monkeypatch.setattr(api, "SourceModel", Model)
    return calls


def test_defaults(exported: list[dict[str, Any]]) -> None:
    assert qsample.bake(Path("decoder.onnx")) == "package"
    assert exported == [
        {
            "source": DecoderSource(
                model_id="decoder.onnx",
                file=None,
                tokenizer="auto",
                hub=HubOptions(),
                rope=None,
                reference=None,
            ),
            "features": Features(),
            "out": None,
            "overwrite": False,
            "progress": None,
        }
    ]


def test_every_keyword_reaches_its_place(exported: list[dict[str, Any]]) -> None:
    def progress(stage: str, fraction: float) -> None: ...

    qsample.bake(
        "me/m",
        "out",
        file="onnx/model_q4.onnx",
        features=Features(logprobs=True),
        tokenizer="me/t",
        rope="long",
        reference="me/r",
        overwrite=True,
        progress=progress,
        revision="v2",
        cache_dir="downloads",
        token="secret",
        local_files_only=True,
    )
    assert exported == [
        {
            "source": DecoderSource(
                model_id="me/m",
                file="onnx/model_q4.onnx",
                tokenizer="me/t",
                hub=HubOptions(
                    revision="v2", cache_dir="downloads", token="secret", local_files_only=True
                ),
                rope="long",
                reference="me/r",
            ),
            "features": Features(logprobs=True),
            "out": "out",
            "overwrite": True,
            "progress": progress,
        }
    ]
    qsample.bake("me/m", "out", features=None, tokenizer=None)
    assert exported[1]["features"] == Features()
    assert exported[1]["source"].tokenizer is None


def test_unknown_keywords_are_refused_before_any_work(exported: list[dict[str, Any]]) -> None:
    with pytest.raises(TypeError, match="bake has no argument 'featurs'; did you mean 'features'"):
        qsample.bake("me/m", featurs=Features())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'trust_remote_code'"):
        qsample.bake("me/m", trust_remote_code=True)  # type: ignore[call-arg]
    assert exported == []
