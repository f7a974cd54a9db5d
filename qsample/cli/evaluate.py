"""`qsample evaluate`: scores packages on the user's own text, as a table, as JSON and as a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape

from qsample.cli.common import Json, Threads, Weights, is_package, open_exported, read_text
from qsample.cli.terminal import console, finite, format_size, note, progress, table

if TYPE_CHECKING:
    from qsample.evaluation import Comparison, Estimate, Evaluation
    from qsample.models.model import PackagedModel

_WIDTH_OF_A_FILE: Final = 160

EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample evaluate qwen3-cpu --text book.txt\n\n"
    "qsample evaluate qwen3-int4 qwen3-int8 --text a.txt --text b.txt --against qwen3-cpu --plot quality.png"
)


def evaluate(
    packages: Annotated[
        list[str], typer.Argument(metavar="PACKAGE_OR_MODEL...", help="Packages, checkpoints or hub ids to score.")
    ],
    text: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Text in UTF-8, a document; may be repeated.", show_default=False)
    ],
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PACKAGE_OR_MODEL", help="Reference for KL divergence and top-1 agreement; may be repeated."
        ),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a window. (default: as many as all hold, at most 1024)")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens from a window to the next. (default: half of a window)")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in a batch.")] = 8,
    confidence: Annotated[float, typer.Option(help="Of the intervals, between 0 and 1.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Of the intervals' resamples.")] = 0,
    step_time: Annotated[bool, typer.Option("--step-time", help="Time decode steps of a row, too.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw size, step time and KL: a .png or .svg file.")
    ] = None,
    weights: Weights = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Score packages on a text: perplexity, KL divergence, top-1 agreement, with confidence intervals."""
    from qsample.evaluation import evaluate as score

    documents = [read_text(path, "--text") for path in text]
    if plot is not None:
        from qsample.evaluation.plot import check_plot

        check_plot(plot)
    # Those of the cache stay there as long as these objects. Packages are opened by their names, and verified, below.
    opened = {name: open_exported(name, None, weights=weights) for name in packages if not is_package(name)}
    references = {name: open_exported(name, None) for name in against or () if not is_package(name)}
    with progress() as report:
        evaluation = score(
            [_path(name, opened) for name in packages],
            documents,
            against=[_path(name, references) for name in against or ()],
            max_length=max_length,
            stride=stride,
            batch_size=batch_size,
            confidence=confidence,
            seed=seed,
            step_time=step_time,
            intra_op_num_threads=threads,
            progress=report,
        )
    if plot is not None:
        from qsample.evaluation.plot import draw

        draw(evaluation, plot)
        note(f"plot written to {plot}")
    if as_json:
        typer.echo(json.dumps(finite(asdict(evaluation)), indent=2, ensure_ascii=False))
    else:
        _show(evaluation)


def _path(name: str, opened: Mapping[str, PackagedModel]) -> str:
    return str(opened[name].package.path) if name in opened else name


def _show(evaluation: Evaluation) -> None:
    """Print the evaluation on stdout, a row for each package, or for each package and reference."""
    compared = any(package.comparisons for package in evaluation.packages)
    timed = any(package.step_ms is not None for package in evaluation.packages)
    several = len({comparison.reference for package in evaluation.packages for comparison in package.comparisons}) > 1
    columns = ["package", "weights", "size", "perplexity"]
    columns += ["against"] if several else []
    columns += ["KL, nats", "top-1, %", "perplexity ratio"] if compared else []
    columns += ["step, ms"] if timed else []
    shown = table(None, *columns)
    for package in evaluation.packages:
        facts = [
            escape(Path(package.path).name),
            escape(package.label),
            format_size(package.bytes),
            _shown(package.perplexity, 4),
        ]
        times = [] if not timed else ["" if package.step_ms is None else f"{package.step_ms:.2f}"]
        for index, comparison in enumerate(package.comparisons or (None,)):
            named = [escape(Path(comparison.reference).name) if comparison else ""] if several else []
            cells = _comparison(comparison) if compared else []
            first = index == 0
            shown.add_row(*(facts if first else [""] * len(facts)), *named, *cells, *(times if first else []))
    screen = console(width_of_a_file=_WIDTH_OF_A_FILE)
    screen.print(shown)
    texts = f"{evaluation.documents} text{'s' if evaluation.documents > 1 else ''}"
    screen.print(
        f"{evaluation.tokens} tokens of {texts}, in windows of {evaluation.max_length}, {evaluation.stride} apart; "
        f"{100 * evaluation.confidence:g} % intervals by block bootstrap"
    )


def _comparison(comparison: Comparison | None) -> list[str]:
    if comparison is None:
        return ["", "", ""]
    share = comparison.agreement.map(lambda value: 100 * value)
    return [_shown(comparison.kl, 3), _shown(share, 4), _shown(comparison.perplexity_ratio, 5)]


def _shown(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}g} ({estimate.low:.{digits}g} to {estimate.high:.{digits}g})"
