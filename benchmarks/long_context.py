"""Long histories on the CPU: first token, step and memory, with caches of several types, compared with other systems.

    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/long_context.py --peers-python peers/bin/python               # a quarter of an hour on two cores
    python benchmarks/long_context.py --peers-python peers/bin/python --history 4096 --minutes 5

The systems are qsample with a float32 and an int8 cache, onnxruntime-genai (float32), and llama.cpp with an f16 and a
q8_0 cache, on the same random weights in 4 bits, in blocks of 32, greedy. Each cell has its own processes, with memory
for that cell only. With a single row and the shortest history, every system reads the history once, which gives the
time to the first token; then the systems take turns in rounds of steps. Longer histories and several rows are
synthetic: qsample's cache is filled with random numbers, and llama.cpp gets copies of the text that it read, in
sequence and per row. A step takes the same time over any numbers. onnxruntime-genai cannot write its cache, so it reads
every row, and is left out if that exceeds MOST_READ tokens. With --no-fill every system reads the whole history of a
single row; llama.cpp with a q8_0 cache takes half an hour for 16,384 tokens.

Systems that do not fit into memory together run in sequence, without ratios. Results are written after every cell, and
a run continues an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import plots
from checkpoints import SHAPES, can_import, make_checkpoint, make_genai_model, make_gguf, make_package
from common import (
    Kept,
    add_peer_options,
    describe_machine,
    make_parser,
    markdown,
    print_table,
    rotated,
)
from rich.console import Console
from turns import PAUSE, PEERS, Worker, size_of, without_folders

FLOAT32: Final = "qsample, float32 cache"
INT8: Final = "qsample, int8 cache"
Rows: TypeAlias = tuple[list[str], list[list[str]]]
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
SYSTEMS: Final = (FLOAT32, INT8, "genai", "llama.cpp, f16", "llama.cpp, q8_0")
CTX_LEN: Final = 16640  # of packages
MOST_READ: Final = 16640  # tokens of all rows
# Bytes per number of the cache; q8_0 has a scale for every 32.
BYTES: Final = {FLOAT32: 4.0, INT8: 1.0, "genai": 4.0, "llama.cpp, f16": 2.0, "llama.cpp, q8_0": 34 / 32}
FREE: Final = 0.85  # usable share of the available memory
WARM_UP: Final = 3  # steps
GROWTH: Final = 128  # capacity of a cell for new tokens


@dataclass(frozen=True)
class Cell:
    """`rows` rows with `history` tokens each."""

    history: int
    rows: int

    def __str__(self) -> str:
        return f"history {self.history:,}, {self.rows} rows"


def cache_bytes(shape: str, system: str, cell: Cell) -> float:
    """The size of keys and values."""
    facts = SHAPES[shape]
    numbers = 2 * facts["num_hidden_layers"] * facts["num_key_value_heads"] * facts["head_dim"]
    return BYTES[system] * numbers * cell.rows * (cell.history + GROWTH)


def needed_bytes(shape: str, system: str, cell: Cell, model: Path) -> float:
    """An estimate: keys and values, the weights (some systems unpack them), and the memory of a call."""
    return cache_bytes(shape, system, cell) + 1.5 * size_of(model) + 3e8


def available_bytes() -> float:
    """The available memory; infinite if Linux does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return 1024 * float(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))


