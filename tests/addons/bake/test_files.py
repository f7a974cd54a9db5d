"""Which file of a folder or a repository is the decoder, and what belongs to it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from tokenizers import Tokenizer

import qsample
from qsample.addons.bake.files import (
    Settings,
    decoders,
    generation_config,
    locate,
    read_settings,
    without_links,
    write_files,
)
from qsample.checkpoints.source import HubOptions
from qsample.contract.interface import Features
from qsample.errors import QsampleError, UnsupportedModelError
from qsample.package.manifest import TokenIds
from qsample.request.sampling_params import SamplingParams
from qsample.runtime import load
from tests.helpers.foreign import edited, greedy_of_file, read, rewritten

Decoder = Callable[[str], tuple[Path, str | None]]


def test_the_only_one_of_a_folder(decoder: Decoder) -> None:
    folder, _ = decoder("optimum_llama")
    location = locate(folder)
    assert location.file == folder / "model.onnx"
    assert location.find("config.json") == folder / "config.json"
    assert locate(folder / "model.onnx").find("config.json") == folder / "config.json"


def test_several_want_a_choice(decoder: Decoder) -> None:
    folder, _ = decoder("community_gqa/x")
    with pytest.raises(
        QsampleError, match=r"several decoders; say which with file \(--file\): onnx/model.onnx, "
    ):
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


def test_the_decoder_of_transformers_exporter(decoder: Decoder) -> None:
    """Beside it is a graph for the first call, without a cache."""
    folder, _ = decoder("transformers_webgpu_phi3")
    assert {"prefill.onnx", "export.json"} <= {path.name for path in folder.iterdir()}
    assert locate(folder).file.name == "decode.onnx"


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
                "../secret",
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=tensor.shape,
                name=tensor.name,
            )
    ir.save(model, folder / "model.onnx")
    with pytest.raises(QsampleError, match=r"refers to '../secret'"):
        locate(folder)


class Repository:
    """`some/model` on the hub, with files in a folder. fetched: what was downloaded. asked: the options of looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, names: list[str]) -> None:
        import huggingface_hub
        from huggingface_hub import constants

        self.folder, self.names = folder, names
        self.fetched: set[str] = set()
        self.asked: list[dict[str, Any]] = []
        self.downloads: list[dict[str, Any]] = []
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            huggingface_hub.HfApi,
            "list_repo_files",
            lambda api, *args, **options: self.look(options),
        )
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)

    def look(self, options: dict[str, Any]) -> list[str]:
        self.asked.append(options)
        return self.names

    def download(self, repository: str, name: str, **options: Any) -> str:
        assert repository == "some/model"
        self.downloads.append(options)
        self.fetched.add(name)
        return str(self.folder / name)


