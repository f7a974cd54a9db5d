"""Plots of evaluations: what is drawn, in which formats, and where none can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsample.addons.evaluate import Comparison, Estimate, Evaluation, PackageQuality
from qsample.addons.evaluate import plot as plots
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
