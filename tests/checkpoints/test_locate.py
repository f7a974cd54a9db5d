"""A mistyped name fails at once, with what to do: no network is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from qsample.checkpoints.hub_options import HubOptions
from qsample.checkpoints.locate import check_exists
from qsample.errors import QsampleError


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
        "from qsample.checkpoints.locate import check_exists\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        print(check_exists(name))\n"
        "    except QsampleError as error:\n        print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code, *names], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


def test_the_hub_is_asked_once_and_its_other_answers_are_left_to_transformers(hub: str, tmp_path: Path) -> None:
    said = ask("some/model", "plain", "a/gated", "a/no-config", "a/broken", HF_ENDPOINT=hub, HF_HOME=str(tmp_path))
    assert said[0].startswith("some/model does not exist, nor is there such a model on the hub, unless it is private")
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
        ("some/model", "was not downloaded from the hub before, and local_files_only allows no download"),
    ],
)
def test_names(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-cpu").mkdir()
    (tmp_path / "models" / "qwen3").mkdir(parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(QsampleError, match=message):
        check_exists(name, HubOptions(local_files_only=True, cache_dir=tmp_path))


def test_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    check_exists(str(tmp_path))
    check_exists(str(tmp_path), file="adapter_config.json")  # whoever reads the adapter says what it lacks
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").touch()
    check_exists("some/model", HubOptions(local_files_only=True, cache_dir=tmp_path))
