"""What `qsample evaluate` shows: a table, and JSON-ready dicts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from qsample.cli.output import finite, format_size
from qsample.cli.terminal import console

if TYPE_CHECKING:
    from qsample.evaluation import Comparison, Estimate, Evaluation

_WIDTH_OF_A_FILE = 160


def describe(evaluation: Evaluation) -> dict[str, Any]:
    """The evaluation as one JSON-ready dict; see `evaluation.report`. What is infinite becomes null."""
    described: dict[str, Any] = finite(asdict(evaluation))
    return described


def show(evaluation: Evaluation) -> None:
    """Print the evaluation on stdout, a row for each package, or for each package and reference."""
    compared = any(one.comparisons for one in evaluation.packages)
    timed = any(one.step_ms is not None for one in evaluation.packages)
    several = len({comparison.reference for one in evaluation.packages for comparison in one.comparisons}) > 1
    columns = ["package", "weights", "size", "perplexity"]
    columns += ["against"] if several else []
    columns += ["KL, nats", "top-1, %", "perplexity ratio"] if compared else []
    columns += ["step, ms"] if timed else []
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for one in evaluation.packages:
        facts = [escape(Path(one.path).name), escape(one.label), format_size(one.bytes), _shown(one.perplexity, 4)]
        time = [] if not timed else ["" if one.step_ms is None else f"{one.step_ms:.2f}"]
        for index, comparison in enumerate(one.comparisons or (None,)):
            named = [escape(Path(comparison.reference).name) if comparison else ""] if several else []
            cells = _comparison(comparison) if compared else []
            first = index == 0
            table.add_row(*(facts if first else [""] * len(facts)), *named, *cells, *(time if first else []))
    screen = console()
    if not screen.is_terminal:
        screen.width = _WIDTH_OF_A_FILE
    screen.print(table)
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
