"""What goes to a terminal: a bar there only, and no escapes where none are wanted."""

from __future__ import annotations

from typing import Any

import pytest
import typer.rich_utils

from qsample.cli.terminal import console, note, progress


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
