"""`qsample evaluate`: scores packages on the user's own text, as a table, as JSON and as a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer

from qsample.cli.common import Json, Threads, read_text

EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample evaluate qwen3-cpu --text book.txt\n\n"
    "qsample evaluate qwen3-int4 qwen3-int8 --text a.txt --text b.txt --against qwen3-cpu --plot quality.png"
)


def evaluate(
    packages: Annotated[list[str], typer.Argument(metavar="PACKAGE...", help="Packages to score.")],
    text: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Text in UTF-8, a document; may be repeated.", show_default=False)
    ],
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="PACKAGE", help="Reference for KL divergence and top-1 agreement; may be repeated."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a window. (default: what all hold, at most 1024)")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens from a window to the next. (default: half of a window)")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows that are read at once.")] = 8,
    confidence: Annotated[float, typer.Option(help="Of the intervals, between 0 and 1.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Of the intervals' resamples.")] = 0,
    step_time: Annotated[bool, typer.Option("--step-time", help="Time decode steps of one row, too.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw size, step time and KL: a .png or .svg file.")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Score packages on a text: perplexity, KL divergence, top-1 agreement, with confidence intervals."""
    from qsample.cli import terminal
    from qsample.cli.evaluate import screen
    from qsample.evaluation import evaluate as score

    documents = [read_text(path, "--text") for path in text]
    if plot is not None:
        from qsample.evaluation.plot import check_plot

        check_plot(plot)
    with terminal.progress() as progress:
        evaluation = score(
            packages,
            documents,
            against=against or (),
            max_length=max_length,
            stride=stride,
            batch_size=batch_size,
            confidence=confidence,
            seed=seed,
            step_time=step_time,
            intra_op_num_threads=threads,
            progress=progress,
        )
    if plot is not None:
        from qsample.evaluation.plot import draw

        draw(evaluation, plot)
        terminal.note(f"plot written to {plot}")
    if as_json:
        typer.echo(json.dumps(screen.describe(evaluation), indent=2, ensure_ascii=False))
    else:
        screen.show(evaluation)
