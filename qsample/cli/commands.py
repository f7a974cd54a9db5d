"""The installed commands of the core and of all add-ons, found by their entry points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import typer

from qsample.cli.help import Command
from qsample.cli.terminal import note
from qsample.extensions import COMMANDS, extension_names, load_extension


class Panel(Enum):
    """The headings of `qsample --help`, in their order."""

    BUILD = "Build packages"
    RUN = "Run packages"
    MEASURE = "Look at packages and measure them"
    TRUST = "Say where packages come from"
    CACHE = "Models given directly"


@dataclass(frozen=True, slots=True)
class CliCommand:
    """A command of the command line, registered under its name in the group `qsample.commands`.

    Attributes:
        function: the function that typer calls, or a typer application with several commands.
        panel: the heading under which `qsample --help` lists the command.
        examples: the text below the help of the command, in the markup of Rich. A blank line
            separates the examples.
    """

    function: Callable[..., Any] | typer.Typer
    panel: Panel
    examples: str = ""


def installed_commands() -> Iterator[tuple[str, CliCommand]]:
    """Each command with its name, in the order of `qsample --help`.

    A command that cannot be imported is left out with a note on stderr, so a broken add-on does not
    break the other commands.
    """
    found: list[tuple[str, CliCommand]] = []
    for name in extension_names(COMMANDS):
        try:
            found.append((name, load_extension(COMMANDS, name)))
        except ImportError as error:
            note(f"the command {name} is left out, because its add-on cannot be imported: {error}")
    panels = list(Panel)
    return iter(sorted(found, key=lambda entry: (panels.index(entry[1].panel), entry[0])))


def register_commands(app: typer.Typer) -> None:
    """Add the installed commands to `app`."""
    for name, command in installed_commands():
        panel = command.panel.value
        if isinstance(command.function, typer.Typer):
            app.add_typer(command.function, name=name, rich_help_panel=panel, no_args_is_help=True)
        else:
            decorate = app.command(
                name, cls=Command, epilog=command.examples, rich_help_panel=panel
            )
            decorate(command.function)
