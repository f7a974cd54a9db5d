"""What goes to a terminal beside the results: notes and a progress bar on stderr, without escapes where wanted so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from qsample.cli.common import no_escapes
from qsample.progress import Progress


def console(*, stderr: bool = False) -> Console:
    """Rich drops colours for NO_COLOR, but not bold and dim; without a colour system it writes no escapes at all."""
    return Console(stderr=stderr, highlight=False, color_system=None if no_escapes() else "auto")


@contextmanager
def progress(*, hidden: bool = False) -> Iterator[Progress]:
    """A progress bar on stderr, as a callback of stage and fraction done. Where that is no terminal, nothing shows."""
    shown = console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
    )
    hidden = hidden or not shown.is_terminal or shown.is_dumb_terminal
    # Rich would send what is printed meanwhile to the bar's terminal, though stdout may be a file.
    with ProgressBar(*columns, console=shown, transient=True, disable=hidden, redirect_stdout=False) as bar:
        task: TaskID = bar.add_task("starting", total=1.0)
        yield lambda stage, fraction: bar.update(task, description=stage, completed=fraction)


def note(text: str) -> None:
    """A line beside the result, on stderr."""
    console(stderr=True).print(text, style="dim", markup=False, soft_wrap=True)
