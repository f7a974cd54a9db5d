"""Plots of evaluations: what is drawn, in which formats, and where none can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsample.addons.evaluate import Comparison, Estimate, Evaluation, PackageQuality
from qsample.addons.evaluate import plot as plots
from qsample.addons.evaluate.differences import Differences, Verification
from qsample.errors import QsampleError


def evaluation(*, compared: bool = True, timed: bool = False, kl: float = 0.01) -> Evaluation:
    one = Estimate(0.9, 0.8, 1.0)
    comparisons = (
        (Comparison("out/plain", Estimate(kl, 0.9 * kl, 1.1 * kl), one, one),) if compared else ()
    )
    step = 3.5 if timed else None
    packages = [
        PackageQuality(f"out/small-{bits}", f"int{bits}", 10**bits, one, comparisons, step)
        for bits in (4, 8)
    ]
    reference = PackageQuality("out/plain", "float32", 10**9, one, (), step)
    return Evaluation(100, 1, 64, 32, 0.95, (*packages, *([reference] if compared else [])))


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("compared", [False, True])
def test_an_svg_names_the_packages_and_the_axes(
    compared: bool, timed: bool, tmp_path: Path
) -> None:
    plots.draw(evaluation(compared=compared, timed=timed), tmp_path / "plot.svg")
    # Text is drawn as glyphs; a comment in front of each says what it spells.
    drawn = (tmp_path / "plot.svg").read_text("utf-8")
    for wanted, there in (
        ("small-4", True),
        ("size, MB", True),
        ("KL divergence from plain", compared),
        ("perplexity", not compared),
        ("decode step of one row", timed),
    ):
        assert (wanted in drawn) is there, wanted


def test_a_png_replaces_what_was_there_and_leaves_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "plot.png").write_text("old")
    plots.draw(evaluation(kl=0.0), tmp_path / "plot.png")  # no logarithm of that
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]


@pytest.mark.parametrize("name", ["plot.pdf", "plot", "missing/plot.png", "folder.png"])
def test_where_none_can_be_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=r"^plot is "):
        plots.check_plot(tmp_path / name)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(QsampleError, match=r"\[plot\]"):
        plots.draw(evaluation(), tmp_path / "plot.png")


def drawn_by(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be saved."""
    figures: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    return figures


@pytest.mark.parametrize("timed", [False, True])
def test_points_are_at_the_sizes_and_have_their_intervals(
    timed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = drawn_by(monkeypatch)
    plots.draw(evaluation(timed=timed, kl=0.5), tmp_path / "plot.svg")
    (figure,) = figures
    axes = figure.axes
    assert len(axes) == (2 if timed else 1)
    assert figure.get_size_inches().tolist() == [12 if timed else 7.5, 4.8]
    assert [one.get_xlabel() for one in axes] == [
        "size, MB",
        *["decode step of one row, ms"] * timed,
    ]
    assert axes[0].get_ylabel() == "KL divergence from plain, nats a token"
    assert {one.get_yscale() for one in axes} == {"log"}
    places = [container.lines[0].get_xydata().tolist() for container in axes[0].containers]
    assert places == [[[0.01, 0.5]], [[100.0, 0.5]]]
    (bars,) = axes[0].containers[0].lines[2]
    assert bars.get_segments()[0][:, 1].tolist() == pytest.approx([0.45, 0.55])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["small-4", "small-8"]
    assert figure.get_suptitle() == "100 tokens; 95 % intervals by block bootstrap"
    if timed:
        steps = [container.lines[0].get_xdata().tolist() for container in axes[1].containers]
        assert steps == [[3.5], [3.5]]


def test_a_value_of_0_has_no_logarithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = drawn_by(monkeypatch)
    plots.draw(evaluation(kl=0.0), tmp_path / "plot.svg")
    plots.draw(evaluation(compared=False), tmp_path / "plot.svg")
    assert [figure.axes[0].get_yscale() for figure in figures] == ["linear", "log"]
    assert figures[1].axes[0].get_ylabel() == "perplexity"


def test_the_quantiles_of_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = drawn_by(monkeypatch)
    found = Differences(0.0123, 0.456, 1.0, 0.99, tuple(number / 100 for number in range(101)))
    forms = {"sequential": found, "batched": None, "captured": found}
    verification = Verification("out/small", "out/plain", 50, 7, forms, 9, "", "")
    with pytest.raises(ValueError, match="plot is"):
        plots.draw_differences(verification, tmp_path / "plot.pdf")
    plots.draw_differences(verification, tmp_path / "plot.svg")
    (figure,) = figures
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == [
        "sequential: mean 0.012, p99 0.46",
        "captured: mean 0.012, p99 0.46",
    ]
    assert axes.lines[0].get_xydata().tolist() == [[number, number / 100] for number in range(101)]
    assert (axes.get_yscale(), figure.get_suptitle()) == ("symlog", "small")
    assert axes.get_xlabel() == "of 50 x 7 log-probabilities, percent"
    assert axes.get_ylabel() == "difference from plain up to, nats"
    assert axes.get_legend() is not None
    assert figure.get_size_inches().tolist() == [7.5, 4.8]
