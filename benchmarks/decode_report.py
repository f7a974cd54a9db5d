"""The measurements of `decode.py` as tables, a page and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plots
from common import Kept, markdown, print_table
from rich.console import Console
from turns import Cell, Worker, size_of, without_folders

OWN = "qsample"


class Results(Kept):
    """All measurements on a machine; a cell that is measured again is replaced.

    `missing` of a shape maps a system to the reason why it cannot run the shape.
    """

    def __init__(self, path: Path, machine: str) -> None:
        super().__init__(path, {"machine": machine, "shapes": {}})

    def shape(self, shape: str) -> dict[str, Any]:
        empty: dict[str, Any] = {"systems": {}, "cells": [], "overhead": {}, "tokens": None, "quantization": None}
        results: dict[str, Any] = self.data["shapes"].setdefault(shape, empty)
        return results

    def add_system(
        self, shape: str, system: str, version: str, size: int, load_seconds: float, memory: dict[str, int]
    ) -> None:
        facts = {"version": version, "bytes": size, "load_seconds": load_seconds, "memory": memory}
        self.shape(shape)["systems"][system] = facts

    def describe(self, shape: str, system: str, model: Path, worker: Worker) -> None:
        """Record the system's version, the size of its files, and its memory after a few steps."""
        loaded, memory = worker.loaded, worker.probe()
        self.add_system(shape, system, loaded["version"], size_of(model), loaded["load_seconds"], memory)

    def set_missing(self, shape: str, system: str, reason: str) -> None:
        self.shape(shape).setdefault("missing", {})[system] = without_folders(reason)

    def clear_missing(self, shape: str, system: str) -> None:
        self.shape(shape).setdefault("missing", {}).pop(system, None)

    def is_complete(self, shape: str, cell: Cell, systems: list[str], rounds: int) -> bool:
        """Whether all of `systems` that can run the shape have `rounds` rounds of the cell."""
        missing = self.shape(shape).get("missing", {})
        cells = [self.cell(shape, cell.prompt, cell.rows, cell.mix, name) for name in systems if name not in missing]
        return all(found is not None and len(found["step_ms"]) == rounds for found in cells)

    def add_cell(
        self, shape: str, prompt: int, batch: int, mix: str, system: str, first: list[float], step: list[float]
    ) -> None:
        """Record a cell.

        Args:
            shape: The model.
            prompt: Tokens per prompt.
            batch: Rows.
            mix: The name of the sampling parameters.
            system: The system.
            first: Milliseconds to the first token, per round.
            step: Milliseconds of a later step (median), per round.
        """
        key = {"prompt": prompt, "batch": batch, "mix": mix, "system": system}
        cells = self.shape(shape)["cells"]
        cells[:] = [cell for cell in cells if any(cell[name] != value for name, value in key.items())]
        cells.append(key | {"first_token_ms": first, "step_ms": step})

    def add_overhead(self, shape: str, batch: int, milliseconds: dict[str, float], ratio: float) -> None:
        self.shape(shape)["overhead"][str(batch)] = {"ms": milliseconds, "everything_over_greedy": ratio}

    def set_tokens(self, shape: str, *, compared: int, equal: int) -> None:
        self.shape(shape)["tokens"] = {"compared": compared, "equal": equal}

    def set_quantization(self, shape: str, manifest: dict[str, Any]) -> None:
        self.shape(shape)["quantization"] = manifest["compilation"]["quantization"]

    def cell(self, shape: str, prompt: int, batch: int, mix: str, system: str) -> dict[str, Any] | None:
        key = (prompt, batch, mix, system)
        cells = self.data["shapes"].get(shape, {"cells": []})["cells"]
        return next((c for c in cells if (c["prompt"], c["batch"], c["mix"], c["system"]) == key), None)

    def ratio(self, shape: str, prompt: int, batch: int, mix: str, system: str, phase: str) -> float | None:
        """The time of `system` over qsample's in `phase`, "decode" or "prefill": the median of the rounds' ratios."""
        own = self.cell(shape, prompt, batch, mix, OWN)
        other = self.cell(shape, prompt, batch, mix, system)
        name = "step_ms" if phase == "decode" else "first_token_ms"
        # Rounds are comparable only within a run, which has equally many of each system.
        if own is None or other is None or len(own[name]) != len(other[name]):
            return None
        return float(np.median(np.divide(other[name], own[name])))

    def save(self) -> None:
        for shape in self.data["shapes"].values():
            shape["cells"].sort(key=lambda cell: (cell["prompt"], cell["batch"], cell["mix"], cell["system"]))
        super().save()


def _cell_rows(results: Results, shape: str) -> tuple[list[str], list[list[str]]]:
    """A line per prompt, batch and mix: ms to the first token and per step, with multiples of qsample's."""
    cells = results.shape(shape)["cells"]
    systems = [OWN, *sorted({cell["system"] for cell in cells} - {OWN})]
    keys = list(dict.fromkeys((cell["prompt"], cell["batch"], cell["mix"]) for cell in cells))
    header = ["prompt", "rows", "sampling", *(f"{name}: TTFT, step" for name in systems)]
    rows = []
    for key in keys:
        row = [f"{key[0]:,}", str(key[1]), key[2]]
        for name in systems:
            cell, texts = results.cell(shape, *key, name), []
            for phase, field in (("prefill", "first_token_ms"), ("decode", "step_ms")):
                if cell is not None:
                    ratio = results.ratio(shape, *key, name, phase)
                    multiple = "" if name == OWN else " (?)" if ratio is None else f" ({ratio:.2f}x)"
                    texts.append(f"{np.median(cell[field]):.1f}{multiple}")
            row.append(", ".join(texts))
        rows.append(row)
    return header, rows


