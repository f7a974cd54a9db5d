"""Tables, notes and a progress bar on the terminal, without escapes if the user wants none; JSON that is valid."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from qsample.errors import printable
from qsample.progress import Progress, Stage, unreported


def no_escapes() -> bool:
    """Whether the terminal gets plain text: NO_COLOR (no-color.org) or a terminal that does not know escapes."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "unknown")


def console(*, stderr: bool = False, width_of_a_file: int | None = None) -> Console:
    """A console on stdout or stderr; `width_of_a_file` applies if that is not a terminal.

    Without a colour system Rich writes no escapes at all; NO_COLOR alone keeps bold and dim.
    """
    made = Console(stderr=stderr, highlight=False, color_system=None if no_escapes() else "auto")
    if width_of_a_file is not None and not made.is_terminal:
        made.width = width_of_a_file
    return made


def note(text: str) -> None:
    """A remark on stderr, a line apart from the result."""
    console(stderr=True).print(printable(text), style="dim", markup=False, soft_wrap=True)


@contextmanager
def progress(*, hidden: bool = False, logged: bool = False) -> Iterator[Progress]:
    """A progress bar on stderr, as a callback of stage and fraction done.

    Args:
        hidden: no bar.
        logged: a line for each stage if stderr is not a terminal, which shows nothing otherwise.
    """
    shown = console(stderr=True)
    if not shown.is_terminal or shown.is_dumb_terminal:
        yield _log(shown) if logged and not hidden else unreported
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
    )
    # Rich would redirect stdout to the bar's terminal, although it may be a file.
    with ProgressBar(*columns, console=shown, transient=True, disable=hidden, redirect_stdout=False) as bar:
        task = bar.add_task(Stage.STARTING, total=1.0)
        yield lambda stage, fraction: bar.update(task, description=stage, completed=fraction)


def _log(screen: Console) -> Progress:
    """A callback that prints each stage when it begins, with the seconds since the first."""
    began, current = time.monotonic(), ""

    def report(stage: str, fraction: float) -> None:
        nonlocal current
        if stage not in (current, Stage.DONE):
            current = stage
            screen.print(f"{time.monotonic() - began:6.1f} s  {stage}", style="dim", markup=False, soft_wrap=True)

    return report


def table(title: str | None, *columns: str) -> Table:
    """A table as all commands show them."""
    return Table(*columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def finite(value: Any) -> Any:
    """JSON-ready lists and dicts with null in place of infinities and NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def counted(number: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_size(count: int) -> str:
    """A number of bytes, such as `12.3 MB`."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count} B"
