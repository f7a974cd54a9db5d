"""`qsample evaluate` and `qsample verify`: the quality of packages, and whether to trust them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape

from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import Json, Preset, Threads, TrustedKeys, Weights, read_text
from qsample.cli.opening import CompileChoices, is_package, open_exported, open_model
from qsample.cli.option_groups import with_option_groups
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """How a text is scored, as the arguments of `qsample.addons.evaluate.evaluate`."""

    max_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens of a window. (default: as many as all hold, at most 1024)"
        ),
    ] = None
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from a window to the next. (default: half of a window)"),
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in a batch.")] = 8
    confidence: Annotated[float, typer.Option(help="Of the intervals, between 0 and 1.")] = 0.95
    seed: Annotated[int, typer.Option(min=0, help="Of the intervals' resamples.")] = 0
    step_time: Annotated[
        bool, typer.Option("--step-time", help="Time decode steps of a row, too.")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How models that are given directly are compiled, and how all are run."""

    weights: Weights = None
    preset: Preset = None
    threads: Threads = None

    @property
    def choices(self) -> CompileChoices:
        return CompileChoices(weights=self.weights, preset=self.preset)


@with_option_groups
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
    *,
    scoring: ScoreOptions,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw size, step time and KL: a .png or .svg file."),
    ] = None,
    models: ModelOptions,
    as_json: Json = False,
) -> None:
    """Score packages on a text: perplexity, KL divergence, top-1 agreement, with confidence
    intervals."""
    from qsample.addons.evaluate import evaluate as score

    documents = [read_text(path, "--text") for path in text]
    if plot is not None:
        from qsample.addons.evaluate.plot import check_plot

        check_plot(plot)
    # Cached packages stay in the cache as long as these objects. The rest are opened by name, and
    # verified, below.
    opened = _open_models(packages, models.choices)
    references = _open_models(against or [], CompileChoices())
    with progress() as report:
        evaluation = score(
            [_path(name, opened) for name in packages],
            documents,
            against=[_path(name, references) for name in against or ()],
            max_length=scoring.max_length,
            stride=scoring.stride,
            batch_size=scoring.batch_size,
            confidence=scoring.confidence,
            seed=scoring.seed,
            step_time=scoring.step_time,
            intra_op_num_threads=models.threads,
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


def _open_models(names: Sequence[str], choices: CompileChoices) -> dict[str, PackagedModel]:
    """The models among `names` that are not packages, compiled, by name."""
    return {name: open_exported(name, choices) for name in names if not is_package(name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions:
    """The tokens that a package and its reference score."""

    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Text in UTF-8; may be repeated. (default: random tokens, always the same)",
        ),
    ] = None
    positions: Annotated[int, typer.Option(min=1, help="Tokens to score.")] = 256
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens of a row; half are scored. (default: as many as fit, at most 64)"
        ),
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """The largest differences at which a package passes."""

    max_mean: Annotated[
        float | None, typer.Option(min=0, help="Fail above this mean difference, in nats.")
    ] = None
    max_p99: Annotated[
        float | None, typer.Option(min=0, help="Fail above this 99th percentile, in nats.")
    ] = None
    max_difference: Annotated[
        float | None, typer.Option(min=0, help="Fail above this difference, in nats.")
    ] = None
    min_agreement: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Fail below this share of positions with equal argmax."),
    ] = None

    @property
    def any_given(self) -> bool:
        """Whether there is a limit above 0."""
        return any(self.by_figure().values())

    def by_figure(self) -> dict[str, float | None]:
        """The limits by the names of the figures; None for a figure without a limit."""
        return {
            "mean": self.max_mean,
            "p99": self.max_p99,
            "largest": self.max_difference,
            "agreement": self.min_agreement,
        }

    def failures(self, verification: Verification) -> list[str]:
        """A sentence for each figure of each form that is outside its limit."""
        failures: list[str] = []
        for form, differences in verification.forms.items():
            if differences is None:
                continue
            for name, limit in self.by_figure().items():
                if limit is None:
                    continue
                figure = getattr(differences, name)
                passes = figure >= limit if name == "agreement" else figure <= limit
                if not passes:  # NaN does not
                    failures.append(f"{form}: {name} is {figure:.3g}, and the limit is {limit:g}")
        return failures


@with_option_groups
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
    *,
    comparison: ComparisonOptions,
    limits: LimitOptions,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the differences: a .png or .svg file.")
    ] = None,
    models: ModelOptions,
    as_json: Json = False,
) -> None:
    """Check a package: its files' hashes, its signature, its log-probabilities beside a
    checkpoint's.

    Exit status 1 if a check fails, or a difference is outside the limits that are given.
    """
    if against is None:
        if comparison.text or plot or limits.any_given:
            raise typer.BadParameter("--text, --plot and the limits go with --against")
        typer.echo(_checked(package, trusted_keys, as_json=as_json))
        return
    if trusted_keys:
        note(_checked(package, trusted_keys, as_json=False))
    if plot is not None:
        from qsample.addons.evaluate.plot import check_plot

        check_plot(plot)
    verification = _compare(package, against, comparison, models)
    if plot is not None:
        from qsample.addons.evaluate.plot import draw_differences

        draw_differences(verification, plot)
        note(f"plot written to {plot}")
    failures = limits.failures(verification)
    if as_json:
        document = {**asdict(verification), "limits": limits.by_figure(), "failures": failures}
        typer.echo(json.dumps(finite(document), indent=2, ensure_ascii=False))
    else:
        _show_verification(verification)
    for failure in failures:
        note(failure)
    if failures:
        raise typer.Exit(1)


def _compare(
    package: str, against: str, comparison: ComparisonOptions, models: ModelOptions
) -> Verification:
    """Score tokens with a package and a reference. against: the reference."""
    from qsample.addons.evaluate import verify as compare
    from qsample.models.model import SourceModel

    documents = [read_text(path, "--text") for path in comparison.text or ()] or None
    # The reference comes first, because it fails faster.
    other = open_model(against)
    opened = open_exported(package, models.choices)
    reference: Any = other.eager_logits() if isinstance(other, SourceModel) else other
    if reference is None:  # a decoder file
        reference = open_exported(against)
    with progress() as report:
        return compare(
            opened,
            reference,
            text=documents,
            positions=comparison.positions,
            max_length=comparison.max_length,
            batch_size=comparison.batch_size,
            name=against,
            intra_op_num_threads=models.threads,
            progress=report,
        )


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
    """Compare every file of a package with its sha256, and with its signature if keys are trusted;
    returns the result, in words or as JSON."""
    with progress():
        opened = read_package(package, trusted_keys=trusted_keys or None)
    signer = opened.signer or signer_of(opened.path)
    trusted = opened.signer is not None
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
