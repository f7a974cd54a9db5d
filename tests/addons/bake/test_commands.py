"""`qsample bake`: its options reach `qsample.bake`, and its help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsample import cli
from qsample.addons.bake import api, commands
from qsample.contract.interface import Features


@pytest.fixture
def baked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `qsample.bake` was given, and how the package is written."""
    calls: list[tuple[Any, ...]] = []

    def bake(path: str, out: Path, **keywords: Any) -> None:
        calls.append((path, out, keywords))

    def write(make: Any, out: Path, writing: Any) -> None:
        make(overwrite=writing.overwrite, progress=None)
        calls.append((out, writing.timing, writing.as_json))

    monkeypatch.setattr(api, "bake", bake)
    monkeypatch.setattr(commands, "write_package", write)
    return calls


def test_options_by_default(baked: list[tuple[Any, ...]], run: Any) -> None:
    assert run("bake", "me/m", "out") == (0, "", "")
    keywords = {
        "file": None,
        "features": Features(),
        "tokenizer": "auto",
        "rope": None,
        "reference": None,
        "revision": None,
        "overwrite": False,
        "progress": None,
    }
    assert baked == [("me/m", Path("out"), keywords), (Path("out"), False, False)]


def test_every_option_reaches_its_place(baked: list[tuple[Any, ...]], run: Any) -> None:
    line = (
        "bake me/m out --file a.onnx --tokenizer me/t --rope long --reference me/r --revision v2 "
        "--logprobs --overwrite --timing --json"
    )
    assert run(*line.split())[0] == 0
    keywords = {
        "file": "a.onnx",
        "features": Features(logprobs=True),
        "tokenizer": "me/t",
        "rope": "long",
        "reference": "me/r",
        "revision": "v2",
        "overwrite": True,
        "progress": None,
    }
    assert baked == [("me/m", Path("out"), keywords), (Path("out"), True, True)]


def test_tokenizer_none_is_no_tokenizer(baked: list[tuple[Any, ...]], run: Any) -> None:
    assert run("bake", "me/m", "out", "--tokenizer", "none")[0] == 0
    assert baked[0][2]["tokenizer"] is None


def test_a_revision_of_a_local_file_is_refused(
    baked: list[tuple[Any, ...]], run: Any, tmp_path: Path
) -> None:
    file = tmp_path / "decoder.onnx"
    file.touch()
    status, _, err = run("bake", file, tmp_path / "out", "--revision", "v2")
    assert status == 2
    assert "--revision belongs to a hub id" in err
    assert baked == []


def test_the_help_has_the_arguments_and_examples(run: Any) -> None:
    assert cli.commands()["bake"].rich_help_panel == "Build packages"
    status, out, _ = run("bake", "--help")
    assert status == 0
    assert "qsample bake MODEL OUT" in out.translate({ord(mark): None for mark in "{}"}).replace(
        "[OPTIONS] ", ""
    )
    for words in ("FOLDER|none", "short|long", "ID|FOLDER", "FILE", "qsample bake ./genai-folder"):
        assert words in out
