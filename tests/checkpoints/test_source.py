"""Sources: what of the hub's options reaches transformers, names that fail at once, and what tells models apart."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from qsample import AutoModelForCausalLM
from qsample.checkpoints import checkpoint as checkpoint_module
from qsample.checkpoints.source import (
    HubOptions,
    check_exists,
    download,
    files_of,
    identity_of,
    license_of,
    origin_of,
)
from qsample.errors import QsampleError
from qsample.models.keywords import HubKeywords, OpenKeywords
from qsample.models.sources import CheckpointSource

GIVEN = {
    "revision": "v2",
    "cache_dir": "/downloads",
    "token": "hf_secret",
    "local_files_only": True,
    "trust_remote_code": True,
}


def test_every_option_is_a_keyword_of_from_pretrained() -> None:
    assert {option.name for option in fields(HubOptions)} == HubKeywords.__optional_keys__
    assert OpenKeywords.__optional_keys__ > HubKeywords.__optional_keys__


def test_loading_takes_all_and_downloading_runs_no_code() -> None:
    options = HubOptions(**GIVEN)
    assert options.loading() == GIVEN
    assert options.downloading() == {
        name: value for name, value in GIVEN.items() if name != "trust_remote_code"
    }
    assert HubOptions().loading()["revision"] == "main"


def test_a_revision_is_of_one_repository() -> None:
    assert HubOptions(**GIVEN).for_another_repository() == HubOptions(
        **(GIVEN | {"revision": None})
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"revision": 2}, "revision is of type int; it must be str or None"),
        ({"cache_dir": b"downloads"}, "cache_dir is of type bytes"),
        ({"local_files_only": "no"}, "local_files_only is of type str; it must be bool"),
        ({"trust_remote_code": None}, "trust_remote_code is of type NoneType; it must be bool"),
    ],
)
def test_values_of_another_type(option: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, **option)


def test_a_token_is_not_shown() -> None:
    assert "hf_secret" not in repr(HubOptions(**GIVEN))
    with pytest.raises(ValueError, match="token is of type bytes") as raised:
        HubOptions(token=b"hf_secret")  # type: ignore[arg-type]
    assert "hf_secret" not in str(raised.value)


def test_options_reach_the_loader_whole(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    def stop(name: str, **options: Any) -> None:
        given.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module.AutoConfig, "from_pretrained", stop)
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), **GIVEN)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        model.export(tmp_path / "package")
    assert given == [GIVEN]


def test_importing_the_options_is_light() -> None:
    program = (
        "import sys, qsample.checkpoints.source\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


class Hub(BaseHTTPRequestHandler):
    """Has one model that needs a token and one without the file; asked for another, it fails or knows none."""

    asked: list[str] = []  # noqa: RUF012

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        status, code = 404, "RepoNotFound"
        if "gated" in self.path:
            status, code = 403, "GatedRepo"
        elif "no-config" in self.path:
            status, code = 404, "EntryNotFound"
        elif "broken" in self.path:
            status, code = 503, ""
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Hub.asked.clear()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def ask(*names: str, **variables: str) -> list[str]:
    """What `check_exists` says of each name where nothing of the hub's is cached; the endpoint is read on import."""
    code = (
        "import sys\nfrom qsample.errors import QsampleError\n"
        "from qsample.checkpoints.source import HubOptions, check_exists\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        print(check_exists(name, HubOptions()))\n"
        "    except QsampleError as error:\n        print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines()


def test_the_hub_is_asked_once_and_its_other_answers_are_left_to_transformers(
    hub: str, tmp_path: Path
) -> None:
    said = ask(
        "some/model",
        "plain",
        "a/gated",
        "a/no-config",
        "a/broken",
        HF_ENDPOINT=hub,
        HF_HOME=str(tmp_path),
    )
    assert said[0].startswith(
        "some/model does not exist, nor is there such a model on the hub, unless it is private"
    )
    assert said[1].startswith("plain does not exist, nor is there such a model on the hub")
    assert said[2:] == ["None"] * 3
    assert len(Hub.asked) == 5


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    (said,) = ask("some/model", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    assert "some/model does not exist, and the hub cannot be reached (" in said
    assert said.endswith("give a checkpoint folder, a package folder or a hub id")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./foo", "./foo does not exist; give a checkpoint folder"),
        ("a/b/c", "a/b/c does not exist"),
        ("/no/such/folder", "/no/such/folder does not exist"),
        ("foo/", "foo/ does not exist"),
        ("~/foo", "~/foo does not exist"),
        ("..\\foo", r"foo does not exist"),
        ("a name", "a name does not exist"),
        ("", "has neither a config.json"),
        ("./tiny-cup", r"did you mean tiny-cpu\?"),
        ("tiny-cup", r"did you mean tiny-cpu\?.*was not downloaded"),
        ("models/qwen", r"did you mean models/qwen3\?.*was not downloaded"),
        ("file", "file is a file; give the folder"),
        ("tiny-cpu", "tiny-cpu has neither a config.json .* nor a qsample.json"),
        (
            "some/model",
            "was not downloaded from the hub before, and local_files_only allows no download",
        ),
        (
            "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main",
            r"is an address; give the hub id, Qwen/Qwen3-0\.6B$",
        ),
        ("hf.co/Qwen/Qwen3-0.6B", r"is an address; give the hub id, Qwen/Qwen3-0\.6B$"),
        ("hf://Qwen/Qwen3-0.6B", r"is an address; give the hub id, Qwen/Qwen3-0\.6B$"),
        (
            "qwen3:0.6b",
            "does not exist; .* hub id, such as Qwen/Qwen3-0.6B: names of ollama are unknown",
        ),
    ],
)
def test_names(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-cpu").mkdir()
    (tmp_path / "models" / "qwen3").mkdir(parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(QsampleError, match=message):
        check_exists(name, HubOptions(local_files_only=True, cache_dir=tmp_path))


@pytest.mark.parametrize(
    ("config", "file", "message"),
    [
        ('{"model_type": "qwen3"}', "model.gguf", r"model\.gguf is no GGUF file that can be read"),
        (
            '{"model_type": "qwen3"}',
            "README.md",
            r"has a config.json and no weights; put .* there$",
        ),
        ('{"model_type": ', "model.safetensors", "its config.json cannot be used"),
        ("[]", "model.safetensors", None),  # transformers says it
        (
            '{"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": true}',
            "model.safetensors",
            r"is an encoder-decoder \(WhisperForConditionalGeneration\).*take a decoder-only language model",
        ),
        (
            '{"model_type": "t5", "is_encoder_decoder": true}',
            "pytorch_model.bin",
            r"encoder-decoder \(t5\)",
        ),
        (
            '{"architectures": ["BertForMaskedLM"]}',
            "model.safetensors",
            "BertForMaskedLM, which does not continue",
        ),
        (
            '{"architectures": ["ViTForImageClassification"]}',
            "model.safetensors",
            "does not continue texts",
        ),
        ('{"architectures": ["BertForMaskedLM"], "is_decoder": true}', "model.safetensors", None),
        (
            '{"architectures": ["Qwen3ForCausalLM"], "x": Infinity}',
            "model.safetensors model.gguf",
            None,
        ),
    ],
)
def test_folders_are_refused_without_torch(
    config: str, file: str, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "config.json").write_text(config)
    for name in file.split():
        (tmp_path / name).touch()
    with nullcontext() if message is None else pytest.raises(QsampleError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_names_that_exist(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    check_exists(str(tmp_path))
    check_exists(
        str(tmp_path), file="adapter_config.json"
    )  # whoever reads the adapter says what it lacks
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").touch()
    check_exists("some/model", HubOptions(local_files_only=True, cache_dir=tmp_path))


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "vocab.txt", "additional_chat_templates/rag.jinja"]
)
def test_links_that_lead_out_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    """What a stranger's folder links to would be copied into the package."""
    folder = tmp_path / "model"
    (folder / name).parent.mkdir(parents=True)
    (folder / "config.json").touch()
    (tmp_path / "secret").touch()
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(
        QsampleError, match=rf"{name} is a link that leads out of its folder, to .*/secret; copy"
    ):
        check_exists(str(folder))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "model.safetensors"])
