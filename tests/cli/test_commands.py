"""Installed commands: their order, their place in the command line, and add-ons that are broken."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import typer

from qsample.cli.commands import CliCommand, Panel, installed_commands, register_commands
from qsample.cli.help import Command

# `qsample.cli` has a function of this name, too.
commands = import_module("qsample.cli.commands")


def first(name: str = "x") -> None:
    """The first."""


def second() -> None:
    """The second."""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """name → command, or an error of its import."""

    def call(**found: Any) -> None:
        def load(group: str, name: str) -> Any:
            assert group == "qsample.commands"
            if isinstance(found[name], Exception):
                raise found[name]
            return found[name]

        def names(group: str) -> list[str]:
            assert group == "qsample.commands"
            return sorted(found)

        monkeypatch.setattr(commands, "extension_names", names)
        monkeypatch.setattr(commands, "load_extension", load)

    return call


def test_commands_are_in_the_order_of_panels_then_of_names(install: Any) -> None:
    install(
        a=CliCommand(first, Panel.CACHE),
        b=CliCommand(first, Panel.RUN),
        c=CliCommand(first, Panel.BUILD),
        d=CliCommand(first, Panel.RUN),
        e=CliCommand(first, Panel.TRUST),
        f=CliCommand(first, Panel.MEASURE),
    )
    assert [name for name, _ in installed_commands()] == ["c", "b", "d", "f", "e", "a"]


def test_a_broken_addon_is_left_out_with_a_note(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = CliCommand(first, Panel.RUN)
    install(broken=ImportError("no module torch"), kept=kept)
    assert list(installed_commands()) == [("kept", kept)]
    note = capsys.readouterr().err
    assert "the command broken is left out" in note
    assert "no module torch" in note


def test_an_error_that_is_no_missing_library_is_raised(install: Any) -> None:
    install(broken=ValueError("a fault in the add-on"))
    with pytest.raises(ValueError, match="a fault in the add-on"):
        installed_commands()


def test_functions_and_applications_become_commands_with_panel_and_examples(install: Any) -> None:
    several = typer.Typer()
    several.command("one")(first)
    several.command("two")(second)
    install(
        single=CliCommand(first, Panel.RUN, "qsample single"),
        several=CliCommand(several, Panel.CACHE),
    )
    app = typer.Typer()
    register_commands(app)
    found: Any = typer.main.get_command(app)
    assert list(found.commands) == ["single", "several"]
    single = found.commands["single"]
    assert isinstance(single, Command)
    assert (single.epilog, single.rich_help_panel) == ("qsample single", "Run packages")
    assert single.help == "The first."
    group = found.commands["several"]
    assert list(group.commands) == ["one", "two"]
    assert (group.rich_help_panel, group.no_args_is_help) == ("Models given directly", True)


def test_the_headings_of_the_help(run: Any) -> None:
    status, out, _ = run("--help")
    assert status == 0
    headings = [
        "Build packages",
        "Run packages",
        "Look at packages and measure them",
        "Say where packages come from",
        "Models given directly",
    ]
    places = [out.index(heading) for heading in headings]
    assert places == sorted(places)
