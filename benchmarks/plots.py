"""How all plots look: a colour for each system, legends next to the data, bars from zero, marks for missing figures.

python benchmarks/plots.py    # draws the plots of docs/benchmarks again, from the JSON files next to them
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

# A system has its colour in every plot; its variants within a plot differ by lightness, dashes and markers.
QSAMPLE: Final = "#1f6fb4"
_GENAI, _LLAMA, _TRANSFORMERS = "#e08214", "#2f8f4e", "#8250a8"
_OTHERS: Final = {"numpy": "#7b6a5a", "mobius": "#b5446e", "optimum": "#6b7a1d"}
SYSTEMS: Final[dict[str, tuple[str, int]]] = {
    **dict.fromkeys(("qsample", "qsample serve", "qsample, int4", "qsample, float32 cache"), (QSAMPLE, 0)),
    **dict.fromkeys(("qsample, continuous", "captured"), (QSAMPLE, 0)),
    **dict.fromkeys(("engine alone", "qsample, static", "qsample, portable", "qsample, int8 cache"), (QSAMPLE, 1)),
    "uncaptured": (QSAMPLE, 1),
    "host": (QSAMPLE, 2),
    **dict.fromkeys(("genai", "onnxruntime-genai", "onnxruntime-genai, static", "genai, int4"), (_GENAI, 0)),
    **dict.fromkeys(("genai defaults", "genai, float32"), (_GENAI, 1)),
    **dict.fromkeys(("llama.cpp", "llama-cpp-python", "llama.cpp, f16"), (_LLAMA, 0)),
    "llama.cpp, q8_0": (_LLAMA, 1),
    **dict.fromkeys(("transformers", "transformers, float32"), (_TRANSFORMERS, 0)),
    "logits to transformers": (_TRANSFORMERS, 1),
    "logits to NumPy": (_OTHERS["numpy"], 0),
    "mobius, float32": (_OTHERS["mobius"], 0),
    "mobius, bfloat16": (_OTHERS["mobius"], 1),
    "optimum, float32": (_OTHERS["optimum"], 0),
}
_DASHES, _MARKERS = ("-", "--", ":"), ("o", "s", "^")
MISSING: Final = "not measured"


def colour(system: str) -> Any:
    """Raises KeyError for a system that `SYSTEMS` lacks."""
    from matplotlib.colors import to_rgb

    base, variant = SYSTEMS[system]
    return tuple(1 - (1 - part) * (1, 0.55, 0.3)[variant] for part in to_rgb(base))


def line_style(system: str) -> dict[str, Any]:
    """Keywords of `Axes.plot`; a line keeps the full colour, because a pale line is hard to see."""
    base, variant = SYSTEMS[system]
    look = {"color": base, "linestyle": _DASHES[variant], "marker": _MARKERS[variant], "markersize": 4, "label": system}
    # Equal results stay visible: qsample's lines are below the others, and wider.
    return look | ({"linewidth": 2.4, "zorder": 2} if base == QSAMPLE else {"linewidth": 1.5, "zorder": 3})


def count(number: int, noun: str) -> str:
    """As "1 row", "4 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def new_figure(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Any, Any]:
    """A figure, and its panels as an array of two dimensions. size: inches of a panel."""
    from matplotlib.figure import Figure  # without pyplot, which would look for a screen

    figure = Figure(figsize=(columns * size[0] + 1.8, rows * size[1]), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
    return figure, axes


def grouped_bars(axis: Any, groups: Sequence[str], heights: dict[str, Sequence[float | None]]) -> None:
    """Bars from zero. heights: system → a height for each group; None is marked as not measured."""
    width = 0.8 / max(len(heights), 1)
    for index, (system, values) in enumerate(heights.items()):
        for group, value in enumerate(values):
            place = group + (index - len(heights) / 2 + 0.5) * width
            if value is None:
                mark = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 6, "color": "#6a6a6a"}
                axis.text(place, 0.01, f" {MISSING}", transform=axis.get_xaxis_transform(), **mark)
            axis.bar(place, value or 0, width * 0.94, color=colour(system), label=None if group else system)
    axis.set_xticks(range(len(groups)))
    axis.set_xticklabels(groups)
    axis.grid(visible=False, axis="x")


def missing_line(names: Sequence[str]) -> str:
    """A line below the label of an axis; nothing if everything was measured."""
    return f"\n{MISSING}: {', '.join(names)}" if names else ""


def legend(figure: Any) -> None:
    """A legend of all panels, to their right."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside right upper", fontsize="small", frameon=False, handlelength=3
    )


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)


def redraw(folder: Path) -> Iterable[Path]:
    """Draw the plots of the JSON files in `folder`, and return the paths that were written."""
    import decode_report
    import export
    import long_context
    import models
    import sampler
    import serve_report
    import serving
    from common import Kept

    def kept(path: Path, kind: Any = Kept) -> Any:
        found = object.__new__(kind)
        found.data = json.loads(path.read_text())
        return found

    draw = {
        "decode": lambda path, png: decode_report.plot(kept(path, decode_report.Results), png),
        "bake": lambda path, png: decode_report.plot(kept(path, decode_report.Results), png),
        "export": lambda path, png: export.plot(json.loads(path.read_text())["shapes"], png),
        "long_context": lambda path, png: long_context.plot(kept(path), png),
        "models": lambda path, png: models.plot(kept(path, models.ModelResults), png),
        "sampler": lambda path, png: sampler.plot(json.loads(path.read_text())["results"], png),
        "serve": lambda path, png: serve_report.plot(
            serve_report.summaries(kept(path, serve_report.ServeResults)), png
        ),
        "serve_tiny": lambda path, png: serve_report.plot(json.loads(path.read_text())["results"], png),
        "serving": lambda path, png: serving.plot(json.loads(path.read_text())["results"], png),
    }
    for name, function in draw.items():
        path = folder / f"{name}.json"
        if path.exists():
            function(path, path.with_suffix(".png"))
            yield path.with_suffix(".png")


if __name__ == "__main__":
    for written in redraw(Path("docs/benchmarks")):
        print(written)