def test_pipes_in_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Libraries that read the folder would wait for a writer, for ever."""
    (tmp_path / "config.json").touch()
    os.mkfifo(tmp_path / name)
    with pytest.raises(QsampleError, match=rf"{name} is a pipe, a device or a socket"):
        check_exists(str(tmp_path))


def test_links_that_stay(tmp_path: Path) -> None:
    """Inside of the folder, to files of the hub's cache, and weights on another disk."""
    blobs = tmp_path / "hub" / "models--me--model" / "blobs"
    targets = {
        "config.json": blobs / "1",
        "vocab.txt": Path("moved"),
        "model.safetensors": tmp_path / "disk",
    }
    (tmp_path / "model").mkdir()
    blobs.mkdir(parents=True)
    for name, target in targets.items():
        (tmp_path / "model" / target).touch()
        (tmp_path / "model" / name).symlink_to(target)
    (tmp_path / "link").symlink_to("model")
    check_exists(str(tmp_path / "link"))


def test_the_identity_of_a_folder_follows_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("qsample.checkpoints.source._MAX_HASHED_BYTES", 1 << 17)
    large, before = tmp_path / "model.safetensors", []
    large.write_bytes(bytes(1 << 18))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "onnx").mkdir()

    def state() -> Any:
        return identity_of(str(tmp_path), HubOptions())

    def changed() -> bool:
        before.append(state())
        return before[-1] not in before[:-1]

    assert changed()
    (tmp_path / "README.md").write_text("x")
    (tmp_path / ".git").write_text("x")
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint-500" / "model.safetensors").write_text("x")
    os.utime(tmp_path / "config.json", (1, 1))
    assert not changed(), "files that are not read, and the times of small files, do not count"
    os.utime(large, (1, 1))
    assert changed()
    large.write_bytes(b"\1" * (1 << 18))
    os.utime(large, (1, 1))
    assert changed(), "other weights with the same size and time"
    (tmp_path / "config.json").write_text("[]")
    assert changed()
    (tmp_path / "onnx" / "model.onnx").write_text("x")
    assert changed()
    (tmp_path / "onnx" / "other.onnx").write_text("x")
    assert changed()
    files = [
        identity_of(str(tmp_path / "onnx" / name), HubOptions())
        for name in ("model.onnx", "other.onnx")
    ]
    assert files[0] == files[1], "a file's own name is its source's, not its identity's"
    (tmp_path / "config.json").write_text("{}")
    assert identity_of(str(tmp_path / "onnx" / "model.onnx"), HubOptions()) != files[0]


