"""An evaluation as a picture: the size, the speed and the quality of packages; and a verification. Needs matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from qsample.addons.evaluate.differences import Verification
from qsample.addons.evaluate.quality import Evaluation, PackageQuality
from qsample.errors import QsampleError, install_hint
from qsample.package.disk.replace import file_aside
from qsample.package.statistics import Estimate

FORMATS: Final = (".png", ".svg")


def check_plot(path: str | Path) -> None:
    """Raise, before long work, if a plot cannot be written to `path`: ValueError for its name or its folder,
    QsampleError without matplotlib."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"plot is {str(path)!r}; give a file that ends in {' or '.join(FORMATS)}")
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(
            f"plot is {str(path)!r}, which is a folder or in none; give a file in a folder that is there"
        )
    if find_spec("matplotlib") is None:
        raise QsampleError(
            f"a plot needs matplotlib, which is not installed: `{install_hint('plot')}`"
        )


def draw(evaluation: Evaluation, path: str | Path) -> None:
    """Draw the KL divergence from the first reference, or else the perplexity, over the packages' sizes, and over a
    step's milliseconds if those were measured, into a .png or .svg file. Raises the errors of `check_plot`."""
    check_plot(path)
    from matplotlib.figure import Figure  # without pyplot: it would look for a screen

    compared = [one for one in evaluation.packages if one.comparisons]
    shown = compared or list(evaluation.packages)
    timed = all(one.step_ms is not None for one in shown)
    figure = Figure(figsize=(12 if timed else 7.5, 4.8), layout="constrained")
    left, *others = figure.subplots(1, 2 if timed else 1, squeeze=False, sharey=True)[0]
    _points(left, shown, [one.bytes / 1e6 for one in shown], "size, MB")
    for right in others:
        _points(right, shown, [one.step_ms or 0.0 for one in shown], "decode step of one row, ms")
    reference = Path(compared[0].comparisons[0].reference).name if compared else None
    left.set_ylabel(
        f"KL divergence from {reference}, nats a token" if reference is not None else "perplexity"
    )
    figure.legend(
        *left.get_legend_handles_labels(),
        loc="outside right upper",
        fontsize="small",
        frameon=False,
    )
    figure.suptitle(
        f"{evaluation.tokens} tokens; {100 * evaluation.confidence:g} % intervals by block bootstrap",
        fontsize="medium",
    )
    _save(figure, path)


def draw_differences(verification: Verification, path: str | Path) -> None:
    """Draw the quantiles of the differences of each form. Raises the errors of `check_plot`."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    for form, found in verification.forms.items():
        if found is not None:
            axes.plot(
                range(101),
                found.quantiles,
                label=f"{form}: mean {found.mean:.2g}, p99 {found.p99:.2g}",
            )
    axes.set_yscale("symlog", linthresh=1e-7)
    axes.set_xlabel(f"of {verification.positions} x {verification.head} log-probabilities, percent")
    axes.set_ylabel(f"difference from {Path(verification.reference).name} up to, nats")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    figure.suptitle(Path(verification.package).name, fontsize="medium")
    _save(figure, path)


def _save(figure: Any, path: str | Path) -> None:
    with file_aside(Path(path)) as aside:
        figure.savefig(aside, format=Path(path).suffix[1:].lower(), dpi=150)


def _points(axes: Any, packages: list[PackageQuality], places: list[float], label: str) -> None:
    estimates = [_shown(one) for one in packages]
    for one, place, estimate in zip(packages, places, estimates, strict=True):
        errors = [
            [max(0.0, estimate.value - estimate.low)],
            [max(0.0, estimate.high - estimate.value)],
        ]
        axes.errorbar(
            [place], [estimate.value], yerr=errors, fmt="o", capsize=3, label=Path(one.path).name
        )
    if all(estimate.value > 0 for estimate in estimates):
        axes.set_yscale("log")
    axes.set_xlabel(label)
    axes.margins(x=0.2)
    axes.grid(alpha=0.3)


def _shown(one: PackageQuality) -> Estimate:
    return one.comparisons[0].kl if one.comparisons else one.perplexity
