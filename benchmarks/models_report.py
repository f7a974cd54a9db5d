"""Keeps the measurements of `models.py` in a JSON file and writes them as tables and a plot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import numpy as np
from decode_report import OWN, Results, markdown
from rich.console import Console
from rich.table import Table

NONE: Final = "no"  # what a system has no figure for; the reason stands below the table
LABELS: Final = {"transformers": "transformers, float32", "genai": "onnxruntime-genai"}
ORDER: Final = (OWN, "genai", "llama.cpp", "transformers")
# What a line shows: prompt, rows, the field of a cell, its name.
LINES: Final = (
    (64, 1, "first_token_ms", "first token, 64 tokens"),
    (1024, 1, "first_token_ms", "first token, 1,024 tokens"),
    (64, 1, "step_ms", "step, 1 row"),
    (64, 4, "step_ms", "step, 4 rows"),
    (1024, 1, "step_ms", "step, 1 row, behind 1,024 tokens"),
)
Rows = tuple[list[str], list[list[str]]]


class ModelResults(Results):
    """Results with the bytes of a step, and the memory's speed.

    Of a shape: `active`, prompt → bytes; `speed`, prompt → bytes a second, one a round.
    """

    def set_active(self, shape: str, prompt: int, count: int) -> None:
        self.shape(shape).setdefault("active", {})[str(prompt)] = count

    def add_speed(self, shape: str, prompt: int, speeds: list[float]) -> None:
        self.shape(shape).setdefault("speed", {})[str(prompt)] = speeds

    def line(self, shape: str, prompt: int, rows: int, field: str, system: str) -> str:
        """Median of the rounds with its multiple of qsample's, or why there is none."""
        cell = self.cell(shape, prompt, rows, "greedy", system)
        if cell is None:
            return NONE if system in self.shape(shape).get("missing", {}) else ""
        text = f"{np.median(cell[field]):.1f}"
        if system == OWN:
            return text
        ratio = self.ratio(shape, prompt, rows, "greedy", system, "decode" if field == "step_ms" else "prefill")
        return text if ratio is None else f"{text} ({ratio:.2f}x)"


def time_rows(results: ModelResults, shape: str) -> Rows:
    """A line for each time and for the memory, a column for each system."""
    facts = results.shape(shape)
    systems = [name for name in ORDER if name in facts["systems"] or name in facts.get("missing", {})]
    rows = [[label, *(results.line(shape, *key, name) for name in systems)] for *key, label in LINES]
    for label, text in (("files, MB", _files), ("memory, MB: own + mapped files", _memory)):
        cells = [text(facts["systems"][name]) if name in facts["systems"] else NONE for name in systems]
        rows.append([label, *cells])
    return ["", *(LABELS.get(name, name) for name in systems)], rows


def _files(system: dict[str, Any]) -> str:
    return f"{system['bytes'] / 1e6:,.0f}"


def _memory(system: dict[str, Any]) -> str:
    memory = system["memory"]
    return " + ".join(f"{memory[kind] / 1e6:,.0f}" for kind in ("anonymous", "mapped") if kind in memory)


def missing_lines(results: ModelResults, shape: str) -> list[str]:
    missing = results.shape(shape).get("missing", {})
    return [f"{LABELS.get(name, name)} does not run it: {_one_line(reason)}" for name, reason in missing.items()]


def _one_line(reason: str) -> str:
    """A peer's message without the paths of this machine and a table's separators."""
    reason = re.sub(r"(/[\w.+-]+){2,}/", "", reason)
    return " ".join(reason.replace("|", "/").split())[:300]


def floor_rows(results: ModelResults) -> Rows:
    """What a step of one row reads, how long memory takes for it, and how long the step takes."""
    rows = []
    for shape, facts in results.data["shapes"].items():
        for prompt, count in facts.get("active", {}).items():
            cell, speeds = results.cell(shape, int(prompt), 1, "greedy", OWN), facts.get("speed", {}).get(prompt)
            if cell is None or not speeds:
                continue
            speed, step = float(np.median(speeds)), float(np.median(cell["step_ms"]))
            # Both of one round, where there are as many: the machine's speed moves.
            pairs = zip(cell["step_ms"], speeds, strict=len(cell["step_ms"]) == len(speeds))
            share = float(np.median([ms * bytes_per_second / 1e3 / count for ms, bytes_per_second in pairs]))
            floor = 1e3 * count / speed
            figures = [f"{count / 1e6:.1f}", f"{speed / 1e9:.1f}", f"{floor:.2f}", f"{step:.2f}", f"{share:.2f}"]
            rows.append([shape, f"{int(prompt):,}", *figures])
    return ["model", "prompt", "read a step, MB", "memory, GB/s", "that takes, ms", "step, ms", "step / that"], rows