def build(options: argparse.Namespace, console: Console) -> dict[str, Path]:
    """The model of each system, built unless it exists."""
    folder, python = options.work / options.shape, options.peers_python
    with console.status(f"{options.shape}: a checkpoint of random weights"):
        checkpoint = make_checkpoint(options.shape, folder / "checkpoint")
    builders = {
        FLOAT32: lambda: make_package(checkpoint, folder / "long-float32-cache", "int4", ctx_len=CTX_LEN),
        INT8: lambda: make_package(
            checkpoint, folder / "long-int8-cache", "int4", "--kv-cache-dtype", "int8", ctx_len=CTX_LEN
        ),
        "genai": lambda: make_genai_model(checkpoint, folder / "genai-last-logits", python, last_logits=True),
        "llama.cpp": lambda: make_gguf(checkpoint, folder / "q4_0.gguf", python),
    }
    models = {}
    for system in options.system:
        missing = can_import(python, PEERS.get(system.split(",")[0], []))
        if missing is not None:
            console.print(f"without {system}: {missing}", highlight=False)
            continue
        with console.status(f"{options.shape}: a model for {system}"):
            models[system] = builders[system if system in builders else system.split(",")[0]]()
    for system, expected in ((FLOAT32, None), (INT8, "int8")):
        if system in models:
            found = json.loads((models[system] / "qsample.json").read_text())["interface"]["kv_cache_dtype"]
            if found != expected:
                raise SystemExit(f"{models[system]} has a cache of {found or 'float32'}; delete it to build it again")
    return models


def state_file(system: str, history: int, options: argparse.Namespace) -> Path:
    """The file in which llama.cpp saves the state of a row."""
    return Path(options.work / options.shape / f"{system.replace(', ', '-')}-{history}.row")


def start(system: str, model: Path, cell: Cell, options: argparse.Namespace) -> Worker:
    python = sys.executable if system in (FLOAT32, INT8) else options.peers_python
    shortest = min(options.history)
    more = ["--rows", str(cell.rows), "--history", str(cell.history), "--growth", str(GROWTH)]
    more += ["--state", str(state_file(system, cell.history, options)), "--read-tokens", str(shortest)]
    more += ["--read-before", str(state_file(system, shortest, options))]
    return Worker(system, model, python, options.threads, *more, script="long_context_worker.py")


