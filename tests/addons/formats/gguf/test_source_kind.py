"""GGUF files as a kind of source: what a request becomes, how it is opened, and how it is described."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsample.addons.formats.gguf import checkpoint as checkpoints
from qsample.addons.formats.gguf import source as sources
from qsample.addons.formats.gguf.source import GGUF, GgufLocation, GgufSource, find_gguf
from qsample.checkpoints.source import HubOptions, file_state
from qsample.errors import QsampleError
from qsample.models.sources import SourceRequest

HUB = HubOptions(revision="v2", token="secret")


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The files that were read or downloaded."""
    calls: list[Any] = []

    def download(name: str, file: str, hub: HubOptions) -> Path:
        calls.append((name, file, hub))
        return Path("downloaded.gguf")

    def read_model(path: Path) -> str:
        calls.append(path)
        return f"contents of {path}"

    monkeypatch.setattr(sources, "download", download)
    monkeypatch.setattr(sources, "read_model", read_model)
    return calls


def test_a_request_becomes_a_source(files: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.touch()
    request = SourceRequest(
        name=str(path), tokenizer="me/t", hub=HUB, dtype="float16", adapter="me/a", images=None
    )
    assert GGUF.find(request) == GgufSource(
        model_id=str(path), tokenizer="me/t", hub=HUB, dtype="float16", adapter="me/a"
    )
    assert files == [path]  # a file that cannot be read is refused at once
    files.clear()
    hub = GGUF.find(SourceRequest(name="me/m", file="a.gguf", hub=HUB))
    assert hub == GgufSource(model_id="me/m", file="a.gguf", hub=HUB)
    assert files == []
    by_other_name = SourceRequest(name="me/m", file="other.gguf", gguf_file="b.gguf")
    assert GGUF.find(by_other_name) == GgufSource(model_id="me/m", file="b.gguf")
    assert GGUF.find(SourceRequest(name="me/m")) is None
    assert GGUF.precedence == 10  # before decoder files


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"images": True}, "is a file of the language model alone"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16"),
        ({"adapter": "no/such/adapter"}, "no/such/adapter does not exist"),
    ],
)
def test_what_a_file_does_not_take(options: dict[str, Any], words: str, files: list[Any]) -> None:
    with pytest.raises(QsampleError, match=words):
        GGUF.find(SourceRequest(name="me/m", file="a.gguf", **options))


def test_a_file_is_opened_as_a_checkpoint(
    files: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        checkpoints, "GgufCheckpoint", lambda *given, **more: calls.append((given, more))
    )
    options = {"tokenizer": "me/t", "adapter": "me/a", "hub": HUB}
    GgufSource(model_id="a.gguf", dtype="float16", **options).open()  # type: ignore[arg-type]
    GgufSource(model_id="me/m", file="deep/a.gguf", **options).open()  # type: ignore[arg-type]
    assert calls == [
        (("contents of a.gguf", "a.gguf", "float16"), options),
        (("contents of downloaded.gguf", "me/m/deep/a.gguf", "float32"), options),
    ]
    assert files == [Path("a.gguf"), ("me/m", "deep/a.gguf", HUB), Path("downloaded.gguf")]


def test_the_identity_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    assert GgufSource(model_id=str(path)).identity()["model"] == file_state(path)
    monkeypatch.setattr("qsample.models.sources.identity_of", lambda *given: [*given])
    found = GgufSource(model_id="me/m", file="a.gguf", hub=HUB).identity()
    assert found["model"] == ["me/m", HUB, "a.gguf"]


def test_a_description_has_its_facts_as_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gguf"
    path.touch()
    facts = {"name": "x", "layers": 2, "license": None, "types": {"Q4_0": 3}}
    monkeypatch.setattr(sources, "describe_gguf", lambda given: facts if given == path else {})
    for given in (path, tmp_path):
        found = GGUF.describe(given)
        assert found is not None
        assert found.document == facts
        rows = {"name": "x", "layers": "2", "license": "", "types": {"Q4_0": 3}}
        assert found.tables == {str(path): rows}
    (tmp_path / "model.bin").touch()
    assert GGUF.describe(tmp_path / "model.bin") is None
    assert GGUF.describe(tmp_path / "none.gguf") is None


def names_of(count: int) -> list[str]:
    return [f"m-{number:02}.gguf" for number in range(count)]


@pytest.mark.parametrize(("count", "more"), [(2, False), (40, False), (41, True)])
def test_at_most_40_files_are_listed(count: int, more: bool, tmp_path: Path) -> None:
    for name in names_of(count):
        (tmp_path / name).touch()
    with pytest.raises(QsampleError) as caught:
        find_gguf(str(tmp_path), None, HubOptions())
    listed = ", ".join(names_of(min(count, 40))) + " and more" * more
    assert f"has several models, {listed}; say which with file=" in str(caught.value)


def test_files_in_capitals_and_paths_that_are_no_files(tmp_path: Path) -> None:
    upper = tmp_path / "A.GGUF"
    upper.touch()
    assert find_gguf(str(upper), None, HUB) == GgufLocation(str(upper))
    assert find_gguf(str(upper), "a.gguf", HUB) is None
    assert find_gguf("me/m", "A.GGUF", HUB) == GgufLocation("me/m", "A.GGUF")
    assert find_gguf("/dev/null", None, HUB) is None
    assert find_gguf("not a hub id!", "a.gguf", HUB) is None


def test_downloaded_files_are_preferred_to_the_hubs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append((name, options["local_files_only"], options["token"]))
        return str(tmp_path)

    def info(api: Any, name: str, **options: Any) -> Any:
        asked.append((name, options))
        raise OSError("no\nnetwork")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", info)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "m.gguf").touch()
    assert find_gguf("me/m-gguf", None, HUB) == GgufLocation("me/m-gguf", "deep/m.gguf")
    assert asked == [("me/m-gguf", True, "secret")]
    (tmp_path / "deep" / "m.gguf").unlink()
    with pytest.raises(QsampleError, match=r"has no whole model of GGUF, but no \.gguf file; give"):
        find_gguf("me/m-gguf", None, HubOptions(local_files_only=True))
    asked.clear()
    with pytest.raises(
        QsampleError,
        match=r"me/m-gguf is not a folder here, and the hub does not give it \(no network\)",
    ):
        find_gguf("me/m-gguf", None, HUB)
    options = {"revision": "v2", "timeout": sources.HUB_TIMEOUT_S, "token": "secret"}
    assert asked[1] == ("me/m-gguf", options)
