"""The measurements of `serve.py` as a table, a page and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plots
from common import Kept, markdown

ENGINE = "engine alone"
HEADER = [
    "system",
    "streams",
    "tokens/s",
    "first token p50 / p99, ms",
    "gap p50 / p99, ms",
    "CPU, us a token",
    "over the engine's",
    "refused",
]
Round = dict[str, Any]


def figures(answer: dict[str, Any]) -> Round:
    """The figures of an answer of `serve_client.py` or `serve_engine.py`; a stream is a list of (moment, tokens)."""
    streams = [row for row in answer["streams"] if row]
    tokens = sum(count for row in streams for _, count in row)
    gaps = [np.diff([moment for moment, _ in row]) for row in streams if len(row) > 1]
    first = [row[0][0] for row in streams]
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / sum(answer["seconds"]),
        "first_ms": (1e3 * np.percentile(first, [50, 99])).tolist() if first else None,
        "gap_ms": (1e3 * np.percentile(np.concatenate(gaps), [50, 99])).tolist() if gaps else None,
        "cpu_us_per_token": 1e6 * answer["cpu_seconds"] / max(tokens, 1),
        "refused": answer["refused"],
    }


class ServeResults(Kept):
    """The measurements with `settings`, per round.

    Raises:
        ValueError: The file has figures of other settings, which cannot share a table.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        super().__init__(path, {"settings": settings, "versions": {}, "cells": {}, "missing": {}}, same=())
        found = self.data.get("settings", {})
        if differing := [key for key, value in settings.items() if found.get(key) != value]:
            raise ValueError(
                f"{path} was measured with other settings ({', '.join(differing)}); give another --output, or remove it"
            )

    def rounds(self, system: str, streams: int) -> list[Round]:
        found: list[Round] = self.data["cells"].get(system, {}).get(str(streams), {}).get("rounds", [])
        return found

    def add(self, system: str, streams: int, measured: Round) -> None:
        cell = self._cell(system, streams)
        cell["rounds"].append(measured)
        cell["failed"] = None

    def fail(self, system: str, streams: int, reason: str) -> None:
        """Record a failure, which the next run tries again."""
        self._cell(system, streams)["failed"] = " ".join(reason.split())

    def failed(self, system: str, streams: int) -> str | None:
        reason: str | None = self.data["cells"].get(system, {}).get(str(streams), {}).get("failed")
        return reason

    def _cell(self, system: str, streams: int) -> dict[str, Any]:
        cell: dict[str, Any] = (
            self.data["cells"].setdefault(system, {}).setdefault(str(streams), {"rounds": [], "failed": None})
        )
        return cell


def summary(results: ServeResults, system: str, streams: int) -> Round | None:
    """The medians of a cell's rounds, and of the ratios within a round (`over_engine`); None = not measured."""
    rounds = results.rounds(system, streams)
    if not rounds:
        return None
    medians: Round = {"refused": sum(one["refused"] for one in rounds)}
    for name in ("tokens_per_second", "cpu_us_per_token", "first_ms", "gap_ms"):
        values = [one[name] for one in rounds if one[name] is not None]
        medians[name] = np.median(values, axis=0).tolist() if values else None
    engine = {one["round"]: one["cpu_us_per_token"] for one in results.rounds(ENGINE, streams)}
    ratios = [one["cpu_us_per_token"] / engine[one["round"]] for one in rounds if one["round"] in engine]
    medians["over_engine"] = float(np.median(ratios)) if ratios else None
    return medians


def table_rows(results: ServeResults) -> list[list[str]]:
    def pair(values: list[float] | None) -> str:
        return "" if values is None else " / ".join(f"{value:.1f}" for value in values)

    lines = []
    cells_of = results.data["cells"]
    for system in sorted(cells_of, key=lambda name: name != ENGINE):  # the reference comes first
        for streams in sorted(map(int, cells_of[system])):
            one = summary(results, system, streams)
            if one is None:
                lines.append([system, str(streams), "failed", *[""] * (len(HEADER) - 3)])
                continue
            ratio = "" if system == ENGINE or one["over_engine"] is None else f"{one['over_engine']:.2f}"
            speed, cost = f"{one['tokens_per_second']:.1f}", f"{one['cpu_us_per_token']:.0f}"
            latencies = [pair(one["first_ms"]), pair(one["gap_ms"])]
            lines.append([system, str(streams), speed, *latencies, cost, ratio, str(one["refused"])])
    return lines


def notes(results: ServeResults) -> list[str]:
    """The reasons for missing parts of the table."""
    lines = [f"Without {system}: {reason}" for system, reason in results.data["missing"].items()]
    for system, cells in results.data["cells"].items():
        for streams, cell in cells.items():
            if cell["failed"]:
                lines.append(f"{system} failed at {streams} streams: {cell['failed']}")
    return lines


def write(results: ServeResults, output: Path, title: str, explanation: str) -> None:
    """Write the page and the plot."""
    settings = results.data["settings"]
    cells = [cell for cells in results.data["cells"].values() for cell in cells.values()]
    rounds = max((len(cell["rounds"]) for cell in cells), default=0)
    versions = ", ".join(f"{name} {version}" for name, version in results.data["versions"].items())
    head = (
        f"# {title}\n\n{settings['machine']}, {settings['slots']} slots, {settings['shape']}, prompts of "
        f"{settings['prompt_tokens']} tokens, {settings['new_tokens']} new tokens per stream; medians of {rounds} "
        f"rounds; {versions}.\n\n{explanation}\n\n"
    )
    missing = "".join(f"{line}\n\n" for line in notes(results))
    table = "\n".join(markdown(HEADER, table_rows(results)))
    output.with_suffix(".md").write_text(f"{head}{table}\n\n{missing}![Tokens per second]({output.name}.png)\n")
    plot(summaries(results), output.with_suffix(".png"))


def summaries(results: ServeResults) -> dict[str, dict[str, Round | None]]:
    """The summary of each system and number of streams; None for a cell without a round."""
    return {
        system: {streams: summary(results, system, int(streams)) for streams in found}
        for system, found in results.data["cells"].items()
    }


def plot(systems: dict[str, dict[str, Round | None]], path: Path) -> None:
    """Speed and latencies by streams. systems: of each, the figures for a number of streams."""
    figure, axes = plots.new_figure(1, 3, (4.2, 3.8), sharex=True)
    counts = sorted({int(streams) for found in systems.values() for streams in found})
    axes[0][1].sharey(axes[0][2])  # both are milliseconds
    kinds = (("tokens_per_second", "tokens per second"), ("first_ms", "median ms to the first token"))
    for axis, (field, title) in zip(axes[0], (*kinds, ("gap_ms", "median ms between tokens")), strict=True):
        lacking = []
        for system, found in systems.items():
            known = {number: (found.get(str(number)) or {}).get(field) for number in counts}
            points = [(n, value[0] if isinstance(value, list) else value) for n, value in known.items() if value]
            axis.plot(*zip(*points, strict=True), **plots.line_style(system)) if points else None
            lacking += [f"{system} at {n}" for n, value in known.items() if not value]
        axis.set(xscale="log", xlabel=f"streams{plots.missing_line(lacking)}", title=title, xticks=counts)
        axis.set_xticklabels(counts)
        axis.minorticks_off()
    axes[0][0].set_ylim(bottom=0)
    axes[0][1].set_yscale("log")
    plots.legend(figure)
    plots.save(figure, path)