def run_steps(workers: dict[str, Worker], options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Milliseconds of a step (median) per round, and the memory of each process afterwards."""
    steps: dict[str, list[float]] = {name: [] for name in workers}
    memory: dict[str, Any] = {}
    for worker in workers.values():
        worker.ask(steps=WARM_UP)
    for index in range(options.rounds):
        for name in rotated(workers, index):
            time.sleep(PAUSE)
            answer = workers[name].ask(steps=options.new_tokens)
            steps[name].append(1e3 * float(np.median(answer["steps"])))
            memory[name] = answer["memory"]
    return steps, memory


def taking_part(cell: Cell, models: dict[str, Path]) -> list[str]:
    """The systems that can load the cell's history in acceptable time."""
    return [name for name in models if name != "genai" or cell.rows == 1 or cell.rows * cell.history <= MOST_READ]


def is_filled(system: str, cell: Cell, options: argparse.Namespace) -> bool:
    """Whether the cell's history is filled in instead of read."""
    return system != "genai" and (cell.rows > 1 or (options.fill and cell.history > min(options.history)))


def expected_minutes(cell: Cell, models: dict[str, Path], options: argparse.Namespace) -> float:
    """For 0.6 B parameters on two cores: 2.3 ms per token plus 0.5 us times the history, steps, and starts."""
    seconds = 0.0
    for system in taking_part(cell, models):
        tokens = 0 if is_filled(system, cell, options) else cell.history * (cell.rows if system == "genai" else 1)
        seconds += 2.3e-3 * tokens + 0.5e-6 * tokens * cell.history + 5
        seconds += options.rounds * options.new_tokens * (0.02 + 8e-6 * cell.history * cell.rows)
    return seconds / 60


def open_history(system: str, worker: Worker, cell: Cell, options: argparse.Namespace, console: Console) -> Any:
    """Load the cell's history into a worker; returns the seconds to the first token, None if nothing was read."""
    seconds = worker.ask(fill=is_filled(system, cell, options))["first_token"]
    done = "has its history" if seconds is None else f"read it in {seconds:.1f} s"
    console.print(f"  {system} {done}", highlight=False)
    return seconds


def run_cell(
    cell: Cell, models: dict[str, Path], results: Cells, options: argparse.Namespace, console: Console
) -> None:
    """Measure all systems of a cell, in turns if the memory has room for all of them."""
    free = FREE * available_bytes()
    needed = {name: needed_bytes(options.shape, name, cell, models[name]) for name in taking_part(cell, models)}
    for name in [name for name in needed if needed[name] > free]:
        reason = f"{needed.pop(name) / 1e9:.0f} GB of memory are not free here"
        results.set_missing(options.shape, cell.history, cell.rows, name, reason)
        console.print(f"  without {name}: {reason}", highlight=False)
    together = time.strftime("%F %T") if sum(needed.values()) < free else False
    for group in [list(needed)] if together else [[name] for name in needed]:
        workers: dict[str, Worker] = {}
        first: dict[str, float | None] = {}
        for name in group:
            try:
                workers[name] = start(name, models[name], cell, options)
                first[name] = open_history(name, workers[name], cell, options, console)
            except RuntimeError as error:
                workers.pop(name, None)
                reason = str(error).strip().splitlines()[-1]
                results.set_missing(options.shape, cell.history, cell.rows, name, reason)
                console.print(f"  without {name}: {reason}", highlight=False)
        if workers:
            steps, memory = run_steps(workers, options)
        for name, worker in workers.items():
            results.add(
                options.shape,
                cell.history,
                cell.rows,
                name,
                first_token_s=first[name],
                step_ms=steps[name],
                memory=memory[name],
                cache_bytes=cache_bytes(options.shape, name, cell),
                version=worker.loaded["version"],
                together=together,
            )
            worker.close()
        results.save()


class Cells(Kept):
    """All measurements on a machine; a cell that is measured again is replaced."""

    def __init__(self, path: Path, machine: str) -> None:
        super().__init__(path, {"machine": machine, "cells": []})

    def add(self, shape: str, history: int, rows: int, system: str, **facts: Any) -> None:
        """Record a cell.

        Args:
            shape: The model.
            history: Tokens per row.
            rows: Rows.
            system: The system.
            **facts: `first_token_s` (None if the history was not read), `step_ms` per round, `memory` of the process
                in bytes by kind, `cache_bytes`, `version`, and `together`: a time stamp that all systems of a joint
                run share, or False.
        """
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
        """Whether each of these systems was measured in the cell, or failed there."""
        return all(self.cell(shape, cell.history, cell.rows, name) is not None for name in systems)

    def ratio(self, cell: dict[str, Any]) -> float | None:
        """The step over the step with a float32 cache: the median of the rounds' ratios, None without joint rounds."""
        own = self.cell(cell["shape"], cell["history"], cell["rows"], FLOAT32)
        if own is None or "step_ms" not in own or not own["together"] or own["together"] != cell["together"]:
            return None
        return float(np.median(np.divide(cell["step_ms"], own["step_ms"])))

    def save(self) -> None:
        self.data["cells"].sort(key=lambda cell: (cell["shape"], cell["history"], cell["rows"]))  # stable
        super().save()


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
        print_table(console, header, lines, shape)


def write(results: Cells, output: Path) -> None:
    """Write the page and the plot."""
    lines = [
        "# Long histories",
        "",
        f"{results.data['machine']}.",
        "Made by `python benchmarks/long_context.py`, whose docstring describes the method;",
        "`pip install -r benchmarks/peers.txt` installs the other systems with all their packages.",
        "4-bit weights in blocks of 32, greedy. The time to the first token is the time to read the whole history;",
        "it is missing if rows were filled or copied. The time of a step is the median of the rounds. Its multiple is",
        "the median of the rounds' ratios, if the systems took turns. Memory is the process's own, without mapped",
        "files.",
        "",
    ]
    for shape in _shapes(results):
        lines += [f"## {shape}", "", *markdown(*table_rows(results, shape)), ""]
        versions = [cell["version"] for cell in results.data["cells"] if cell["shape"] == shape and "version" in cell]
        lines += [f"Measured with {', '.join(dict.fromkeys(versions))}.", ""]
    if any("step_ms" in cell for cell in results.data["cells"]):
        lines += [f"![A step by history]({output.name}.png)", ""]
        plot(results, output.with_suffix(".png"))
    output.with_suffix(".md").write_text("\n".join(lines))


def plot(results: Kept, path: Path) -> None:
    """A step's time by history, a panel per shape and number of rows, a line per system."""
    cells = [cell for cell in results.data["cells"] if "step_ms" in cell]
    panels = list(dict.fromkeys((cell["shape"], cell["rows"]) for cell in cells))
    systems = list(dict.fromkeys(cell["system"] for cell in cells))
    figure, axes = plots.new_figure(1, len(panels), (5, 3.6), sharex=True, sharey=True)
    for (shape, rows), axis in zip(panels, axes[0], strict=True):
        shown = [cell for cell in cells if (cell["shape"], cell["rows"]) == (shape, rows)]
        histories, lacking = {cell["history"] for cell in shown}, []
        for name in systems:
            points = sorted((cell["history"], np.median(cell["step_ms"])) for cell in shown if cell["system"] == name)
            if points:
                axis.plot(*zip(*points, strict=True), **plots.line_style(name))
            lacking += [f"{name} at {history:,}" for history in sorted(histories - {place for place, _ in points})]
        label = f"tokens before the step{plots.missing_line(lacking)}"
        axis.set(title=f"{shape}, {plots.count(rows, 'row')}", xlabel=label)
    axes[0][0].set_yscale("log")  # of all panels, which share it
    axes[0][0].set_ylabel("ms a step")
    plots.legend(figure)
    plots.save(figure, path)


def main() -> None:
    parser = make_parser(__doc__)
    add_peer_options(parser, "long_context")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--history", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=16, help="of each row and round")
    parser.add_argument(
        "--fill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fill in long histories; otherwise read the whole history of a single row, which takes an hour",
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell that would end later")
    options, console = parser.parse_args(), Console(stderr=True)
    longest = min(CTX_LEN, SHAPES[options.shape]["max_position_embeddings"]) - GROWTH
    if min(options.history) < 1 or max(options.history) > longest:
        parser.error(f"--history must be 1 to {longest:,} for {options.shape}")
    if min(options.rows) < 1 or options.new_tokens < 1 or options.rounds < 1:
        parser.error("--rows, --new-tokens and --rounds must be at least 1")
    if WARM_UP + options.rounds * options.new_tokens > GROWTH - 8:
        parser.error(f"--rounds times --new-tokens must be at most {GROWTH - 8 - WARM_UP}")
    ends = time.perf_counter() + 60 * options.minutes
    models = build(options, console)
    results = Cells(options.output.with_suffix(".json"), describe_machine(options.threads))
    # Single rows first: llama.cpp copies the text read there to the rows of the other cells.
    cells = [Cell(history, rows) for rows in sorted(options.rows) for history in sorted(options.history)]
    todo = [cell for cell in cells if options.again or not results.has(options.shape, cell, taking_part(cell, models))]
    for cell in todo:
        console.print(f"{cell}: about {expected_minutes(cell, models, options):.1f} minutes", highlight=False)
    for cell in todo:
        if time.perf_counter() + 60 * expected_minutes(cell, models, options) > ends:
            console.print(f"time is up before {cell}; run the same command to continue", highlight=False)
            break
        console.print(f"{options.shape}, {cell}", highlight=False)
        run_cell(cell, models, results, options, console)
    if all(results.has(options.shape, cell, taking_part(cell, models)) for cell in cells):
        for path in (options.work / options.shape).glob("*.row"):
            path.unlink()
    show(results, Console())
    write(results, options.output)
    console.print(f"wrote {options.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()
