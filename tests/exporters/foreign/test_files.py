"""Which file of a folder or a repository is the decoder, and what belongs to it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

import qsample
from qsample.checkpoints.hub import HubOptions
from qsample.errors import QsampleError
from qsample.exporters.foreign.files import Settings, locate
from qsample.interface import Features
from tests.helpers.foreign import edited

Decoder = Callable[[str], tuple[Path, str | None]]


def test_the_only_one_of_a_folder(decoder: Decoder) -> None:
    folder, _ = decoder("optimum_llama")
    location = locate(folder)
    assert location.file == folder / "model.onnx"
    assert location.find("config.json") == folder / "config.json"
    assert locate(folder / "model.onnx").find("config.json") == folder / "config.json"


def test_several_want_a_choice(decoder: Decoder) -> None:
    folder, _ = decoder("community_gqa/x")
    with pytest.raises(QsampleError, match=r"several decoders; say which with file \(--file\): onnx/model.onnx, "):
        locate(folder)
    location = locate(folder, "onnx/model.onnx")
    assert [path.name for path in location.data] == ["model.onnx_data", "model.onnx_data_1"]
    assert location.find("config.json") is None
    assert location.find("tokenizer.json") == folder / "tokenizer.json"


def test_a_genai_config_names_it(decoder: Decoder, tmp_path: Path) -> None:
    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "two", lambda model: None)
    (folder / "embedding.onnx").write_bytes((folder / "model.onnx").read_bytes())
    assert locate(folder).file.name == "model.onnx"
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"]["filename"] = "../outside.onnx"
    (folder / "genai_config.json").write_text(json.dumps(config))
    with pytest.raises(QsampleError, match="several decoders"):
        locate(folder)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("nowhere.onnx", "nowhere.onnx does not exist"),
        ("./nowhere/model", "does not exist"),
    ],
)
def test_nothing_there(given: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QsampleError, match=why):
        locate(given)


def test_a_folder_without_any(tmp_path: Path) -> None:
    with pytest.raises(QsampleError, match=r"has no \.onnx file, in it or in onnx/"):
        locate(tmp_path)


def test_data_that_is_missing_or_lies_elsewhere(decoder: Decoder, tmp_path: Path) -> None:
    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "copy", lambda model: None)
    (folder / "model.onnx.data").rename(folder / "elsewhere")
    with pytest.raises(QsampleError, match=r"its data, model.onnx.data, is missing"):
        locate(folder)

    model = ir.load(folder / "model.onnx")
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            tensor = value.const_value
            value.const_value = ir.ExternalTensor(
                "../secret", tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name
            )
    ir.save(model, folder / "model.onnx")
    with pytest.raises(QsampleError, match=r"refers to '../secret'"):
        locate(folder)


def test_no_onnx_file(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a protobuf, which is clear from the first byte on")
    with pytest.raises(QsampleError, match="not an ONNX file"):
        locate(tmp_path)


def test_of_a_repository_only_what_belongs_to_the_decoder_is_downloaded(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    folder, _ = decoder("community_gqa/x")
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    names += ["onnx/vision/config.json", "README.md", "model.safetensors"]
    fetched = []

    def download(repository: str, name: str, **options: Any) -> str:
        assert repository == "some/model"
        assert options == HubOptions(revision="v2").downloading()
        fetched.append(name)
        return str(folder / name)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repository, **options: names)

    location = locate("some/model", "onnx/model.onnx", hub=HubOptions(revision="v2"))

    assert location.file == folder / "onnx" / "model.onnx"
    assert {name for name in fetched if name.startswith("onnx/")} == {
        "onnx/model.onnx",
        "onnx/model.onnx_data",
        "onnx/model.onnx_data_1",
    }
    assert "tokenizer.json" in fetched
    assert not {"README.md", "model.safetensors", "onnx/vision/config.json"} & {*fetched}


def test_a_repository_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    def fail(self: Any, repository: str, **options: Any) -> list[str]:
        raise OSError("no route\nto host")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    with pytest.raises(
        QsampleError, match=r"some/model is not a folder here, and the hub does not give it \(no route to"
    ):
        locate("some/model")


def linked(folder: Path, cache: Path) -> Path:
    """`folder` as the hub's cache keeps it: links to files with other names."""
    snapshot, blobs = cache / "snapshots" / "abc", cache / "blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.rglob("*.*"))):
        (blobs / str(number)).write_bytes(path.read_bytes())
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    return snapshot


def test_stop_tokens_are_those_of_the_generation_config() -> None:
    """Chat models stop at more tokens than config.json has."""

    def token_ids(generation: dict[str, Any], genai: dict[str, Any], config: dict[str, Any]) -> tuple[Any, ...]:
        found = Settings(config, generation, genai, {}).token_ids(10)
        return found.pad, found.bos, found.eos

    ids = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    more = {"eos_token_id": [3, 4, 10, None], "bos_token_id": 5, "pad_token_id": 10}
    genai = {"eos_token_id": 6, "bos_token_id": 9, "pad_token_id": 8}
    assert token_ids(more, genai, ids) == (3, 5, (3, 4))
    assert token_ids({}, genai, ids) == (8, 9, (6,))
    assert token_ids({"eos_token_id": None}, {}, ids) == (0, 1, (2,))
    assert token_ids({}, {}, {"bos_token_id": -1}) == (0, None, ())


def test_links_of_the_hubs_cache(decoder: Decoder, tmp_path: Path) -> None:
    snapshot = linked(decoder("community_gqa/x")[0], tmp_path / "models--some--model")
    package = qsample.bake(snapshot, tmp_path / "out", file="onnx/model.onnx", features=Features(sampler=False)).package
    assert package.manifest.source.model_id == str(snapshot)
    assert package.has("tokenizer.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models--some--model", "out"]
    with pytest.raises(QsampleError, match=r"abc/onnx/model_quantized\.onnx cannot be baked"):
        qsample.bake(snapshot, tmp_path / "other", file="onnx/model_quantized.onnx")


def test_files_with_several_names(decoder: Decoder, tmp_path: Path) -> None:
    """Hard links, as backups and some caches make them."""
    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "model", lambda model: None)
    os.link(folder / "model.onnx.data", tmp_path / "backup")
    package = qsample.bake(folder, tmp_path / "out", features=Features(sampler=False)).package
    assert package.has("decoder.onnx.data")
    assert (folder / "model.onnx.data").samefile(tmp_path / "backup")


@pytest.mark.parametrize("name", ["model.onnx.data", "config.json", "tokenizer.json", "chat_template.jinja"])
def test_links_that_lead_elsewhere(name: str, decoder: Decoder, tmp_path: Path) -> None:
    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "model", lambda model: None)
    (folder / name).touch()
    (folder / name).rename(tmp_path / "secret")
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(QsampleError, match=rf"{name} is a link that leads out of its folder, to .*/secret"):
        qsample.bake(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
