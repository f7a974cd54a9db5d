"""The terminal: a bar there only, no escapes against the user's will, sizes, and JSON that is valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import typer.rich_utils
from onnx import numpy_helper

from qsample.cli.terminal import console, format_size, note, progress
from tests.helpers.fake_package import VOCAB, fake_package


def test_no_bar_where_standard_error_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as report:
        report("tracing", 0.5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("variables", "escapes"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
    ids=["usual", "NO_COLOR", "empty NO_COLOR", "dumb"],
)
def test_escapes(
    variables: dict[str, str], escapes: bool, run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "", "TERM": "xterm-256color", **variables}.items():
        monkeypatch.setenv(name, value)
    for name, value in (("FORCE_TERMINAL", True), ("COLOR_SYSTEM", "auto")):
        monkeypatch.setattr(typer.rich_utils, name, value)
    note("dim")
    console().rule("dim", style="dim")
    console().print("[bold]bold[/bold]")
    shown = "".join(capsys.readouterr())
    assert ("\x1b[2m" in shown) == ("\x1b[1m" in shown) == ("\x1b" in shown) == escapes
    assert ("\x1b" in run("generate", "--help")[1]) == escapes


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_345_678, "12.3 MB"), (2_000_000_000, "2.0 GB")],
)
def test_sizes(count: int, text: str) -> None:
    assert format_size(count) == text


def test_what_a_model_masks_is_null_in_json(run: Any, tmp_path: Path) -> None:
    """Logits of -inf are a model's mask, and JSON has no infinity."""

    def mask(graph: onnx.ModelProto) -> None:
        (bias,) = (tensor for tensor in graph.graph.initializer if tensor.name == "head_bias")
        values = np.full(VOCAB, -np.inf, np.float32)
        values[[70, 71]] = 0
        bias.CopyFrom(numpy_helper.from_array(values, "head_bias"))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    package = fake_package(tmp_path / "package", edit=mask, logprobs=True, top_logprobs=3)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n")
    options = ("--max-new-tokens", "2", "--seed", "1")
    status, whole, _ = run("generate", package.path, "-p", "a", "--json", *options)
    assert status == 0
    status, line, _ = run("generate", package.path, "--prompt-file", prompts, *options)
    assert status == 0
    for record in (json.loads(whole, parse_constant=refuse)["results"][0], json.loads(line, parse_constant=refuse)):
        assert [row[2] for row in record["top_logprobs"]] == [None, None]
        assert all(value < 0 for row in record["top_logprobs"] for value in row[:2])
