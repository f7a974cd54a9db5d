"""The rows of the GPU benchmark, their comparisons, and their page and plot: gpu.json, gpu.md and gpu.png."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import report
from report import markdown, one_line, write_json

Row: TypeAlias = dict[str, Any]
BANDWIDTH: Final = "bytes per second that a copy reads and writes"
READS: Final = (1, 4, 16)
HOST_TRANSFORMERS: Final = "host, transformers' processors"
# Table → what its rows are.
TABLES: Final = {
    "machine": "The machine.",
    "problems": "What failed or was omitted.",
    "comparisons": "Tokens per second of a system over another's. The source is the project that claims a difference.",
    "steps": "Medians of the rounds. The share of the floor is the time to read the weights and the cache once, at the "
    "bandwidth of a copy, over the time of a step.",
    "kernels": "What CUPTI sees in a step.",
    "prompts": "Until every row has its first token.",
    "sampler": "Rows of the captured sampler that agree with the tests' float64 reference and with docs/vectors.",
    "packages": "Nodes, and tokens beside those of a read after every step.",
    "parts": "The seconds of each part.",
    "verify": "Log-probabilities beside transformers in float32 on the CPU, by `qsample verify`.",
}
# Source, system, the other system, of the same rows and sampling.
_CLAIMS: Final = (
    *(("web-llm", f"captured, read every {n}", "captured, read every 1") for n in READS[1:]),
    *(
        ("nkipy", f"captured, read every {n}", f"captured, read every {n}, one buffer")
        for n in READS
    ),
    ("openinfer", "captured", "captured, 1 row"),
    ("QEfficient", "captured", HOST_TRANSFORMERS),
    ("QEfficient", "captured", "host"),
    ("qsample", "captured", "uncaptured"),
    ("qsample", "captured, int4", "captured"),
    ("onnxruntime-genai", "captured", "genai"),
    ("onnxruntime-genai", "captured", "genai, CUDA graph"),
    ("transformers", "captured", "transformers"),
)


class Rows:
    """The rows of a run, in a file that all of its processes append to.

    Args:
        folder: the folder of the run.
        part: the name of the part that adds the rows.
    """

    def __init__(self, folder: Path, part: str = "") -> None:
        self.folder, self._path, self._part = folder, folder / "rows.jsonl", part

    def of(self, part: str) -> Rows:
        return Rows(self.folder, part)

    def add(self, table: str, **values: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([table, values]) + "\n")

    def problem(self, text: str) -> None:
        self.add("problems", part=self._part, problem=one_line(text))

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Add a problem if an error ends this section."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.problem(f"{name}: {type(error).__name__}: {error}")

    def read(self) -> list[tuple[str, Row]]:
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        return [(table, row) for table, row in map(json.loads, lines)]


def comparisons(steps: Sequence[Row]) -> list[Row]:
    """A row for each claim and cell of which both sides were measured."""
    speeds = {
        (row["shape"], row["rows"], row["mix"], row["system"]): row["tokens_per_second"]
        for row in steps
    }
    for (shape, rows, mix, system), speed in list(speeds.items()):
        if (rows, mix, system) == (1, "greedy", "captured"):
            speeds[shape, 32, mix, "captured, 1 row"] = speed
    found: list[Row] = []
    for cell in dict.fromkeys(key[:3] for key in speeds):
        for source, system, other in _CLAIMS:
            if {(*cell, system), (*cell, other)} <= speeds.keys():
                row = {"source": source, "system": system, "other": other}
                row |= dict(zip(("shape", "rows", "mix"), cell, strict=True))
                found.append(row | {"ratio": speeds[*cell, system] / speeds[*cell, other]})
    return found


def tables(command: str, rows: Sequence[tuple[str, Row]]) -> dict[str, Any]:
    """The results of runs: the rows of each table, with the comparisons."""
    data: dict[str, Any] = {"command": command}
    data |= {name: [row for table, row in rows if table == name] for name in TABLES}
    return data | {"comparisons": comparisons(data["steps"])}


def write(data: dict[str, Any], folder: Path) -> None:
    """Write gpu.json and gpu.md, which are complete at any time."""
    write_json(folder / "gpu.json", data)
    lines = ["# Decoding on a GPU", "", f"Written by `{data['command']}`.", ""]
    for name, sentence in TABLES.items():
        columns = list(dict.fromkeys(column for row in data[name] for column in row))
        cells = [[shown(row.get(column)) for column in columns] for row in data[name]]
        if cells:
            lines += [f"## {name.capitalize()}", "", sentence, ""]
            lines += [*markdown([column.replace("_", " ") for column in columns], cells), ""]
    if (folder / "gpu.png").exists():
        lines += ["![tokens per second](gpu.png)", ""]
    partial = folder / "gpu.md.partial"
    partial.write_text("\n".join(lines), encoding="utf-8")
    partial.replace(folder / "gpu.md")


def shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def plot(data: dict[str, Any], path: Path) -> None:
    """Draw tokens per second over rows, of greedy steps."""
    greedy = [row for row in data["steps"] if row["mix"] == "greedy"]
    greedy = [row for row in greedy if "read every" not in row["system"]]
    shapes = list(dict.fromkeys(row["shape"] for row in greedy))
    if not shapes:
        return
    figure, axes = report.new_figure(1, len(shapes), (5, 4), sharex=True, sharey=True)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for system in dict.fromkeys(row["system"] for row in greedy):
            own = [row for row in greedy if (row["shape"], row["system"]) == (shape, system)]
            points = sorted((row["rows"], row["tokens_per_second"]) for row in own)
            if points:
                axis.plot(*zip(*points, strict=True), **report.line_style(system))
        axis.set(title=f"{shape}, greedy", xlabel="rows", xscale="log", yscale="log")
    axes[0][0].set_ylabel("tokens/s")
    report.save_figure(figure, path)
