"""Sources: which kind of source a path is, in which order the kinds are asked, and what unknown keywords say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import qsample
from qsample.addons.bake.source import DecoderSource
from qsample.addons.formats.gguf.source import GgufSource
from qsample.checkpoints.source import HubOptions
from qsample.errors import QsampleError
from qsample.models import sources
from qsample.models.sources import (
    CheckpointSource,
    SourceKind,
    SourceRequest,
    find_source,
    holds_graph,
)


@dataclass
class FakeKind(SourceKind):
    """A kind that takes the names with a mark in them, and takes note of every name."""

    precedence: int  # type: ignore[misc]
    mark: str
    asked: list[tuple[int, str]]

    def find(self, request: SourceRequest) -> Any:
        self.asked.append((self.precedence, request.name))
        return self if self.mark in request.name else None

    def describe(self, path: Path) -> None:
        return None


def test_kinds_are_asked_by_precedence_and_a_checkpoint_is_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, str]] = []
    late, early = FakeKind(9, "a", asked), FakeKind(1, "b", asked)
    monkeypatch.setattr(sources, "load_extensions", lambda group: {"x": late, "y": early})
    found = [find_source(SourceRequest(name=name)) for name in ("ab", "a", "me/c")]
    assert found[:2] == [early, late]
    assert isinstance(found[2], CheckpointSource)
    assert asked == [(1, "ab"), (1, "a"), (9, "a"), (1, "me/c"), (9, "me/c")]


def test_a_folder_with_files_of_both_kinds_is_of_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qsample.addons.formats.gguf.source.read_model", lambda path: None)
    (tmp_path / "decoder.onnx").touch()
    assert isinstance(find_source(SourceRequest(name=str(tmp_path))), DecoderSource)
    assert holds_graph(tmp_path)
    (tmp_path / "model.gguf").touch()
    found = find_source(SourceRequest(name=str(tmp_path)))
    assert isinstance(found, GgufSource)
    assert found.model_id == str(tmp_path / "model.gguf")
    decoder = find_source(SourceRequest(name=str(tmp_path), file="decoder.onnx"))
    assert (decoder.file, decoder.kind) == ("decoder.onnx", "decoder file")
    with pytest.raises(QsampleError, match=r"is a file of the language model alone; open it with"):
        find_source(SourceRequest(name=str(tmp_path), images=True))


def test_unknown_keywords_of_bake(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="bake has no argument 'revison'; did you mean 'revision'"):
        qsample.bake(tmp_path, revison="main")  # type: ignore[call-arg]


def test_the_revision_is_of_the_model_and_of_no_other_repository(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, HubOptions] = {}

    def identity(name: str, hub: HubOptions, file: str) -> list[Any]:
        asked[name] = hub
        return [name]

    monkeypatch.setattr(sources, "identity_of", identity)
    hub = HubOptions(revision="v2", token="secret", local_files_only=True)
    others = HubOptions(token="secret", local_files_only=True)
    source = CheckpointSource(model_id="me/m", tokenizer="me/t", adapter="me/a", hub=hub)
    found = source.identity()
    assert [found[name] for name in ("model", "tokenizer", "adapter")] == [
        ["me/m"],
        ["me/t"],
        ["me/a"],
    ]
    assert asked == {"me/m": hub, "me/t": others, "me/a": others}
