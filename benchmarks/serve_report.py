"""Keeps the measurements of `serve.py` in a JSON file, and writes them as a page and a plot."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from decode_report import markdown

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
    """Of what `serve_client.py` and `serve_engine.py` tell: a stream is the moments of its events and their tokens."""
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


class ServeResults:
    """What was measured with `settings`, round by round.

    Raises ValueError where the file has figures of other settings, which do not belong into one table.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self.data: dict[str, Any] = {"settings": settings, "versions": {}, "cells": {}, "missing": {}}
        if path.exists():
            earlier = json.loads(path.read_text())
            if earlier.get("settings") != settings:
                differing = [key for key, value in settings.items() if earlier.get("settings", {}).get(key) != value]
                raise ValueError(
                    f"{path} was measured with other settings ({', '.join(differing)}); give another --output, or "
                    "remove it"
                )
            self.data = earlier

    def rounds(self, system: str, streams: int) -> list[Round]:
        found: list[Round] = self.data["cells"].get(system, {}).get(str(streams), {}).get("rounds", [])
        return found

    def add(self, system: str, streams: int, one: Round) -> None:
        cell = self._cell(system, streams)
        cell["rounds"].append(one)
        cell["failed"] = None

    def fail(self, system: str, streams: int, reason: str) -> None:
        """It is tried again by the next run."""
        self._cell(system, streams)["failed"] = " ".join(reason.split())

    def failed(self, system: str, streams: int) -> str | None:
        reason: str | None = self.data["cells"].get(system, {}).get(str(streams), {}).get("failed")
        return reason

    def _cell(self, system: str, streams: int) -> dict[str, Any]:
        cell: dict[str, Any] = (
            self.data["cells"].setdefault(system, {}).setdefault(str(streams), {"rounds": [], "failed": None})
        )
        return cell

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_name(f"{self._path.name}.partial")
        scratch.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(scratch, self._path)


def summary(results: ServeResults, system: str, streams: int) -> Round | None:
    """The medians of a cell's rounds; `over_engine` is that of the ratios within a round. None = not measured."""
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
    for system in sorted(cells_of, key=lambda name: name != ENGINE):  # what the others are compared with comes first
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
    """What is missing from the table, and why."""
    lines = [f"Without {system}: {reason}" for system, reason in results.data["missing"].items()]
    for system, cells in results.data["cells"].items():
        for streams, cell in cells.items():
            if cell["failed"]:
                lines.append(f"{system} failed at {streams} streams: {cell['failed']}")
    return lines


def write(results: ServeResults, output: Path, title: str, explanation: str) -> None:
    """The page and the plot, beside the JSON file."""
    settings = results.data["settings"]
    cells = [cell for cells in results.data["cells"].values() for cell in cells.values()]
    rounds = max((len(cell["rounds"]) for cell in cells), default=0)
    versions = ", ".join(f"{name} {version}" for name, version in results.data["versions"].items())
    head = (
        f"# {title}\n\n{settings['machine']}, {settings['slots']} slots, {settings['shape']}, prompts of "
        f"{settings['prompt_tokens']} tokens, {settings['new_tokens']} new tokens a stream; medians of {rounds} "
        f"rounds; {versions}.\n\n{explanation}\n\n"
    )
    missing = "".join(f"{line}\n\n" for line in notes(results))
    table = "\n".join(markdown(HEADER, table_rows(results)))
    output.with_suffix(".md").write_text(f"{head}{table}\n\n{missing}![Tokens per second]({output.name}.png)\n")
    _plot(results, output.with_suffix(".png"))


def _plot(results: ServeResults, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 3.8))
    for system, cells in results.data["cells"].items():
        counts = sorted(map(int, cells))
        found = [(count, one) for count in counts if (one := summary(results, system, count)) is not None]
        for axis, values in (
            (axes[0], [(count, one["tokens_per_second"]) for count, one in found]),
            (axes[1], [(count, one["first_ms"][0]) for count, one in found if one["first_ms"]]),
            (axes[2], [(count, one["gap_ms"][0]) for count, one in found if one["gap_ms"]]),
        ):
            axis.plot([count for count, _ in values], [value for _, value in values], marker="o", label=system)
    titles = ("tokens a second", "median ms to the first token", "median ms between tokens")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xscale="log", yscale="log", xlabel="streams", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