def _system_rows(results: Results, shape: str) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, facts in results.shape(shape)["systems"].items():
        memory = facts["memory"]
        held = [f"{memory[kind] / 1e6:.0f}" if kind in memory else "" for kind in ("anonymous", "mapped")]
        rows.append([name, facts["version"], f"{facts['bytes'] / 1e6:.0f}", f"{facts['load_seconds']:.2f}", *held])
    return ["system", "version", "files, MB", "load, s", "anonymous memory, MB", "mapped files in memory, MB"], rows


def _overhead_rows(results: Results, shape: str) -> tuple[list[str], list[list[str]]]:
    """The cost of the sampler and the host, as shares of a greedy step."""
    rows = []
    for batch, facts in results.shape(shape)["overhead"].items():
        extra = facts["everything_over_greedy"] - 1
        host = facts["ms"]["greedy_host"] / facts["ms"]["greedy"]
        rows.append([batch, f"{extra:.1%}", f"{host:.1%}"])
    return ["rows", "every sampling step, over greedy", "host's share of a step"], rows


def _tokens(results: Results, shape: str) -> str:
    tokens = results.shape(shape)["tokens"]
    if not tokens:
        return ""
    return (
        f"Greedy tokens of the float32 package equal to transformers': {tokens['equal']:,} of {tokens['compared']:,}."
    )


def _divergence(results: Results, shape: str) -> str:
    facts = results.shape(shape)["quantization"]
    if not facts:
        return ""
    figures = facts["divergence"]
    return (
        f"{facts['dtype']} weights in blocks of {facts['block_size']} ({facts['method']}) are {figures['kl']:.3g} nats "
        f"a token from the float32 model, perplexity {figures['quantized_perplexity']:.4g} instead of "
        f"{figures['perplexity']:.4g}, argmax equal in {figures['agreement']:.1%}: random weights, peaked logits."
    )


def show(results: Results, console: Console) -> None:
    """Print every table."""
    for shape in results.data["shapes"]:
        for title, (header, rows) in (
            (f"{shape}: ms (multiple of qsample's)", _cell_rows(results, shape)),
            (f"{shape}: loaded", _system_rows(results, shape)),
            (f"{shape}: overhead", _overhead_rows(results, shape)),
        ):
            print_table(console, header, rows, title)
        console.print(_tokens(results, shape), _divergence(results, shape), sep="\n", highlight=False)


_SYSTEMS = """All systems except transformers (float32) have 4-bit weights in blocks of 32. `genai defaults` uses
onnxruntime-genai's own number of threads: half of the logical processors."""


def write(results: Results, output: Path, title: str, script: str, systems: str = _SYSTEMS) -> None:
    """Write the page and the plot.

    Args:
        results: The measurements.
        output: The path of the page without a suffix.
        title: The page's title.
        script: The file in benchmarks/ that measured.
        systems: A paragraph on the systems.
    """
    lines = [
        f"# {title}",
        "",
        f"{results.data['machine']}. Made by `python benchmarks/{script}`, whose docstring describes the method;",
        "`pip install -r benchmarks/peers.txt` installs the other systems with all their packages.",
        "For each system: ms until every row has its first token (TTFT), and ms per later step, medians of the rounds;",
        "in brackets the multiple of qsample's time, the median of the ratios within each round.",
        systems,
        "Flat: a temperature that leaves no peak.",
        "",
    ]
    for shape in results.data["shapes"]:
        lines += [f"## {shape}", "", *markdown(*_cell_rows(results, shape)), ""]
        lines += [*markdown(*_system_rows(results, shape)), ""]
        header, rows = _overhead_rows(results, shape)
        if rows:
            lines += [*markdown(header, rows), ""]
        lines += [text + "\n" for text in (_tokens(results, shape), _divergence(results, shape)) if text]
        missing = results.shape(shape).get("missing", {})
        lines += [f"{system} does not run it: {reason.replace('|', '/')}\n" for system, reason in missing.items()]
    if any(facts["cells"] for facts in results.data["shapes"].values()):
        lines += [f"![Tokens per second]({output.name}.png)", ""]
        plot(results, output.with_suffix(".png"))
    output.with_suffix(".md").write_text("\n".join(lines))


def plot(results: Results, path: Path) -> None:
    """Tokens per second of all rows, at the shortest prompt; a line of panels per shape, a panel per mix."""
    shapes = [name for name, facts in results.data["shapes"].items() if facts["cells"]]
    mixes = list(dict.fromkeys(cell["mix"] for name in shapes for cell in results.shape(name)["cells"]))
    systems = [OWN, *sorted({cell["system"] for name in shapes for cell in results.shape(name)["cells"]} - {OWN})]
    figure, axes = plots.new_figure(len(shapes), len(mixes), (3.6, 2.9), sharey="row")
    for shape, line in zip(shapes, axes, strict=True):
        cells = results.shape(shape)["cells"]
        prompt = min(cell["prompt"] for cell in cells)
        for mix, axis in zip(mixes, line, strict=True):
            batches = sorted({cell["batch"] for cell in cells if cell["mix"] == mix})
            found = {name: [results.cell(shape, prompt, rows, mix, name) for rows in batches] for name in systems}
            plots.grouped_bars(
                axis,
                [plots.count(rows, "row") for rows in batches],
                {
                    name: [
                        1e3 * n / float(np.median(c["step_ms"])) if c else None
                        for n, c in zip(batches, row, strict=True)
                    ]
                    for name, row in found.items()
                },
            )
            axis.set_title(f"{shape}: {mix}", fontsize="medium")
        line[0].set_ylabel(f"tokens/s, prompt of {prompt}")
    plots.legend(figure)
    plots.save(figure, path)
