"""GGUF files as a source: which file a name means, and what tells the states of a file apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qsample.addons.formats.gguf.source import GgufLocation, GgufSource, find_gguf
from qsample.checkpoints.source import HubOptions
from qsample.errors import QsampleError


def test_names_of_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = ["README.md", "mmproj-F16.gguf", "m-Q4_0.gguf", "BF16/m-00001-of-00002.gguf"]

    def model_info(api: Any, name: str, **options: Any) -> Any:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=one) for one in listed])

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)

    def find(name: str, file: str | None = None) -> tuple[str, str | None] | None:
        found = find_gguf(name, file, HubOptions())
        return None if found is None else (found.model_id, found.file)

    blob = tmp_path / "sha256-1"  # of ollama
    blob.write_bytes(b"GGUF and more")
    other = tmp_path / "model.bin"
    other.touch()
    assert find("sha256-1") == ("sha256-1", None)
    assert find("model.bin") is None
    folder = tmp_path / "folder"
    folder.mkdir()
    assert find("folder") is None
    for name in ("a.gguf", "mmproj-a.gguf"):
        (folder / name).touch()
    assert find("folder") == ("folder/a.gguf", None)
    assert find("folder", "mmproj-a.gguf") == ("folder/mmproj-a.gguf", None)
    (folder / "b.gguf").touch()
    several = r"folder has several models, a\.gguf, b\.gguf, mmproj-a\.gguf; say which with file=, or give a path"
    with pytest.raises(QsampleError, match=several):
        find("folder")
    for file in ("c.gguf", "../folder/a.gguf"):
        with pytest.raises(QsampleError, match=rf"folder has no {file}, but a\.gguf"):
            find("folder", file)
    assert find("folder", "decoder.onnx") is None
    (folder / "model.safetensors").touch()
    assert find("folder") is None
    assert find("me/m-GGUF") == ("me/m-GGUF", "m-Q4_0.gguf")
    assert find("me/m") is None
    assert find("me/m", "q.gguf") == find("me/m/q.gguf") == ("me/m", "q.gguf")
    assert find("me/m/deep/q.gguf") == ("me/m", "deep/q.gguf")
    for missing in (
        "m.gguf",
        "./m.gguf",
        "../me/m/q.gguf",
        "/me/m/q.gguf",
        "~/me/q.gguf",
        "folder/m/q.gguf",
        "me/q.gguf",
    ):
        with pytest.raises(
            QsampleError, match=rf"^{missing} does not exist; give a GGUF file, or OWNER/NAME/FILE"
        ):
            find(missing)
    with pytest.raises(QsampleError, match="is one of 2 parts of a model; join them"):
        find("me/m", listed[-1])
    listed[2:2] = ["m-Q8_0.gguf"]
    with pytest.raises(
        QsampleError, match=r"m-GGUF has several models, BF16/m-00001.*, m-Q4_0\.gguf, m-Q8_0\.gguf"
    ):
        find("me/m-GGUF")
    del listed[2:4]
    with pytest.raises(QsampleError, match="m-GGUF has no whole model of GGUF, but BF16"):
        find("me/m-GGUF")


def test_the_identity_of_a_gguf_file_is_its_content(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    source = GgufSource(model_id=str(path))
    before = source.identity()
    (tmp_path / "config.json").touch()
    assert source.identity() == before
    assert source.pinned().path == path
    path.write_bytes(b"GGUF 2")
    assert source.identity() != before


def test_a_gguf_file_of_a_hub_id_is_its_downloaded_commit(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--me--m" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    (snapshot / "m.gguf").write_bytes(b"GGUF")
    hub = HubOptions(cache_dir=tmp_path, local_files_only=True)
    assert find_gguf("me/m-GGUF", "m.gguf", hub) == GgufLocation("me/m-GGUF", "m.gguf")
    source = GgufSource(model_id="me/m", hub=hub, file="m.gguf")
    assert source.identity()["model"] == ["me/m", "a" * 40]
    assert source.pinned().hub.revision == "a" * 40
    assert source.path == snapshot / "m.gguf"
    with pytest.raises(QsampleError, match=r"the hub does not give n\.gguf of me/m"):
        _ = replace(source, file="n.gguf").path
