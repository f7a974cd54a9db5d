"""`qsample policy`: its options reach the functions that write files, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsample import cli
from qsample.addons.policy import files
from tests.helpers.flags import unlike

CONTRACT = "onnx-genai.token-sampler@2"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def write_policy(out: Path, vocab_size: int, **options: Any) -> list[Path]:
        calls.append(("write", out, vocab_size, options))
        return [out / "a.onnx", out / "b.onnx"]

    def replace_sampler(package: Path, **options: Any) -> Path:
        calls.append(("replace", package, options))
        return package / "new.onnx"

    monkeypatch.setattr(files, "write_policy", write_policy)
    monkeypatch.setattr(files, "replace_sampler", replace_sampler)
    return calls


def test_components_into_a_folder(written: list[tuple[Any, ...]], run: Any) -> None:
    status, out, _ = run("policy", "to", "--vocab-size", "1")
    assert (status, out.split()) == (0, [str(Path("to/a.onnx")), str(Path("to/b.onnx"))])
    line = "policy to --vocab-size 9 --contract c@1 --provider cuda --overwrite"
    assert run(*line.split())[0] == 0
    assert written == [
        ("write", Path("to"), 1, {"contract": CONTRACT, "provider": "cpu", "overwrite": False}),
        ("write", Path("to"), 9, {"contract": "c@1", "provider": "cuda", "overwrite": True}),
    ]


def test_a_sampler_into_a_package(written: list[tuple[Any, ...]], run: Any) -> None:
    status, out, _ = run("policy", "--into", "package")
    assert (status, out.split()) == (0, [str(Path("package/new.onnx"))])
    line = "policy --into package --vocab-size 9 --contract c@1 --provider cuda --overwrite"
    assert run(*line.split())[0] == 0
    defaults = {"contract": CONTRACT, "vocab_size": None, "provider": "cpu", "overwrite": False}
    given = {"contract": "c@1", "vocab_size": 9, "provider": "cuda", "overwrite": True}
    assert written == [
        ("replace", Path("package"), defaults),
        ("replace", Path("package"), given),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "give either OUT or --into"),
        ("to --into package --vocab-size 9", "give either OUT or --into"),
        ("to", "give --vocab-size, the number of tokens"),
        ("to --vocab-size 0", "--vocab-size': Input should be greater than or equal to 1"),
    ],
)
def test_wrong_usage(line: str, words: str, written: list[tuple[Any, ...]], run: Any) -> None:
    status, out, err = run("policy", *line.split())
    assert (status, out) == (2, "")
    assert words in err
    assert written == []


def test_a_refused_value_is_wrong_usage(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    def refuse(*_: Any, **options: Any) -> None:
        raise ValueError("the sampler has no such form")

    monkeypatch.setattr(files, "write_policy", refuse)
    status, _, err = run("policy", "to", "--vocab-size", "9")
    assert status == 2
    assert "the sampler has no such form" in err


def test_the_help(run: Any) -> None:
    assert cli.commands()["policy"].rich_help_panel == "Build packages"
    status, out, _ = run("policy", "--help")
    assert status == 0
    for words in ("[OUT]", "PACKAGE", CONTRACT, "qsample policy --into qwen3-workflow"):
        assert words in out


def test_the_flags() -> None:
    own = f"out [OUT]; --contract = {CONTRACT}; --vocab-size >=1; --into PACKAGE; --provider = cpu; --overwrite"
    assert unlike(own, "policy") == []
