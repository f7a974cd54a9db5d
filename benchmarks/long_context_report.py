"""Keeps the measurements of `long_context.py` in a JSON file and writes them as tables and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from decode_report import markdown
from rich.console import Console
from rich.table import Table
from turns import without_folders

FLOAT32: Final = "qsample, float32 cache"
INT8: Final = "qsample, int8 cache"
Rows = tuple[list[str], list[list[str]]]
_HEADER: Final = [
    "history",
    "rows",
    "system",
    "first token, s",
    "step, ms",
    "over float32 cache",
    "memory, GB",
    "of it keys and values",
]


class Cells:
    """Everything measured so far on one machine, as the JSON file holds it; a cell measured again is replaced."""

    def __init__(self, path: Path, machine: str) -> None:
        self._path = path
        self.data: dict[str, Any] = {"machine": machine, "cells": []}
        if path.exists():
            earlier = json.loads(path.read_text())
            if earlier["machine"] == machine:
                self.data = earlier

    def add(self, shape: str, history: int, rows: int, system: str, **facts: Any) -> None:
        """first_token_s: None where the history was not read. step_ms: one a round. memory: bytes by kind, of the
        process. cache_bytes. version. together: when the systems took turns, the same for all of them; or False."""
        key = {"shape": shape, "history": history, "rows": rows, "system": system}
        cells = self.data["cells"]
        cells[:] = [cell for cell in cells if any(cell[name] != value for name, value in key.items())]
        cells.append(key | facts)

    def set_missing(self, shape: str, history: int, rows: int, system: str, reason: str) -> None:
        self.add(shape, history, rows, system, missing=without_folders(reason))

    def cell(self, shape: str, history: int, rows: int, system: str) -> dict[str, Any] | None:
        key = (shape, history, rows, system)
        cells = self.data["cells"]
        return next((c for c in cells if (c["shape"], c["history"], c["rows"], c["system"]) == key), None)

    def has(self, shape: str, cell: Any, systems: list[str]) -> bool:
        """Whether each of these systems was measured in the cell, or could not be."""
        return all(self.cell(shape, cell.history, cell.rows, name) is not None for name in systems)

    def ratio(self, cell: dict[str, Any]) -> float | None:
        """The step over that with a float32 cache: median of the rounds' ratios, None where they took no turns."""
        own = self.cell(cell["shape"], cell["history"], cell["rows"], FLOAT32)
        if own is None or "step_ms" not in own or not own["together"] or own["together"] != cell["together"]:
            return None
        return float(np.median(np.divide(cell["step_ms"], own["step_ms"])))

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.data["cells"].sort(key=lambda cell: (cell["shape"], cell["history"], cell["rows"]))  # stable
        self._path.write_text(json.dumps(self.data, indent=1) + "\n")


def table_rows(results: Cells, shape: str) -> Rows:
    """A line per history, number of rows and system."""
    lines = []
    for cell in results.data["cells"]:
        if cell["shape"] != shape:
            continue
        line = [f"{cell['history']:,}", str(cell["rows"]), cell["system"]]
        if "missing" in cell:
            lines.append([*line, cell["missing"].replace("|", "/"), "", "", "", ""])
            continue
        first, ratio, memory = cell["first_token_s"], results.ratio(cell), cell["memory"]
        line += ["" if first is None else f"{first:.1f}", f"{np.median(cell['step_ms']):.1f}"]
        line += ["" if ratio is None else f"{ratio:.2f}x"]
        line += [
            f"{memory['anonymous'] / 1e9:.2f}" if "anonymous" in memory else "",
            f"{cell['cache_bytes'] / 1e9:.2f}",
        ]
        lines.append(line)
    return _HEADER, lines


def _shapes(results: Cells) -> list[str]:
    return list(dict.fromkeys(cell["shape"] for cell in results.data["cells"]))


def show(results: Cells, console: Console) -> None:
    """Print every table."""
    for shape in _shapes(results):
        header, lines = table_rows(results, shape)
        table = Table(*header, title=shape, title_justify="left")
        for line in lines:
            table.add_row(*line)
        console.print(table)


def write(results: Cells, output: Path) -> None:
    """The tables as markdown beside the JSON file, and a plot."""
    lines = [
        "# Long histories",
        "",
        f"{results.data['machine']}. Made by `python benchmarks/long_context.py`, which says how it measures.",
        "4-bit weights in blocks of 32, greedy. The first token's time is that of reading the whole history, once; it",
        "is missing where rows were filled or copied. A step's is the median of the rounds, its multiple that of the",
        "rounds' ratios, where the systems took turns. Memory is the process's own, without mapped files.",
        "",
    ]
    for shape in _shapes(results):
        lines += [f"## {shape}", "", *markdown(*table_rows(results, shape)), ""]
        versions = [cell["version"] for cell in results.data["cells"] if cell["shape"] == shape and "version" in cell]
        lines += [f"Measured with {', '.join(dict.fromkeys(versions))}.", ""]
    if any("step_ms" in cell for cell in results.data["cells"]):
        lines += [f"![A step by history]({output.name}.png)", ""]
        _plot(results, output.with_suffix(".png"))
    output.with_suffix(".md").write_text("\n".join(lines))


def _plot(results: Cells, path: Path) -> None:
    """A step's time by history, a panel per shape and number of rows, a line per system."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = [cell for cell in results.data["cells"] if "step_ms" in cell]
    panels = list(dict.fromkeys((cell["shape"], cell["rows"]) for cell in cells))
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 3.6), squeeze=False)
    for (shape, rows), axis in zip(panels, axes[0], strict=True):
        shown = [cell for cell in cells if (cell["shape"], cell["rows"]) == (shape, rows)]
        for name in dict.fromkeys(cell["system"] for cell in shown):
            points = [(cell["history"], np.median(cell["step_ms"])) for cell in shown if cell["system"] == name]
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(title=f"{shape}, {rows} rows", xlabel="tokens before the step", ylim=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("ms a step")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
