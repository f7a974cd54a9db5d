"""The pages and plots of docs/benchmarks: tables of the figures next to them; colours, legends, bars, gaps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs" / "benchmarks"


@pytest.fixture
def plots(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    pytest.importorskip("matplotlib")
    return benchmark("report")


def test_bars_begin_at_zero_and_missing_ones_are_marked(plots: ModuleType, tmp_path: Path) -> None:
    figure, axes = plots.new_figure(1, 2, (4, 3), sharey=True)
    plots.grouped_bars(
        axes[0][0], ["1 row", "4 rows"], {"qsample": [3.0, 90.0], "genai": [4.0, None]}
    )
    plots.grouped_bars(axes[0][1], ["1 row"], {"qsample": [7.0], "llama.cpp": [5.0]})
    plots.save_figure(figure, tmp_path / "plot.png")
    for axis in axes[0]:
        low, high = axis.get_ylim()
        assert (low, axis.get_yscale()) == (0, "linear")
        assert high > 90  # shared: of both panels, and nothing is cut off
        assert all(bar.get_y() == 0 for bar in axis.patches)
    assert [text.get_text().strip() for axis in axes[0] for text in axis.texts] == [plots.MISSING]
    # A system has its colour in both panels and in the legend, which is to the right of them.
    (legend,) = figure.legends
    colours = {
        text.get_text(): bar.get_facecolor()
        for text, bar in zip(legend.texts, legend.get_patches(), strict=True)
    }
    assert [bar.get_facecolor() for bar in axes[0][0].patches] == [
        colours[name] for name in ("qsample", "genai") for _ in "12"
    ]
    assert [bar.get_facecolor() for bar in axes[0][1].patches] == [
        colours["qsample"],
        colours["llama.cpp"],
    ]
    assert len(set(colours.values())) == 3
    assert legend.get_window_extent().x0 >= axes[0][1].get_window_extent().x1


def test_every_measured_system_has_a_colour(plots: ModuleType) -> None:
    found = {
        name: json.loads((DOCS / f"{name}.json").read_text())
        for name in ("decode", "bake", "long_context", "serve")
    }
    cells = [
        cell
        for name in ("decode", "bake")
        for shape in found[name]["shapes"].values()
        for cell in shape["cells"]
    ]
    names = {cell["system"] for cell in cells + found["long_context"]["cells"]} | set(
        found["serve"]["cells"]
    )
    # What a name begins with, or ends with for hosts of logits, is the system.
    families: dict[str, set[str]] = {}
    for name in names:
        family = next(
            part
            for part in ("qsample", "engine", "genai", "llama", "transformers", "NumPy")
            if part in name
        )
        families.setdefault(family.replace("engine", "qsample"), set()).add(plots.SYSTEMS[name][0])
    assert families["qsample"] == {plots.QSAMPLE}
    assert all(len(colours) == 1 for colours in families.values())
    assert len(set.union(*families.values())) == len(families) == 5
    for variants in (("genai", "genai defaults"), ("transformers", "logits to transformers")):
        assert plots.colour(variants[0]) != plots.colour(variants[1])


@pytest.mark.parametrize(
    ("number", "text"), [(1, "1 row"), (0, "0 rows"), (16, "16 rows"), (1024, "1,024 rows")]
)
def test_counts(plots: ModuleType, number: int, text: str) -> None:
    assert plots.count(number, "row") == text


@pytest.mark.parametrize(
    "name", ["decode", "models", "long_context", "export", "quality", "sampler", "serve", "serving"]
)
def test_a_page_says_what_its_figures_say(
    benchmark: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
) -> None:
    """Written again from its JSON file, a page is what it is, to the letter."""
    file = Path(shutil.copy(DOCS / f"{name}.json", tmp_path))
    given: Any = json.loads(file.read_text(encoding="utf-8"))
    module, decoders = benchmark(name), benchmark("decoders")
    for part in (module, decoders):
        for function in ("plot", "print_table"):
            monkeypatch.setattr(part, function, lambda *_: None, raising=False)
    if name in ("decode", "models"):
        given = decoders.Results(file, given["machine"])
    more = ("Decode benchmark", "decode.py", module.SYSTEMS) if name == "decode" else ()
    module.write(given, tmp_path / name, *more)
    assert (tmp_path / f"{name}.md").read_text() == (DOCS / f"{name}.md").read_text()


@pytest.mark.slow
def test_all_plots_are_drawn_from_what_is_kept(
    benchmark: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    for path in DOCS.glob("*.json"):
        shutil.copy(path, tmp_path)
    written = {path.name for path in benchmark("plots").redraw(tmp_path)}
    assert written == {path.name for path in DOCS.glob("*.png")}
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
