"""The help of a command: options and their texts, none cut at any width."""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from qsample.cli.terminal import console

_NAMES: Final = 24  # characters; the text of a longer name comes below it
_KIND: Final = re.compile(r"<(?:list\[)?(\w+)[^>]*>")


class Command(TyperCommand):
    """A command that prints its help as a name and its text a row, with both whole at any width."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help on stdout; `formatter` stays empty."""
        screen = console()
        about = f"\n{ctx.get_usage()}\n\n{inspect.cleandoc(self.help or '')}\n"
        screen.print(Padding(Text(about), (0, 1)))
        panels: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                title = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or title, []).extend(
                    _entry(*record)
                )
        for title, entries in panels.items():
            screen.print(
                Panel(Group(*entries), title=title, title_align="left", border_style="dim")
            )
        screen.print(
            *(f" {line}" for line in (self.epilog or "").split("\n\n")), sep="\n", soft_wrap=True
        )


def _entry(names: str, text: str) -> list[Any]:
    """An option's name and text side by side, or one below the other."""
    names = _KIND.sub(r"<\1>", names)
    beside = cell_len(names) <= _NAMES
    row = Table.grid(padding=(0, 1))
    row.add_column(width=_NAMES, no_wrap=True)
    row.add_column()
    shown = Text(names, style="bold cyan")
    row.add_row(shown if beside else "", Text(text))
    return [row] if beside else [shown, row]
