"""The layout of a command's help, and paths that are empty."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from qsample.cli.help import Command, takes_path


def application(seen: list[Any]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode="rich", add_completion=False)

    @app.command(cls=Command, epilog="[bold]Examples[/bold]\n\nqsample first\n\nqsample second")
    def command(
        model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model.")],
        name: Annotated[str, typer.Argument(metavar="[NAME]", help="A name.")] = "me",
        keys: Annotated[
            list[str] | None, typer.Option(metavar="FILE", help="Keys, of files.")
        ] = None,
        lora: Annotated[list[str] | None, typer.Option(metavar="NAME=DIR", help="Adapter.")] = None,
        a_rather_long_name: Annotated[int, typer.Option(help="A number.")] = 1,
        seed: Annotated[list[int] | None, typer.Option("--seed", help="Seeds.")] = None,
        text: Annotated[str, typer.Option(help="A text.", rich_help_panel="Texts")] = "",
        secret: Annotated[str, typer.Option(hidden=True, help="Hidden.")] = "",
    ) -> None:
        """First line
        goes on.

        Second paragraph.
        """
        seen.append((str(model), name, keys, lora, text))

    return app


def test_the_parts_of_the_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    app = application([])
    with pytest.raises(SystemExit) as ended:
        app(["--help"], prog_name="tool")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    lines = [line.rstrip() for line in shown.splitlines()]
    assert " Usage: tool" in shown
    assert " First line goes on." in lines
    assert " Second paragraph." in lines
    assert "Hidden" not in shown
    titles = [line.split("─ ")[1].split(" ─")[0] for line in lines if line.startswith("╭─ ")]
    assert titles == ["Arguments", "Options", "Texts"]
    inside = [line.strip("│").rstrip() for line in lines if line.startswith("│")]
    assert inside[2:7] == [
        " --keys FILE              Keys, of files.",  # beside its name
        " --lora NAME=DIR          Adapter.",
        " --a-rather-long-name <int>",  # above its text, which keeps its column
        "                          A number.  [default: 1]",
        " --seed <int>             Seeds.",
    ]
    assert " Examples" in lines
    assert [line for line in lines if line.startswith(" qsample")] == [
        " qsample first",
        " qsample second",
    ]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (["", "x"], "MODEL"),
        (["m", "--keys", ""], "--keys"),
        (["m", "--keys", "a", "--keys", ""], "--keys"),
        (["m", "--lora", "a="], "--lora"),
        (["m", "--lora", ""], "--lora"),
    ],
)
def test_an_empty_path_is_refused(line: list[str], name: str) -> None:
    seen: list[Any] = []
    with pytest.raises(Exception, match=rf"{name} is empty; give a path \(the current folder is"):
        application(seen)(line, standalone_mode=False)
    assert seen == []


def test_empty_texts_and_paths_with_text_pass() -> None:
    seen: list[Any] = []
    app = application(seen)
    app(["m", "", "--keys", "a=", "--lora", "b=c", "--text", ""], standalone_mode=False)
    app(["."], standalone_mode=False)
    assert seen == [("m", "", ["a="], ["b=c"], ""), (".", "me", None, None, "")]
    assert CliRunner().invoke(app, ["m"]).exit_code == 0


@pytest.mark.parametrize(
    ("metavar", "wanted"),
    [
        ("FILE", True),
        ("FOLDER|none", True),
        ("NAME=DIR", True),
        ("[OUT]", True),
        ("PACKAGE_OR_MODEL", True),
        ("CHECKPOINT", True),
        ("JSON|SCHEMA", True),
        ("NAME", False),
        ("FILES", False),
        ("file", False),
        (None, False),
    ],
)
def test_placeholders_of_paths(metavar: str | None, wanted: bool) -> None:
    class Parameter:
        pass

    parameter = Parameter()
    parameter.metavar = metavar  # type: ignore[attr-defined]
    assert takes_path(parameter) is wanted


def test_a_command_without_a_text() -> None:
    assert Command("x").help == ""
