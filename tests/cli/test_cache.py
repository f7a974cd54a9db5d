"""`qsample pull` and `qsample cache`, and commands that are given a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qsample.models.model import SourceModel
from qsample.package.package import Package
from tests.helpers.fake_package import fake_package


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: Callable[..., Package]) -> list[dict[str, Any]]:
    """The options of each package that was made, which is a fake package in place of a compiled one."""
    monkeypatch.setenv("QSAMPLE_CACHE", str(tmp_path / "cache"))
    calls: list[dict[str, Any]] = []

    def make(self: SourceModel, path: Path, *, provider: str, options: Any, progress: Any) -> None:
        calls.append({"provider": provider, "weights": options.weights, "ctx_len": options.ctx_len})
        progress("publishing", 0.9)
        shutil.copytree(fake().path, path)

    monkeypatch.setattr(SourceModel, "_make", make)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return calls


def test_a_checkpoint_is_made_once_for_each_of_its_options(run: Any, made: list[Any], tmp_path: Path) -> None:
    arguments = ("generate", tmp_path / "model", "-p", "ab", "--greedy", "--max-new-tokens", "3")
    status, first, told = run(*arguments)
    assert status == 0, told
    assert "model is in the cache now (" in told
    assert "later runs start at once; --weights int4 takes about a seventh" in told
    again = run(*arguments)
    assert again[:2] == (0, first)
    assert "cache" not in again[2]
    status, path, told = run("pull", tmp_path / "model", "--weights", "int8")
    assert (status, Path(path.rstrip()).parent) == (0, tmp_path / "cache")
    assert "--weights int4" not in told
    assert run(*arguments, "--weights", "int8")[:2] == (0, first)
    assert made == [
        {"provider": "cpu", "weights": None, "ctx_len": None},
        {"provider": "cpu", "weights": "int8", "ctx_len": None},
    ]
    (tmp_path / "model" / "config.json").write_text('{"changed": 1}')
    run(*arguments)
    assert len(made) == 3


def test_a_package_for_serving_is_one_of_its_own(run: Any, made: list[Any], tmp_path: Path) -> None:
    plain, serving = (run("pull", tmp_path / "model", *more)[1] for more in ([], ["--for-serving"]))
    assert plain != serving
    assert len(made) == 2
    assert run("pull", tmp_path / "model", "--for-serving")[1] == serving
    assert len(made) == 2


def test_list_and_clear(run: Any, made: list[Any], tmp_path: Path) -> None:
    empty = run("cache", "list")
    assert empty[0] == 0
    assert empty[1].startswith("no model, 0 B of at most 50.0 GB, in ")
    for weights in ("int4", "int8"):
        run("pull", tmp_path / "model", "--weights", weights)
    listed = json.loads(run("cache", "list", "--json")[1])
    assert listed["folder"] == str(tmp_path / "cache")
    assert [len(listed["entries"]), listed["bytes"]] == [2, 2 * listed["entries"][0]["bytes"]]
    name = listed["entries"][0]["model"]
    assert f" {name} " in run("cache", "list")[1]
    status, _, told = run("cache", "clear", "elsewhere/model")
    assert (status, told.split(";")[0]) == (2, "qsample: elsewhere/model is not in the cache")
    assert run("cache", "clear", name)[2] == "2 removed\n"
    assert run("cache", "clear")[2] == "0 removed\n"
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_package_has_its_own_weights(run: Any, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package").path
    for command in ("generate", "chat", "bench", "serve"):
        status, _, told = run(command, package, "--weights", "int4", *(["-p", "x"] if command == "generate" else []))
        assert (status, "--weights is for a checkpoint, and" in told) == (2, True), told
    status, _, told = run("pull", package)
    assert (status, "is a package already" in told) == (2, True)
