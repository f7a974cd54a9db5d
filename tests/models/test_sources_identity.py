"""What a source is: its folders, its identity in the cache, its commit, and how it is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qsample.checkpoints import checkpoint
from qsample.checkpoints.source import HubOptions
from qsample.errors import QsampleError
from qsample.models import sources
from qsample.models.sources import (
    CheckpointSource,
    SourceDescription,
    SourceKind,
    SourceRequest,
    describe_source,
    find_source,
    holds_graph,
)

HUB = HubOptions(revision="v2", token="secret", trust_remote_code=True)
COMMIT = "0" * 40


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is asked of the hub; every model has the commit `COMMIT`."""
    calls: list[tuple[Any, ...]] = []

    def answer(name: str, hub: HubOptions, file: str) -> Any:
        calls.append((name, hub, file))
        return COMMIT

    for function in ("commit_of", "newest_commit"):
        monkeypatch.setattr(sources, function, answer)

    def identity(*given: Any) -> list[Any]:
        calls.append(given)
        return [given[0]]

    monkeypatch.setattr(sources, "identity_of", identity)
    return calls


def test_a_request_by_default() -> None:
    request = SourceRequest(name="me/m")
    assert (request.file, request.gguf_file, request.dtype, request.adapter) == (None,) * 4
    assert (request.tokenizer, request.images, request.text_only) == ("auto", False, False)
    assert (request.hub, request.export_dtype) == (HubOptions(), "float32")
    assert SourceRequest(name="me/m", dtype="float16").export_dtype == "float16"


