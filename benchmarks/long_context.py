"""Long histories on the CPU: first token, step and memory, with caches of several types, beside other systems.

    python -m venv peers && peers/bin/pip install onnxruntime-genai torch transformers llama-cpp-python gguf
    python benchmarks/long_context.py --peers-python peers/bin/python               # a quarter of an hour on two cores
    python benchmarks/long_context.py --peers-python peers/bin/python --history 4096 --minutes 5

qsample with a float32 and an int8 cache, onnxruntime-genai (float32), llama.cpp with an f16 and a q8_0 cache; the same
random weights, 4 bits in blocks of 32, greedy. Each cell has processes of its own, with memory for just that cell. At
one row and the shortest history every system reads it, once, and that is the time to the first token; then the systems
take turns in rounds of steps. Longer histories, and several rows, are made: qsample's cache is filled with random
numbers, llama.cpp gets copies of what it read, one behind the other, and of the row. A step takes the same time over
any numbers. onnxruntime-genai has no way to write its cache, so it reads every row, and is left out where that is more
than MOST_READ tokens. With --no-fill every system reads the whole of one row; llama.cpp with a q8_0 cache takes half an
hour for 16,384 tokens.

Where the systems do not fit into the memory together they run one after another; then no ratio is given. Results are
written after every cell, and a run goes on where the one before it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from checkpoints import SHAPES, can_import, make_checkpoint, make_genai_model, make_gguf, make_package
from long_context_report import FLOAT32, INT8, Cells, show, write
from machine import describe_machine
from rich.console import Console
from turns import PAUSE, PEERS, Worker, size_of

SYSTEMS: Final = (FLOAT32, INT8, "genai", "llama.cpp, f16", "llama.cpp, q8_0")
CTX_LEN: Final = 16640  # of packages
MOST_READ: Final = 16640  # tokens of all rows
# Bytes of a number of the cache; q8_0 has a scale for 32 of them.
BYTES: Final = {FLOAT32: 4.0, INT8: 1.0, "genai": 4.0, "llama.cpp, f16": 2.0, "llama.cpp, q8_0": 34 / 32}
FREE: Final = 0.85  # share of the available memory that may be taken
WARM_UP: Final = 3  # steps
GROWTH: Final = 128  # steps that a cell has room for


@dataclass(frozen=True)
class Cell:
    """history: tokens of each of `rows` rows."""

    history: int
    rows: int

    def __str__(self) -> str:
        return f"history {self.history:,}, {self.rows} rows"


def cache_bytes(shape: str, system: str, cell: Cell) -> float:
    """Of keys and values."""
    facts = SHAPES[shape]
    numbers = 2 * facts["num_hidden_layers"] * facts["num_key_value_heads"] * facts["head_dim"]
    return BYTES[system] * numbers * cell.rows * (cell.history + GROWTH)


def needed_bytes(shape: str, system: str, cell: Cell, model: Path) -> float:
    """Keys and values, the weights, which some systems unpack, and what a call takes."""
    return cache_bytes(shape, system, cell) + 1.5 * size_of(model) + 3e8


def available_bytes() -> float:
    """Memory that can be taken; no bound where Linux does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return 1024 * float(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))


def build(options: argparse.Namespace, console: Console) -> dict[str, Path]:
    """The model of each system, built where it is not there."""
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
                raise SystemExit(f"{models[system]} has a cache of {found or 'float32'}; delete it to build it anew")
    return models


def state_file(system: str, history: int, options: argparse.Namespace) -> Path:
    """Where llama.cpp keeps what a row holds."""
    return Path(options.work / options.shape / f"{system.replace(', ', '-')}-{history}.row")


def start(system: str, model: Path, cell: Cell, options: argparse.Namespace) -> Worker:
    python = sys.executable if system in (FLOAT32, INT8) else options.peers_python
    shortest = min(options.history)
    more = ["--rows", str(cell.rows), "--history", str(cell.history), "--growth", str(GROWTH)]
    more += ["--state", str(state_file(system, cell.history, options)), "--read-tokens", str(shortest)]
    more += ["--read-before", str(state_file(system, shortest, options))]
    return Worker(system, model, python, options.threads, *more, script="long_context_worker.py")


def run_steps(workers: dict[str, Worker], options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Milliseconds of a step (median), one a round, and the memory of each process behind them."""
    steps: dict[str, list[float]] = {name: [] for name in workers}
    memory: dict[str, Any] = {}
    for worker in workers.values():
        worker.ask(steps=WARM_UP)
    for index in range(options.rounds):
        names = list(workers)
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            time.sleep(PAUSE)
            answer = workers[name].ask(steps=options.new_tokens)
            steps[name].append(1e3 * float(np.median(answer["steps"])))
            memory[name] = answer["memory"]
    return steps, memory


def taking_part(cell: Cell, models: dict[str, Path]) -> list[str]:
    """The systems that can have the cell's history in bearable time."""
    return [name for name in models if name != "genai" or cell.rows == 1 or cell.rows * cell.history <= MOST_READ]


def is_filled(system: str, cell: Cell, options: argparse.Namespace) -> bool:
    """Whether the cell's history is not read."""
    return system != "genai" and (cell.rows > 1 or (options.fill and cell.history > min(options.history)))


def expected_minutes(cell: Cell, models: dict[str, Path], options: argparse.Namespace) -> float:
    """For 0.6 B parameters on two cores: 2.3 ms a token, and 0.5 us times the history; steps, and starts."""
    seconds = 0.0
    for system in taking_part(cell, models):
        tokens = 0 if is_filled(system, cell, options) else cell.history * (cell.rows if system == "genai" else 1)
        seconds += 2.3e-3 * tokens + 0.5e-6 * tokens * cell.history + 5
        seconds += options.rounds * options.new_tokens * (0.02 + 8e-6 * cell.history * cell.rows)
    return seconds / 60


def open_history(system: str, worker: Worker, cell: Cell, options: argparse.Namespace, console: Console) -> Any:
    """Have a worker hold the cell's history. Returns the seconds to the first token, None where nothing was read."""
    seconds = worker.ask(fill=is_filled(system, cell, options))["first_token"]
    done = "has its history" if seconds is None else f"read it in {seconds:.1f} s"
    console.print(f"  {system} {done}", highlight=False)
    return seconds


def run_cell(
    cell: Cell, models: dict[str, Path], results: Cells, options: argparse.Namespace, console: Console
) -> None:
    """All systems of a cell, in turns where the memory has room for all of them."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=sys.executable, help="a Python that has the other systems")
    parser.add_argument("--work", type=Path, default=Path("build/decode"), help="folder for the models")
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
        help="make long histories, or read every history of one row: an hour",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="measure anew what was measured before")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell that would end later")
    parser.add_argument(
        "--output", type=Path, default=Path("docs/benchmarks/long_context"), help="file name without suffix"
    )
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
    # One row first: what llama.cpp read there is copied to the rows of the cells with several.
    cells = [Cell(history, rows) for rows in sorted(options.rows) for history in sorted(options.history)]
    todo = [cell for cell in cells if options.again or not results.has(options.shape, cell, taking_part(cell, models))]
    for cell in todo:
        console.print(f"{cell}: some {expected_minutes(cell, models, options):.1f} minutes", highlight=False)
    for cell in todo:
        if time.perf_counter() + 60 * expected_minutes(cell, models, options) > ends:
            console.print(f"time is up before {cell}; run it again to go on", highlight=False)
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
