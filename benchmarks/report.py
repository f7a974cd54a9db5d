"""Measurements in a JSON file, and how they are shown: tables, pages, plots. It imports no benchmark.

The workers that run in a peer's environment do not import this module: it needs rich and matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

Rows: TypeAlias = tuple[Sequence[str], list[list[str]]]  # the header of a table, and its lines
PEERS: Final = (
    "`pip install -r benchmarks/peers.txt` installs the other systems with all their packages."
)
# The speed of matrix products of 4 and 8 bits depends on these.
_EXTENSIONS: Final = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "asimd", "asimddp", "i8mm")


def describe_machine(threads: int | None = None) -> str:
    """The processor and its cores; with `threads`, also the vector extensions that libraries find."""
    known, facts = _cpuinfo(), f"{os.cpu_count()} cores"
    name = known.get("model name") or platform.processor() or platform.machine()
    if threads is None:
        return f"{name}, {facts}"
    found, hidden = _extensions()
    extensions = f" ({', '.join(found)}{hidden})" if found else ""
    return f"{name}{extensions}, {facts}, {threads} threads"


def processor_class() -> str:
    """The last of the vector extensions that libraries find, such as "AVX512 VNNI"."""
    found, hidden = _extensions()
    return (found or ["unknown"])[-1].upper().replace("_", " ") + hidden


def _cpuinfo() -> dict[str, str]:
    """Linux's facts of the first processor."""
    facts: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts


def _extensions() -> tuple[list[str], str]:
    """The extensions that Linux lists and that `avx2.c` does not hide; and whether it hides some, in words."""
    known = _cpuinfo()
    found = [
        name
        for name in _EXTENSIONS
        if name in f"{known.get('flags', '')} {known.get('Features', '')}".split()
    ]
    simd: Any = np.show_config(mode="dicts")["SIMD Extensions"]  # type: ignore[index, call-overload]
    asked = [
        *simd.get("baseline", ()),
        *simd.get("found", ()),
    ]  # NumPy asks the processor, and not Linux
    if "avx512f" not in found or any(name.startswith(("AVX512", "X86_V4")) for name in asked):
        return found, ""
    return [
        name for name in found if not name.startswith(("avx512", "avx_vnni"))
    ], " with AVX-512 hidden"


def make_parser(
    doc: str | None,
    output: str = "",
    *,
    work: str = "",
    peers: bool = False,
    again: bool = False,
    threads: int = 0,
) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of a benchmark, with the options that benchmarks share.

    Args:
        doc: The docstring.
        output: The name of the results in docs/benchmarks, for --output.
        work: The folder for the models, for --work.
        peers: Whether there is --peers-python.
        again: Whether there is --again.
        threads: The default of --threads; 0 = no such option.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if peers:
        parser.add_argument(
            "--peers-python", default=sys.executable, help="a Python with the packages of peers.txt"
        )
    if work:
        parser.add_argument("--work", type=Path, default=Path(work), help="folder for the models")
    if threads:
        parser.add_argument("--threads", type=int, default=threads)
    if again:
        parser.add_argument("--again", action="store_true", help="repeat complete measurements")
    if output:
        path = Path("docs/benchmarks", output)
        parser.add_argument(
            "--output", type=Path, default=path, help="path of the results without a suffix"
        )
    return parser


def rotated(names: Iterable[str], turn: int) -> list[str]:
    """`names` in an order that begins with another name in each turn."""
    listed = list(names)
    first = turn % len(listed) if listed else 0
    return listed[first:] + listed[:first]


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file, which is complete at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(path)


class Kept:
    """Measurements in a JSON file.

    Args:
        path: The JSON file.
        data: The initial content.
        same: Keys of `data`; the measurements of an existing file are kept if it agrees in all of them.
    """

    def __init__(
        self, path: Path, data: dict[str, Any], same: Sequence[str] = ("machine",)
    ) -> None:
        self._path, self.data = path, data
        path.parent.mkdir(parents=True, exist_ok=True)  # for the page and the plot next to it, too
        if path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            if all(earlier.get(name) == data[name] for name in same):
                self.data = earlier

    def save(self) -> None:
        write_json(self._path, self.data)


def find(cells: list[dict[str, Any]], **key: Any) -> dict[str, Any] | None:
    """The cell with these values."""
    return next((cell for cell in cells if key.items() <= cell.items()), None)


def put(cells: list[dict[str, Any]], key: dict[str, Any], **facts: Any) -> None:
    """Add a cell; it replaces the cell with this key."""
    cells[:] = [cell for cell in cells if not key.items() <= cell.items()]
    cells.append(key | facts)


def median(values: Any) -> float:
    return float(np.median(values))