@pytest.mark.parametrize("field", ["name", "file", "gguf_file", "tokenizer", "adapter"])
def test_an_empty_name_is_not_the_current_folder(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is empty; give a path"):
        SourceRequest(**{"name": "me/m", field: ""})  # type: ignore[arg-type]


def test_files_of_text_alone_are_not_opened_with_images() -> None:
    for images in (False, None):
        SourceRequest(name="m.gguf", images=images).check_text_suffices()
    with pytest.raises(QsampleError, match=r"m\.gguf is a file of the language model alone; open"):
        SourceRequest(name="m.gguf", images=True).check_text_suffices()


def test_adapters_and_dtypes_are_checked() -> None:
    SourceRequest(name="me/m").check_adapter_and_dtype()
    SourceRequest(name="me/m", adapter="me/a", dtype="float16").check_adapter_and_dtype()
    with pytest.raises(QsampleError, match="dtype is bfloat16"):
        SourceRequest(name="me/m", dtype="bfloat16").check_adapter_and_dtype()
    with pytest.raises(QsampleError, match="no/such/adapter does not exist"):
        SourceRequest(name="me/m", adapter="no/such/adapter").check_adapter_and_dtype()


def test_a_checkpoint_has_all_of_its_request(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    found = find_source(
        SourceRequest(
            name=str(tmp_path),
            tokenizer="me/t",
            adapter="me/a",
            dtype="float16",
            images=None,
            text_only=True,
            hub=HUB,
        )
    )
    assert found == CheckpointSource(
        model_id=str(tmp_path),
        tokenizer="me/t",
        hub=HUB,
        dtype="float16",
        adapter="me/a",
        images=None,
        text_only=True,
    )
    assert found.notice is None
    assert found.kind == "checkpoint"
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(QsampleError, match=r"has a config\.json and no weights"):
        find_source(SourceRequest(name=str(tmp_path)))


@pytest.mark.parametrize(("installed", "asks"), [(True, False), (False, True)])
def test_the_hub_is_asked_at_once_without_transformers(
    installed: bool, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(sources, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(sources, "check_exists", lambda name, hub=None: seen.append((name, hub)))
    find_source(SourceRequest(name="me/m", hub=HUB))
    assert seen == [("me/m", HUB if asks else None)]


def test_a_folder_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    assert find_source(SourceRequest(name=str(tmp_path))).model_id == str(tmp_path)


def test_the_folders_that_a_model_is_read_from() -> None:
    plain = CheckpointSource(model_id="m")
    assert plain.folders == ("m", "auto")
    assert CheckpointSource(model_id="m", tokenizer=None, adapter="").folders == ("m",)
    assert CheckpointSource(model_id="m", tokenizer="t", adapter="a").folders == ("m", "a", "t")


def test_the_identity_has_all_that_the_model_follows_from(asked: list[tuple[Any, ...]]) -> None:
    plain = CheckpointSource(model_id="me/m").identity()
    assert plain == {
        "model": ["me/m"],
        "file": None,
        "tokenizer": "auto",
        "dtype": "float32",
        "adapter": None,
        "code": False,
        "images": False,
        "text_only": False,
    }
    assert asked == [("me/m", HubOptions(), "config.json")]
    asked.clear()
    source = CheckpointSource(
        model_id="me/m",
        file="f.bin",
        tokenizer="me/t",
        adapter="me/a",
        dtype="float16",
        images=None,
        text_only=True,
        hub=HUB,
    )
    assert source.identity() == {
        "model": ["me/m"],
        "file": "f.bin",
        "tokenizer": ["me/t"],
        "dtype": "float16",
        "adapter": ["me/a"],
        "code": True,
        "images": None,
        "text_only": True,
    }
    others = HUB.for_another_repository()
    assert sorted(asked, key=lambda call: call[0]) == [
        ("me/a", others, "adapter_config.json"),
        ("me/m", HUB, "f.bin"),
        ("me/t", others, "tokenizer_config.json"),
    ]
    assert CheckpointSource(model_id="me/m", tokenizer=None).identity()["tokenizer"] is None


def test_a_source_is_pinned_to_a_commit_or_to_its_full_name(
    asked: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = CheckpointSource(model_id="me/m", file="f.bin", hub=HUB).pinned()
    assert (pinned.model_id, pinned.hub.revision, pinned.hub.token) == ("me/m", COMMIT, "secret")
    assert asked == [("me/m", HUB, "f.bin")]
    asked.clear()
    CheckpointSource(model_id="me/m").download_newest()
    assert asked == [("me/m", HubOptions(), "config.json")]
    asked.clear()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    pinned = CheckpointSource(model_id="m", hub=HUB).pinned()
    assert (pinned.model_id, pinned.hub) == (str(tmp_path / "m"), HUB)
    assert asked == []


def test_a_checkpoint_is_opened_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        checkpoint, "Checkpoint", lambda *given, **options: calls.append((given, options))
    )
    CheckpointSource(
        model_id="me/m",
        dtype="float16",
        tokenizer="me/t",
        adapter="me/a",
        hub=HUB,
        images=None,
        text_only=True,
    ).open()
    options = {
        "tokenizer": "me/t",
        "adapter": "me/a",
        "hub": HUB,
        "images": None,
        "text_only": True,
    }
    assert calls == [(("me/m", "float16"), options)]


@dataclass
class FakeKind(SourceKind):
    """A kind that knows the paths with a mark in them."""

    precedence: int  # type: ignore[misc]
    mark: str

    def find(self, request: SourceRequest) -> None:
        return None

    def describe(self, path: Path) -> SourceDescription | None:
        known = self.mark in path.name
        return SourceDescription(document=self.precedence, tables={}) if known else None


def test_descriptions_are_of_the_first_kind_that_knows_the_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {"x": FakeKind(9, "a"), "y": FakeKind(1, "b")}
    monkeypatch.setattr(sources, "load_extensions", lambda group: kinds)
    found = [describe_source(Path(name)) for name in ("ab", "a", "b", "c")]
    assert [each and each.document for each in found] == [1, 9, 1, None]
    assert holds_graph(Path("ab")) is False


def test_graphs_of_other_exporters(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graphs(FakeKind):
        def holds_graph(self, path: Path) -> bool:
            return self.mark in path.name

    kinds = {"x": FakeKind(1, "a"), "y": Graphs(2, "b")}
    monkeypatch.setattr(sources, "load_extensions", lambda group: kinds)
    assert [holds_graph(Path(name)) for name in ("a", "b", "ab", "c")] == [False, True, True, False]
