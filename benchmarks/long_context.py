"""Long histories on the CPU: first token, step and memory, with caches of several types, compared with other systems.

    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/long_context.py --peers-python peers/bin/python               # 5 minutes on two cores
    python benchmarks/long_context.py --peers-python peers/bin/python --rows 1 4 --most-read 16640  # the whole table
    python benchmarks/long_context.py --shape gemma-3-270m --output build/windows          # caches of a window

(In addition, the models are built once, which takes some minutes.) The systems are qsample with caches of several
types, onnxruntime-genai (float32), and llama.cpp with an f16 and a q8_0 cache, on the same random weights in 4 bits, in
blocks of 32, greedy. Each cell has its own processes, with memory for that cell only. With a single row, every system
reads a history of up to READ tokens once, which gives the time to the first token; then the systems take turns in
rounds of steps. Longer histories and several rows are synthetic: qsample's cache is filled with random numbers, and
llama.cpp gets copies of the text that it read, in sequence and per row. A step takes the same time over any numbers.
onnxruntime-genai cannot write its cache, so it reads every row, and is left out if that exceeds --most-read tokens.
With --no-fill every system reads the whole history of a single row; llama.cpp with a q8_0 cache takes half an hour for
16,384 tokens.

Systems that do not fit into memory together run in sequence, without ratios. Results are written after every cell, and
a run continues an interrupted run.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import report
from checkpoints import SHAPES, make_checkpoint, make_genai_model, make_gguf, make_package
from report import (
    PEERS,
    Kept,
    Rows,
    count,
    describe_machine,
    find,
    make_parser,
    markdown,
    median,
    median_ratio,
    one_line,
    print_table,
    put,
    rotated,
)
from rich.console import Console
from turns import PAUSE, Worker, available, size_of

from qsample.compiler.passes.window_caches import SLACK
from qsample.contract.tensors import KV_CACHE_DTYPES

FLOAT32: Final = "qsample, float32 cache"
WHOLE: Final = "qsample, whole caches"  # of layers with a window, in float32
OWN: Final = {
    FLOAT32: (),
    WHOLE: ("--no-sliding-window-cache",),
    "qsample, int8 cache": ("--kv-cache-dtype", "int8"),
    "qsample, int4 cache": ("--kv-cache-dtype", "int4"),
}
# Bytes per number of the cache; q8_0 has a scale for every 32.
SYSTEMS: Final = dict(zip(OWN, (4.0, 4.0, 1.0, 0.5), strict=True)) | {
    "genai": 4.0,
    "llama.cpp, f16": 2.0,
    "llama.cpp, q8_0": 34 / 32,
}
CTX_LEN: Final = 16640  # of packages
READ: Final = 1024  # tokens of a history that every system reads
FREE: Final = 0.85  # usable share of the available memory
WARM_UP: Final = 3  # steps
GROWTH: Final = 128  # capacity of a cell for new tokens
HEADER: Final = [
    "history",
    "rows",
    "system",
    "first token, s",
    "step, ms",
    "over float32 cache",
    "memory, GB",
]
Results = list[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """`rows` rows with `history` tokens each."""

    shape: str
    history: int
    rows: int

    def key(self, system: str) -> dict[str, Any]:
        return {**asdict(self), "system": system}

    def cache_bytes(self, system: str) -> float:
        """The size of keys and values."""
        facts = SHAPES[self.shape]
        held = [self.history + GROWTH] * facts["num_hidden_layers"]
        if (
            "sliding_window" in facts and system != WHOLE
        ):  # Gemma's: every sixth layer sees all tokens
            most = facts["sliding_window"] + SLACK - 1
            held = [
                tokens if layer % 6 == 5 else min(tokens, most) for layer, tokens in enumerate(held)
            ]
        return (
            SYSTEMS[system]
            * 2
            * facts["num_key_value_heads"]
            * facts["head_dim"]
            * self.rows
            * sum(held)
        )


def available_bytes() -> float:
    """The available memory; infinite if Linux does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return float("inf")
    return 1024 * float(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))


def build(options: argparse.Namespace, console: Console) -> dict[str, Path]:
    """The model of each system, built unless it exists."""
    folder, python = options.work / options.shape, options.peers_python
    checkpoint = make_checkpoint(options.shape, folder / "checkpoint")

    def package(name: str) -> Path:
        made = folder / name.replace("qsample, ", "long-").replace(" ", "-")
        return make_package(checkpoint, made, "int4", *OWN[name], ctx_len=CTX_LEN)

    builders = {
        **{name: partial(package, name) for name in OWN},
        "genai": lambda: make_genai_model(
            checkpoint, folder / "genai-last-logits", python, last_logits=True
        ),
        "llama.cpp": lambda: make_gguf(checkpoint, folder / "q4_0.gguf", python),
    }
    models = {}
    for system in available(options.system, python, console):
        with console.status(f"{options.shape}: a model for {system}"):
            models[system] = builders[system if system in builders else system.split(",")[0]]()
    return models


