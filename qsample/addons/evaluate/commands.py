"""`qsample evaluate` and `qsample verify`: the quality of packages, and whether to trust them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape

from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import (
    Json,
    Preset,
    Threads,
    TrustedKeys,
    Weights,
    is_package,
    open_exported,
    open_model,
    read_text,
)
from qsample.cli.terminal import console, finite, format_size, note, progress, table
from qsample.package.package import read_package
from qsample.package.signature import signer_of

if TYPE_CHECKING:
    from qsample.addons.evaluate import Comparison, Estimate, Evaluation, Verification
    from qsample.models.model import PackagedModel

EVALUATE_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample evaluate qwen3-cpu --text book.txt\n\n"
    "qsample evaluate qwen3-int4 qwen3-int8 --text a.txt --text b.txt --against qwen3-cpu --plot quality.png"
)
VERIFY_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample verify qwen3-cpu --trusted-keys public.pem\n\n"
    "qsample verify qwen3-cpu --against Qwen/Qwen3-0.6B\n\n"
    "qsample verify qwen3-int4 --against qwen3-cpu --text book.txt --max-mean 0.2 --min-agreement 0.9 --json"
)
_WIDTH_OF_A_FILE: Final = 160


def evaluate(
    packages: Annotated[
        list[str],
        typer.Argument(
            metavar="PACKAGE_OR_MODEL...", help="Packages, checkpoints or hub ids to score."
        ),
    ],
    text: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE", help="Text in UTF-8, a document; may be repeated.", show_default=False
        ),
    ],
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PACKAGE_OR_MODEL",
            help="Reference for KL divergence and top-1 agreement; may be repeated.",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens of a window. (default: as many as all hold, at most 1024)"
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from a window to the next. (default: half of a window)"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in a batch.")] = 8,
    confidence: Annotated[float, typer.Option(help="Of the intervals, between 0 and 1.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Of the intervals' resamples.")] = 0,
    step_time: Annotated[
        bool, typer.Option("--step-time", help="Time decode steps of a row, too.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw size, step time and KL: a .png or .svg file."),
    ] = None,
    weights: Weights = None,
    preset: Preset = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Score packages on a text: perplexity, KL divergence, top-1 agreement, with confidence intervals."""
    from qsample.addons.evaluate import evaluate as score

    documents = [read_text(path, "--text") for path in text]
    if plot is not None:
        from qsample.addons.evaluate.plot import check_plot

        check_plot(plot)
    # Cached packages stay in the cache as long as these objects. The rest are opened by name, and verified, below.
    made = [name for name in packages if not is_package(name)]
    opened = {name: open_exported(name, None, weights=weights, preset=preset) for name in made}
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
        from qsample.addons.evaluate.plot import draw

        draw(evaluation, plot)
        note(f"plot written to {plot}")
    if as_json:
        typer.echo(json.dumps(finite(asdict(evaluation)), indent=2, ensure_ascii=False))
    else:
        _show_evaluation(evaluation)