def median_ratio(values: Sequence[float], references: Sequence[float]) -> float | None:
    """The median of the rounds' ratios; None for other rounds: they are comparable only within a run."""
    return median(np.divide(values, references)) if len(values) == len(references) else None


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    table = Table(*header, title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def count(number: int, noun: str) -> str:
    """As "1 row", "4 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_line(reason: str) -> str:
    """A peer's message without the folders of this machine, which are private, and without a table's separators."""
    reason = re.sub(r"(?<![\w.:/])(?:/[\w.+-]+)+/([\w.+-]+)", r"\1", reason)
    return " ".join(reason.replace("|", "/").split())[:300]


# Plots: a colour for each system, legends next to the data, bars from zero, marks for missing figures. A system has its
# colour in every plot; its variants within a plot differ by lightness, dashes and markers.
QSAMPLE: Final = "#1f6fb4"
_GENAI, _LLAMA, _TRANSFORMERS, _MOBIUS = "#e08214", "#2f8f4e", "#8250a8", "#b5446e"
NOT_INVARIANT: Final = "--no-batch-invariant"
SYSTEMS: Final[dict[str, tuple[str, int]]] = {
    **dict.fromkeys(
        ("qsample", "qsample serve", "qsample, int4", "qsample, float32 cache"), (QSAMPLE, 0)
    ),
    **dict.fromkeys(("qsample, continuous", "captured", "baked"), (QSAMPLE, 0)),
    **{f"qsample, {name}": (QSAMPLE, look) for name, look in (("balanced", 1), ("speed", 3))},
    **{
        f"qsample, {name}": (QSAMPLE, look)
        for name, look in ((NOT_INVARIANT, 2), (f"speed, {NOT_INVARIANT}", 4))
    },
    **dict.fromkeys(
        ("engine alone", "qsample, static", "qsample, portable", "qsample, int8 cache"),
        (QSAMPLE, 1),
    ),
    "uncaptured": (QSAMPLE, 1),
    "host": (QSAMPLE, 2),
    **dict.fromkeys(("captured, int4", "baked, int4"), (QSAMPLE, 3)),
    "captured, int8": (QSAMPLE, 4),
    **dict.fromkeys(
        ("genai", "onnxruntime-genai", "onnxruntime-genai, static", "genai, int4"), (_GENAI, 0)
    ),
    **dict.fromkeys(("genai defaults", "genai, float32"), (_GENAI, 1)),
    **dict.fromkeys(("llama.cpp", "llama-cpp-python", "llama.cpp, f16"), (_LLAMA, 0)),
    "llama.cpp, q8_0": (_LLAMA, 1),
    **dict.fromkeys(("transformers", "transformers, float32"), (_TRANSFORMERS, 0)),
    "logits to transformers": (_TRANSFORMERS, 1),
    "logits to NumPy": ("#7b6a5a", 0),
    "mobius, float32": (_MOBIUS, 0),
    "mobius, bfloat16": (_MOBIUS, 1),
    "optimum, float32": ("#6b7a1d", 0),
}
_DASHES, _MARKERS = ("-", "--", ":", "-.", (0, (5, 1))), ("o", "s", "^", "D", "v")
_STRENGTHS: Final = (1, 0.55, 0.3, 0.75, 0.45)
MISSING: Final = "not measured"


def _look(system: str) -> tuple[str, int]:
    """Colour and variant; of a setting that `SYSTEMS` lacks, as "captured, read every 4", the system's.

    Raises:
        KeyError: The system is unknown.
    """
    return SYSTEMS.get(system) or SYSTEMS[system.split(",")[0]]


def colour(system: str) -> Any:
    from matplotlib.colors import to_rgb

    base, variant = _look(system)
    return tuple(1 - (1 - part) * _STRENGTHS[variant] for part in to_rgb(base))


def line_style(system: str) -> dict[str, Any]:
    """Keywords of `Axes.plot`; a line keeps the full colour, because a pale line is hard to see."""
    base, variant = _look(system)
    look = {
        "color": base,
        "linestyle": _DASHES[variant],
        "marker": _MARKERS[variant],
        "markersize": 4,
        "label": system,
    }
    # Equal results stay visible: qsample's lines are below the other lines, and wider.
    return look | (
        {"linewidth": 2.4, "zorder": 2} if base == QSAMPLE else {"linewidth": 1.5, "zorder": 3}
    )


def new_figure(
    rows: int, columns: int, size: tuple[float, float], **shared: Any
) -> tuple[Any, Any]:
    """A figure, and its panels as an array of two dimensions. size: inches of a panel."""
    from matplotlib.figure import Figure  # without pyplot, which would look for a screen

    figure = Figure(figsize=(columns * size[0] + 1.8, rows * size[1]), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
    return figure, axes


def grouped_bars(
    axis: Any, groups: Sequence[str], heights: dict[str, Sequence[float | None]]
) -> None:
    """Bars from zero. heights: system → a height for each group; None is marked as not measured."""
    width = 0.8 / max(len(heights), 1)
    for index, (system, values) in enumerate(heights.items()):
        for group, value in enumerate(values):
            place = group + (index - len(heights) / 2 + 0.5) * width
            if value is None:
                mark = {
                    "rotation": 90,
                    "ha": "center",
                    "va": "bottom",
                    "fontsize": 6,
                    "color": "#6a6a6a",
                }
                axis.text(place, 0.01, f" {MISSING}", transform=axis.get_xaxis_transform(), **mark)
            axis.bar(
                place,
                value or 0,
                width * 0.94,
                color=colour(system),
                label=None if group else system,
            )
    axis.set_xticks(range(len(groups)))
    axis.set_xticklabels(groups)
    axis.grid(visible=False, axis="x")


def missing_line(names: Sequence[str]) -> str:
    """A line below the label of an axis; nothing if everything was measured."""
    return f"\n{MISSING}: {', '.join(names)}" if names else ""


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure with a legend of all panels to their right."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    look = {"loc": "outside right upper", "fontsize": "small", "frameon": False, "handlelength": 3}
    figure.legend(handles.values(), handles.keys(), **look)
    figure.savefig(path, dpi=110)