def start(system: str, model: Path, cell: Cell, options: argparse.Namespace) -> Worker:
    python = sys.executable if system in OWN else options.peers_python
    read, folder = read_tokens(options), options.work / cell.shape
    # The files in which llama.cpp saves the state of a row.
    state, before = (
        str(folder / f"{system.replace(', ', '-')}-{n}.row") for n in (cell.history, read)
    )
    more = {"rows": cell.rows, "history": cell.history, "growth": GROWTH}
    more |= {"state": state, "read_tokens": min(read, cell.history), "read_before": before}
    return Worker(system, model, python, options.threads, "rows", **more)


def run_steps(workers: dict[str, Worker], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Milliseconds of a step (median) per round, and the memory of each process afterwards."""
    found: dict[str, dict[str, Any]] = {name: {"step_ms": []} for name in workers}
    for worker in workers.values():
        worker.ask("steps", count=WARM_UP)
    for index in range(options.rounds):
        for name in rotated(workers, index):
            time.sleep(PAUSE)
            answer = workers[name].ask("steps", count=options.new_tokens)
            found[name]["step_ms"].append(1e3 * median(answer["steps"]))
            found[name]["memory"] = answer["memory"]
    return found


def read_tokens(options: argparse.Namespace) -> int:
    """The longest history that every system reads."""
    return max(
        (history for history in options.history if history <= READ), default=min(options.history)
    )


def taking_part(cell: Cell, models: dict[str, Path], most_read: int) -> list[str]:
    """The systems that can load the cell's history in acceptable time."""
    return [name for name in models if name != "genai" or cell.rows * cell.history <= most_read]


def is_filled(system: str, cell: Cell, options: argparse.Namespace) -> bool:
    """Whether the cell's history is filled in instead of read."""
    return system != "genai" and (
        cell.rows > 1 or (options.fill and cell.history > read_tokens(options))
    )


def run_cell(
    cell: Cell,
    models: dict[str, Path],
    results: Kept,
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Measure all systems of a cell, in turns if the memory has room for all of them."""
    cells, free = results.data["cells"], FREE * available_bytes()

    def leave_out(system: str, reason: str) -> None:
        put(cells, cell.key(system), missing=one_line(reason))
        console.print(f"  without {system}: {reason}", highlight=False)

    # An estimate: keys and values, the weights (some systems unpack them), and the memory of a call.
    needed = {
        name: cell.cache_bytes(name) + 1.5 * size_of(models[name]) + 3e8
        for name in taking_part(cell, models, options.most_read)
    }
    for name in [name for name in needed if needed[name] > free]:
        leave_out(name, f"{needed.pop(name) / 1e9:.0f} GB of memory are not free here")
    together = time.strftime("%F %T") if sum(needed.values()) < free else False
    for group in [list(needed)] if together else [[name] for name in needed]:
        workers: dict[str, Worker] = {}
        first: dict[str, float | None] = {}
        for name in group:
            try:
                worker = start(name, models[name], cell, options)
                first[name] = worker.ask("history", filled=is_filled(name, cell, options))[
                    "first_token"
                ]
                workers[name] = worker
            except RuntimeError as error:
                leave_out(name, str(error).strip().splitlines()[-1])
        for name, found in run_steps(workers, options).items() if workers else ():
            about = {
                "version": workers[name].loaded["version"],
                "cache_bytes": cell.cache_bytes(name),
            }
            put(
                cells,
                cell.key(name),
                first_token_s=first[name],
                **found,
                **about,
                together=together,
            )
            workers[name].close()
        cells.sort(key=lambda one: (one["shape"], one["history"], one["rows"]))  # stable
        results.save()


def ratio(cells: Results, cell: dict[str, Any]) -> float | None:
    """The step over the step with a float32 cache: the median of the rounds' ratios, None without joint rounds."""
    own = find(cells, **{name: cell[name] for name in ("shape", "history", "rows")}, system=FLOAT32)
    if (
        own is None
        or "step_ms" not in own
        or not own["together"]
        or own["together"] != cell["together"]
    ):
        return None
    return median_ratio(cell["step_ms"], own["step_ms"])


def table_rows(cells: Results, shape: str) -> Rows:
    """A line per history, number of rows and system."""
    lines = []
    for cell in (cell for cell in cells if cell["shape"] == shape):
        line = [f"{cell['history']:,}", str(cell["rows"]), cell["system"]]
        if "missing" in cell:
            lines.append([*line, cell["missing"].replace("|", "/"), "", "", "", ""])
            continue
        first, times, memory = cell["first_token_s"], ratio(cells, cell), cell["memory"]
        line += ["" if first is None else f"{first:.1f}", f"{median(cell['step_ms']):.1f}"]
        line += ["" if times is None else f"{times:.2f}x"]
        line += [
            f"{memory['anonymous'] / 1e9:.2f}" if memory else "",
            f"{cell['cache_bytes'] / 1e9:.2f}",
        ]
        lines.append(line)
    return [*HEADER, "of it keys and values"], lines


def write(data: dict[str, Any], output: Path) -> None:
    """Print the tables, and write the page and the plot."""
    cells = data["cells"]
    lines = [
        "# Long histories",
        "",
        f"{data['machine']}.",
        "Made by `python benchmarks/long_context.py`, whose docstring describes the method;",
        PEERS,
        "4-bit weights in blocks of 32, greedy. The time to the first token is the time to read the whole history;",
        "it is missing if rows were filled or copied. The time of a step is the median of the rounds. Its multiple is",
        "the median of the rounds' ratios, if the systems took turns. Memory is the process's own, without mapped",
        "files.",
        "",
    ]
    for shape in dict.fromkeys(cell["shape"] for cell in cells):
        print_table(*table_rows(cells, shape), shape)
        lines += [f"## {shape}", "", *markdown(*table_rows(cells, shape)), ""]
        versions = [
            cell["version"] for cell in cells if cell["shape"] == shape and "version" in cell
        ]
        lines += [f"Measured with {', '.join(dict.fromkeys(versions))}.", ""]
    if any("step_ms" in cell for cell in cells):
        lines += [f"![A step by history]({output.name}.png)", ""]
        plot(data, output.with_suffix(".png"))
    output.with_suffix(".md").write_text("\n".join(lines))


def plot(data: dict[str, Any], path: Path) -> None:
    """A step's time by history, a panel per shape and number of rows, a line per system."""
    cells = [cell for cell in data["cells"] if "step_ms" in cell]
    panels = list(dict.fromkeys((cell["shape"], cell["rows"]) for cell in cells))
    systems = list(dict.fromkeys(cell["system"] for cell in cells))
    figure, axes = report.new_figure(1, len(panels), (5, 3.6), sharex=True, sharey=True)
    for (shape, rows), axis in zip(panels, axes[0], strict=True):
        shown = [cell for cell in cells if (cell["shape"], cell["rows"]) == (shape, rows)]
        histories, lacking = {cell["history"] for cell in shown}, []
        for name in systems:
            points = sorted(
                (cell["history"], median(cell["step_ms"]))
                for cell in shown
                if cell["system"] == name
            )
            if points:
                axis.plot(*zip(*points, strict=True), **report.line_style(name))
            lacking += [
                f"{name} at {history:,}"
                for history in sorted(histories - {place for place, _ in points})
            ]
        label = f"tokens before the step{report.missing_line(lacking)}"
        axis.set(title=f"{shape}, {count(rows, 'row')}", xlabel=label)
    axes[0][0].set_yscale("log")  # of all panels, which share it
    axes[0][0].set_ylabel("ms a step")
    report.save_figure(figure, path)


def main() -> None:
    parser = make_parser(
        __doc__, "long_context", work="build/decode", peers=True, again=True, threads=2
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument(
        "--system", nargs="+", choices=SYSTEMS, help="(default: all for which the shape is made)"
    )
    parser.add_argument("--history", type=int, nargs="+", default=[64, 1024, 4096, 16384])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--most-read", type=int, default=4096, help="tokens that onnxruntime-genai reads"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=16, help="of each row and round")
    whole = "read the whole history of a single row, which takes an hour"
    parser.add_argument("--no-fill", dest="fill", action="store_false", help=whole)
    options, console = parser.parse_args(), Console(stderr=True)
    slides = "sliding_window" in SHAPES[options.shape]
    options.system = options.system or [
        name
        for name in SYSTEMS
        if (name in OWN or not slides)
        and (name != WHOLE or slides)
        and ("int4" not in name or "int4" in KV_CACHE_DTYPES)
    ]
    longest = min(CTX_LEN, SHAPES[options.shape]["max_position_embeddings"]) - GROWTH
    if min(options.history) < 1 or max(options.history) > longest:
        parser.error(f"--history must be 1 to {longest:,} for {options.shape}")
    if WARM_UP + options.rounds * options.new_tokens > GROWTH - 8:
        parser.error(f"--rounds times --new-tokens must be at most {GROWTH - 8 - WARM_UP}")
    models = build(options, console)
    data: dict[str, Any] = {"machine": describe_machine(options.threads), "cells": []}
    results = Kept(options.output.with_suffix(".json"), data)
    cells = results.data["cells"]
    # Single rows first: llama.cpp copies the text read there to the rows of the other cells.
    for rows in sorted(options.rows):
        for history in sorted(options.history):
            cell = Cell(options.shape, history, rows)
            if options.again or any(
                find(cells, **cell.key(name)) is None
                for name in taking_part(cell, models, options.most_read)
            ):
                console.print(f"{cell}", highlight=False)
                run_cell(cell, models, results, options, console)
    for path in (options.work / options.shape).glob("*.row"):
        path.unlink()
    write(results.data, options.output)


if __name__ == "__main__":
    main()