def verify(
    package: Annotated[
        str, typer.Argument(metavar="PACKAGE_OR_MODEL", help="Package, checkpoint or hub id.")
    ],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT_OR_PACKAGE",
            help="Compare log-probabilities with a checkpoint or hub id, run by transformers, or with a package.",
        ),
    ] = None,
    trusted_keys: TrustedKeys = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Text in UTF-8; may be repeated. (default: random tokens, always the same)",
        ),
    ] = None,
    positions: Annotated[int, typer.Option(min=1, help="Tokens to score.")] = 256,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens of a row; half are scored. (default: as many as fit, at most 64)"
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 8,
    max_mean: Annotated[
        float | None, typer.Option(min=0, help="Fail above this mean difference, in nats.")
    ] = None,
    max_p99: Annotated[
        float | None, typer.Option(min=0, help="Fail above this 99th percentile, in nats.")
    ] = None,
    max_difference: Annotated[
        float | None, typer.Option(min=0, help="Fail above this difference, in nats.")
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Fail below this share of positions with equal argmax."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the differences: a .png or .svg file.")
    ] = None,
    weights: Weights = None,
    preset: Preset = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Check a package: its files' hashes, its signature, its log-probabilities beside a checkpoint's.

    Exit status 1 if a check fails, or a difference is outside the limits that are given.
    """
    if against is None and any(
        given for given in (text, plot, max_mean, max_p99, max_difference, min_agreement)
    ):
        raise typer.BadParameter("--text, --plot and the limits go with --against")
    if against is None:
        typer.echo(_checked(package, trusted_keys, as_json=as_json))
        return
    if trusted_keys:
        note(_checked(package, trusted_keys, as_json=False))
    from qsample.addons.evaluate import verify as compare
    from qsample.addons.evaluate.plot import check_plot, draw_differences
    from qsample.models.model import SourceModel

    documents = [read_text(path, "--text") for path in text or ()] or None
    if plot is not None:
        check_plot(plot)
    other = open_model(against)  # first: it fails fast
    opened = open_exported(package, None, weights=weights, preset=preset)
    reference: Any = other.eager_logits() if isinstance(other, SourceModel) else other
    if reference is None:  # a decoder file
        reference = open_exported(against, None)
    with progress() as report:
        verification = compare(
            opened,
            reference,
            text=documents,
            positions=positions,
            max_length=max_length,
            batch_size=batch_size,
            name=against,
            intra_op_num_threads=threads,
            progress=report,
        )
    if plot is not None:
        draw_differences(verification, plot)
        note(f"plot written to {plot}")
    limits = {
        "mean": max_mean,
        "p99": max_p99,
        "largest": max_difference,
        "agreement": min_agreement,
    }
    failures = [
        f"{form}: {name} is {getattr(found, name):.3g}, and the limit is {limit:g}"
        for form, found in verification.forms.items()
        for name, limit in limits.items()
        if found is not None and limit is not None
        if (
            getattr(found, name) < limit
            if name == "agreement"
            else not getattr(found, name) <= limit
        )
    ]
    if as_json:
        shown = {**asdict(verification), "limits": limits, "failures": failures}
        typer.echo(json.dumps(finite(shown), indent=2, ensure_ascii=False))
    else:
        _show_verification(verification)
    for failure in failures:
        note(failure)
    if failures:
        raise typer.Exit(1)


def _show_verification(found: Verification) -> None:
    """Print the verification on stdout, a row for each form."""
    shown = table(None, "form", "mean, nats", "p99", "largest", "argmax equal, %")
    for form, one in found.forms.items():
        cells = [f"{value:.2e}" for value in (one.mean, one.p99, one.largest)] if one else ["none"]
        shown.add_row(form, *cells, *([f"{100 * one.agreement:.4g}"] if one else []))
    screen = console(width_of_a_file=_WIDTH_OF_A_FILE)
    screen.print(shown)
    screen.print(
        f"{found.positions} positions, the {found.head} likeliest tokens of {escape(found.reference)}"
    )
    screen.print(f"{found.tokens} generated tokens, sha256 {found.sha256}")
    if found.alone_sha256 != found.sha256:
        screen.print(f"the same rows, one by one: other tokens, sha256 {found.alone_sha256}")


def _path(name: str, opened: Mapping[str, PackagedModel]) -> str:
    return str(opened[name].package.path) if name in opened else name


def _show_evaluation(evaluation: Evaluation) -> None:
    """Print the evaluation on stdout, a row for each package, or for each package and reference."""
    compared = any(package.comparisons for package in evaluation.packages)
    timed = any(package.step_ms is not None for package in evaluation.packages)
    several = (
        len(
            {
                comparison.reference
                for package in evaluation.packages
                for comparison in package.comparisons
            }
        )
        > 1
    )
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
            named = (
                [escape(Path(comparison.reference).name) if comparison else ""] if several else []
            )
            cells = _comparison(comparison) if compared else []
            first = index == 0
            shown.add_row(
                *(facts if first else [""] * len(facts)), *named, *cells, *(times if first else [])
            )
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


def _checked(package: str, trusted_keys: list[str] | None, *, as_json: bool) -> str:
    """Compare every file of a package with its sha256, and with its signature if keys are trusted; returns the result,
    in words or as JSON."""
    with progress():
        opened = read_package(package, trusted_keys=trusted_keys or None)
    signer, trusted = opened.signer or signer_of(opened.path), opened.signer is not None
    count = len(opened.manifest.files)
    if as_json:
        facts = (
            {}
            if signer is None
            else {"kind": signer.kind, "fingerprint": signer.fingerprint, "trusted": trusted}
        )
        return json.dumps(
            {"package": str(opened.path), "files": count, "signature": facts or None}, indent=2
        )
    words = "not signed" if signer is None else f"signed by the {'trusted ' * trusted}{signer}"
    unchecked = "; --trusted-keys checks that" if signer is not None and not trusted else ""
    return f"{opened.path}: {count} files have the sha256 of the manifest; {words}{unchecked}"


EVALUATE: Final = CliCommand(evaluate, Panel.MEASURE, EVALUATE_EXAMPLES)
VERIFY: Final = CliCommand(verify, Panel.MEASURE, VERIFY_EXAMPLES)