def test_a_hub_id_is_its_downloaded_commit(tmp_path: Path) -> None:
    repository = tmp_path / "models--some--model"
    for branch, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").touch()
    hub = HubOptions(cache_dir=tmp_path, local_files_only=True)
    source = CheckpointSource(model_id="some/model", hub=hub)
    assert identity_of("some/model", hub) == ["some/model", "a" * 40]
    assert source.pinned().hub.revision == "a" * 40
    assert identity_of("some/model", HubOptions(cache_dir=tmp_path, revision="v2")) == [
        "some/model",
        "b" * 40,
    ]
    assert identity_of("some/model", HubOptions(cache_dir=tmp_path, revision="c" * 40)) == [
        "some/model",
        "c" * 40,
    ]
    with pytest.raises(QsampleError, match="other/model does not exist, was not downloaded"):
        identity_of("other/model", hub)


def test_the_origin_for_a_manifest_is_the_same_on_every_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--some--model" / "snapshots" / commit
    for name in (
        "config.json",
        "README.md",
        "model.safetensors",
        "pytorch_model.bin",
        "onnx/model.onnx",
    ):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text("{}")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(commit)
    hub = HubOptions(cache_dir=tmp_path, local_files_only=True)
    read = {snapshot / "model.safetensors"}
    assert origin_of("some/model", hub) == origin_of(str(snapshot)) == ("some/model", commit)
    assert origin_of(str(snapshot / "onnx" / "model.onnx")) == ("some/model", commit)
    assert origin_of("other/model", hub) == ("other/model", None)
    for name in ("some/model", str(snapshot)):
        assert list(files_of(name, hub, read)) == [
            "config.json",
            "model.safetensors",
            "onnx/model.onnx",
        ]
    files = files_of(str(snapshot), hub, set())
    assert "pytorch_model.bin" in files
    monkeypatch.chdir(tmp_path)
    for name in ("copy", "./copy", str(tmp_path / "copy")):
        (tmp_path / "copy").mkdir(exist_ok=True)
        assert origin_of(name) == ("copy", None)
    for text, stated in (
        ("{}", None),
        ("---\nlicense: apache-2.0\n---\n# A", "apache-2.0"),
        ("---\na: 1\n---\n", None),
    ):
        (snapshot / "README.md").write_text(text)
        assert license_of(files) == stated


def test_a_file_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason; the options of the hub reach it."""
    given: list[Any] = []

    def refuse(name: str, file: str, **options: Any) -> str:
        given.append((name, file, options))
        if len(given) == 1:
            return "/cache/file"
        raise ConnectionError("no\n  route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    hub = HubOptions(revision="v2", token="hf_secret", local_files_only=True)
    assert download("me/model", "w.gguf", hub) == Path("/cache/file")
    with pytest.raises(
        QsampleError, match=r"does not give w\.gguf of me/model \(no route\); download"
    ):
        download("me/model", "w.gguf", hub)
    assert given == [("me/model", "w.gguf", hub.downloading())] * 2
