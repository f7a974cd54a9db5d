"""`qsample evaluate`: as a table, as JSON, with a plot, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_package import fake_package

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps.\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_a_table_json_and_a_plot(run: Any, text: Path, tmp_path: Path) -> None:
    first, second = fake_package(tmp_path / "first"), fake_package(tmp_path / "second")
    arguments = ("evaluate", first.path, "--text", text, "--text", text, "--against", second.path)
    status, out, err = run(*arguments, "--max-length", 16, "--stride", 8, "--confidence", 0.9)
    assert (status, err) == (0, "")
    assert "first" in out
    assert "KL, nats" in out
    assert f"{2 * len(TEXT)} tokens of 2 texts, in windows of 16, 8 apart; 90 % intervals by block bootstrap" in out

    plot = tmp_path / "plot.svg"
    status, out, err = run(*arguments, "--plot", plot, "--step-time", "--json")
    assert (status, err) == (0, f"plot written to {plot}\n")
    assert plot.read_text("utf-8").startswith("<?xml")
    shown = json.loads(out)
    assert shown["tokens"] == 2 * len(TEXT)
    one, reference = shown["packages"]
    assert one["comparisons"][0]["reference"] == reference["path"] == str(second.path)
    assert one["comparisons"][0]["kl"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert one["step_ms"] > 0
    assert one["perplexity"]["low"] < one["perplexity"]["value"] < one["perplexity"]["high"]


def test_no_columns_for_what_was_not_asked_for(run: Any, text: Path, tmp_path: Path) -> None:
    status, out, _ = run("evaluate", fake_package(tmp_path / "package").path, "--text", text)
    assert status == 0
    assert "perplexity" in out
    assert all(word not in out for word in ("KL", "top-1", "step, ms", "against"))


def test_several_references_have_a_row_each(run: Any, text: Path, tmp_path: Path) -> None:
    names = ["one", "two", "three"]
    one, two, three = (fake_package(tmp_path / name).path for name in names)
    status, out, _ = run("evaluate", one, "--text", text, "--against", two, "--against", three)
    assert status == 0
    rows = [line.split() for line in out.splitlines() if "0 (0 to 0)" in line]
    assert ["two" in rows[0], "three" in rows[1]] == [True, True]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty; give a file with text"), (b" \n", "is empty"), (b"ok \xff", "is not valid UTF-8 from byte 3 on")],
)
def test_files_without_text(content: bytes, message: str, run: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    status, out, err = run("evaluate", tmp_path, "--text", path)
    assert (status, out) == (2, "")
    assert message in err


def test_what_is_refused_before_anything_is_loaded(run: Any, text: Path, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package").path
    for arguments, status, message in (
        ((package,), 2, "--text"),
        ((package, "--text", tmp_path / "missing"), 2, "cannot read --text"),
        (
            (tmp_path / "nowhere", "--text", text),
            1,
            "nowhere does not exist; give a checkpoint folder, a package folder or a hub id",
        ),
        ((package, "--text", text, "--plot", "quality.pdf"), 1, "--plot is 'quality.pdf'; give a file that ends in"),
        ((package, "--text", text, "--stride", 90, "--max-length", 80), 1, "--stride is 90 and --max-length 80"),
        ((package, "--text", text, "--confidence", 2), 1, "--confidence is 2"),
    ):
        got, out, err = run("evaluate", *arguments)
        assert (got, out) == (status, ""), arguments
        assert message in err
    status, out, _ = run("evaluate", tmp_path / "nowhere", "--text", text, "--json")
    assert (status, json.loads(out)["error"]["type"]) == (1, "QsampleError")
