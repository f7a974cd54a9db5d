"""Shared by the benchmarks: sampling mixes, the machine, options, results on disk, tables and plots.

The workers that run in a peer's environment do not import this module: it needs rich and matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# Sampling parameters by Hugging Face's names; an absent parameter is off.
EVERYTHING = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
}
MIXES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}
# At this temperature no distribution has a peak: the nucleus is most of the vocabulary, the worst case for hosts that
# sort the probabilities.
FLAT: dict[str, dict[str, float]] = {"top-p 0.95, flat": {"temperature": 100.0, "top_p": 0.95}}
# The choices of `--mix` in the benchmarks of whole decoders.
ALL: dict[str, dict[str, float]] = MIXES | FLAT | {"everything": EVERYTHING}
# The speed of matrix products of 4 and 8 bits depends on these.
_EXTENSIONS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "asimd", "asimddp", "i8mm")


def describe_machine(threads: int) -> str:
    """The processor with its vector extensions (if Linux lists them), the cores, and `threads`."""
    facts: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    flags = f"{facts.get('flags', '')} {facts.get('Features', '')}".split()
    extensions = ", ".join(name for name in _EXTENSIONS if name in flags)
    name = facts.get("model name") or platform.processor() or platform.machine()
    return f"{name}{f' ({extensions})' if extensions else ''}, {os.cpu_count()} cores, {threads} threads"


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of a script."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "--output", type=Path, default=Path("docs/benchmarks", name), help="path of the results without a suffix"
    )


def add_peer_options(parser: argparse.ArgumentParser, output: str, work: str = "build/decode") -> None:
    """Add the options that the benchmarks with other systems share."""
    parser.add_argument("--peers-python", default=sys.executable, help="a Python with the packages of peers.txt")
    parser.add_argument("--work", type=Path, default=Path(work), help="folder for the models")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="repeat complete measurements")
    add_output(parser, output)


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

    def __init__(self, path: Path, data: dict[str, Any], same: Sequence[str] = ("machine",)) -> None:
        self._path, self.data = path, data
        path.parent.mkdir(parents=True, exist_ok=True)  # for the page and the plot next to it, too
        if path.exists():
            earlier = json.loads(path.read_text())
            if all(earlier.get(name) == data[name] for name in same):
                self.data = earlier

    def save(self) -> None:
        write_json(self._path, self.data)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def print_table(console: Console, header: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    table = Table(*header, title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