def test_of_a_repository_only_what_belongs_to_the_decoder_is_downloaded(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = decoder("community_gqa/x")
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    names += ["onnx/vision/config.json", "README.md", "model.safetensors"]
    repository = Repository(monkeypatch, folder, names)
    location = locate("some/model", "onnx/model.onnx", hub=HubOptions(revision="v2"))
    assert location.file == folder / "onnx" / "model.onnx"
    # The branch may get another commit after the first file: the others are of the first's.
    revisions = ["v2", *[folder.name] * (len(repository.downloads) - 1)]
    assert repository.downloads == [
        HubOptions(revision=revision).downloading() for revision in revisions
    ]
    assert len(repository.downloads) > 3
    files = {"onnx/model.onnx", "onnx/model.onnx_data", "onnx/model.onnx_data_1"}
    assert {name for name in repository.fetched if name.startswith("onnx/")} == files
    assert "tokenizer.json" in repository.fetched
    assert not {"README.md", "model.safetensors"} & repository.fetched


def test_a_deep_file_of_a_repository(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one if it is asked for only; configurations are its folder's, its parent's and the repository's."""
    names = [
        "a.json",
        "b.onnx",
        "cpu/c.json",
        "cpu/x/model.onnx",
        "cpu/x/d.jinja",
        "cpu/x/e.txt",
        "gpu/f.json",
    ]
    names += ["genai_config.json"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "made", lambda model: None)
    for name in ("model.onnx", "model.onnx.data"):
        (folder / name).rename(tmp_path / "cpu" / "x" / name)
    names += ["cpu/x/model.onnx.data"]
    repository = Repository(monkeypatch, tmp_path, names)
    location = locate(
        "some/model", "cpu/x/model.onnx", hub=HubOptions(revision="v2", token="secret")
    )
    assert location.file == tmp_path / "cpu" / "x" / "model.onnx"
    assert location.folders == (tmp_path / "cpu" / "x", tmp_path / "cpu", tmp_path)
    assert repository.asked == [{"revision": "v2", "token": "secret"}]
    assert repository.fetched == {*names} - {"b.onnx", "cpu/x/e.txt", "gpu/f.json"}

    (tmp_path / "b.onnx").write_bytes((tmp_path / "cpu" / "x" / "model.onnx").read_bytes())
    (tmp_path / "model.onnx.data").touch()
    for wanted in ({"a.json", "b.onnx", "genai_config.json"}, {"a.json", "b.onnx"}):
        repository.fetched.clear()
        assert locate("some/model").file == tmp_path / "b.onnx"
        assert repository.fetched == wanted
        names[:] = [name for name in names if name != "genai_config.json"]
    with pytest.raises(QsampleError, match=r"has no \.\./b\.onnx; it has none$"):
        locate(tmp_path / "cpu", "../b.onnx")


def test_a_repository_that_the_hub_does_not_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: dict[str, Any]) -> list[str]:
        raise OSError("no route\nto host")

    Repository(monkeypatch, tmp_path, []).look = fail  # type: ignore[method-assign]
    with pytest.raises(
        QsampleError, match=r"is not a folder here, and the hub does not give it \(no route to"
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

    def token_ids(
        generation: dict[str, Any], genai: dict[str, Any], config: dict[str, Any]
    ) -> tuple[Any, ...]:
        found = Settings(config, generation, genai, {}).token_ids(10)
        return found.pad, found.bos, found.eos

    ids = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    more = {"eos_token_id": [3, 4, 10, None], "bos_token_id": 5, "pad_token_id": 10}
    genai = {"eos_token_id": 6, "bos_token_id": 9, "pad_token_id": 8}
    assert token_ids(more, genai, ids) == (3, 5, (3, 4))
    assert token_ids({}, genai, ids) == (8, 9, (6,))
    assert token_ids({"eos_token_id": None}, {}, ids) == (0, 1, (2,))
    assert token_ids({}, {}, {"bos_token_id": -1}) == (0, None, ())


def test_a_tokenizer_with_other_tokens_and_another_ending(decoder: Decoder, tmp_path: Path) -> None:
    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "model", lambda model: None)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([f"<extra {number}>" for number in range(200)])
    tokenizer.save(path)
    baked_without = qsample.bake(
        folder, tmp_path / "without", tokenizer=None, features=Features(sampler=False)
    )
    size = baked_without.package.interface.vocab_size
    stops = baked_without.package.manifest.token_ids.eos
    last = tokenizer.id_to_token(size - 1)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": last}))
    with pytest.warns(UserWarning, match=rf"the model lacks .* \(id {size}\) on"):
        baked = qsample.bake(folder, tmp_path / "out", features=Features(logit_bias=True))
    assert baked.package.manifest.token_ids.eos == (*stops, size - 1)
    assert baked.generation_config.eos_token_id == [*stops]
    model = load(baked.package.path)
    biased = model.generate("a", logit_bias={size - 1: 1e4}, max_new_tokens=3)
    assert biased.token_ids == [[size - 1] * 3]
    with pytest.raises(
        ValueError, match=rf"token {size} of the tokenizer, and the model has {size}"
    ):
        model.generate(f"a{tokenizer.id_to_token(size)}")


def test_links_of_the_hubs_cache(decoder: Decoder, tmp_path: Path) -> None:
    snapshot = linked(decoder("community_gqa/x")[0], tmp_path / "models--some--model")
    package = qsample.bake(
        snapshot, tmp_path / "out", file="onnx/model.onnx", features=Features(sampler=False)
    ).package
    assert (package.manifest.source.model_id, package.manifest.source.revision) == (
        "some/model",
        "abc",
    )
    assert {"model.onnx", "tokenizer.json"} <= package.manifest.source.files.keys()
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


@pytest.mark.parametrize(
    "name", ["model.onnx.data", "config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_links_that_lead_elsewhere(name: str, decoder: Decoder, tmp_path: Path) -> None:
    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "model", lambda model: None)
    (folder / name).touch()
    (folder / name).rename(tmp_path / "secret")
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(
        QsampleError, match=rf"{name} is a link that leads out of its folder, to .*/secret"
    ):
        qsample.bake(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


DOZEN = [f"{number:02}.onnx" for number in range(12)]


@pytest.mark.parametrize(
    ("names", "given", "file", "why"),
    [
        ([], "nowhere.onnx", None, "nowhere.onnx does not exist"),
        ([], "./nowhere/model", None, "does not exist"),
        ([], "./nowhere", None, "does not exist"),
        ([], ".", None, r"has no \.onnx file, in it or in onnx/"),
        (["model.onnx"], ".", None, "not an ONNX file"),
        (
            ["model.onnx"],
            "model.onnx",
            "model.onnx",
            r"is a file already; leave file out, or give its folder",
        ),
        (["config.json"], "config.json", None, r"config\.json is not an \.onnx file"),
        (
            ["model.onnx", "config.json"],
            ".",
            "config.json",
            r"has no config\.json; it has model\.onnx$",
        ),
        (DOZEN, ".", None, rf": {', '.join(DOZEN)}$"),
        ([*DOZEN, "12.onnx", "notes.txt"], ".", None, rf": {', '.join(DOZEN)} and 1 others$"),
    ],
)
def test_no_decoder_is_found(
    names: list[str],
    given: str,
    file: str | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in names:
        (tmp_path / name).write_bytes(b"not a protobuf: that is clear from the first byte on")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(QsampleError, match=why):
        locate(given, file)
    assert decoders(tmp_path) == [name for name in names if name.endswith(".onnx")]


def test_a_copy_without_links(decoder: Decoder, tmp_path: Path) -> None:
    location = locate(
        linked(decoder("community_gqa/x")[0], tmp_path / "models--some--model"), "onnx/model.onnx"
    )
    assert location.is_linked
    (out := tmp_path / "out").mkdir()
    copy = without_links(location, out)
    assert not copy.is_linked
    assert (copy.file, [path.name for path in copy.data]) == (
        out / "model.onnx",
        ["model.onnx_data", "model.onnx_data_1"],
    )
    assert [path.read_bytes() for path in copy.data] == [
        path.read_bytes() for path in location.data
    ]
    assert copy.folders == location.folders  # the configurations stay


def settings(
    config: dict[str, Any] | None = None,
    genai: dict[str, Any] | None = None,
    search: dict[str, Any] | None = None,
) -> Settings:
    return Settings(config or {}, {}, genai or {}, search or {})


def test_sizes_of_the_configurations() -> None:
    none = settings()
    assert (none.context, none.head_dim, none.vocab_size, none.window) == (None, None, None, None)
    assert none.model_type == "unknown"
    genai = {"context_length": 64, "vocab_size": 9, "type": "phi", "decoder": {"head_size": 4}}
    assert settings({}, genai).context == 64
    assert settings({"max_position_embeddings": 32}, genai).context == 32
    assert [
        settings({name: 48}, genai).context
        for name in ("n_positions", "max_sequence_length", "seq_length")
    ] == [*(48, 48, 48)]
    assert (settings({}, genai).vocab_size, settings({"vocab_size": 8}, genai).vocab_size) == (9, 8)
    assert (
        settings({}, genai).model_type,
        settings({"model_type": "llama"}, genai).model_type,
    ) == ("phi", "llama")
    sizes = {"hidden_size": 12, "num_attention_heads": 4}
    assert settings(sizes).head_dim == 3
    assert settings(sizes, genai).head_dim == 4
    assert settings(sizes | {"head_dim": 5}, genai).head_dim == 5
    assert settings({"hidden_size": 3, "num_attention_heads": 4}).head_dim is None
    assert settings({"hidden_size": 12}).head_dim is None


def test_attention_windows() -> None:
    genai = {"decoder": {"sliding_window": {"window_size": 7}}}
    assert settings({"sliding_window": 5}).window == 5
    assert settings({"sliding_window": 5}, genai).window == 5
    assert settings({}, genai).window == 7
    assert settings({"sliding_window": 5, "use_sliding_window": False}).window is None
    assert settings({"sliding_window": 5, "layer_types": ["full_attention"]}).window is None
    assert (
        settings(
            {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
        ).window
        == 5
    )
    with pytest.raises(
        QsampleError,
        match=r"config\.json: layer_types is 'x'; it must be a list with the type of each",
    ):
        _ = settings({"layer_types": "x"}).window
    with pytest.raises(
        QsampleError, match=r"genai_config\.json: sliding_window is 7; it must be an object"
    ):
        _ = settings({}, {"decoder": {"sliding_window": 7}}).window


@pytest.mark.parametrize(
    ("given", "size"),
    [(None, None), (False, None), (0, None), (-1, None), (1, 1), (8.0, 8), (2**31 - 1, 2**31 - 1)],
)
def test_a_size(given: object, size: int | None) -> None:
    assert settings({"vocab_size": given}).vocab_size == size


@pytest.mark.parametrize(
    ("given", "accepted"),
    [(True, "an integer"), ("8", "an integer"), (8.5, "an integer"), (2**31, "at most 2147483647")],
)
def test_what_is_no_size(given: object, accepted: str) -> None:
    with pytest.raises(
        QsampleError,
        match=rf"^config\.json: vocab_size is {given!r}; it must be {accepted}\. Correct it",
    ):
        _ = settings({"vocab_size": given}).vocab_size


def test_what_a_package_gets(decoder: Decoder, tmp_path: Path) -> None:
    """Configurations, and the tokenizer that is asked for."""
    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "model", lambda model: None)
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "further.json").write_text("{}")
    (folder / "config.json").write_text('{"text_config": {"vocab_size": 128}, "vocab_size": 7}')
    (folder / "generation_config.json").unlink(missing_ok=True)
    location = locate(folder)
    read = read_settings(location)
    assert read.vocab_size == 128
    search = {"temperature": 0.5, "top_p": 0.75, "repetition_penalty": 1.5}
    sampled = replace(read, generation={}, search={"do_sample": True, "top_k": None} | search)
    ids = TokenIds(pad=2, bos=1, eos=(3, 4))

    def written(
        name: str, settings: Settings, ids: TokenIds, tokenizer: str | None
    ) -> tuple[set[str], Any]:
        (out := tmp_path / name).mkdir()
        write_files(location, generation_config(settings, ids), 128, tokenizer, out)
        return {path.name for path in out.iterdir()}, json.loads(
            (out / "generation_config.json").read_text()
        )

    names, generation = written("all", sampled, ids, "auto")
    configs = {"config.json", "generation_config.json"}
    tokenizer = {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    }
    assert names == configs | tokenizer
    tokens = {"pad_token_id": 2, "bos_token_id": 1, "eos_token_id": [3, 4]}
    assert generation == {"do_sample": True} | search | tokens
    greedy, none = (
        replace(sampled, search={"do_sample": False} | search),
        TokenIds(pad=0, bos=None, eos=()),
    )
    assert written("ids", greedy, none, None) == (
        configs,
        {"repetition_penalty": 1.5, "pad_token_id": 0, "eos_token_id": None},
    )
    own = replace(sampled, generation={"temperature": 2.0})
    assert written("own", own, ids, None) == (configs, {"temperature": 2.0} | tokens)

    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(
        QsampleError, match=r"empty has no tokenizer\.json; give the folder of a tokenizer"
    ):
        written("other", read, ids, str(empty))
    (folder / "tokenizer.json").rename(empty / "tokenizer.json")
    assert written("given", read, ids, str(empty))[0] == configs | {"tokenizer.json"}
    with pytest.warns(
        UserWarning, match=r"has no tokenizer\.json: the package takes token ids only"
    ):
        assert written("without", read, ids, "auto")[0] == configs

    size = Tokenizer.from_file(str(empty / "tokenizer.json")).get_vocab_size()
    own = generation_config(read, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_files(location, own, size, str(empty), tmp_path / "given")
    with pytest.warns(UserWarning, match=rf"the model lacks 1 of .* \(id {size - 1}\) on"):
        write_files(location, own, size - 1, str(empty), tmp_path / "given")
    # No file names the tokenizer's end of a text, or in one of two ways.
    vocabulary = Tokenizer.from_file(str(empty / "tokenizer.json")).get_vocab()
    text = next(text for text, token in vocabulary.items() if token == size - 1)
    ends: list[tuple[Any, Any]] = [(None, None), (text, size - 1), ({"content": text}, size - 1)]
    for given, end in [*ends, ("no token", None)]:
        (empty / "tokenizer_config.json").write_text(json.dumps({"eos_token": given}))
        found = write_files(location, own, size, str(empty), tmp_path / "given")
        assert found == end
    (empty / "tokenizer.json").write_text("{}")
    with pytest.raises(QsampleError, match=r"tokenizer\.json cannot be read"):
        write_files(location, own, 128, str(empty), tmp_path / "given")


# What onnxruntime-genai's builder writes for a model without settings of its own.
BUILT: dict[str, Any] = {
    "diversity_penalty": 0.0, "do_sample": False, "early_stopping": True, "length_penalty": 1.0, "max_length": 4096,
    "min_length": 0, "no_repeat_ngram_size": 0, "num_beams": 1, "num_return_sequences": 1,
    "past_present_share_buffer": True, "repetition_penalty": 1.0, "temperature": 1.0, "top_k": 1, "top_p": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("search", "params", "left_out"),
    [
        ({}, {"temperature": 0.0}, []),
        ({"max_length": 80, "min_length": 9}, {"max_length": 80, "min_length": 9}, []),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
            [],
        ),
        ({"do_sample": True, "top_k": 5, "top_p": 0.0}, {"temperature": 1.0, "top_k": 5}, []),
        ({"do_sample": True, "top_k": 0}, {"temperature": 1.0, "top_k": 0}, []),
        ({"do_sample": True, "temperature": 0.0}, {"temperature": 0.0}, []),
        ({"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
         {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "temperature": 0.0}, []),
        ({"random_seed": 5}, {"seed": None}, ["random_seed"]),
        ({"random_seed": -1, "chunk_size": 64, "batch_size": 2}, {"seed": None}, []),
        ({"num_return_sequences": 2, "of_tomorrow": 1}, {}, ["num_return_sequences", "of_tomorrow"]),
    ],
)  # fmt: skip
def test_the_search_of_a_genai_config_becomes_the_defaults(
    search: dict[str, Any], params: dict[str, Any], left_out: list[str]
) -> None:
    read = settings({}, {"context_length": 4096}, BUILT | search)
    ids = TokenIds(pad=0, bos=None, eos=(3,))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        own = generation_config(read, ids)
    names = [f'"search" in genai_config.json has {", ".join(left_out)}, which the package']
    assert [str(one.message).partition(" goes")[0] for one in said] == (names if left_out else [])
    made = SamplingParams.from_generation_config(own)
    assert {name: getattr(made, name) for name in params} == params
    assert made.max_length == search.get("max_length")
    # A caller that samples does not get the builder's top_k.
    if not search.get("do_sample"):
        assert SamplingParams.from_generation_config(own, temperature=0.7).top_k == 50
    # The model's own file comes first, as a whole.
    own = generation_config(replace(read, generation={"top_k": 7, "do_sample": True}), ids)
    assert own == {"top_k": 7, "do_sample": True, "pad_token_id": 0, "eos_token_id": [3]}


@pytest.mark.ci
def test_beams_of_a_genai_config_are_named_where_they_would_run(
    decoder: Decoder, tmp_path: Path
) -> None:
    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "model", lambda model: None)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "genai_config.json").read_text())
    config["search"] |= {"num_beams": 3, "no_repeat_ngram_size": 2}
    (folder / "genai_config.json").write_text(json.dumps(config))
    package = qsample.bake(folder, tmp_path / "package")
    assert package.features.filters == ("no_repeat_ngram_size",)
    with pytest.warns(UserWarning, match='asks for "num_beams", which qsample does not do'):
        tokens = package.generate([[5, 6, 7]], max_new_tokens=40, eos_token_id=()).token_ids[0]
    pairs = list(itertools.pairwise(tokens))
    assert len({*pairs}) == len(pairs)


@pytest.mark.parametrize(
    ("content", "why"),
    [("[]", "is not a JSON object"), ("{", "cannot read"), ('{"text_config": 3}', "an object")],
)
def test_a_configuration_that_is_none(
    content: str, why: str, decoder: Decoder, tmp_path: Path
) -> None:
    folder = edited(decoder("genai_cpu_fp32")[0], tmp_path / "model", lambda model: None)
    (folder / "config.json").write_text(content)
    with pytest.raises(QsampleError, match=why):
        read_settings(locate(folder))


def test_without_the_network_a_snapshot_is_taken_as_it_is(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    asked = []

    def snapshot(repository: str, **options: Any) -> str:
        asked.append((repository, options["local_files_only"]))
        return str(decoder("optimum_llama")[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    for offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert (
            locate("some/model", hub=HubOptions(local_files_only=not offline)).file.name
            == "model.onnx"
        )
    assert asked == [("some/model", True)] * 2


def renamed_data(folder: Path, name: str) -> None:
    """Let the tensors of model.onnx.data be in `name`."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    onnx.save(model, folder / "model.onnx")


@pytest.mark.parametrize(
    "name", ["./model.onnx.data", "././model.onnx.data", "part/./model.onnx.data"]
)
def test_data_in_the_same_folder_by_a_dot(name: str, decoder: Decoder, tmp_path: Path) -> None:
    folder = edited(decoder("genai_cpu_int4")[0], tmp_path / "model", lambda model: None)
    data = folder / name
    data.parent.mkdir(exist_ok=True)
    shutil.move(folder / "model.onnx.data", data)
    renamed_data(folder, name)
    location = locate(folder)
    (found,) = location.data
    assert found.samefile(data)
    assert "." not in location.files[found.relative_to(folder).as_posix()].parts
    wanted = greedy_of_file(read(decoder("genai_cpu_int4")[0]), [1, 17, 40], 3)
    (out := tmp_path / "out").mkdir()
    copy = without_links(location, out)
    for file in (location.file, copy.file):
        assert greedy_of_file(read(file.parent), [1, 17, 40], 3) == wanted
    assert rewritten(folder).interface.vocab_size


@pytest.mark.parametrize(
    "name",
    [
        "../model.onnx.data",
        "./../model.onnx.data",
        "/model.onnx.data",
        ".//etc/passwd",
        ".",
        "./",
        "",
    ],
)
def test_data_elsewhere_is_refused(name: str, decoder: Decoder, tmp_path: Path) -> None:
    folder = edited(decoder("genai_cpu_int4")[0], tmp_path / "model", lambda model: None)
    shutil.copy(folder / "model.onnx.data", tmp_path)
    renamed_data(folder, name)
    with pytest.raises(
        UnsupportedModelError, match=r"it refers to .*, which (lies outside|has an empty part)"
    ):
        locate(folder)
