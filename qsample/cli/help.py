"""The class of commands: their help, whose names and texts are whole at any width of the terminal,
and their paths, which must not be empty."""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

import typer
from rich.cells import cell_len
from rich.console import Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from qsample.cli.terminal import console

# The width of the names' column, in characters. The text of a longer name is printed below it.
_NAME_WIDTH: Final = 24
# The type of an option, such as "<list[str]>", whose word is shown.
_OPTION_TYPE: Final = re.compile(r"<(?:list\[)?(\w+)[^>]*>")
# The words in the placeholders of values that are paths, or may be.
_PATH_WORDS: Final = {"FILE", "FOLDER", "DIR", "PACKAGE", "MODEL", "CHECKPOINT", "OUT", "SCHEMA"}
# A line break inside a paragraph of a docstring.
_LINE_BREAK: Final = re.compile(r"(?<!\n)\n(?!\n)")


class Command(TyperCommand):
    """A command whose help has a row for each option: the names and the text.

    An empty path is refused, because `Path` would take it for the current folder: of a shell's
    variable that is not set, `--trusted-keys "$KEYS"` would trust every key of that folder.
    """

    def __init__(self, name: str | None, *, help: str | None = None, **settings: Any) -> None:
        """Make a command whose help is a docstring, without the line breaks in its paragraphs."""
        text = _LINE_BREAK.sub(" ", inspect.cleandoc(help or ""))
        super().__init__(name, help=text, **settings)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line. Raises typer.BadParameter for an empty path."""
        given, *_ = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in self.get_params(ctx):
            if takes_path(parameter) and _has_empty_path(parameter, given.get(parameter.name)):
                is_argument = parameter.param_type_name == "argument"
                name = parameter.metavar if is_argument else parameter.opts[0]
                raise typer.BadParameter(
                    f'{name} is empty; give a path (the current folder is "."), or leave it out'
                )
        remaining: list[str] = super().parse_args(ctx, args)
        return remaining

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help on stdout. The formatter of the parser stays empty."""
        screen = console()
        screen.print(Padding(Text(f"\n{ctx.get_usage()}\n\n{self.help}\n"), (0, 1)))
        panels: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:  # The parameter is hidden.
                continue
            names, text = record
            title = "Arguments" if parameter.param_type_name == "argument" else "Options"
            title = getattr(parameter, "rich_help_panel", None) or title
            panels.setdefault(title, []).extend(_entry(names, text))
        for title, entries in panels.items():
            screen.print(
                Panel(Group(*entries), title=title, title_align="left", border_style="dim")
            )
        examples = [f" {line}" for line in (self.epilog or "").split("\n\n")]
        screen.print("\n".join(examples), soft_wrap=True)


def takes_path(parameter: Any) -> bool:
    """Whether the values of an option or argument are paths, or may be."""
    return bool(_PATH_WORDS & set(re.findall("[A-Z]+", parameter.metavar or "")))


def _has_empty_path(parameter: Any, given: Any) -> bool:
    """Whether a value as the parser read it, or one of several, has an empty path: all of it, or
    what follows the name in NAME=PATH."""
    values = given if isinstance(given, list | tuple) else [given]
    has_name = "=" in parameter.metavar
    return any(value == "" or (has_name and str(value).endswith("=")) for value in values)


def _entry(names: str, text: str) -> list[Any]:
    """The names of an option and its text, side by side or below each other."""
    names = _OPTION_TYPE.sub(r"<\1>", names)
    styled_names = Text(names, style="bold cyan")
    row = Table.grid(padding=(0, 1))
    row.add_column(width=_NAME_WIDTH, no_wrap=True)
    row.add_column()
    if cell_len(names) <= _NAME_WIDTH:
        row.add_row(styled_names, Text(text))
        return [row]
    row.add_row("", Text(text))
    return [styled_names, row]