def scan_rows(results: ModelResults) -> Rows:
    """The first token of 1,024 tokens, the recurrent layers as a loop and with operators."""
    found = results.data.get("scan")
    if not found:
        return [], []
    times = found["first_token_ms"]
    rows = []
    for name, label in (("loop", "a loop (Scan)"), ("operators", "operators"), ("transformers", "transformers")):
        ratios = np.divide(times[name], times["operators"])
        rows.append([label, f"{np.median(times[name]):.0f}", f"{np.median(ratios):.2f}x"])
    return ["recurrent layers as", "first token of 1,024, ms", "over operators"], rows


def show(results: ModelResults, console: Console) -> None:
    """Print every table."""
    tables = [(f"{shape}: ms (multiple of qsample's)", time_rows(results, shape)) for shape in results.data["shapes"]]
    tables += [("One row: bytes of a step", floor_rows(results)), ("Loop and operators", scan_rows(results))]
    for title, (header, rows) in tables:
        if rows:
            table = Table(*header, title=title, title_justify="left")
            for row in rows:
                table.add_row(*row)
            console.print(table)
    for shape in results.data["shapes"]:
        for line in missing_lines(results, shape):
            console.print(f"{shape}: {line}", highlight=False)


def write(results: ModelResults, output: Path) -> None:
    """The tables as markdown beside the JSON file, and a plot."""
    shapes = [name for name, facts in results.data["shapes"].items() if facts["cells"]]
    lines = [
        "# Hybrids and mixtures of experts",
        "",
        f"{results.data['machine']}. Made by `python benchmarks/models.py`, which says how it measures.",
        "Milliseconds, medians of the rounds; in brackets the multiple of qsample's, median of the ratios within each",
        "round. Greedy, random weights; all but transformers (float32) have 4-bit weights in blocks of 32. A slice has",
        "a few of its model's layers and the same share of its vocabulary.",
        "",
    ]
    for shape in shapes:
        lines += [f"## {shape}", "", *markdown(*time_rows(results, shape)), ""]
        lines += [f"{line}\n" for line in missing_lines(results, shape)]
        versions = (facts["version"] for facts in results.shape(shape)["systems"].values())
        lines += [f"Measured with {', '.join(dict.fromkeys(versions))}.", ""]
    if floor_rows(results)[1]:
        lines += ["## What a step reads", "", *markdown(*floor_rows(results)), ""]
        lines += [
            "One row: weights, of a mixture those of the experts that a token takes; keys and values; recurrent",
            "states. The memory's speed was measured beside each round (`benchmarks/memory_speed.py`).",
            "",
        ]
    if scan_rows(results)[1]:
        lines += ["## A loop over the tokens, and operators", "", *markdown(*scan_rows(results)), ""]
        lines += [f"{results.data['scan']['shape']}, float32, one row.", ""]
    if shapes:
        lines += [f"![Times by system]({output.name}.png)", ""]
        _plot(results, shapes, output.with_suffix(".png"))
    output.with_suffix(".md").write_text("\n".join(lines))


def _plot(results: ModelResults, shapes: list[str], path: Path) -> None:
    """A panel for each time, a group of bars for each shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7))
    for (prompt, rows, field, label), axis in zip(LINES[:4], axes.flat, strict=True):
        for index, name in enumerate(ORDER):
            cells = [results.cell(shape, prompt, rows, "greedy", name) for shape in shapes]
            heights = [float(np.median(cell[field])) if cell else 0.0 for cell in cells]
            axis.bar(np.arange(len(shapes)) + (index - 1.5) * 0.2, heights, 0.2, label=LABELS.get(name, name))
        axis.set(title=f"{label}, ms", yscale="log", xticks=range(len(shapes)))
        axis.set_xticklabels(shapes, fontsize=7)
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
